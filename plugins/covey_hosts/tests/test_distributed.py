"""A step that several processes share is the step of one, and the environment that names them; threads stand for
processes here.
"""

import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey import GRPOConfig, PPOConfig, RLTrainingConfig, RolloutConfig
from covey.cli.main import main
from covey.config.algorithms import algorithm_of
from covey.config.processes import ADDRESS, BIND, COUNT, MODE, NUMBER
from covey.config.schema import EnvsConfig, RewardSafetyConfig
from covey.data.loader import PromptLoader
from covey.errors import CoveyError, EpisodeError
from covey.packing.rows import unpack
from covey.parallel import make_mesh, processes
from covey.rewards.scoring import RewardRunner
from covey.rl.batches import RowSizes
from covey.rl.grpo import GRPOLearner
from covey.rl.metrics import gather_step_stats, group_metrics
from covey.rl.roles import ClusterConfig, Role
from covey.rl.rollouts import FailureCounts, Rollouts
from covey.rl.stage_sizes import StageSizes
from covey.rl.step_data import RolloutBatch
from covey.sampling.model_runner import SamplerStats
from covey.types import Completion, FinishReason, Group
from covey_hosts.channel import PORT, SILENT, Channel
from covey_ppo.learner import PPOLearner

Threads = Callable[[int, Callable[[int], Any]], list[Any]]
GOLDEN = Path(__file__).parents[3] / "tests" / "parity" / "golden" / "tiny-llama"


def told(group: Group) -> Any:
    numbers = [None if x is None else list(x) for x in (group.rewards, group.advantages)]
    return group.prompt, [(c.text, list(c.tokens)) for c in group.completions], *numbers


def held(rows: int, index: int, processes: int) -> np.ndarray:
    """Rows of a process's devices; every fourth is in all processes."""
    return np.array([row for row in range(rows) if row % processes == index or row % 4 == 0])


class Played:
    """In place of a cluster: every number follows from the step, the prompt's number and the sample's."""

    training = RLTrainingConfig(prompts_per_step=6, train_micro_batch_size=2, packing="dense")
    config = ClusterConfig({}, training, RolloutConfig(max_new_tokens=5))
    row_sizes, measures_agreement = RowSizes(config), False

    def __init__(self) -> None:
        self.rollout = SimpleNamespace(stats=SamplerStats(), environments=None)
        self.inference = SimpleNamespace(has=lambda role: False)

    def generate(self, examples: Sequence[Any], samples: int, *, step: int, first: int) -> list[Group]:
        def completion(*noise: int) -> Completion:
            rng = np.random.default_rng(noise)
            tokens = rng.integers(0, 50, rng.integers(1, 6)).astype(np.int32)
            return Completion(tokens, np.sin(tokens), np.sin(tokens), FinishReason.STOP)

        self.rollout.stats = SamplerStats(tokens=len(examples))
        return [
            Group(row["prompt"], np.arange(3), tuple(completion(step, number, s) for s in range(samples)))
            for number, row in enumerate(examples, first)
        ]

    def get_values(self, rows: Any, lengths: Sequence[int]) -> list[np.ndarray]:
        return unpack(rows, np.sin(rows.target), lengths)

    def get_ref_per_token_logps(self, rows: Any, lengths: Sequence[int]) -> list[np.ndarray]:
        return unpack(rows, np.cos(rows.target), lengths)


WHOLE_STEP = {
    "batch_std": GRPOConfig(num_generations=3, advantage="batch_std", aggregate="token_mean"),
    "dynamic sampling": GRPOConfig("dapo", num_generations=2, max_sampling_rounds=3, advantage="batch_std"),
    "whitening": PPOConfig(num_generations=2),
}


def fed(made_by: Callable, config: GRPOConfig, step: int) -> tuple[list[dict[str, np.ndarray]], RolloutBatch, int, int]:
    """What a step trains on, its log, the prompts taken from the data, and those that this process sampled."""
    reward: Any = lambda completion_ids: [float(ids[0] % 2) for ids in completion_ids]  # noqa: E731
    others: Any = {"rl_cluster": Played(), "reward_fns": reward}
    critic = algorithm_of(config).needs_critic
    learner = PPOLearner(ppo_config=config, **others) if critic else GRPOLearner(grpo_config=config, **others)
    loader = PromptLoader([{"prompt": str(i)} for i in range(50)], 6, shuffle=False)
    batches = made_by(learner, next(loader), loader.take, step)
    sampled, log = learner.stats.rollout.stats.tokens, gather_step_stats(learner.stats).rollout
    return [b.arrays() | {"denominator": np.array(b.denominator)} for b in batches], log, loader.position, sampled


