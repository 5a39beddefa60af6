"""Stages' slices: nothing lost, nothing reordered, nothing larger than allowed, whatever the sizes."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.config.schema import RLTrainingConfig
from covey.errors import DataError, RecipeError
from covey.rl.microbatch import cut, merge, service_batches, slices
from covey.rl.stage_sizes import STAGES, StageSizes, stage_sizes

sizes = st.integers(1, 9)
all_sizes = st.builds(StageSizes, rollout=sizes, ref_logps=sizes, old_logps=sizes, train=sizes)


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


@given(st.integers(0, 60), all_sizes)
def test_the_micro_batches_that_come_out_are_those_that_went_in(count: int, stage: StageSizes) -> None:
    """Also where the data end early: `count` is any number of prompts."""
    services = list(service_batches(iter(range(count)), stage))
    assert [m for service in services for m in service] == list(slices(range(count), stage.train))


@given(st.integers(0, 60), all_sizes)
def test_a_service_batch_is_flushed_as_soon_as_it_is_large_enough(count: int, stage: StageSizes) -> None:
    held = [[len(m) for m in service] for service in service_batches(range(count), stage)]
    lcm = math.lcm(stage.rollout, stage.ref_logps, stage.old_logps)
    assert stage.service == lcm
    assert all(sum(service) >= lcm for service in held[:-1])
    assert all(sum(service[:-1]) < lcm for service in held)
    assert all(held), "no empty service batch"


@given(st.integers(1, 60), all_sizes)
def test_stages_before_training_are_cut_short_only_at_the_end_of_a_flush(count: int, stage: StageSizes) -> None:
    for service in service_batches(range(count), stage):
        merged = merge(service)
        for size in (stage.rollout, stage.ref_logps, stage.old_logps):
            parts = [len(part) for part in slices(merged, size)]
            assert sum(parts) == len(merged)
            assert all(part == size for part in parts[:-1])
            assert parts[-1] <= size


@given(st.integers(0, 30), all_sizes, st.integers(1, 4))
def test_whatever_the_sizes_every_prompt_gets_its_own_results(count: int, stage: StageSizes, G: int) -> None:
    """The whole way: gather, merge, repeat ×G, run each stage in its slices, cut back ×G."""
    got = []
    for service in service_batches(range(count), stage):
        sampled = [f"{x}/{g}" for part in slices(merge(service), stage.rollout) for x in part for g in range(G)]
        scored = [s for part in slices(sampled, stage.ref_logps * G) for s in part]
        got += cut(scored, [len(m) for m in service], times=G)
    assert got == [[f"{x}/{g}" for x in m for g in range(G)] for m in slices(range(count), stage.train)]


def test_micro_batches_are_gathered_lazily() -> None:
    """A learner may sample the first service batch before the rest of the data is read."""
    read: list[int] = []
    rows = (read.append(i) or i for i in range(100))  # type: ignore[func-returns-value]
    next(service_batches(rows, StageSizes(2, 4, 1, 3)))
    assert len(read) == 6


# Merging and cutting back

columns = st.lists(st.lists(st.tuples(st.integers(), st.floats(allow_nan=False)), max_size=4), min_size=1, max_size=5)


@given(columns)
def test_cut_undoes_merge_for_lists_arrays_and_mappings(batches: list[list[tuple[int, float]]]) -> None:
    counts = [len(b) for b in batches]
    assert cut(merge(batches), counts) == batches
    tables = [
        {"row": b, "x": np.array([x for _, x in b], float), "pair": np.array(b, float).reshape(-1, 2)} for b in batches
    ]
    back = cut(merge(tables), counts)
    assert [t["row"] for t in back] == batches
    for name in ("x", "pair"):
        for new, old in zip(back, tables, strict=True):
            np.testing.assert_array_equal(new[name], old[name])


def test_integers_beside_floats_do_not_truncate_them() -> None:
    assert merge([np.array([1, 0]), np.array([0.7])]).tolist() == [1.0, 0.0, 0.7]


def test_other_columns_are_named() -> None:
    with pytest.raises(
        DataError, match=r"micro-batch 1 has the columns answer, question\n.*of the first: answer, topic"
    ):
        merge([{"topic": [1], "answer": [2]}, {"question": [1], "answer": [2]}])


@pytest.mark.parametrize("count", [3, 5, 8])
def test_results_of_another_number_are_never_cut(count: int) -> None:
    with pytest.raises(AssertionError, match=f"{count} results for 2 × 2 samples"):
        cut(list(range(count)), [1, 1], times=2)


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


def test_a_size_given_in_samples_is_told_in_prompts() -> None:
    with pytest.raises(RecipeError, match="32 samples would be 4 prompts"):
        stage_sizes(training(8, rollout=32), num_generations=8)


@pytest.mark.parametrize(("bad", "nearest"), [(9, "8"), (10**9, "8")])
@pytest.mark.parametrize("stage", STAGES)
def test_sizes_out_of_range_are_refused_with_the_nearest(stage: str, bad: int, nearest: str) -> None:
    with pytest.raises(RecipeError, match=rf"{stage}_micro_batch_size {bad} prompts[\s\S]*fix: {nearest},"):
        stage_sizes(training(8, **{stage: bad}), 4)


@pytest.mark.parametrize("bad", [2.5, "4", 4.0, 0, -3])
def test_a_size_that_is_no_number_of_prompts_is_refused(bad: object) -> None:
    with pytest.raises(RecipeError, match=r"rollout_micro_batch_size is .*\n  wanted: (a whole number|at least 1)"):
        stage_sizes(replace(training(8), rollout_micro_batch_size=bad), 4)


def test_all_sizes_that_do_not_fit_are_told_at_once() -> None:
    with pytest.raises(RecipeError, match=r"2 problems[\s\S]*rollout_micro_batch_size[\s\S]*train_micro_batch_size"):
        stage_sizes(training(8, rollout=9, ref_logps=3, train=99), 4)


def test_of_many_divisors_the_nearest_are_shown() -> None:
    with pytest.raises(RecipeError, match=r"divide the step evenly: 120, 144, 180, 240, 360, 720\n"):
        stage_sizes(training(720, train=721), 1)
