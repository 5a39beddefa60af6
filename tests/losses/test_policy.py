"""The functions of the loss one by one: by hand and by their properties. `test_policy_loss` has what is made of them,
`test_algebra` every combination.
"""

from dataclasses import replace
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.config.algorithms import Correction, algorithm_of
from covey.config.schema import GRPOConfig
from covey.losses.advantages import ADVANTAGES
from covey.losses.policy import (
    AGGREGATES,
    CLIP_METRICS,
    CORRECTION_LEVELS,
    KLS,
    MAX_EXPONENT,
    RATIOS,
    SURROGATES,
    effective_share_sums,
    k3,
    sampler_correction,
    segment_mean,
    sequence_ratio,
    sequence_token_ratio,
    token_ratio,
)

BASE = algorithm_of(GRPOConfig("grpo"))
CORRECTIONS = [name for name in get_args(Correction) if name != "none"]
POLICIES = st.lists(st.floats(-3, 3), min_size=4, max_size=4)


def one(x: float) -> jax.Array:
    return jnp.full((1, 1), x, jnp.float32)


def test_names_are_those_of_the_config() -> None:
    """A choice that the recipe offers exists, and one that exists is offered."""
    hints = get_type_hints(GRPOConfig)
    tables = {"ratio": RATIOS, "surrogate": SURROGATES, "aggregate": AGGREGATES, "kl": KLS}
    tables["advantage"] = [*ADVANTAGES, "gae"]
    for setting, table in tables.items():
        assert set(get_args(get_args(hints[setting])[0])) == set(table)


# --- ratios


def in_row(values: list[float]) -> jax.Array:
    return jnp.asarray([values], jnp.float32)


def test_ratios_by_hand() -> None:
    """Two completions of two and one tokens, and a third whose tokens are not in the loss."""
    logps, old = in_row([-1, -2, -3, -4, 9]), in_row([-1.2, -2.4, -3, -9, 0])
    segment_ids, mask = jnp.array([[1, 1, 2, 3, 0]]), jnp.array([[1, 1, 1, 0, 0]], bool)
    np.testing.assert_allclose(token_ratio(logps, old, mask, segment_ids)[:, :3], np.exp([[0.2, 0.4, 0.0]]), rtol=1e-6)
    for ratio in (sequence_ratio, sequence_token_ratio):
        np.testing.assert_allclose(
            ratio(logps, old, mask, segment_ids)[:, :4], np.exp([[0.3, 0.3, 0.0, 0.0]]), rtol=1e-6
        )


def test_samples_are_told_apart_by_owner_and_row() -> None:
    """Not by place: the same number in another row is another sample, and tokens of one need not be neighbours."""
    values, segment_ids = jnp.array([[1.0, 5.0, 3.0], [10.0, 7.0, 0.0]]), jnp.array([[1, 2, 1], [1, 2, 0]])
    mean = segment_mean(values, segment_ids > 0, segment_ids)
    np.testing.assert_allclose(mean[:, :2], [[2.0, 5.0], [10.0, 7.0]])
    np.testing.assert_allclose(jax.vmap(segment_mean)(values, segment_ids > 0, segment_ids), mean)


@pytest.mark.parametrize("ratio", RATIOS)
def test_exponents_are_cut_off_at_twenty(ratio: str) -> None:
    segment_ids = jnp.ones((1, 1), jnp.int32)
    for exponent, kept in ((19.5, 19.5), (20.5, 20.0)):
        assert float(RATIOS[ratio](one(exponent), one(0.0), segment_ids > 0, segment_ids)[0, 0]) == pytest.approx(
            np.exp(kept)
        )


# --- surrogates


@pytest.mark.parametrize("x", [0.2, 3e-4])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 2.5, -0.3])
@pytest.mark.parametrize("side", [-1, 0, 1])
def test_clip_boundaries_from_both_sides_and_on_them(x: float, advantage: float, side: int) -> None:
    """The gradient ends only where moving on would be paid for: above for A > 0, below for A < 0. On the bound itself
    it is whole, not a half or a quarter.
    """
    clip = replace(BASE, epsilon=x, epsilon_high=1.5 * x)
    for edge in (1 - x, 1 + 1.5 * x):
        ratio = np.float32(edge) * np.float32(1 + side * 1e-6)
        loss = lambda w: SURROGATES["clip"](w, one(-1.0), one(advantage), clip).sum()  # noqa: E731
        value, grad = jax.value_and_grad(loss)(one(ratio))
        stopped = side * np.sign(advantage) > 0 and (side > 0) == (edge > 1)
        assert float(value) == pytest.approx(-advantage * (edge if stopped else ratio), rel=1e-6)
        assert float(grad[0, 0]) == pytest.approx(0.0 if stopped else -advantage, rel=1e-6)


