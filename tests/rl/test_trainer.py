"""One update is one update: however the step is cut, packed or spread over devices."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from covey.configs import GRPOConfig
from covey.models.decoder import Decoder
from covey.parallel import flatten, make_mesh, reshard, shardings
from covey.parallel.placement import put_rows
from covey.rl.losses import LossInputs, sequence_mean_weights
from covey.rl.rows import lay, micro_batches, pack, spread
from covey.rl.trainer import MicroBatch, RLTrainer
from covey.train.trainer import Trainer

SHAPES = [(5, [1, 3, 9, 20]), (30, [14, 4, 1, 1])]
LENGTHS = [n for _, sizes in SHAPES for n in sizes]
CONFIG = GRPOConfig(beta=0.1)
RATE = 3.0
"""High, so that what float32 loses in the sum of weight and step is far below 1e-5 of the step."""


@pytest.fixture
def trainer(decoder: Callable[..., Decoder]) -> Callable[..., RLTrainer]:
    def make(lora: int = 0, mesh: Any = None) -> RLTrainer:
        model = decoder(lora)
        if mesh is not None:
            graph, params = nnx.split(model)
            model = nnx.merge(graph, reshard(params, shardings(params, mesh)))
        return RLTrainer(model, optax.sgd(RATE), CONFIG, temperature=0.9)

    return make


@pytest.fixture
def batch(groups_of: Callable) -> Callable[[str], MicroBatch]:
    """`batch(packing)`: a step's rows with old and reference log-probs."""

    def make(packing: str) -> MicroBatch:
        rows = pack(groups_of(SHAPES), 64, packing)  # type: ignore[arg-type]
        rng = np.random.default_rng(1)
        logps = lambda: [rng.normal(size=n, scale=0.3) - 5.7 for n in LENGTHS]  # noqa: E731
        inputs = LossInputs(
            advantage=spread(rows, 3 * rng.normal(size=len(LENGTHS))),
            weight=spread(rows, sequence_mean_weights(np.array(LENGTHS))),
            sampled=lay(rows, logps()),
            old_logps=lay(rows, logps()),
            ref_logps=lay(rows, logps()),
        )
        return MicroBatch(rows, inputs)

    return make


class OneStep:
    """Makes the same first update again and again with one compiled trainer."""

    def __init__(self, trainer: RLTrainer):
        self.trainer = trainer
        self.start = jax.tree.map(np.array, trainer.trainable)
        self.places = jax.tree.map(lambda x: x.sharding, trainer.trainable)

    def __call__(self, batch: MicroBatch, size: int) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """The step that each parameter took, and the metrics."""
        trainer = self.trainer
        trainer.trainable = jax.tree.map(jax.device_put, jax.tree.map(np.array, self.start), self.places)
        metrics = trainer.update(put_rows(part, trainer.trainable) for part in micro_batches(batch, size))
        after, before = flatten(trainer.trainable), flatten(self.start)
        return {name: np.asarray(after[name], np.float64) - before[name] for name in before}, metrics


def same_update(one: Any, other: Any) -> None:
    (steps, metrics), (want, want_metrics) = one, other
    scale = max(np.abs(x).max() for x in want.values())
    assert scale > 0.1
    for name, value in want.items():
        np.testing.assert_allclose(steps[name], value, atol=1e-5 * scale, err_msg=name)
    assert metrics == pytest.approx(want_metrics, rel=1e-4, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(want_metrics["grad_norm"], rel=1e-5)


Updates = dict[int, tuple[OneStep, tuple[dict[str, np.ndarray], dict[str, float]]]]


@pytest.fixture(scope="module")
def updates() -> Updates:
    """By rank of the adapters: a trainer on one device and its update on the whole batch at once, compiled once."""
    return {}


@pytest.fixture
def whole(updates: Updates, trainer: Callable, batch: Callable) -> Callable[[int], Any]:
    def make(lora: int) -> Any:
        if lora not in updates:
            step = OneStep(trainer(lora))
            updates[lora] = step, step(batch("dense"), 8)
        return updates[lora]

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "sizes"), [(0, (1, 2, 3)), (4, (3,))], ids=["full", "lora"])
def test_micro_batches_and_packing_change_nothing(
    whole: Callable, batch: Callable, lora: int, sizes: tuple[int, ...]
) -> None:
    """Trap 6: loss normalised per micro-batch, grad norm divided by accumulation steps."""
    step, want = whole(lora)
    dense, groups = batch("dense"), batch("groups")
    assert len(dense.rows.tokens) == 8
    assert len(groups.rows.tokens) == 2
    for size in sizes:  # 3 leaves a last slice that is filled up
        same_update(step(dense, size), want)
        same_update(step(groups, size), want)
    norm = np.sqrt(sum((x**2).sum() for x in want[0].values())) / RATE
    assert want[1]["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("shapes", "lora"), [([(4, 1), (2, 2), (1, 4)], 0), ([(2, 2)], 4)], ids=["full", "lora"])
def test_a_mesh_of_four_devices_makes_the_update_of_one(
    whole: Callable, trainer: Callable, batch: Callable, shapes: list[tuple[int, int]], lora: int
) -> None:
    for shape in shapes:
        spread_out = trainer(lora, mesh=make_mesh(shape, ("fsdp", "tp")))
        assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(spread_out.trainable))
        same_update(OneStep(spread_out)(batch("dense"), 4), whole(lora)[1])


