"""The loop, and its stages with a micro-batch size of their own: each behaviour by its name.

What the models of a played cluster say is made up, everything else is the real thing: it shows what the loop does and
when.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from covey.config.algorithms import algorithm_of
from covey.config.schema import GRPOConfig, RLTrainingConfig, RolloutConfig
from covey.data.loader import PromptLoader
from covey.errors import RewardError
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.monitor.record import StepRecord
from covey.parallel import make_mesh
from covey.rl.batches import TrainBatch
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.roles import ClusterConfig, Role
from covey.rl.stage_sizes import StageSizes
from covey.text.tokenizer import Tokenizer
from covey.types import Completion, FinishReason, Group

LIMIT = 10.0
"""Seconds after which a wait is a defect; no claim rests on how long anything takes."""
SIZES = ("rollout", "ref_logps", "old_logps", "train")
CONFIG = ModelConfig(
    vocab_size=300, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    tie_embeddings=True,
)  # fmt: skip


class Note(NamedTuple):
    """That something was done, to how many samples, in which thread."""

    what: str
    samples: int
    thread: str


class Threaded(ClusterConfig):
    """Settings of a cluster whose rollout runs ahead, as on devices of its own."""

    runs_ahead = True  # type: ignore[assignment]


class Played(RLCluster):
    """A cluster that notes what it is asked for, and makes up what its models would have said."""

    def __init__(self, grpo: GRPOConfig, **given: Any):
        super().__init__(**given)
        self.grpo, self.notes, self.records = grpo, list[Note](), list[StepRecord]()
        self.updates: list[list[TrainBatch]] = []
        self._noted = threading.Condition()

    def note(self, what: str, samples: int) -> None:
        with self._noted:
            self.notes.append(Note(what, samples, threading.current_thread().name))
            self._noted.notify_all()

    def seen(self, what: str, within: float = LIMIT) -> bool:
        """Waits until `what` has been noted; False when it never is."""
        with self._noted:
            return self._noted.wait_for(lambda: any(n.what == what for n in self.notes), within)

    def samples(self, what: str) -> list[int]:
        return [n.samples for n in self.notes if n.what == what]

    def order(self) -> list[str]:
        return [n.what for n in self.notes]

    def learner(self, reward_fns: Any = None, **others: Any) -> GRPOLearner:
        given = {"reward_fns": reward_fns or self.by_length, "observers": [self.records.append], **others}
        return GRPOLearner(rl_cluster=self, grpo_config=self.grpo, **given)

    def train(self, data: Any, reward_fns: Any = None, **others: Any) -> "Played":
        """The learner's whole run over a count of prompts, in their order, or over what a learner takes."""
        self.learner(reward_fns, **others).train(self.loader(data) if isinstance(data, int) else data)
        return self

    def loader(self, count: int, **options: Any) -> PromptLoader:
        rows = [{"prompt": f"p{i}", "answer": str(i)} for i in range(count)]
        return PromptLoader(rows, self.config.training_config.prompts_per_step, shuffle=False, **options)

    def by_length(self, prompts: Sequence[str], completion_ids: Sequence[list[int]]) -> list[float]:
        self.note("reward", len(prompts))
        return [float(len(ids)) for ids in completion_ids]

    def generate(
        self, examples: Sequence[Mapping[str, Any]], samples: int, *, step: int = 0, first: int = 0, **_: Any
    ) -> list[Group]:
        self.note("rollout", len(examples) * samples)
        return [_group(row, samples, (step, first + i)) for i, row in enumerate(examples)]

    def get_ref_per_token_logps(self, rows: Any, lengths: Sequence[int]) -> list[np.ndarray]:
        self.note("ref_logps", len(lengths))
        return [np.full(n, -1.0, np.float32) for n in lengths]

    def get_old_per_token_logps(self, rows: Any, lengths: Sequence[int]) -> list[np.ndarray]:
        self.note("old_logps", len(lengths))
        return [np.full(n, -1.0, np.float32) for n in lengths]

    def update_actor(self, batches: Iterable[TrainBatch]) -> dict[str, float]:
        self.updates.append([])
        for batch in batches:
            self.updates[-1].append(batch)
            self.note("train", sum(len(g.completions) for g in batch.groups))
        self.note("update", 0)
        return {"loss": 0.0, "grad_norm": 0.0, "kl": 0.0}

    def sync_weights(self) -> None:
        self.note("sync", 0)

    def prepare(self, *given: Any) -> None:
        super().prepare(*given)
        self.notes.clear()  # the loop's own are wanted


