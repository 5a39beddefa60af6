"""Advantages: the formulas, ties, samples nobody scored, and PPO's estimates over tokens."""

import inspect
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from covey.losses import advantages
from covey.losses.advantages import ADVANTAGES, batch_std, gae, has_reward_variance, reads_groups, whiten
from covey.types import Completion, FinishReason, Group

NAN = np.nan
REWARD = st.floats(-100, 100, allow_nan=False)
GROUP = st.lists(REWARD, min_size=2, max_size=16)
TABLE = st.integers(2, 6).flatmap(lambda n: st.lists(st.lists(REWARD, min_size=n, max_size=n), min_size=1, max_size=5))
every = pytest.mark.parametrize("name", ADVANTAGES)


def of(name: str, *groups: tuple[float, ...]) -> np.ndarray:
    return compute(name, np.array(groups, np.float64))


def compute(name: str, table: np.ndarray) -> np.ndarray:
    """The advantages of a table of rewards. A function that reads groups gets completions whose texts differ."""
    function = ADVANTAGES[name]
    if not reads_groups(function):
        return function(table)
    ones, empty = np.ones(1, np.int32), np.zeros(1, np.float32)
    texts = [Completion(ones, empty, empty, FinishReason.STOP, f"text {number}") for number in range(table.shape[1])]
    return function(table, [Group("prompt", ones, tuple(texts)) for _ in table])


def test_every_function_of_rewards_is_in_the_table() -> None:
    """Else no recipe can name it, and no test holds it to the contract."""
    public = {
        name: f for name, f in vars(advantages).items() if inspect.isfunction(f) and f.__module__ == advantages.__name__
    }
    takes = {name: [*inspect.signature(f).parameters] for name, f in public.items() if not name.startswith("_")}
    assert {name for name, given in takes.items() if given in (["rewards"], ["rewards", "groups"])} == {
        *(f.__name__ for f in ADVANTAGES.values()),
        "reward_table",  # makes the table
    }


# --- of groups


def test_by_hand() -> None:
    """Mean 2 and deviations −1, −1, 2: with ddof 1 the std is √3. The other group has mean 10, all together 6."""
    table = (1.0, 1.0, 4.0), (5.0, 10.0, 15.0)
    std = np.sqrt(sum((x - 6.0) ** 2 for group in table for x in group) / 5)
    np.testing.assert_allclose(of("group_zscore", *table)[0], np.array([-1, -1, 2]) / (np.sqrt(3.0) + 1e-4), rtol=1e-12)
    np.testing.assert_allclose(of("group_zscore", *table)[1], np.array([-5, 0, 5]) / (5 + 1e-4), rtol=1e-12)
    np.testing.assert_allclose(of("batch_std", *table) * (std + 1e-4), [[-1, -1, 2], [-5, 0, 5]], rtol=1e-12)
    np.testing.assert_allclose(of("centred", *table), [[-1, -1, 2], [-5, 0, 5]], rtol=1e-12)
    np.testing.assert_allclose(of("leave_one_out", *table), [[1 - 2.5, 1 - 2.5, 4 - 1], [5 - 12.5, 0, 15 - 7.5]])


@pytest.mark.parametrize("name", [n for n in ADVANTAGES if n != "batch_std"])
def test_each_group_is_compared_with_itself_alone(name: str) -> None:
    table = np.array([[1.0, 0.0], [100.0, 90.0], [3.0, 3.0]])
    got = compute(name, table)
    for row, group in zip(got, table, strict=True):
        np.testing.assert_array_equal(row, of(name, group)[0])
    assert got.dtype == np.float64


@every
def test_whole_numbers_do_not_truncate(name: str) -> None:
    """Rewards in an integer array give the advantages of the same rewards as floats."""
    whole = compute(name, np.array([[0, 1, 0, 1], [2, 2, 7, 9]]))
    np.testing.assert_array_equal(whole, of(name, (0.0, 1.0, 0.0, 1.0), (2.0, 2.0, 7.0, 9.0)))
    assert not np.array_equal(whole, np.round(whole))


@every
@given(st.floats(-1e6, 1e6, allow_nan=False), st.integers(1, 16))
def test_ties_are_exactly_zero(name: str, value: float, count: int) -> None:
    """The mean of equal numbers may differ from them in the last bit; that bit must not become a gradient."""
    assert not of(name, (value,) * count).any()


