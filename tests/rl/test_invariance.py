"""A step's gradient does not depend on how the step is cut, packed, queued or spread over devices.

Real learners take real steps, from prompts to gradients. What stands in for the optimizer remembers gradients and
follows none, so that one compiled learner can take the same steps again and again. Each batch is used twice; at its
second update the weights are elsewhere, so that ratios are not 1 and clips cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.config.algorithms import PRESETS, algorithm_of
from covey.config.metrics import CLOCKS
from covey.config.schema import GRPOConfig, LoRAConfig, RLTrainingConfig, RolloutConfig
from covey.data.loader import PromptLoader
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.models.lora import projections, with_lora
from covey.models.value_model import make_value_model
from covey.monitor.record import StepRecord
from covey.parallel import flatten, make_mesh
from covey.rl.batches import TrainBatch
from covey.rl.cluster import RLCluster
from covey.rl.grpo import GRPOLearner
from covey.rl.learner import Learner
from covey.rl.roles import ClusterConfig, Role
from covey.rl.stage_sizes import StageSizes
from covey.text.tokenizer import Tokenizer
from covey.train.trainer import Trainer
from covey.types import FinishReason

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_programs")]

TINY = Path(__file__).parents[1] / "parity" / "golden" / "tiny-llama"
MODEL = ModelConfig(
    vocab_size=300, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8,
    tie_embeddings=True,
)  # fmt: skip
P, G, UPDATES, LONGEST, ROWS = 4, 4, 2, 16, 7
"""Prompts in a step, answers to each, updates on each batch, tokens in an answer, prompts before the data end."""
STOPS = range(260, 300)
"""So many that answers of random weights end at any length, a few by the limit."""
TEXTS = ("a", "hello there", "the", "on and on", "b", "zz top", "x y", "q", "so", "it is")
WHOLE = (P, P, P, P)
Gradient = dict[str, np.ndarray]
Sizes = tuple[int, int, int, int]

ADAPTERS = "grpo on adapters"
ALIKE = ("bnpo", "gspo_token", "cispo", "sapo")
"""Presets that a step treats as it does others here: their losses, which alone differ, are cut, packed and divided in
`tests/losses/test_policy_loss.py`.
"""
CASES = {name: GRPOConfig(algorithm=name) for name in PRESETS if name not in ALIKE} | {
    ADAPTERS: GRPOConfig(),
    "dapo with every term": GRPOConfig(
        algorithm="dapo", beta=0.1, kl="k2", entropy_bonus=0.05, correction="token_mask", mask_truncated=True
    ),
    "adapted beta": GRPOConfig(
        advantage="batch_std", surrogate="dual_clip", beta=0.1, kl="k1", kl_in="reward", kl_target=0.1, kl_horizon=32,
        correction="geometric_truncate", mask_truncated=True,
    ),
}  # fmt: skip


ON_DEVICES = (("grpo", "two"), ("gspo", "four"), ("ppo", "two"), (ADAPTERS, "four"))
"""Terms of tokens, of sequences, of a critic, and adapters; `tests/losses` has the loss of every preset on a mesh."""


class Remembered(NamedTuple):
    """Where the weights began, updates made, and the gradients of the last two."""

    start: Any
    count: Any
    seen: tuple[Any, Any]


def remembering(updates: int) -> optax.GradientTransformation:
    """Follows no gradient: after a batch's first update the weights are half as large again, after its last they are
    back to the bit, for the difference of numbers so close is exact.

    Args:
        updates: on each batch.
    """

    def init(params: Any) -> Remembered:
        nothing = jax.tree.map(jnp.zeros_like, params)
        return Remembered(jax.tree.map(jnp.copy, params), jnp.zeros((), jnp.int32), (nothing, nothing))

    def update(grads: Any, state: Remembered, params: Any = None) -> tuple[Any, Remembered]:
        count = state.count + 1
        factor = jnp.where(count % updates == 0, 1.0, 1.5)
        moves = jax.tree.map(lambda start, now: start * factor - now, state.start, params)
        return moves, Remembered(state.start, count, (state.seen[1], grads))

    return optax.GradientTransformation(init, update)


def odd(completion_ids: Sequence[Sequence[int]]) -> list[float | None]:
    """Mixed rewards, now and then equal ones in a group; some answers are not scored."""
    return [None if ids[0] % 17 == 0 else float(sum(ids) % 2) for ids in completion_ids]


class Steps(NamedTuple):
    """What a lab's learner did: the gradient of each update, and each step's record."""

    gradients: list[Gradient]
    records: list[StepRecord]


class Lab:
    """A compiled learner that takes the same steps as often as it is asked to.

    Args:
        config: the algorithm.
        meshes: where the roles live.
        adapted: train adapters alone.
    """

    def __init__(self, config: GRPOConfig, meshes: dict[Role, Any], adapted: bool = False):
        updates = 1 if config.algorithm == "reinforce" else UPDATES  # it has no ratio for a second one
        optimizer: Any = remembering(updates)
        self.training = RLTrainingConfig(
            max_steps=100, prompts_per_step=P, actor_optimizer=optimizer, critic_optimizer=optimizer, row_length=64,
            max_tokens_per_micro_batch=64,
        )  # fmt: skip
        sampling = RolloutConfig(max_new_tokens=LONGEST, slots=4, temperature=0.8, seed=36)
        plain = Tokenizer.from_folder(TINY)
        critic = make_value_model(decoder(2))
        critic.score[...] = jnp.asarray(np.random.default_rng(7).normal(size=16), jnp.float32)
        self.cluster = RLCluster(
            actor=with_adapters(decoder(0)) if adapted else decoder(0),
            reference=decoder(1),
            critic=critic if algorithm_of(config).needs_critic else None,
            tokenizer=Tokenizer(plain.inner, eos_id=plain.eos_id, stop_ids=STOPS),
            cluster_config=ClusterConfig(meshes, self.training, sampling),
        )
        self.steps: Steps = Steps([], [])
        self.learner = self._learner(replace(config, num_generations=G, num_iterations=updates))
        self.start = self.learner.state()
        self.learner.prepare(100)

    def train(self, rows: int, sizes: Sizes = WHOLE, thread: bool = False, **training: Any) -> Steps:
        """Steps on data that end after so many rows, their samples drawn by a `thread` or in turn; `training` is put in
        place of the settings for this call.
        """
        self._set(sizes, **training)
        self.learner.load_state(self.start, 0)
        self.steps = Steps([], [])
        with patch.object(ClusterConfig, "runs_ahead", thread):
            self.learner.train(data(rows))
        return self.steps

    def batches(self, made_by: Callable[..., list[TrainBatch]], sizes: Sizes) -> list[TrainBatch]:
        """The training micro-batches of the first step."""
        self._set(sizes)
        loader = data(ROWS)
        return made_by(self.learner, next(loader), loader.take)

    def updates(self, batches: Sequence[TrainBatch]) -> list[Gradient]:
        """The gradient of each update on `batches`."""
        for _ in range(UPDATES):
            self.learner.update(batches)
        self.cluster.sync_weights()
        return self._seen(UPDATES)

    def trainers(self) -> dict[str, Trainer]:
        """Those of the actor and, where there is one, of the critic."""
        found = {"actor": self.cluster.trainer, "critic": self.cluster.critic_trainer}
        return {role: trainer for role, trainer in found.items() if trainer is not None}

    def _learner(self, config: GRPOConfig) -> Learner:
        others: Any = {"rl_cluster": self.cluster, "reward_fns": odd, "observers": [self._remember]}
        critic = algorithm_of(GRPOConfig(config.algorithm)).needs_critic
        return (
            pytest.importorskip("covey_ppo.learner").PPOLearner(ppo_config=config, **others)
            if critic
            else GRPOLearner(grpo_config=config, **others)
        )

    def _set(self, sizes: Sizes, **settings: Any) -> None:
        training = replace(self.training, **settings)
        self.learner.training = training
        self.cluster.config = replace(self.cluster.config, training_config=training)
        self.learner.sizes = StageSizes(*sizes)

    def _remember(self, record: StepRecord) -> None:
        self.steps.records.append(record)
        self.steps.gradients.extend(self._seen(record.updates))

    def _seen(self, count: int) -> list[Gradient]:
        seen = {role: trainer.opt_state.seen for role, trainer in self.trainers().items()}
        return [
            {f"{role}.{name}": np.array(x) for role, of in seen.items() for name, x in flatten(of[i]).items()}
            for i in range(-count, 0)
        ]


def decoder(seed: int) -> Decoder:
    return Decoder(MODEL, rngs=nnx.Rngs(seed), remat=False)


def with_adapters(model: Decoder) -> Decoder:
    """The model with adapters that change what it computes."""
    adapted = with_lora(model, LoRAConfig(rank=2))
    for number, linear in enumerate(projections(adapted).values()):
        assert linear.lora is not None
        linear.lora.b[...] = jnp.asarray(
            np.random.default_rng(number).normal(size=linear.lora.b.shape, scale=0.03), jnp.float32
        )
    return adapted


def data(rows: int) -> PromptLoader:
    return PromptLoader([{"prompt": text} for text in TEXTS[:rows]], P, shuffle=False, num_epochs=1)


def largest(gradient: Gradient, role: str) -> float:
    return max((float(np.abs(x).max()) for name, x in gradient.items() if name.startswith(role)), default=0.0)


def same(got: Sequence[Gradient], want: Sequence[Gradient]) -> None:
    """Equal to 1e-5 of the largest entry, update by update, actor and critic each by its own."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        for name, x in other.items():
            atol = 1e-5 * largest(other, name.split(".")[0])
            np.testing.assert_allclose(one[name], x, rtol=0, atol=atol, err_msg=name)