def _group(row: Mapping[str, Any], samples: int, noise: tuple[int, int]) -> Group:
    """Answers of 1 to 5 tokens that depend on the noise alone; every second one was cut off."""
    ends = (FinishReason.STOP, FinishReason.LENGTH)
    tokens = [np.random.default_rng([*noise, s]).integers(0, 300, 1 + (sum(noise) + s) % 5) for s in range(samples)]
    logps = [np.full(len(t), -1.0, np.float32) for t in tokens]
    made = (Completion(t, p, p, ends[s % 2], f"says {s}") for s, (t, p) in enumerate(zip(tokens, logps, strict=True)))
    columns = {name: value for name, value in row.items() if name != "prompt"}
    return Group(row["prompt"], np.arange(3), tuple(made), columns)


@pytest.fixture(scope="module")
def played() -> Callable[..., Played]:
    """`played(prompts=4, samples=2, updates=1, batches=1, meshes={}, thread=False, rollout=None, ..., train=None,
    **settings)`: sizes of the stages by their short names, other settings where they belong.
    """
    tokenizer = Tokenizer.from_folder(Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama")
    base = Decoder(CONFIG, rngs=nnx.Rngs(0), remat=False)  # only read: a trainer would use up its arrays

    def make(
        prompts: int = 4,
        samples: int = 2,
        updates: int = 1,
        batches: int = 1,
        meshes: Any = None,
        thread: bool = False,
        **settings: Any,
    ) -> Played:
        sizes = {f"{name}_micro_batch_size": settings.pop(name, None) for name in SIZES}
        training = {name: settings.pop(name) for name in list(settings) if hasattr(RLTrainingConfig, name)}
        grpo = GRPOConfig(**{"num_generations": samples, "num_iterations": updates, "beta": 0.04, **settings})
        given = {"prompts_per_step": prompts, "max_steps": batches * updates, **sizes, **training}
        given = {"actor_optimizer": optax.sgd(0.1), **given}
        kind = Threaded if thread else ClusterConfig
        config = kind(meshes or {}, RLTrainingConfig(**given), RolloutConfig(max_new_tokens=8))
        return Played(grpo, actor=base, tokenizer=tokenizer, cluster_config=config)

    return make


def prompts(batches: Sequence[Any]) -> list[list[str]]:
    """Those of each training micro-batch."""
    return [[g.prompt for g in batch.groups] for batch in batches]


def named(*sizes: int) -> list[list[str]]:
    """p0, p1, ... in parts of `sizes`."""
    prompts = (f"p{i}" for i in range(sum(sizes)))
    return [list(islice(prompts, size)) for size in sizes]


def on(device: int) -> Any:
    return make_mesh((1,), ("fsdp",), [jax.devices()[device]])


# Sizes


@pytest.mark.parametrize("samples", [2, 3, 5])
def test_each_stage_works_in_slices_of_its_own_size_and_the_last_may_be_short(played: Callable, samples: int) -> None:
    """Sizes count prompts before the repeat, and are samples inside a stage."""
    sizes = {"rollout": 2, "ref_logps": 3, "old_logps": 5, "train": 4}
    cluster = played(prompts=7, samples=samples, updates=2, **sizes).train(7)
    prompts = {stage: [count / samples for count in cluster.samples(stage)] for stage in sizes}
    assert prompts == {"rollout": [2, 2, 2, 1], "ref_logps": [3, 3, 1], "old_logps": [5, 2], "train": [4, 3] * 2}


# The service batch


def test_training_micro_batches_are_gathered_until_they_hold_the_lcm_of_the_other_sizes(played: Callable) -> None:
    """lcm(2, 4, 1) = 4 prompts: two micro-batches of 3 hold enough. Each service batch is scored in one call."""
    assert StageSizes(rollout=2, ref_logps=4, old_logps=1, train=3).rollout_batch_size == 6
    cluster = played(prompts=12, updates=2, rollout=2, ref_logps=4, old_logps=1, train=3).train(12)
    assert cluster.samples("reward") == [12, 12]
    assert cluster.samples("rollout") == [4] * 6
    assert cluster.samples("ref_logps") == [8, 4, 8, 4]
    assert cluster.order().index("ref_logps") < 5, "the first service batch goes on before the second is sampled"


def test_the_remainder_is_flushed_and_never_waits_or_is_dropped(played: Callable) -> None:
    """Of 7 prompts a service batch of 4 leaves 3: they are of this step and do not wait for the next."""
    cluster = played(prompts=7, batches=2, rollout=4, ref_logps=2, old_logps=1, train=2).train(14)
    assert cluster.samples("reward") == [8, 6, 8, 6]
    trained = [[prompt for batch in prompts(update) for prompt in batch] for update in cluster.updates]
    assert trained == named(7, 7)


def test_data_that_ends_early_is_flushed(played: Callable) -> None:
    cluster = played(prompts=4, batches=9, rollout=4, ref_logps=4, old_logps=4, train=2)
    cluster.train(cluster.loader(5, num_epochs=1))
    assert [prompts(update) for update in cluster.updates] == [named(2, 2), [["p4"]]]


def test_nothing_is_fed_beyond_the_allowed_number_of_steps(played: Callable) -> None:
    cluster = played(prompts=2, batches=3, rollout=2, train=1, thread=True).train(100)
    assert [record.step for record in cluster.records] == [1, 2, 3]
    assert sum(cluster.samples("rollout")) == 3 * 2 * 2
    assert len(cluster.updates) == 3


@pytest.mark.parametrize("thread", [False, True])
def test_the_trainer_sees_exactly_the_micro_batches_that_went_in(played: Callable, thread: bool) -> None:
    """Cut back at the original boundaries × G, though the stages between cut otherwise."""
    cluster = played(prompts=8, samples=3, rollout=5, ref_logps=4, old_logps=3, train=3, thread=thread).train(8)
    (batches,) = cluster.updates
    assert prompts(batches) == named(3, 3, 2)
    for batch in batches:
        assert [len(g.completions) for g in batch.groups] == [3] * len(batch.groups)
        tokens = np.concatenate([c.tokens for g in batch.groups for c in g.completions])
        assert sorted(batch.rows.target[batch.rows.scored]) == sorted(tokens)


# Passes


@pytest.mark.parametrize("thread", [False, True])
def test_each_micro_batch_is_used_mu_times(played: Callable, thread: bool) -> None:
    cluster = played(prompts=4, updates=3, batches=2, train=2, thread=thread).train(8)
    assert len(cluster.updates) == 6
    for passes in (cluster.updates[:3], cluster.updates[3:]):
        for again in passes[1:]:
            assert [id(batch) for batch in again] == [id(batch) for batch in passes[0]]
    assert cluster.samples("rollout") == [8, 8], "sampled once"


def test_in_sync_all_are_queued_before_the_first_is_used(played: Callable) -> None:
    cluster = played(prompts=3, updates=2, rollout=1, ref_logps=1, old_logps=1, train=1).train(3)
    making, using = cluster.order()[:12], cluster.order()[12:]
    assert making == ["rollout", "reward", "ref_logps", "old_logps"] * 3
    assert using == ["train", "train", "train", "update"] * 2 + ["sync"]


def test_in_async_each_micro_batch_is_queued_as_soon_as_it_exists(played: Callable) -> None:
    """The second is not even scored before the first has been trained on."""
    cluster = played(prompts=3, rollout=1, ref_logps=1, old_logps=1, train=1, thread=True)
    arrived: list[bool] = []

    def reward(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        arrived.append(prompts[0] == "p0" or cluster.seen("train"))
        return [1.0] * len(prompts)

    cluster.train(3, reward)
    assert arrived == [True, True, True]


# Counting, restarting, ending


def resumed_like_a_straight_run(played: Callable, data: Callable[[Any], Any]) -> None:
    """Two updates, and a new learner that takes up from there, make the six of a run never stopped."""
    whole, begun, rest = (played(prompts=2, updates=2, batches=batches) for batches in (3, 1, 3))
    whole.train(data(whole))
    stopped, learner, at = begun.learner(), rest.learner(), data(begun)
    stopped.train(at)
    learner.load_state(stopped.state(), step=2)
    again = data(rest)
    if isinstance(again, PromptLoader):
        again.restore(at.state())
    learner.train(again)
    together = begun.updates + rest.updates
    assert [prompts(update) for update in together] == [prompts(update) for update in whole.updates]
    for one, other in zip(together, whole.updates, strict=True):
        np.testing.assert_array_equal(one[0].rows.target, other[0].rows.target)


def test_after_a_restart_the_feeder_fast_forwards_over_what_is_done(played: Callable) -> None:
    resumed_like_a_straight_run(played, lambda cluster: cluster.loader(6))


def test_a_run_that_has_made_more_steps_than_are_asked_for_makes_none(played: Callable) -> None:
    """The trap: a negative number of updates, with samples of the next step that a checkpoint has, counts backwards."""
    learner = played(prompts=2, updates=1, batches=1).learner()
    learner.step = 6
    assert list(learner.steps(PromptLoader([{"prompt": "p"}], 2), 2)) == []


def test_after_a_restart_plain_rows_are_fast_forwarded_too(played: Callable) -> None:
    """A resumed learner that is given the data set again must not train on its first prompts twice."""
    resumed_like_a_straight_run(played, lambda cluster: [{"prompt": f"p{i}"} for i in range(6)])


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("after", [0, 1])
def test_an_error_of_a_reward_reaches_the_caller(played: Callable, thread: bool, after: int) -> None:
    cluster = played(prompts=2, rollout=1, ref_logps=1, old_logps=1, train=1, thread=thread)

    def fails(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        if prompts[0] == f"p{after}":
            raise OSError("the judge is away")
        return [1.0] * len(prompts)

    with pytest.raises(RewardError, match="'fails' raised OSError: the judge is away"):
        cluster.train(2, fails)
    assert len(cluster.samples("train")) == (after if thread else 0)
    assert not [t for t in threading.enumerate() if t.name.startswith("covey-")]


def test_max_tokens_per_micro_batch_splits_a_slice_further(played: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of six rows of 64 tokens; the budget holds one row, in the update and in the log-probs."""
    cluster, parts, slices = played(prompts=3, packing="dense", row_length=64, max_tokens_per_micro_batch=64), [], []
    learner = cluster.learner()
    learner.prepare(1)

    def update(given: Any) -> dict[str, float]:
        parts.extend(part.batch.rows.tokens.size for part in given)
        return {"loss": 0.0, "grad_norm": 0.0}

    def scores(role: str, rows: Any, lengths: Sequence[int], size: int) -> list[np.ndarray]:
        slices.append(size * rows.tokens.shape[1])
        return [np.zeros(n, np.float32) for n in lengths]

    for method in ("update_actor", "get_ref_per_token_logps"):
        monkeypatch.setattr(cluster, method, partial(getattr(RLCluster, method), cluster))
    monkeypatch.setattr(cluster.trainer, "update", update)
    monkeypatch.setattr(cluster.inference, "scores", scores)
    learner.train(cluster.loader(3))
    assert (parts, slices) == ([64] * 6, [64])


# The loop


def test_a_step_is_rollouts_rewards_advantages_mu_updates_and_weight_sync(played: Callable) -> None:
    order = played(prompts=2, updates=2, batches=2).train(2).order()
    assert order == ["rollout", "reward", "ref_logps", "old_logps", *["train", "update"] * 2, "sync"] * 2


def test_an_eval_set_is_evaluated_as_often_as_asked(played: Callable) -> None:
    made = played(prompts=2, batches=4, eval_every_n_steps=2)
    made.learner().train(made.loader(2), [{"prompt": "held out", "answer": "x"}] * 3)
    assert ["eval/reward" in record.metrics for record in made.records] == [False, True, False, True]


def test_roles_on_one_mesh_run_in_turn(played: Callable) -> None:
    made = played(prompts=2, meshes={Role.ACTOR: on(0)}).train(2)
    assert {note.thread for note in made.notes} == {"MainThread"}


def test_when_actor_and_rollout_live_apart_threads_sample_and_score(played: Callable) -> None:
    made = played(prompts=2, meshes={Role.ACTOR: on(0), Role.ROLLOUT: on(1)}).train(2)
    threads = {note.what: note.thread for note in made.notes}
    assert (threads["rollout"], threads["reward"]) == ("covey-sampler", "covey-scorer")
    assert {threads[what] for what in ("ref_logps", "train", "update", "sync")} == {"MainThread"}


def test_a_run_chooses_what_its_line_shows(played: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    made = played(prompts=2, show=("kl",))
    made.learner(observers=None).train(made.loader(2))
    assert "kl 0" in capsys.readouterr().out


# The GRPO step


def half(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    return [0.5] * len(completions)


def test_the_names_users_know(played: Callable) -> None:
    config = GRPOConfig(beta=0.08, num_generations=4)
    assert (algorithm_of(config).beta, config.num_generations) == (0.08, 4)
    assert 0.02 <= algorithm_of(GRPOConfig()).beta <= 0.08
    assert GRPOLearner(rl_cluster=played(), reward_fns=half, grpo_config=config).reward_fns == [half]
    assert GRPOLearner(rl_cluster=played(), reward_funcs=half).reward_fns == [half]


def test_the_advantage_stands_at_each_token_of_its_sample(played: Callable) -> None:
    cluster = played(prompts=2, samples=3).train(2)
    ((batch,),) = cluster.updates
    advantages = np.concatenate([group.advantages for group in cluster.records[0].groups])
    for number, place, advantage in zip(
        *np.moveaxis(batch.rows.scatter_index, -1, 0), batch.inputs.advantage, strict=True
    ):
        np.testing.assert_array_equal(advantage[number >= 0], advantages[number[number >= 0]])
        assert not advantage[place < 0].any()


def test_samples_that_are_masked_whole_contribute_0_to_a_step(played: Callable) -> None:
    """Every second completion was cut off: masked, it has no weight and still counts in the mean."""
    ((batch,),) = played(prompts=2, samples=4, mask_truncated=True).train(2).updates
    number = batch.rows.scatter_index[..., 0]
    assert not batch.inputs.weight[number % 2 == 1].any()
    assert (batch.inputs.weight[(number >= 0) & (number % 2 == 0)] > 0).all()
    assert batch.denominator == 8.0