@pytest.mark.parametrize(
    ("surrogate", "ratio", "advantage", "loss", "slope"),
    [
        ("clip", 5.0, -1.0, 2.0, 0.0),  # δ = 2: for A < 0 the loss would grow without bound
        ("clip", 2.0, -1.0, 2.0, 1.0),  # on δ
        ("clip", 1.9, -1.0, 1.9, 1.0),
        ("clip", 5.0, 1.0, -1.2, 0.0),
        ("dual_clip", 5.0, -2.0, 4.0, 0.0),  # δ comes before c
        ("dual_clip", 0.5, -2.0, 1.6, 0.0),
        ("dual_clip, no delta", 2.9, -2.0, 5.8, 2.0),
        ("dual_clip, no delta", 3.0, -2.0, 6.0, 2.0),  # on c
        ("dual_clip, no delta", 3.1, -2.0, 6.0, 0.0),
        ("sapo", 1.0, 2.0, -4.0, -2.0),  # σ(0)·4 = 2, with the slope of w·A
    ],
)
def test_surrogates_by_hand(surrogate: str, ratio: float, advantage: float, loss: float, slope: float) -> None:
    name, _, no_delta = surrogate.partition(", ")
    x = replace(BASE, delta=None if no_delta else 2.0)
    fn = lambda w: SURROGATES[name](w, one(-1.0), one(advantage), x).sum()  # noqa: E731
    value, grad = jax.value_and_grad(fn)(one(ratio))
    assert (float(value), float(grad[0, 0])) == pytest.approx((loss, slope), rel=1e-6)


@pytest.mark.parametrize(
    ("surrogate", "bound", "advantages"),
    [
        ("clip", 0.8, (-1.0, 1.0)),
        ("clip", 1.2, (-1.0, 1.0)),
        ("clip", 2.0, (-1.0,)),  # δ
        ("dual_clip", 3.0, (-1.0,)),  # c
        ("cispo", 5.0, (-1.0, 1.0)),  # cap
    ],
)
def test_on_a_bound_no_token_counts_as_cut(surrogate: str, bound: float, advantages: tuple[float, ...]) -> None:
    """Its gradient is whole there, and `cispo` weighs it with its own ratio."""
    x = replace(BASE, delta=2.0 if surrogate == "clip" else None)
    for advantage in advantages:
        parts = CLIP_METRICS[surrogate](one(bound), one(advantage), x)
        assert not any(part.any() for part in parts.values())


# --- estimators of the KL


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


def test_k3_still_pulls_where_the_reference_has_nothing() -> None:
    """d = −50: the loss is 49 and falls with logp. Only d above `MAX_EXPONENT` has no gradient."""
    slope = jax.value_and_grad(k3)
    assert [float(v) for v in slope(-1.0, -51.0)] == pytest.approx([49.0, 1.0])
    value, grad = slope(-60.0, -1.0)
    assert float(value) == pytest.approx(np.exp(MAX_EXPONENT), rel=1e-5)
    assert float(grad) == 0


# --- sampler and trainer


