"""Sums over micro-batches are divided once, and no slice of a stage loses, reorders or exceeds anything."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from covey.config.schema import RLTrainingConfig
from covey.errors import RecipeError
from covey.models.decoder import Decoder
from covey.parallel import flatten
from covey.rl.stage_sizes import STAGES, StageSizes, stage_sizes
from covey.rl.step_data import prompt_batches, slices
from covey.train.trainer import MicroBatch, Trainer
from covey.types import Mean

sizes = st.integers(1, 9)
all_sizes = st.builds(StageSizes, rollout=sizes, ref_logps=sizes, old_logps=sizes, train=sizes)


# --- the accumulation alone, with a loss that needs no model


def toy_loss(graph: Any, params: Any, batch: np.ndarray) -> tuple[jax.Array, dict[str, Any]]:
    weight = jax.tree.leaves(params)[0]
    value = jnp.sum(weight[0, 0] * batch)
    mean = Mean(jnp.sum(batch), jnp.float32(batch.size))
    return value, {"mean": mean, "x/min": batch.min(), "x/max": batch.max(), "nothing": Mean(jnp.float32(0), 0.0)}


def toy_parts(*batches: list[float]) -> list[MicroBatch]:
    return [MicroBatch(np.array(batch, np.float32), float(len(batch))) for batch in batches]


@pytest.fixture
def toy(decoder: Callable[..., Decoder]) -> Iterator[Trainer]:
    return Trainer(decoder(layers=1), optax.sgd(0.0), toy_loss)


def test_sums_and_denominators_are_added_up_and_divided_once(toy: Trainer) -> None:
    """Micro-batches of unlike sizes: the mean of their means would be another number. Only names that end in
    /min and /max are compared; what nothing counts for is NaN.
    """
    value = float(jax.tree.leaves(toy.trainable)[0][0, 0])
    got = toy.update(toy_parts([1, 2, 3], [-6]))
    want = {"loss": 0.0, "mean": 0.0, "x/min": -6.0, "x/max": 3.0, "grad_norm": 0.0, "nothing": np.nan}
    assert got == pytest.approx(want, abs=1e-6, nan_ok=True)
    got = toy.update(toy_parts([1, 2, 3], [10]))
    want |= {"loss": 4 * value, "mean": 4.0, "x/min": 1.0, "x/max": 10.0, "grad_norm": 4.0}
    assert got == pytest.approx(want, nan_ok=True)
    assert all(type(x) is float for x in got.values())


@pytest.mark.slow
def test_an_update_is_four_programs(toy: Trainer) -> None:
    """Zeros, the gradients of a micro-batch, their norm, the step; the metrics are added on the host."""
    counter = pytest.importorskip("covey_status.programs").CompileCounter
    jax.clear_caches()
    with counter() as programs:
        toy.update(toy_parts([1, 2, 3], [4, 5, 6], [7, 8, 9]))
    assert programs.counts.total() == 4


@pytest.mark.slow
def test_a_step_without_a_token_in_its_loss_changes_nothing(toy: Trainer) -> None:
    """As when every completion was cut off and masked: it is made, and its loss, a mean over nothing, is NaN."""
    before = jax.tree.map(np.array, toy.trainable)
    got = toy.update([MicroBatch(np.zeros(2, np.float32), 0.0)])
    assert np.isnan(got["loss"])
    assert (got["grad_norm"], toy.step) == (0.0, 1)
    jax.tree.map(np.testing.assert_array_equal, before, toy.trainable)


def test_grad_norm_is_before_the_clip(decoder: Callable) -> None:
    clipped = Trainer(decoder(layers=1), optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0)), toy_loss)
    before = float(jax.tree.leaves(clipped.trainable)[0][0, 0])
    assert clipped.update(toy_parts([4.0, 4.0]))["grad_norm"] == pytest.approx(4.0)
    assert float(jax.tree.leaves(clipped.trainable)[0][0, 0]) == pytest.approx(before - 0.5, abs=1e-5)


@pytest.mark.slow
def test_what_is_trained_is_taken_over_and_the_rest_is_only_read(decoder: Callable) -> None:
    """Buffers of trainable arrays are reused at each update, so the arrays that came in are gone."""
    model = decoder(4, layers=1)
    given, base = flatten(nnx.state(model, nnx.LoRAParam)), flatten(nnx.state(model, nnx.Param))
    base = {name: x for name, x in base.items() if ".lora." not in name}
    trainer = Trainer(model, optax.sgd(0.1), lambda g, p, b: (jnp.sum(jax.tree.leaves(p)[0]), {}))
    trainer.update([MicroBatch(np.zeros(1), 1.0)])
    assert all(x.is_deleted() for x in given.values())
    assert not any(x.is_deleted() for x in base.values())
    assert not any(x.is_deleted() for x in jax.tree.leaves(trainer.params))


def training(prompts: int = 8, **given_sizes: int | None) -> RLTrainingConfig:
    named = {f"{stage}_micro_batch_size": size for stage, size in given_sizes.items()}
    return RLTrainingConfig(prompts_per_step=prompts, **named)  # type: ignore[arg-type]


# Cutting


@given(st.lists(st.integers(), max_size=40), sizes)
def test_slices_are_full_but_for_the_last_and_lose_nothing(items: list[int], size: int) -> None:
    parts = list(slices(iter(items), size))
    assert [x for part in parts for x in part] == items
    assert all(len(part) == size for part in parts[:-1])
    assert all(1 <= len(part) <= size for part in parts)
    assert len(parts) == math.ceil(len(items) / size)


def test_a_slice_of_nothing_is_refused_rather_than_losing_everything() -> None:
    with pytest.raises(AssertionError):
        list(slices([1, 2], 0))


@given(st.integers(1, 60), all_sizes)
def test_prompts_are_sampled_in_whole_micro_batches_and_stages_work_in_full_slices(
    count: int, stage: StageSizes
) -> None:
    """But for the last ones, also where the data end early: `count` is any number of prompts."""
    rows = [{"prompt": str(n)} for n in range(count)]
    batches = list(prompt_batches(rows, 3, stage.rollout_batch_size, list))
    assert [row for batch in batches for row in batch.examples] == rows
    assert [batch.first for batch in batches] == [int(batch.examples[0]["prompt"]) for batch in batches]
    lcm, size = math.lcm(stage.rollout, stage.ref_logps, stage.old_logps), stage.rollout_batch_size
    assert all(len(batch.examples) == size for batch in batches[:-1])
    assert size - stage.train < lcm <= size
    assert size % stage.train == 0


# Sizes


def test_a_size_that_is_not_set_is_the_whole_step() -> None:
    assert stage_sizes(training(12), 4) == StageSizes(12, 12, 12, 12)
    assert stage_sizes(training(12, rollout=4, train=5), 4) == StageSizes(4, 12, 12, 5)


@given(st.integers(1, 24), st.data())
def test_every_size_from_one_to_the_step_is_legal(prompts: int, data: st.DataObject) -> None:
    chosen = {stage: data.draw(st.none() | st.integers(1, prompts)) for stage in STAGES}
    got = stage_sizes(training(prompts, **chosen), 2)
    assert got == StageSizes(**{stage: size or prompts for stage, size in chosen.items()})


def test_the_error_states_unit_arithmetic_and_what_would_do() -> None:
    with pytest.raises(RecipeError) as caught:
        stage_sizes(training(8, train=12), num_generations=8)
    text = str(caught.value)
    assert "train_micro_batch_size 12 prompts × num_generations 8 = 96 samples" in text
    assert "a step has prompts_per_step 8 × 8 = 64" in text
    assert "before the ×8 repeat, × 8 samples inside the stage" in text
    assert "divide the step evenly: 1, 2, 4, 8" in text
    assert "fix: 8, or null for the whole step" in text
    assert caught.value.where == "training.train_micro_batch_size"


@pytest.mark.parametrize("bad", [2.5, "4", 4.0, 0, -3])
def test_a_size_that_is_no_number_of_prompts_is_refused(bad: object) -> None:
    wanted = r"rollout_micro_batch_size is .*\n  wanted: (a whole number|greater than or equal to 1)"
    with pytest.raises(RecipeError, match=wanted):
        stage_sizes(replace(training(8), rollout_micro_batch_size=bad), 4)


@pytest.mark.parametrize(
    ("prompts", "sizes", "samples", "words"),
    [
        (8, {"rollout": 32}, 8, "32 samples would be 4 prompts"),
        (8, {"rollout": 9, "ref_logps": 3, "train": 99}, 4, r"2 problems[\s\S]*rollout_micro[\s\S]*train_micro"),
        (720, {"train": 721}, 1, r"divide the step evenly: 120, 144, 180, 240, 360, 720\n"),
        *((8, {stage: 9}, 4, rf"{stage}_micro_batch_size 9 prompts[\s\S]*fix: 8,") for stage in STAGES),
    ],
)
def test_sizes_that_do_not_fit_are_told_at_once_with_those_that_would(
    prompts: int, sizes: dict[str, int], samples: int, words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        stage_sizes(training(prompts, **sizes), samples)
