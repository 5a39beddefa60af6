"""What is taken from a reward: the length penalty in tokens, the KL per token, and how β moves."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.losses.policy import KLS
from covey.losses.shaping import adapt_beta, kl_penalty, overlong_penalty, token_rewards

logps = st.lists(st.floats(-30, 0), max_size=6)


# Overlong penalty


def oracle_overlong(length: int, limit: int, buffer: float, penalty: float) -> float:
    """DAPO, eq. 13, case by case."""
    start = limit - buffer
    if length <= start:
        return 0.0
    return penalty * (start - length) / buffer if length <= limit else -penalty


@given(st.lists(st.integers(0, 700), max_size=8), st.integers(1, 600), st.integers(1, 600), st.floats(0, 5))
def test_overlong_penalty_by_the_formula(lengths: list[int], limit: int, buffer: int, penalty: float) -> None:
    got = overlong_penalty(np.array(lengths, int), max_new_tokens=limit, buffer=buffer, penalty=penalty)
    np.testing.assert_allclose(got, [oracle_overlong(n, limit, buffer, penalty) for n in lengths], atol=1e-12)
    assert got.dtype == np.float64
    assert ((got <= 0) & (got >= -penalty)).all()


def test_a_buffer_below_one_is_a_share_of_the_limit_and_none_is_no_penalty() -> None:
    lengths = np.arange(120)
    fraction = overlong_penalty(lengths, max_new_tokens=100, buffer=0.2, penalty=1.0)
    np.testing.assert_allclose(fraction, overlong_penalty(lengths, max_new_tokens=100, buffer=20, penalty=1.0))
    one_token = overlong_penalty(np.array([99, 100]), max_new_tokens=100, buffer=1, penalty=1.0)
    assert one_token.tolist() == [0.0, -1.0]
    assert overlong_penalty(np.array([1, 1000]), max_new_tokens=10, buffer=0, penalty=1.0).tolist() == [0.0, 0.0]


def test_the_penalty_is_a_fraction_of_whole_tokens() -> None:
    """Token counts are integers, penalties are not."""
    assert overlong_penalty(np.array([95], np.int32), max_new_tokens=100, buffer=10, penalty=0.7).tolist() == [-0.35]


# KL in the reward


@given(st.lists(logps, min_size=1, max_size=3), st.sampled_from(sorted(KLS)), st.floats(0, 2), st.integers(0, 99))
def test_kl_penalty_by_the_formulas(policy: list[list[float]], name: str, beta: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = [np.array(p, np.float32) for p in policy]
    refs = [a + rng.normal(size=a.size).astype(np.float32) for a in arrays]
    for got, p, ref in zip(kl_penalty(arrays, refs, name, beta), arrays, refs, strict=True):
        wanted = [beta * KLS[name](*np.float64([[x], [r]]))[0] for x, r in zip(p, ref, strict=True)]
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=0)
        assert got.dtype == np.float64


@given(st.floats(-100, 100))
def test_estimators_agree_on_the_host_and_in_the_loss(d: float) -> None:
    for estimate in KLS.values():
        here = estimate(np.zeros(1), np.array([d]))
        there = estimate(jnp.zeros(1, jnp.float32), jnp.array([d], jnp.float32))
        assert isinstance(here, np.ndarray)
        assert isinstance(there, jax.Array)
        np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-6)


def test_a_far_off_reference_gives_no_infinity() -> None:
    [got] = kl_penalty([np.array([-1000.0])], [np.array([-1.0])], "k3", 0.1)
    assert np.isfinite(got).all()


def test_arrays_of_different_length_never_broadcast() -> None:
    with pytest.raises(AssertionError, match="broadcast"):
        kl_penalty([np.zeros(3)], [np.zeros(1)], "k1", 0.1)
    with pytest.raises(ValueError, match="zip"):
        kl_penalty([np.zeros(3)], [], "k1", 0.1)


# Rewards of tokens

samples = st.lists(st.tuples(st.floats(-5, 5) | st.just(math.nan), st.lists(st.floats(-1, 1), max_size=5)), max_size=4)


@given(samples)
def test_token_rewards_by_the_rules(rows: list[tuple[float, list[float]]]) -> None:
    rewards, penalties = np.array([r for r, _ in rows]), [np.array(p) for _, p in rows]
    kept = [p.copy() for p in penalties]
    for got, (reward, penalty) in zip(token_rewards(rewards, penalties), rows, strict=True):
        wanted = [-x for x in penalty]
        if wanted:
            wanted[-1] += reward
        assert got.tolist() == ([0.0] * len(penalty) if math.isnan(reward) else pytest.approx(wanted))
    for now, before in zip(penalties, kept, strict=True):
        np.testing.assert_array_equal(now, before)


def test_each_reward_has_its_penalties() -> None:
    with pytest.raises(ValueError, match="zip"):
        token_rewards(np.ones(2), [np.zeros(3)])


def test_whole_penalties_do_not_truncate_the_reward() -> None:
    """A penalty array of integers would turn a reward of 0.7 into 0."""
    [got] = token_rewards(np.array([0.7]), [np.zeros(2, np.int64)])
    assert got.tolist() == [0.0, 0.7]


# β


def test_beta_by_hand() -> None:
    """Ziegler et al.: 256 samples of a horizon of 10 000; the error of 5/6 − 1 is within the clip."""
    assert adapt_beta(0.3, kl=6.0, target=6.0, horizon=100, samples=50) == 0.3
    assert adapt_beta(0.2, kl=5.0, target=6.0, horizon=10_000, samples=256) == pytest.approx(
        0.2 * (1 - (1 / 6) * 0.0256)
    )


@given(st.floats(1e-4, 10), st.floats(-5, 50), st.floats(0.01, 20), st.integers(1, 10**5), st.integers(1, 10**5))
def test_beta_moves_toward_the_target_a_little_and_keeps_its_sign(
    beta: float, kl: float, target: float, horizon: int, samples: int
) -> None:
    got = adapt_beta(beta, kl=kl, target=target, horizon=horizon, samples=samples)
    assert 0.8 * beta - 1e-12 <= got <= 1.2 * beta + 1e-12
    assert (got >= beta) if kl >= target else (got <= beta)


def test_a_kl_that_is_no_number_leaves_beta_alone() -> None:
    assert adapt_beta(0.3, kl=math.nan, target=6.0, horizon=100, samples=50) == 0.3