@pytest.mark.parametrize(
    ("name", "floor", "want"),
    [
        ("token_truncate", None, [1.5, 0.5, 1.5, 1.0]),
        ("token_truncate", 0.75, [1.5, 0.75, 1.5, 1.0]),
        ("token_mask", None, [0.0, 0.0, 0.0, 1.0]),
        ("token_mask", 0.5, [0.0, 0.5, 0.0, 1.0]),
        ("sequence_truncate", None, [1.0, 1.0, 1.5, 1.5]),
        ("sequence_mask", None, [1.0, 1.0, 0.0, 0.0]),
        ("geometric_truncate", None, [1.0, 1.0, 1.5, 1.5]),
        ("geometric_mask", None, [1.0, 1.0, 0.0, 0.0]),
        ("geometric_mask", 1.25, [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_corrections_by_hand(name: str, floor: float | None, want: list[float]) -> None:
    """ρ = 2 and ½ in one completion (product and geometric mean 1), 4 and 1 in the other (4 and 2); the cap is 1.5."""
    x = replace(BASE, correction=name, correction_cap=1.5, correction_floor=floor)
    old, segment_ids = in_row(list(np.log([2, 0.5, 4, 1]))), jnp.array([[1, 1, 2, 2]])
    weights = lambda old: sampler_correction(x, old, jnp.zeros((1, 4)), segment_ids > 0, segment_ids)  # noqa: E731
    np.testing.assert_allclose(weights(old)[0], want, rtol=1e-6)
    assert not jax.grad(lambda old: weights(old).sum())(old).any()


def test_the_effective_sample_size_by_hand() -> None:
    """Weights 1.5, 0.5, 1.5 and 1 of four tokens beside padding: 4.5² / (4 · 5.75). Parts of a step add up."""
    weights, mask = np.array([1.5, 0.5, 1.5, 1.0, 7.0]), np.array([1, 1, 1, 1, 0], bool)
    of = lambda *w: effective_share_sums(jnp.asarray(w), jnp.ones(len(w), bool)).value  # noqa: E731
    parts = [effective_share_sums(jnp.asarray(weights[at]), jnp.asarray(mask[at])) for at in (slice(2), slice(2, 5))]
    assert jax.tree.map(jnp.add, *parts).value == pytest.approx(20.25 / 23, rel=1e-6)
    assert (of(3.0, 3.0), of(2.0, 0.0, 0.0, 0.0), of(0.0, 0.0)) == (1.0, 0.25, 0.0)
    assert np.isnan(of())


def test_only_the_ratio_of_the_whole_sequence_grows_with_its_length() -> None:
    segment_ids = jnp.ones((1, 4), jnp.int32)
    of_level = {
        level: ratio(in_row([np.log(2)] * 4), jnp.zeros((1, 4)), segment_ids > 0, segment_ids)[0, 0]
        for level, ratio in CORRECTION_LEVELS.items()
    }
    assert of_level == pytest.approx({"token": 2, "sequence": 16, "geometric": 2})


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_on_its_bounds_is_kept(name: str) -> None:
    """Only what is beyond the cap or the floor is masked."""
    x = replace(BASE, correction=name, correction_cap=1.0)
    segment_ids = jnp.ones((1, 2), jnp.int32)
    assert sampler_correction(x, in_row([-1, -2]), in_row([-1, -2]), segment_ids > 0, segment_ids).tolist() == [
        [1.0, 1.0]
    ]


# --- aggregates


@pytest.mark.parametrize(("name", "denominator"), [("sequence_mean", 0), ("token_mean", 1), ("constant", 2)])
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(0, 99))
def test_aggregates_are_their_formulas(name: str, denominator: int, lengths: list[int], seed: int) -> None:
    """With an empty sample or none: never 0/0, and it counts among the samples."""
    values = [np.random.default_rng(seed + i).normal(size=n) for i, n in enumerate(lengths)]
    weights, divisor = AGGREGATES[name](np.array(lengths), 64)
    want = [
        np.sum([v.mean() for v in values if len(v)]),
        np.sum(np.concatenate(values)),
        np.sum(np.concatenate(values)),
    ]
    assert divisor == [len(lengths), sum(lengths), 64 * len(lengths)][denominator]
    assert sum(w * v.sum() for w, v in zip(weights, values, strict=True)) == pytest.approx(want[denominator], abs=1e-9)
    assert weights.dtype == np.float64
    np.testing.assert_array_equal(weights > 0, np.array(lengths) > 0)


@pytest.mark.parametrize("name", AGGREGATES)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(0, 12))
def test_weights_and_denominators_of_parts_make_the_whole(name: str, lengths: list[int], cut: int) -> None:
    """A step may be cut into micro-batches that know nothing of each other."""
    parts = [AGGREGATES[name](np.array(part, int), 64) for part in (lengths[:cut], lengths[cut:])]
    weights, denominator = AGGREGATES[name](np.array(lengths), 64)
    np.testing.assert_array_equal(np.concatenate([w for w, _ in parts]), weights)
    assert sum(d for _, d in parts) == denominator