@every
@pytest.mark.parametrize(
    "values",
    [(0.1,) * 3, (0.7,) * 7, (1 / 3,) * 6, (1e15 + 0.1,) * 5, (0.1 + 0.2, 0.3, 0.3), (-0.1 - 0.2, -0.3), (0.0, -0.0)],
)
def test_ties_up_to_rounding_are_exactly_zero(name: str, values: tuple[float, ...]) -> None:
    """0.1 + 0.2 and 0.3 differ in the last bit, and are the same reward. Other groups do not change that."""
    assert not of(name, values).any()
    assert not of(name, values, tuple(range(len(values))))[0].any()
    assert not has_reward_variance(np.array(values))


def test_a_small_difference_is_no_tie() -> None:
    np.testing.assert_allclose(of("centred", (0.3, 0.3 + 2e-9)), [[-1e-9, 1e-9]], rtol=1e-6)


@pytest.mark.parametrize("size", [1e-9, 1.0, -1e6])
def test_a_tie_is_a_share_of_the_largest_reward(size: float) -> None:
    """Half of 1e-12 of it is none of a difference, twice that is one, whatever the unit of the rewards."""
    assert not has_reward_variance(size * np.array([1.0, 1.0 + 5e-13, 1.0]))
    assert has_reward_variance(size * np.array([1.0, 1.0 + 2e-12, 1.0]))


def test_a_tie_is_a_share_of_the_largest_reward_and_not_of_the_least() -> None:
    """5000 lies between 1e-12 of the one and of the other."""
    assert not has_reward_variance(np.array([5e15 + 1, 5e15 - 4999]))


@every
def test_unscored_samples_are_left_out_and_get_zero(name: str) -> None:
    first, second = of(name, (1, 0))[0]
    np.testing.assert_array_equal(of(name, (1, NAN, 0, NAN)), [[first, 0, second, 0]])
    assert not of(name, (NAN, NAN, NAN)).any()
    assert not of(name, (NAN, 5.0, NAN)).any()
    assert not of(name, (NAN, 2.0, 2.0), (NAN, NAN, 1.0)).any()


@pytest.mark.parametrize(
    ("group", "teaches"),
    [((1, 0), 1), ((1, 1), 0), ((1,), 0), ((NAN, NAN), 0), ((NAN, 1), 0), ((NAN, 1, 2), 1), ((), 0), ((np.inf,), 0)],
)
def test_informative(group: tuple[float, ...], teaches: int) -> None:
    assert has_reward_variance(np.array(group, np.float64)) is bool(teaches)


@pytest.mark.parametrize("name", ["group_zscore", "batch_std", "centred", "leave_one_out"])
@given(TABLE)
def test_a_groups_advantages_sum_to_zero(name: str, table: list[list[float]]) -> None:
    assert np.abs(of(name, *table).sum(axis=1)).max() < 1e-6


@every
@given(TABLE, st.floats(-50, 50))
def test_a_shift_of_all_rewards_does_not_matter(name: str, table: list[list[float]], shift: float) -> None:
    assume(all(np.ptp(group) > 1e-3 for group in table))
    np.testing.assert_allclose(of(name, *(np.array(table) + shift)), of(name, *table), rtol=1e-6, atol=1e-8)


@every
@given(GROUP, st.floats(0.5, 20))
def test_scale(name: str, values: list[float], scale: float) -> None:
    """What divides by a std forgets it, up to the 1e-4; the others keep it."""
    assume(np.std(values) > 1.0)
    kept = 1.0 if name in ("group_zscore", "batch_std") else scale
    np.testing.assert_allclose(of(name, scale * np.array(values)), kept * of(name, values), rtol=1e-9, atol=2e-3)


@every
@given(TABLE)
def test_order_is_kept(name: str, table: list[list[float]]) -> None:
    for group, got in zip(table, of(name, *table), strict=True):
        assert (np.diff(got[np.argsort(group, kind="stable")]) >= -1e-9).all()


@every
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=4, max_size=4), min_size=1, max_size=5))
def test_never_nan_and_never_a_warning(name: str, table: list[list[float]]) -> None:
    assert np.isfinite(of(name, *table)).all()


def test_batch_std_is_that_of_every_scored_reward() -> None:
    """Those of tied groups too; with one alone there is none."""
    table = (1.0, 0.0, NAN), (2.0, 2.0, 2.0)
    std = np.std([1.0, 0.0, 2.0, 2.0, 2.0], ddof=1)
    np.testing.assert_allclose(batch_std(np.array(table))[0] * (std + 1e-4), [0.5, -0.5, 0.0], rtol=1e-12)
    np.testing.assert_allclose(batch_std(np.array([[1.0, NAN, 0.0]])), of("group_zscore", (1.0, NAN, 0.0)))
    assert not batch_std(np.array([[3.0, NAN]])).any()