@pytest.mark.parametrize("name", WHOLE_STEP)
@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("count", [2, 3])
def test_every_process_has_the_batches_of_one(
    threads: Threads, made_by: Callable, name: str, step: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each samples and scores a share, and has the rows of its devices; their values, log and data are those of one
    process, bit for bit.
    """
    of_process: Any = lambda number, rows, *_: [held(rows, index, number) for index in range(number)]  # noqa: E731
    monkeypatch.setattr("covey_hosts.routes.rows_by_process", of_process)
    batches, log, position, _ = fed(made_by, WHOLE_STEP[name], step)
    every = threads(count, lambda i: fed(made_by, WHOLE_STEP[name], step))
    for index, (theirs, their_log, their_position, sampled) in enumerate(every):
        for one, other in zip(batches, theirs, strict=True):
            assert one.keys() == other.keys()
            own = held(len(one["tokens"]), index, count)
            assert len(own) < len(one["tokens"])
            for key in one.keys() - {"denominator"}:
                assert np.array_equal(one[key][own], other[key][own])
            assert one["denominator"] == other["denominator"]
        own = np.flatnonzero(their_log.table.owner == index)
        assert [told(g) for g in their_log.groups] == [told(log.groups[number]) for number in own]
        assert group_metrics(their_log.table) == group_metrics(log.table)
        assert their_position == position
        assert (their_log.rounds, their_log.replaced, their_log.tied) == (log.rounds, log.replaced, log.tied)
        assert 0 < sampled < their_log.stats.tokens == log.stats.tokens


@given(st.integers(0, 40), st.integers(1, 7))
def test_shares_are_all_of_it_in_order_and_nearly_equal(size: int, count: int) -> None:
    shares = []
    for index in range(count):
        shares.append(Channel(index, count).local_slice(range(size)))
    assert [item for _, share in shares for item in share] == list(range(size))
    assert all(not len(share) or share[0] == start for start, share in shares)
    assert max(len(share) for _, share in shares) - min(len(share) for _, share in shares) <= 1


def test_no_thread_samples_on_the_actors_devices_in_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its programs and those of the trainer would come in another order on each device, and wait for each other."""
    actor, first, last = make_mesh((2, 1), devices=jax.devices()[:2]), jax.devices()[:1], jax.devices()[3:]
    ahead: dict[tuple[int, int, int], bool] = {}
    for count, lead, place in itertools.product((1, 2), (0, 1), (first, last)):
        monkeypatch.setattr(jax, "process_count", lambda count=count: count)
        meshes = {Role.ACTOR: actor, Role.ROLLOUT: make_mesh((1, 1), devices=place)}
        config = ClusterConfig(meshes, RLTrainingConfig(off_policy_steps=lead))
        ahead[count, lead, place[0].id] = config.runs_ahead
    assert [where for where, there in ahead.items() if not there] == [(2, 0, 0), (2, 1, 0)]
    assert [ClusterConfig({}, RLTrainingConfig(off_policy_steps=lead)).runs_ahead for lead in (0, 1)] == [False, False]
    monkeypatch.undo()
    assert [ClusterConfig({}, RLTrainingConfig(off_policy_steps=lead)).runs_ahead for lead in (0, 1)] == [False, True]


@pytest.mark.slow
def test_a_process_that_has_read_programs_reads_no_more(tmp_path: Path) -> None:
    code = """
    import jax
    from covey_hosts.start import disable_compilation_cache

    found = []
    jax.monitoring.register_event_listener(lambda name, **_: found.append(name))

    def reads():
        found.clear()
        jax.jit(lambda x: x @ x)(jax.numpy.eye(8)).block_until_ready()
        return "/jax/compilation_cache/cache_hits" in found

    read = [reads(), reads()]
    disable_compilation_cache()
    read += [reads(), reads()]  # JAX looks for a program compiled before under another key than after
    assert read == [False, True, False, False], read
    """
    limits = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=os.environ | limits, check=True)


