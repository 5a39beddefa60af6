"""What processes tell each other, and what becomes of a step that they share; threads stand for processes here."""

import base64
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from covey import GRPOConfig, PPOConfig, RLTrainingConfig, RolloutConfig
from covey.cli.main import main
from covey.config.algorithms import algorithm_of
from covey.config.processes import ADDRESS, BIND, COUNT, MODE, NUMBER, SILENT
from covey.config.schema import EnvsConfig, RewardSafetyConfig
from covey.data.loader import PromptLoader
from covey.envs import EnvironmentRunner
from covey.errors import CoveyError, EpisodeError, RecipeError, RewardError, Stopped
from covey.packing.rows import unpack
from covey.parallel import distributed, liveness, make_mesh, store, wire
from covey.parallel.distributed import PeerError
from covey.rewards.runner import RewardRunner
from covey.rl.experience import RolloutBatch, StepStats, gather_step_stats
from covey.rl.grpo import GRPOLearner
from covey.rl.learner import FailureCounts
from covey.rl.ppo import PPOLearner
from covey.rl.roles import ClusterConfig, Role
from covey.sampling.model_runner import SamplerStats
from covey.types import Completion, FinishReason, Group

GOLDEN = Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama"


class Threads:
    """Calls a function in several threads, each of which believes to be a process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.own = threading.local()
        monkeypatch.setattr(distributed, "index", lambda: getattr(self.own, "index", 0))
        monkeypatch.setattr(distributed, "count", lambda: self.count)
        monkeypatch.setattr(distributed, "_allgather", self._allgather)
        monkeypatch.setattr(distributed, "read_no_programs", lambda: None)  # it would last for all tests behind these
        self.count = 1

    def __call__(self, count: int, function: Callable[[int], Any]) -> list[Any]:
        """What each returned or raised."""
        self.count, self.given = count, [np.zeros(0)] * count
        self.barrier = threading.Barrier(count, timeout=20)
        results: list[Any] = [None] * count

        def run(index: int) -> None:
            self.own.index = index
            try:
                with distributed.start({}):
                    results[index] = function(index)
            except BaseException as error:
                results[index] = error

        threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def _allgather(self, array: np.ndarray) -> np.ndarray:
        self.given[distributed.index()] = array
        self.barrier.wait()
        found = np.stack(self.given)
        self.barrier.wait()
        return found


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


def test_everyone_gets_what_everyone_gave(threads: Threads) -> None:
    given_ = [{"text": "ä" * 1000}, None, [1.5, float("inf")]]
    assert threads(3, lambda i: distributed.gathered(given_[i], "x")) == [given_] * 3
    assert threads(3, lambda i: distributed.all_of("ab" * i, "x")) == [list("ababab")] * 3
    assert threads(3, lambda i: distributed.agreed(i, "x")) == [0, 0, 0]


def test_one_that_fails_ends_all(threads: Threads) -> None:
    """The trap: the others wait in an exchange for one that has gone, and it waits at its end for them."""

    def work(index: int) -> None:
        distributed.gathered(index, "before")
        if index == 1:
            raise RewardError("the reward broke", where="my.py")
        distributed.gathered(index, "after")

    first, second, third = threads(3, work)
    assert isinstance(second, RewardError)
    for other in (first, third):
        assert isinstance(other, PeerError)
        assert "process 1 has failed: my.py: the reward broke" in str(other)


def test_one_that_fails_at_the_end_is_still_heard(threads: Threads) -> None:
    first, second = threads(2, lambda index: 1 / index)
    assert isinstance(first, ZeroDivisionError)
    assert "process 0 has failed: ZeroDivisionError" in str(second)


@pytest.mark.parametrize(
    ("stop", "told", "name"),
    [
        (Stopped("SIGTERM"), "SIGTERM", "SIGTERM"),
        (Stopped("SIGINT", step=3), "SIGINT", "SIGINT"),
        (KeyboardInterrupt(), "Ctrl-C", "SIGINT"),
    ],
)
def test_a_process_that_was_stopped_says_by_what(threads: Threads, stop: BaseException, told: str, name: str) -> None:
    """The others leave with the code of that signal, not with that of a mistake."""

    def work(index: int) -> None:
        if index == 0:
            raise stop
        distributed.gathered(index, "step")

    _, second = threads(2, work)
    assert f"process 0 has failed: it was stopped by {told}" in str(second)
    assert isinstance(second, PeerError)
    assert second.stopped is not None
    assert (second.stopped.signal, second.stopped.step) == (name, None)


def test_processes_that_are_not_at_the_same_place_stop(threads: Threads) -> None:
    """The trap: one evaluates while the other trains, and each takes the other's numbers for what it waits for."""
    found = threads(2, lambda index: distributed.gathered(index, f"place {index}"))
    assert all(isinstance(each, PeerError) and "come apart" in str(each) for each in found)


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """As in a terminal: a shell has the jobs that it puts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_waits_until_an_exchange_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap: it comes between the roll call and what follows, and the others take the farewell for the rest."""
    exchanged = []

    def allgather(array: np.ndarray) -> np.ndarray:
        exchanged.append(array)
        signal.raise_signal(signal.SIGINT)
        return np.stack([array, array])

    monkeypatch.setattr(distributed, "count", lambda: 2)
    monkeypatch.setattr(distributed, "_allgather", allgather)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        distributed.gathered("x", "here")
    assert len(exchanged) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_differences_are_refused_by_all(threads: Threads) -> None:
    found = threads(3, lambda i: distributed.refuse_differences("recipe", lambda: i // 2, "start again"))
    assert all(isinstance(each, RecipeError) and "process 2 has another recipe" in str(each) for each in found)
    assert threads(2, lambda i: distributed.refuse_differences("recipe", lambda: 7, "")) == [None, None]


def told(group: Group) -> Any:
    numbers = [None if x is None else list(x) for x in (group.rewards, group.advantages)]
    return group.prompt, [(c.text, list(c.tokens)) for c in group.completions], *numbers


class Played:
    """In place of a cluster: every number follows from the step, the prompt's number and the sample's."""

    training = RLTrainingConfig(prompts_per_step=6, train_micro_batch_size=2)
    config = ClusterConfig({}, training, RolloutConfig(max_new_tokens=5))
    compile_cost, rows_at_a_time = 0.0, config.rows_at_a_time

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
    threads: Threads, made_by: Callable, name: str, step: int, count: int
) -> None:
    """Each samples and scores a share; micro-batches, log and data are those of one process, bit for bit."""
    ((batches, log, position, _),) = threads(1, lambda i: fed(made_by, WHOLE_STEP[name], step))
    every = threads(count, lambda i: fed(made_by, WHOLE_STEP[name], step))
    for theirs, their_log, their_position, sampled in every:
        for one, other in zip(batches, theirs, strict=True):
            assert one.keys() == other.keys()
            assert all(np.array_equal(one[key], other[key]) for key in one)
        assert [told(g) for g in their_log.groups] == [told(g) for g in log.groups]
        assert their_position == position
        assert (their_log.rounds, their_log.replaced, their_log.tied) == (log.rounds, log.replaced, log.tied)
        assert 0 < sampled < their_log.stats.tokens == log.stats.tokens


@given(st.integers(0, 40), st.integers(1, 7))
def test_shares_are_all_of_it_in_order_and_nearly_equal(size: int, count: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        threads = Threads(patch)
        threads.count, shares = count, []
        for index in range(count):
            threads.own.index = index
            shares.append(distributed.share(range(size)))
    assert [item for _, share in shares for item in share] == list(range(size))
    assert all(not len(share) or share[0] == start for start, share in shares)
    assert max(len(share) for _, share in shares) - min(len(share) for _, share in shares) <= 1


def test_a_thread_that_samples_on_the_actors_devices_is_refused_in_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its programs and those of the trainer would come in another order on each device, and wait for each other."""
    actor, first, last = make_mesh((2, 1), devices=jax.devices()[:2]), jax.devices()[:1], jax.devices()[3:]
    found: dict[tuple[int, str, int], Any] = {}
    for count, queueing, place in itertools.product((1, 2), ("auto", "async"), (first, last)):
        for module in (distributed, jax):
            name = "count" if module is distributed else "process_count"
            monkeypatch.setattr(module, name, lambda count=count: count)
        meshes = {Role.ACTOR: actor, Role.ROLLOUT: make_mesh((1, 1), devices=place)}
        config = ClusterConfig(meshes, RLTrainingConfig(queueing=queueing))  # type: ignore[arg-type]
        learner = object.__new__(GRPOLearner)
        learner.cluster = SimpleNamespace(config=config)  # type: ignore[assignment]
        try:
            learner._check_threads()
            found[count, queueing, place[0].id] = config.runs_ahead
        except RecipeError as error:
            found[count, queueing, place[0].id] = error
    told = found.pop((2, "async", 0))
    assert "training.queueing is async in 2 processes, and rollout and actor share devices" in str(told)
    assert not found.pop((2, "auto", 0))
    assert all(value is True for value in found.values())


def test_what_a_thread_exchanges_needs_no_device_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text longer than one piece; a process that fails meanwhile ends the wait."""
    shared = {"covey/exchange/x/0/1/0": "1 " + base64.b64encode(wire.pack([2.5])).decode()}

    class Fake:
        def set(self, key: str, value: str) -> None:
            assert len(value) <= store.PIECE + 10
            shared[key] = value

        def wait(self, key: str, seconds: float) -> str | None:
            return shared.get(key)

        def delete(self, key: str) -> None:
            raise AssertionError(key)

    monkeypatch.setattr(store, "CoordinationStore", Fake)
    monkeypatch.setattr(store, "PIECE", 20)
    monkeypatch.setattr(store, "_exchanges", Counter())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert distributed.all_of_from_a_thread([list(range(30))], "x") == [list(range(30)), 2.5]
    monkeypatch.setattr(liveness, "_watch", SimpleNamespace(verdict="process 1 has failed: it broke"))
    with pytest.raises(liveness.PeerLostError, match="it broke"):
        distributed.all_of_from_a_thread([1], "y")


class Shelf:
    """What the processes share, in memory."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.texts[key] = value

    def under(self, folder: str) -> dict[str, str]:
        return {key.removeprefix(folder + "/"): text for key, text in self.texts.items() if key.startswith(folder)}


def test_a_verdict_says_whether_a_process_is_lost_or_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has failed takes part in the shutdown; one that is lost does not, so nobody waits for it."""
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    for lost in (False, True):
        shelf = Shelf()
        first, last = (liveness.Watch(shelf, number, 3) for number in (1, 2))  # type: ignore[arg-type]
        shelf.set(f"{liveness.WATCH}/beats/0", '{"doing": "update", "pid": "7", "host": "here"}')
        first._note(shelf.under(liveness.WATCH))
        if lost:
            first._lose(0)
        else:
            first.failed("it broke")
        until = time.monotonic() + 10
        while len(shelf.texts) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        last._note(shelf.under(liveness.WATCH))
        assert (last.verdict, last.lost) == (first.verdict, lost)
        monkeypatch.setattr(liveness, "_watch", last)
        monkeypatch.setattr(jax, "process_index", lambda: 2)
        liveness.leave(69)
    assert "process 0 of 3 has given no sign for" in last.verdict
    assert ended == [69]


def test_a_process_that_knows_of_a_verdict_writes_no_other() -> None:
    """All processes name the same one, even if two see two of them silent at a time."""
    shelf = Shelf()
    watch = liveness.Watch(shelf, 1, 3)  # type: ignore[arg-type]
    watch._note({liveness.LOST: "process 0 is lost"})
    for kind in (liveness.LOST, liveness.FAILED):
        watch._publish(kind, "process 2").join(10)
    assert shelf.texts == {f"{liveness.WATCH}/{liveness.LOST}": "process 0 is lost"}


def test_process_0_leaves_once_no_other_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = liveness.Watch(Shelf(), 0, 3, every=0.01)  # type: ignore[arg-type]
    beats = iter("abcde")

    def beat(seconds: float) -> None:
        watch._beats[1].text = next(beats, "e")

    monkeypatch.setattr(time, "sleep", beat)
    watch.wait_for_the_others()
    assert next(beats, None) is None  # it has waited for all of them, and not for ever


def test_process_0_prints_a_verdict_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap: it has told of the error and waits for the others, and its watch ends it with the same words."""
    monkeypatch.setattr(liveness, "END_SECONDS", 0.02)
    for leaves, told in ((False, ["process 1 is lost"]), (True, [])):
        ended: list[str] = []
        watch = liveness.Watch(Shelf(), 0, 3, every=0.01, end=ended.append)  # type: ignore[arg-type]
        watch._take(liveness.LOST, "process 1 is lost")
        if leaves:
            watch.wait_for_the_others()
        watch._judge()
        assert ended == told


def test_a_broken_exchange_names_the_process_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap: a closed connection says that another process is gone, and not which."""

    def breaks() -> None:
        raise ValueError("Connection closed by peer")

    for blamed, told in (("process 2 of 4 has given no sign for 6 s", "process 2 of 4"), ("", "Connection closed")):
        monkeypatch.setattr(liveness, "_watch", SimpleNamespace(blame=lambda blamed=blamed: blamed))
        with pytest.raises(PeerError, match=told):
            distributed._exchange(breaks)


def test_one_process_is_given_back_what_it_gave() -> None:
    value = object()
    assert distributed.gathered(value, "x")[0] is value
    assert (distributed.count(), distributed.index(), distributed.is_first()) == (1, 0, True)
    with distributed.start({}), distributed.start({COUNT: "1", NUMBER: "0", ADDRESS: "here:1"}):
        assert not jax.distributed.is_initialized()


def test_a_process_that_has_read_programs_reads_no_more(tmp_path: Path) -> None:
    code = """
    import jax
    from covey.parallel import distributed

    found = []
    jax.monitoring.register_event_listener(lambda name, **_: found.append(name))

    def reads():
        found.clear()
        jax.jit(lambda x: x @ x)(jax.numpy.eye(8)).block_until_ready()
        return "/jax/compilation_cache/cache_hits" in found

    read = [reads(), reads()]
    distributed.read_no_programs()
    read += [reads(), reads()]  # JAX looks for a program compiled before under another key than after
    assert read == [False, True, False, False], read
    """
    limits = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=os.environ | limits, check=True)


def test_a_fingerprint_knows_every_bit_and_no_sharding() -> None:
    a = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    tree = {"a": a, "b": jnp.ones(3, jnp.bfloat16), "c": jnp.arange(2), "d": jnp.array([True, False])}
    one = distributed.fingerprint(tree)
    sharded = jax.device_put(a, NamedSharding(make_mesh((4, 1)), PartitionSpec("fsdp")))
    assert distributed.fingerprint(tree | {"a": sharded}) == one
    for name, value in {"a": jnp.nextafter(a[-1], jnp.inf), "b": 1.0078125, "c": 2, "d": True}.items():
        assert distributed.fingerprint(tree | {name: tree[name].at[-1].set(value)}) != one


@pytest.mark.parametrize(
    ("environment", "told_"),
    [
        ({ADDRESS: "here:1"}, f"{ADDRESS} set, and {COUNT} and {NUMBER} not"),
        ({COUNT: "2", NUMBER: "0"}, f"{ADDRESS} not"),
        ({ADDRESS: "here", COUNT: "2", NUMBER: "0"}, "host:port"),
        ({ADDRESS: "here:1", COUNT: "two", NUMBER: "0"}, "a whole number"),
        ({ADDRESS: "here:1", COUNT: "2", NUMBER: "2"}, "from 0 to 1"),
        ({MODE: "automatic"}, "did you mean 'auto'?"),
        ({SILENT: "1"}, "seconds, from 5 up"),
        ({MODE: "auto"}, "did not come together"),
        ({ADDRESS: "192.0.2.1:1234", COUNT: "2", NUMBER: "0"}, "cannot listen at 192.0.2.1:1234"),
        ({ADDRESS: "127.0.0.1:1234", BIND: "192.0.2.1:1", COUNT: "2", NUMBER: "0"}, "cannot listen at 192.0.2.1:1"),
        ({ADDRESS: "127.0.0.1:1234", BIND: "nowhere", COUNT: "2", NUMBER: "0"}, "cannot listen at nowhere"),
    ],
)
def test_a_contradictory_environment_is_refused(environment: dict[str, str], told_: str) -> None:
    with pytest.raises(CoveyError) as error, distributed.start(environment):
        pass
    assert told_ in str(error.value)


def test_the_command_reads_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ADDRESS, "here:1")
    assert main(["train", "quickstart", "--model.source", str(GOLDEN), "--out", str(tmp_path / "run")]) == 2
    assert COUNT in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("budget", "over"), [(9, False), (8, True)])
