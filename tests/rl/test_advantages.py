"""Advantages: the formula, ties, and samples nobody scored."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from covey.rl.advantages import group_zscore, informative
from covey.rl.grpo import with_advantages
from covey.types import Completion, FinishReason, Group

rewards = st.lists(st.floats(-100, 100, allow_nan=False), min_size=2, max_size=16)


def one(*values: float) -> np.ndarray:
    return group_zscore(np.array([values], np.float64))[0]


def test_by_hand() -> None:
    """Mean 2, deviations −1, −1, 2; ddof 1: std √3."""
    std = np.sqrt(3.0)
    np.testing.assert_allclose(one(1, 1, 4), np.array([-1, -1, 2]) / (std + 1e-4), rtol=1e-12)


def test_each_group_is_compared_with_itself_alone() -> None:
    table = np.array([[1.0, 0.0], [100.0, 90.0], [3.0, 3.0]])
    got = group_zscore(table)
    for row, group in zip(got, table, strict=True):
        np.testing.assert_array_equal(row, one(*group))
    assert got.dtype == np.float64


def test_whole_numbers_do_not_truncate() -> None:
    """Trap 7: rewards in an integer array."""
    np.testing.assert_allclose(group_zscore(np.array([[0, 1, 0]])), [one(0.0, 1.0, 0.0)])


@given(st.floats(-1e6, 1e6, allow_nan=False), st.integers(1, 16))
def test_ties_are_exactly_zero(value: float, count: int) -> None:
    """The mean of equal numbers may differ from them in the last bit; that bit must not become a gradient."""
    assert not one(*[value] * count).any()


@pytest.mark.parametrize("values", [(0.1,) * 3, (0.7,) * 7, (1 / 3,) * 6, (1e15 + 0.1,) * 5])
def test_ties_whose_mean_is_rounded(values: tuple[float, ...]) -> None:
    assert not one(*values).any()


def test_a_tie_up_to_rounding_teaches_nothing_to_speak_of() -> None:
    """0.1 + 0.2 and 0.3 differ in the last bit. The 1e-4 under the fraction keeps what comes of it below 1e-11."""
    assert np.abs(one(0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2)).max() < 1e-11


def test_unscored_samples_are_left_out_and_get_zero() -> None:
    nan = np.nan
    np.testing.assert_array_equal(one(1, nan, 0, nan), [one(1, 0)[0], 0, one(1, 0)[1], 0])
    assert not one(nan, nan, nan).any()
    assert not one(nan, 5.0, nan).any()
    assert not one(nan, 2.0, 2.0).any()


@pytest.mark.parametrize(
    ("group", "teaches"),
    [((1, 0), 1), ((1, 1), 0), ((1,), 0), ((np.nan, np.nan), 0), ((np.nan, 1), 0), ((np.nan, 1, 2), 1)],
)
def test_informative(group: tuple[float, ...], teaches: int) -> None:
    assert informative(np.array(group, np.float64)) is bool(teaches)


@given(rewards)
def test_advantages_of_a_group_sum_to_zero(values: list[float]) -> None:
    assert abs(one(*values).sum()) < 1e-6 * len(values)


@given(rewards, st.floats(0.5, 20), st.floats(-50, 50))
def test_shift_and_scale_of_the_reward_do_not_matter(values: list[float], scale: float, shift: float) -> None:
    """As far as the 1e-4 allows: exactly for a shift, nearly for a scale."""
    assume(np.std(values) > 1.0)
    np.testing.assert_allclose(one(*(np.array(values) + shift)), one(*values), atol=1e-9)
    np.testing.assert_allclose(one(*(scale * np.array(values))), one(*values), atol=2e-3)


@given(rewards)
def test_order_is_kept_and_nothing_is_larger_than_the_group_allows(values: list[float]) -> None:
    got = one(*values)
    order = np.argsort(values, kind="stable")
    assert (np.diff(got[order]) >= -1e-9).all()
    assert np.abs(got).max() <= (len(values) - 1) / np.sqrt(len(values)) + 1e-9  # the most a z-score with ddof 1 can be


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, np.nan]), min_size=4, max_size=4), min_size=1, max_size=5))
def test_never_nan(table: list[list[float]]) -> None:
    assert np.isfinite(group_zscore(np.array(table))).all()


def test_groups_get_float32_advantages_and_keep_the_rest() -> None:
    none = np.zeros(0, np.float32)
    completion = Completion(np.array([1], np.int32), none, none, FinishReason.STOP)
    groups = [
        Group("p", none, (completion,) * 2, rewards=np.array([1.0, 0.0])),
        Group("q", none, (completion,) * 2, rewards=np.array([np.nan, 0.0])),
    ]
    first, second = with_advantages(groups)
    np.testing.assert_allclose(first.advantages, one(1, 0), rtol=1e-6)
    assert first.advantages.dtype == np.float32
    assert second.advantages.tolist() == [0.0, 0.0]
    assert first.completions == groups[0].completions