@pytest.mark.parametrize(
    ("environment", "told_"),
    [
        ({ADDRESS: "here:1"}, f"{ADDRESS} set, and {COUNT} and {NUMBER} not"),
        ({COUNT: "2", NUMBER: "0"}, f"{ADDRESS} not"),
        ({ADDRESS: "here", COUNT: "2", NUMBER: "0"}, "host:port"),
        ({ADDRESS: "here:1", COUNT: "two", NUMBER: "0"}, "a whole number"),
        ({ADDRESS: "here:1", COUNT: "2", NUMBER: "2"}, "from 0 to 1"),
        ({MODE: "automatic"}, "did you mean 'auto'?"),
        ({MODE: "auto", SILENT: "1"}, "seconds, from 5 up"),
        ({MODE: "auto", PORT: "any"}, "a port"),
        ({MODE: "auto", PORT: "65536"}, "a port"),
        ({ADDRESS: "here:70000", COUNT: "2", NUMBER: "0"}, "host:port"),
        ({MODE: "auto"}, "did not come together"),
        ({ADDRESS: "192.0.2.1:1234", COUNT: "2", NUMBER: "0"}, "cannot listen at 192.0.2.1:1234"),
        ({ADDRESS: "127.0.0.1:1234", BIND: "192.0.2.1:1", COUNT: "2", NUMBER: "0"}, "cannot listen at 192.0.2.1:1"),
        ({ADDRESS: "127.0.0.1:1234", BIND: "nowhere", COUNT: "2", NUMBER: "0"}, "cannot listen at nowhere"),
    ],
)
def test_a_contradictory_environment_is_refused(environment: dict[str, str], told_: str) -> None:
    with pytest.raises(CoveyError) as error, processes.start(environment):
        pass
    assert told_ in str(error.value)


def test_one_process_joins_nothing() -> None:
    with processes.start({}), processes.start({COUNT: "1", NUMBER: "0", ADDRESS: "here:1"}):
        assert not jax.distributed.is_initialized()
    assert (processes.here().count, processes.here().index, processes.here().is_first) == (1, 0, True)


def test_the_command_reads_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ADDRESS, "here:1")
    assert main(["train", "quickstart", "--model.source", str(GOLDEN), "--out", str(tmp_path / "run")]) == 2
    assert COUNT in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


GUESS, SAFETY = EnvsConfig(environment="guess", on_error="none"), RewardSafetyConfig(on_error="none")


@pytest.mark.parametrize(
    ("environments", "rewards", "told"),
    [
        (9, 6, ""),
        (8, 6, "9 failures of the environment 'guess'"),
        (9, 5, "6 failures of reward functions"),
    ],
)
def test_the_budgets_of_failures_hold_for_all_processes_together(
    threads: Threads, environments: int, rewards: int, told: str
) -> None:
    """Three processes with 1, 2 and 3 failures of the environment, and one more each in the next step: 9 in all."""
    runner = pytest.importorskip("covey_envs.runner").EnvironmentRunner

    def work(index: int) -> tuple[int, dict[str, int]]:
        played = runner("guess", replace(GUESS, budget=environments))
        scored = RewardRunner(replace(SAFETY, budget=rewards))
        counts = FailureCounts(scored, played)
        for number in (index + 1, 1):
            for _ in range(number):
                played.accept(EpisodeError("fails"))
            scored.failed = {"f": scored.failed.get("f", 0) + index}
            counts.agree(counts.take_sampled())
        return played.failed, scored.failed

    results = threads(3, work)
    if not told:
        assert results == [(9, {"f": 6})] * 3
    assert all(told in str(result) for result in results)


def test_the_counts_of_a_checkpoint_are_those_of_all(threads: Threads) -> None:
    runner = pytest.importorskip("covey_envs.runner").EnvironmentRunner

    def work(index: int) -> int:
        environments = runner("guess", GUESS)
        counts = FailureCounts(RewardRunner(SAFETY), environments)
        environments.failed = 5
        counts.restart()
        environments.accept(EpisodeError("fails"))
        counts.agree(counts.take_sampled())
        return environments.failed

    assert threads(2, work) == [7, 7]


def test_each_step_adds_the_failures_of_the_other_processes(threads: Threads) -> None:
    runner = pytest.importorskip("covey_envs.runner").EnvironmentRunner

    def work(index: int) -> int:
        environments = runner("guess", GUESS)
        learner: Any = SimpleNamespace(
            training=SimpleNamespace(off_policy_steps=0),
            sampled=(),
            step=0,
            on_phase=print,
            algorithm=SimpleNamespace(max_sampling_rounds=1, needs_whole_step=False),
            config=SimpleNamespace(num_iterations=1),
            sizes=StageSizes(1, 1, 1, 1),
            cluster=SimpleNamespace(config=SimpleNamespace(runs_ahead=False)),
            failures=FailureCounts(RewardRunner(SAFETY), environments),
            sample=lambda prompts: RolloutBatch([], env_failed=index + 1),
            score=lambda rollout: rollout,
            replace_tied=lambda rollout, *_: rollout,
        )
        environments.failed = index + 1
        assert len(list(Rollouts(learner, PromptLoader(["a"], 1), 1).of_step(0))) == 1
        return environments.failed

    assert threads(2, work) == [3, 3]