def test_the_budgets_of_failures_hold_for_all_processes_together(threads: Threads, budget: int, over: bool) -> None:
    """Three processes with 1, 2 and 3 failures, and one more each in the next step: 9 in all."""
    shown: list[Any] = [None] * 3
    config, safety = EnvsConfig(environment="guess", on_error="none", budget=budget), RewardSafetyConfig()

    def work(index: int) -> None:
        environments, rewards = EnvironmentRunner("guess", config), RewardRunner(safety)
        counts = FailureCounts(rewards, environments)
        for number in (index + 1, 1):
            for _ in range(number):
                environments.accept(EpisodeError("fails"))
            rewards.failed = {"f": rewards.failed.get("f", 0) + index}
            counts.agree()
            shown[index] = (environments.failed, rewards.failed)

    results = threads(3, work)
    if over:
        assert all("9 failures of the environment 'guess'" in str(error) for error in results)
        assert all("at most 8" in str(error) for error in results)
    else:
        assert results == [None] * 3
        assert shown == [(9, {"f": 6})] * 3


def test_the_budget_of_reward_functions_holds_for_all_processes_together(threads: Threads) -> None:
    safety = RewardSafetyConfig(on_error="none", budget=3)

    def work(index: int) -> None:
        rewards = RewardRunner(safety)
        counts = FailureCounts(rewards, None)
        rewards.failed = {"first": 2} if index else {"second": 2}
        counts.agree()

    for error in threads(2, work):
        assert isinstance(error, RewardError)
        assert "4 failures of reward functions" in str(error)


def test_the_counts_of_a_checkpoint_are_those_of_all(threads: Threads) -> None:
    config, safety = EnvsConfig(environment="guess", on_error="none"), RewardSafetyConfig()

    def work(index: int) -> int:
        environments = EnvironmentRunner("guess", config)
        counts = FailureCounts(RewardRunner(safety), environments)
        environments.failed = 5
        counts.restart()
        environments.accept(EpisodeError("fails"))
        counts.agree()
        return environments.failed

    assert threads(2, work) == [7, 7]


def test_each_step_adds_the_failures_of_the_other_processes(threads: Threads) -> None:
    config, safety = EnvsConfig(environment="guess", on_error="none"), RewardSafetyConfig()

    def work(index: int) -> int:
        environments, learner = EnvironmentRunner("guess", config), object.__new__(GRPOLearner)
        learner.step, learner._failures = 1, FailureCounts(RewardRunner(safety), environments)
        learner._metrics = lambda *given: {}  # type: ignore[method-assign]
        environments.failed = index + 1
        learner.stats, scorer = StepStats(), SimpleNamespace(values=lambda groups: None)
        learner._token_scorer = scorer  # type: ignore[assignment]
        learner._record([], 1)
        return environments.failed

    assert threads(2, work) == [3, 3]