def same_steps(got: Steps, want: Steps) -> None:
    """Gradients, and every metric that is not about time or padding."""
    same(got.gradients, want.gradients)
    work = (*CLOCKS, "waste/")
    for one, other in zip(got.records, want.records, strict=True):
        metrics = {name: value for name, value in other.metrics.items() if not name.startswith(work)}
        found = {name: one.metrics[name] for name in metrics}
        assert found == pytest.approx(metrics, rel=1e-4, abs=1e-5, nan_ok=True)


Labs = Callable[..., Lab]


@pytest.fixture(scope="module")
def labs() -> Labs:
    """`labs(case, place="one")`: made once."""
    return cache(lambda case, place="one": Lab(CASES[case], PLACES[place](), adapted=case == ADAPTERS))


@pytest.fixture(scope="module")
def whole(labs: Labs) -> Callable[[str, int], Steps]:
    """`whole(case, rows)`: the steps with each stage working on the whole batch."""
    return cache(lambda case, rows: labs(case).train(rows))


def test_the_steps_are_worth_comparing(labs: Labs) -> None:
    """Answers of many lengths, stopped and cut off; groups that teach and one that does not; a last step that is
    short; a second update whose weights, ratios and gradient are others; weights that come back to the bit.
    """
    lab = labs("dapo")
    before = {name: np.array(x) for name, x in flatten(lab.cluster.trainer.params).items()}
    gradients, records = lab.train(ROWS)
    completions = [c for record in records for g in record.groups for c in g.completions]
    assert len({len(c.tokens) for c in completions}) >= 8
    assert {c.finish for c in completions} == {FinishReason.STOP, FinishReason.LENGTH}
    assert [record.metrics["dynamic_sampling/replaced"] for record in records] == [1, 0]
    assert [len(record.groups) for record in records] == [5, 2]
    assert min(record.metrics["clip_ratio/region_mean"] for record in records) > 0.02
    for first, second in zip(gradients[::2], gradients[1::2], strict=True):
        scale = largest(first, "actor")
        assert scale > 0.01
        assert max(np.abs(first[name] - second[name]).max() for name in first) > 0.1 * scale
    norms = [np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in gradient.values())) for gradient in gradients]
    shown = [record.metrics["grad_norm"] for record in records]
    assert shown == pytest.approx(np.mean(np.reshape(norms, (-1, UPDATES)), axis=1), rel=1e-4)
    assert all(np.array_equal(x, before[name]) for name, x in flatten(lab.cluster.trainer.params).items())