@pytest.mark.slow
def test_the_base_under_adapters_does_not_move_by_a_bit(whole: Callable, batch: Callable, decoder: Callable) -> None:
    step, _ = whole(4)
    step(batch("dense"), 8)
    actor, base = step.trainer, flatten(nnx.state(decoder(4)))
    held = {name: x.unsafe_buffer_pointer() for name, x in flatten(actor.frozen).items()}
    for _ in range(2):
        actor.update([batch("dense")])
    for name, x in flatten(actor.frozen).items():
        assert np.array_equal(x, base[name]), name
        assert x.unsafe_buffer_pointer() == held[name]
    for name, x in flatten(actor.trainable).items():
        assert np.isfinite(x).all(), name
        assert not np.array_equal(x, base[name]), name
    assert {name.rsplit(".", 2)[-2] for name in flatten(actor.trainable)} == {"lora"}


# --- the accumulation alone, with a loss that needs no model


def toy_loss(graph: Any, params: Any, batch: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
    weight = jax.tree.leaves(params)[0]
    value = jnp.sum(weight[0, 0] * batch)
    return value, {"value": value, "x/min": batch.min(), "x/max": batch.max(), "minimum": batch.sum()}


@pytest.fixture
def toy(decoder: Callable) -> Iterator[Trainer]:
    return Trainer(decoder(), optax.sgd(0.0), toy_loss)


def test_metrics_add_up_except_the_smallest_and_the_largest(toy: Trainer) -> None:
    """Only names that end in /min and /max are compared; `minimum` is a sum like any other."""
    value = float(jax.tree.leaves(toy.trainable)[0][0, 0])
    parts = [np.array(x, np.float32) for x in ([1, 2], [-5, 4], [3, 3])]
    got = toy.update(parts)
    assert got == pytest.approx(
        {"value": 8 * value, "x/min": -5.0, "x/max": 4.0, "minimum": 8.0, "grad_norm": 8.0}, rel=1e-5
    )
    assert all(type(x) is float for x in got.values())


def test_grad_norm_is_before_the_clip(decoder: Callable) -> None:
    clipped = Trainer(decoder(), optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0)), toy_loss)
    before = float(jax.tree.leaves(clipped.trainable)[0][0, 0])
    assert clipped.update([np.full(2, 2.0, np.float32)])["grad_norm"] == pytest.approx(4.0)
    assert float(jax.tree.leaves(clipped.trainable)[0][0, 0]) == pytest.approx(before - 0.5, abs=1e-5)


def test_state_goes_out_and_comes_back(decoder: Callable) -> None:
    make = partial(Trainer, optimizer=optax.sgd(0.1, momentum=0.9), loss_fn=toy_loss)
    straight, resumed, parts = make(decoder()), make(decoder()), [np.full(2, 2.0, np.float32)]
    straight.update(parts)
    saved = jax.tree.map(np.array, straight.state())
    resumed.load_state(jax.tree.map(jnp.asarray, saved), straight.step)
    for trainer in (straight, resumed):
        trainer.update(parts)
    assert resumed.step == straight.step == 2
    for one, other in zip(jax.tree.leaves(resumed.trainable), jax.tree.leaves(straight.trainable), strict=True):
        assert np.array_equal(one, other)


def test_what_is_trained_is_taken_over_and_the_rest_is_only_read(decoder: Callable) -> None:
    """Buffers of trainable arrays are reused at each update, so the arrays that came in are gone."""
    model = decoder(4)
    given, base = flatten(nnx.state(model, nnx.LoRAParam)), flatten(nnx.state(model, nnx.Param))
    base = {name: x for name, x in base.items() if ".lora." not in name}
    trainer = Trainer(model, optax.sgd(0.1), lambda g, p, b: (jnp.sum(jax.tree.leaves(p)[0]), {}))
    trainer.update([np.zeros(1)])
    assert all(x.is_deleted() for x in given.values())
    assert not any(x.is_deleted() for x in base.values())
    assert not any(x.is_deleted() for x in jax.tree.leaves(trainer.params))