# --- of tokens


TOKENS = st.lists(st.floats(-5, 5), max_size=8).map(np.array)


def test_gae_by_hand() -> None:
    """γ = 0.9, λ = 0.5: δ = 1 + 0.9·2 − 1 = 1.8 and 3 − 2 = 1; A = 1.8 + 0.45·1 and 1; returns A + V."""
    (advantage,), (returns,) = gae([np.array([1.0, 3.0])], [np.array([1.0, 2.0])], gamma=0.9, lam=0.5)
    np.testing.assert_allclose(advantage, [2.25, 1.0])
    np.testing.assert_allclose(returns, [3.25, 3.0])


@given(st.lists(TOKENS, max_size=4), st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_gae_is_the_sum_of_discounted_errors(rewards: list[np.ndarray], gamma: float, lam: float, seed: int) -> None:
    """Schulman et al. (2016), eq. 16, as it is written: A_t = Σ_l (γλ)^l δ_{t+l}, sample by sample."""
    rng = np.random.default_rng(seed)
    values = [rng.normal(size=len(r)) for r in rewards]
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam)
    for r, v, got, value_target in zip(rewards, values, advantages, returns, strict=True):
        delta = [r[t] + gamma * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(v))]
        want = [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, len(v))) for t in range(len(v))]
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(value_target, got + v, rtol=1e-12)


def test_gae_is_float64_and_refuses_what_would_broadcast() -> None:
    """Integer rewards and float32 values are summed in float64."""
    (advantage,), (returns,) = gae([np.array([0, 1])], [np.array([0.1, 0.7], np.float32)], gamma=1.0, lam=1.0)
    np.testing.assert_allclose(advantage, [0.9, 0.3], rtol=1e-6)
    assert (advantage.dtype, returns.dtype) == (np.float64, np.float64)
    for rewards, values in (([1.0, 2.0], [1.0]), ([[1.0]], [1.0])):
        with pytest.raises(AssertionError, match="broadcast"):
            gae([np.array(rewards)], [np.array(values)], gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="zip"):
        gae([np.zeros(2)], [], gamma=1.0, lam=1.0)


@given(st.lists(TOKENS, min_size=1, max_size=5))
def test_whitened_numbers_have_mean_zero_and_variance_one(arrays: list[np.ndarray]) -> None:
    """Over all tokens together, not sample by sample."""
    flat = np.concatenate(arrays)
    got = np.concatenate(whiten(arrays))
    assert len(got) == len(flat)
    assert np.isfinite(got).all()
    assert (np.diff(got[np.argsort(flat)]) >= 0).all()
    if flat.size > 1 and np.ptp(flat) > 0.1:
        assert (got.mean(), got.var(ddof=1)) == pytest.approx((0.0, 1.0), abs=1e-5)


def test_whitening_divides_by_the_std_of_a_sample() -> None:
    """Mean 4, deviations −3, −1, 0, 4: their squares add up to 26, which 4 − 1 divides (ddof 1), as in TRL, Tunix and
    verl.
    """
    first, second = whiten([np.array([1.0, 3.0]), np.array([4.0, 8.0])])
    np.testing.assert_allclose([*first, *second], np.array([-3, -1, 0, 4]) / math.sqrt(26 / 3), rtol=1e-6)


def test_whitening_adds_its_epsilon_to_the_std() -> None:
    """A std of 1e-8 is doubled."""
    (got,) = whiten([np.array([0.0, math.sqrt(2) * 1e-8])])
    np.testing.assert_allclose(got, [-math.sqrt(0.5) / 2, math.sqrt(0.5) / 2], rtol=1e-9)


@pytest.mark.parametrize(
    "arrays", [[], [[]], [[3.0]], [[3.0], []], [[0.1, 0.1], [0.1]], [[0.1 + 0.2], [0.3]], [[0, 0]]]
)
def test_nothing_to_whiten_is_zero_and_never_nan(arrays: list[list[float]]) -> None:
    got = whiten([np.array(a, np.float64) for a in arrays])
    assert [a.tolist() for a in got] == [[0.0] * len(a) for a in arrays]


def test_tokens_outside_the_loss_do_not_count_and_get_zero() -> None:
    arrays, mask = [np.array([1.0, 3.0, 1e9]), np.array([NAN])], [np.array([True, True, False]), np.array([False])]
    assert [a.round(4).tolist() for a in whiten(arrays, mask)] == [[-0.7071, 0.7071, 0.0], [0.0]]
    assert [a.tolist() for a in whiten(arrays, [~mask[0], mask[1]])] == [[0.0, 0.0, 0.0], [0.0]]