def test_the_base_under_adapters_does_not_move_by_a_bit(labs: Labs) -> None:
    lab = labs(ADAPTERS)
    assert lab.cluster.trainer is not None
    frozen = flatten(lab.cluster.trainer.frozen)
    values = {name: np.array(x) for name, x in frozen.items()}
    places = {name: x.unsafe_buffer_pointer() for name, x in frozen.items()}
    gradients = lab.train(ROWS).gradients
    for name, x in flatten(lab.cluster.trainer.frozen).items():
        assert np.array_equal(x, values[name]), name
        assert x.unsafe_buffer_pointer() == places[name]
    assert {name.rsplit(".", 2)[-2] for name in gradients[0]} == {"lora"}


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_packing_and_a_thread_change_nothing(labs: Labs, whole: Callable, case: str) -> None:
    lab, want = labs(case), whole(case, ROWS)
    assert all(largest(gradient, role) > 1e-3 for gradient in want.gradients for role in lab.trainers())
    for train, packing in ((1, "dense"), (3, "groups")):
        same_steps(lab.train(ROWS, (P, P, P, train), packing=packing), want)
    queued, straight = (lab.train(ROWS, (1, 2, 1, 1), thread=thread) for thread in (True, False))
    same_steps(queued, want)
    for one, other in zip(queued.gradients, straight.gradients, strict=True):
        assert all(np.array_equal(one[name], x) for name, x in other.items())


