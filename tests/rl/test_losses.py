"""The loss by value and by gradient against float64 formulas worked out here."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.rl.losses import LossInputs, clipped_surrogate, grpo_loss, k3, sequence_mean_weights, token_ratio
from covey.rl.rows import lay, micro_batches, pack, spread

SETTINGS = {"beta": 0.04, "epsilon_low": 0.2, "epsilon_high": 0.3}

loss_and_shares = jax.jit(grpo_loss, static_argnames=("beta", "epsilon_low", "epsilon_high"))
value_and_grad = jax.jit(
    jax.value_and_grad(grpo_loss, (0, 1), has_aux=True), static_argnames=("beta", "epsilon_low", "epsilon_high")
)


class Oracle:
    """One batch of samples in float64: the loss by its formula, its gradient by central differences."""

    def __init__(self, lengths: list[int], old: bool = True, ref: bool = True):
        rng = np.random.default_rng(0)
        self.lengths = lengths
        self.advantages = rng.normal(size=len(lengths))
        self.logps = [rng.normal(size=n) - 3 for n in lengths]
        self.old = [x + rng.normal(size=len(x), scale=0.3) for x in self.logps] if old else None
        self.ref = [x + rng.normal(size=len(x), scale=0.5) for x in self.logps] if ref else None

    def loss(self, logps: list[np.ndarray], beta: float, epsilon_low: float, epsilon_high: float) -> float:
        total = 0.0
        for i, (lp, a) in enumerate(zip(logps, self.advantages, strict=True)):
            # Without stored log-probs the ratio's denominator is the log-prob at the point, held fixed.
            w = np.exp(lp - (self.logps[i] if self.old is None else self.old[i]))
            per_token = -np.minimum(w * a, np.clip(w, 1 - epsilon_low, 1 + epsilon_high) * a)
            if self.ref is not None:
                d = self.ref[i] - lp
                per_token = per_token + beta * (np.exp(d) - d - 1)
            total += per_token.mean() if len(lp) else 0.0
        return total / len(logps)

    def gradient(self, **settings: float) -> list[np.ndarray]:
        out = [np.zeros(n) for n in self.lengths]
        for i, t in [(i, t) for i, n in enumerate(self.lengths) for t in range(n)]:
            moved = []
            for h in (1e-6, -1e-6):
                logps = [x.copy() for x in self.logps]
                logps[i][t] += h
                moved.append(self.loss(logps, **settings))
            out[i][t] = (moved[0] - moved[1]) / 2e-6
        return out

    def laid(self, groups_of: Callable) -> tuple[Any, np.ndarray, LossInputs]:
        """Rows of these samples, and log-probs and inputs laid on them."""
        rows = pack(groups_of([(3, self.lengths)]), 64, "dense")
        inputs = LossInputs(
            advantage=spread(rows, self.advantages),
            weight=spread(rows, sequence_mean_weights(np.array(self.lengths))),
            sampled=lay(rows, self.logps),
            old_logps=None if self.old is None else lay(rows, self.old),
            ref_logps=None if self.ref is None else lay(rows, self.ref),
        )
        return rows, lay(rows, self.logps), inputs


# --- the pieces


def test_ratio_and_k3_by_hand() -> None:
    logps, other = np.array([[-1.0, -2.0, -0.5]]), np.array([[-1.0, -1.5, -4.0]])
    np.testing.assert_allclose(token_ratio(jnp.array(logps), jnp.array(other)), np.exp(logps - other), rtol=1e-6)
    d = other - logps
    np.testing.assert_allclose(k3(jnp.array(logps), jnp.array(other)), np.exp(d) - d - 1, rtol=1e-5, atol=1e-7)


@given(st.floats(-20, 0), st.floats(-20, 0))
def test_k3_is_never_negative_and_zero_only_at_equality(logp: float, ref: float) -> None:
    value = float(k3(jnp.float32(logp), jnp.float32(ref)))
    d = float(np.float32(ref)) - float(np.float32(logp))
    assert value >= -1e-7 * abs(d)
    np.testing.assert_allclose(value, np.expm1(d) - d, rtol=1e-4, atol=1e-6 * max(1, abs(d)))


def test_k3_keeps_its_digits_for_policies_that_hardly_differ() -> None:
    """exp(d) − d − 1 as written is all rounding at d = 1e-3; the true value is about d²/2."""
    d = np.float32(1e-3)
    assert float(k3(jnp.float32(0), jnp.float32(d))) == pytest.approx(float(d) ** 2 / 2, rel=1e-3)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 2.5, -0.3])
@pytest.mark.parametrize(("edge", "side"), [(0.8, -1), (0.8, 1), (1.3, -1), (1.3, 1), (1.0, 1)])
def test_clip_boundaries_from_both_sides(advantage: float, edge: float, side: int) -> None:
    """The gradient ends only where moving on would be paid for: above 1.3 for A > 0, below 0.8 for A < 0."""
    ratio = edge + side * 1e-3
    value, grad = jax.value_and_grad(clipped_surrogate)(jnp.float32(ratio), jnp.float32(advantage), 0.2, 0.3)
    clipped = (ratio > 1.3 and advantage > 0) or (ratio < 0.8 and advantage < 0)
    assert float(value) == pytest.approx(-advantage * (edge if clipped else ratio), rel=1e-5)
    assert float(grad) == pytest.approx(0.0 if clipped else -advantage, rel=1e-5)


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.79, -1, 0), (0.81, 0, 0), (1.29, 0, 0), (1.31, 0, 1)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_clip_ratios_count_what_the_clip_stops(ratio: float, low: int, high: int, advantage: float) -> None:
    one = lambda x: jnp.full((1, 1), x, jnp.float32)  # noqa: E731
    inputs = LossInputs(one(advantage), one(1.0), one(0.0), old_logps=one(-np.log(ratio)))
    _, shares = loss_and_shares(one(0.0), one(2.0), inputs, **SETTINGS)
    want = {"low_mean": float(low and advantage < 0), "high_mean": float(high and advantage > 0)}
    want["region_mean"] = max(want.values())
    assert {name: float(shares[f"clip_ratio/{name}"]) for name in want} == want
    assert float(shares["entropy"]) == 2.0


def test_sequence_mean_weights() -> None:
    """Of three samples with 4, 0 and 1 tokens: 1/(3·4), nothing, 1/3. The empty one still counts among the three."""
    weights = sequence_mean_weights(np.array([4, 0, 1]))
    np.testing.assert_allclose(weights, [1 / 12, 0.0, 1 / 3])
    assert np.array_equal(sequence_mean_weights(np.array([0, 0])), [0.0, 0.0])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(0, 99))
def test_weighted_sum_is_the_mean_of_the_samples_means(lengths: list[int], seed: int) -> None:
    values = [np.random.default_rng(seed + i).normal(size=n) for i, n in enumerate(lengths)]
    weights = sequence_mean_weights(np.array(lengths))
    got = sum(w * v.sum() for w, v in zip(weights, values, strict=True))
    assert got == pytest.approx(np.mean([v.mean() if len(v) else 0.0 for v in values]), abs=1e-12)
    assert (weights * np.array(lengths)).sum() <= 1 + 1e-12


# --- the whole


@pytest.mark.parametrize("ref", [True, False])
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("lengths", [[5, 9, 3, 20], [1, 1, 1, 1], [7, 0, 1, 0]], ids=["ragged", "one token", "empty"])
def test_loss_and_gradient_are_the_oracles(groups_of: Callable, lengths: list[int], old: bool, ref: bool) -> None:
    oracle = Oracle(lengths, old=old, ref=ref)
    rows, logps, inputs = oracle.laid(groups_of)
    (value, _), (grad, grad_entropy) = value_and_grad(logps, np.zeros_like(logps), inputs, **SETTINGS)
    assert float(value) == pytest.approx(oracle.loss(oracle.logps, **SETTINGS), rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(grad, lay(rows, oracle.gradient(**SETTINGS)), atol=1e-5)
    assert not np.asarray(grad)[~rows.scored].any()
    assert not grad_entropy.any()


def test_the_oracle_above_meets_every_branch() -> None:
    oracle = Oracle([5, 9, 3, 20])
    signs = np.repeat(oracle.advantages > 0, oracle.lengths)
    ratio = np.exp(np.concatenate(oracle.logps) - np.concatenate(oracle.old or []))
    for sign in (True, False):
        assert (signs & (ratio > 1.3) if sign else ~signs & (ratio > 1.3)).any()
        assert (signs & (ratio < 0.8) if sign else ~signs & (ratio < 0.8)).any()


def test_without_old_log_probs_the_gradient_is_the_policy_gradient(groups_of: Callable) -> None:
    """Trap 16: with ratio 1 the loss is −mean(A) whatever the policy. The gradient is −A·∇logp all the same."""
    oracle = Oracle([5, 9, 3, 20], old=False, ref=False)
    _, logps, inputs = oracle.laid(groups_of)
    (value, shares), (grad, _) = value_and_grad(logps, np.zeros_like(logps), inputs, **SETTINGS)
    assert float(value) == pytest.approx(-oracle.advantages.mean(), rel=1e-5)
    np.testing.assert_allclose(grad, -inputs.advantage * inputs.weight, rtol=1e-6)
    assert float(shares["clip_ratio/region_mean"]) == 0


def test_equal_old_log_probs_give_the_same_loss_and_gradient(groups_of: Callable) -> None:
    """The first of several updates on a batch is the only update of a batch used once."""
    once = Oracle([5, 9, 3, 20], old=False)
    _, logps, inputs = once.laid(groups_of)
    (value, _), (grad, _) = value_and_grad(logps, np.zeros_like(logps), inputs, **SETTINGS)
    stored = inputs._replace(old_logps=logps)
    (again, _), (grad_again, _) = value_and_grad(logps, np.zeros_like(logps), stored, **SETTINGS)
    assert float(value) == float(again)
    np.testing.assert_array_equal(grad, grad_again)


def test_a_group_of_advantages_that_sum_to_zero_has_no_loss_and_still_teaches(groups_of: Callable) -> None:
    oracle = Oracle([5, 9, 3, 20], old=False, ref=False)
    oracle.advantages = oracle.advantages - oracle.advantages.mean()
    _, logps, inputs = oracle.laid(groups_of)
    (value, _), (grad, _) = value_and_grad(logps, np.zeros_like(logps), inputs, **SETTINGS)
    assert abs(float(value)) < 1e-6
    assert np.abs(grad).max() > 1e-3


def test_beta_zero_reports_the_kl_and_does_not_follow_it(groups_of: Callable) -> None:
    with_ref, without = Oracle([5, 9]), Oracle([5, 9])
    without.ref = None
    settings = SETTINGS | {"beta": 0.0}
    results = []
    for oracle in (with_ref, without):
        _, logps, inputs = oracle.laid(groups_of)
        results.append(value_and_grad(logps, np.zeros_like(logps), inputs, **settings))
    ((value, shares), (grad, _)), ((plain, plain_shares), (plain_grad, _)) = results
    assert float(value) == float(plain)
    np.testing.assert_array_equal(grad, plain_grad)
    assert float(shares["kl"]) > 0.01
    assert "kl" not in plain_shares


def test_shares_by_hand(groups_of: Callable) -> None:
    """Two samples of 1 and 2 tokens: every metric is the mean over samples of the mean over tokens."""
    oracle = Oracle([1, 2])
    oracle.advantages = np.array([1.0, -2.0])
    oracle.logps = [np.array([-1.0]), np.array([-2.0, -3.0])]
    oracle.old = [np.array([-1.5]), np.array([-2.0, -2.0])]  # ratios e^0.5, then 1 and e^-1
    oracle.ref = [np.array([-1.0]), np.array([-2.0, -2.0])]  # d = 0, then 0 and 1
    rows, logps, inputs = oracle.laid(groups_of)
    inputs = inputs._replace(sampled=lay(rows, [np.array([-1.25]), np.array([-2.0, -3.5])]))
    loss, shares = loss_and_shares(logps, lay(rows, [np.array([3.0]), np.array([1.0, 2.0])]), inputs, **SETTINGS)
    kl = (np.e - 2) / 4
    surrogate = (-1.3 + (2.0 + 2 * 0.8) / 2) / 2
    want = {
        "loss": surrogate + 0.04 * kl,
        "kl": kl,
        "entropy": (3 + 1.5) / 2,
        "clip_ratio/high_mean": 1 / 2,
        "clip_ratio/low_mean": 1 / 4,
        "clip_ratio/region_mean": 3 / 4,
        # Of the log-probs before the update: later ones tell how far the policy has moved.
        "sampling/logp_difference/mean": (0.25 + 0.75) / 2,
        "sampling/logp_difference/max": 1.5,
        "sampling/importance_ratio/mean": (np.exp(-0.25) + (1 + np.exp(1.5)) / 2) / 2,
        "sampling/importance_ratio/min": np.exp(-0.25),
        "sampling/importance_ratio/max": np.exp(1.5),
    }
    assert shares.keys() == want.keys()
    for name, value in want.items():
        assert float(shares[name]) == pytest.approx(value, rel=1e-5), name
    assert float(loss) == pytest.approx(want["loss"], rel=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_and_losses_of_parts_add_up(groups_of: Callable, size: int) -> None:
    """Trap 6: denominators were fixed for the step, so parts are plain sums, the filled-up last one included."""
    _, logps, inputs = Oracle([5, 0, 1, 20, 13]).laid(groups_of)
    whole, shares = loss_and_shares(logps, logps, inputs, **SETTINGS)
    parts = [loss_and_shares(lp, lp, part, **SETTINGS) for lp, part in micro_batches((logps, inputs), size)]
    assert sum(float(loss) for loss, _ in parts) == pytest.approx(float(whole), rel=1e-5)
    for name, value in shares.items():
        combine = {"min": min, "max": max}.get(name.rsplit("/")[-1], sum)
        assert combine([float(s[name]) for _, s in parts]) == pytest.approx(float(value), rel=1e-5), name


def test_padding_is_never_nan_and_never_counts(groups_of: Callable) -> None:
    """A whole batch of padding: no loss, no gradient, and comparisons that say nothing is wrong."""
    _, logps, inputs = Oracle([4]).laid(groups_of)
    nothing = jax.tree.map(np.zeros_like, inputs)
    (value, shares), (grad, _) = value_and_grad(np.zeros_like(logps), np.zeros_like(logps), nothing, **SETTINGS)
    assert float(value) == 0
    assert not np.asarray(grad).any()
    neutral = {"sampling/importance_ratio/min": np.inf, "sampling/importance_ratio/max": 0.0}
    assert {name: float(x) for name, x in shares.items()} == dict.fromkeys(shares, 0.0) | neutral


@given(st.floats(-30, 0), st.floats(-30, 0), st.floats(-30, 0), st.sampled_from([-3.0, -1.0, 0.0, 1e-6, 2.0]))
def test_far_apart_policies_stay_finite(logp: float, old: float, ref: float, advantage: float) -> None:
    one = lambda x: jnp.full((1, 1), x, jnp.float32)  # noqa: E731
    inputs = LossInputs(one(advantage), one(1.0), one(logp), one(old), one(ref))
    (value, shares), (grad, _) = value_and_grad(one(logp), one(1.0), inputs, **SETTINGS)
    assert jnp.isfinite(value)
    assert jnp.isfinite(grad).all()
    assert all(jnp.isfinite(x) for x in shares.values())