@pytest.mark.parametrize("case", ["dapo", "ppo"])
def test_rows_that_are_computed_together_change_nothing(labs: Labs, whole: Callable, case: str) -> None:
    """Two rows at a time, which take programs of their own."""
    same_steps(labs(case).train(ROWS, max_tokens_per_micro_batch=128), whole(case, ROWS))


@pytest.mark.parametrize(("case", "place"), ON_DEVICES)
def test_devices_change_nothing(labs: Labs, made_by: Callable, case: str, place: str) -> None:
    """Nor do updates move a weight from the devices that it was given: what takes it would be compiled anew."""
    one, several = labs(case), labs(case, place)
    batches = one.batches(made_by, (P, P, P, 2))
    places = [jax.tree.map(lambda x: x.sharding, t.trainable) for t in several.trainers().values()]
    assert any(not x.is_fully_replicated for x in jax.tree.leaves(places))
    same(several.updates(batches), one.updates(batches))
    assert places == [jax.tree.map(lambda x: x.sharding, t.trainable) for t in several.trainers().values()]


def test_a_rollout_on_other_devices_changes_nothing(labs: Labs, whole: Callable) -> None:
    """The whole loop, with reference, critic and old log-probs on the actor's two devices and the rollout on two more;
    the next micro-batch is sampled while the last one is trained on.
    """
    lab = labs("ppo", "two")
    assert lab.cluster.config.runs_ahead
    got = lab.train(ROWS, (2, 3, 1, 2), thread=True)
    same(got.gradients, whole("ppo", ROWS).gradients)


size = st.integers(1, P)


@settings(max_examples=12)
@given(
    case=st.sampled_from(list(CASES)),
    rows=st.integers(1, len(TEXTS)),
    sizes=st.tuples(size, size, size, size),
    training=st.fixed_dictionaries(
        {
            "packing": st.sampled_from(["groups", "dense"]),
            "thread": st.booleans(),
        }
    ),
)
def test_no_sizes_of_the_stages_change_anything(
    labs: Labs, whole: Callable, case: str, rows: int, sizes: Sizes, training: dict[str, Any]
) -> None:
    """Sizes that do not divide the batch, and data that end in the middle of it."""
    same_steps(labs(case).train(rows, sizes, **training), whole(case, rows))


PLACES: dict[str, Callable[[], dict[Role, Any]]] = {
    "one": dict,
    "two": lambda: {
        Role.ACTOR: make_mesh((2, 1), devices=jax.devices()[:2]),
        Role.ROLLOUT: make_mesh((1, 2), devices=jax.devices()[2:]),
    },
    "four": lambda: {Role.ACTOR: make_mesh((2, 2))},
}
