"""Every point of the algebra against an oracle in float64, by value and by gradient.

The oracle is written from the formulas, sample by sample, without rows, weights or masks. Its gradient is a complex
step: at x + ih the imaginary part over h is the derivative to the last digit, whatever branch a clip takes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from covey.config.algorithms import PRESETS, Algorithm, Correction, algorithm_of
from covey.config.schema import GRPOConfig
from covey.losses.policy import AGGREGATES, CORRECTION_LEVELS, KLS, RATIOS, SURROGATES, LossInputs, policy_loss

STEP, MAX_NEW, ROW = 1e-30, 40, 64
BASE = algorithm_of(GRPOConfig("grpo"))
Array = np.ndarray
Rows = Sequence[Sequence[int]]
"""The samples in each row, by number."""


@dataclass
class Sample:
    """One completion: arrays of its true length, numbers that float32 holds exactly. `kept`: tokens in the loss."""

    logps: Array
    old: Array
    ref: Array
    sampled: Array
    entropy: Array
    advantage: Array
    kept: Array

    def __post_init__(self) -> None:
        for name in ("logps", "old", "ref", "sampled", "entropy", "advantage"):
            setattr(self, name, np.asarray(getattr(self, name), np.float32).astype(np.float64))


# --- the formulas. Rows of `lp` are the same sample with another token moved by ih; tokens are the last axis.


def stop(x: Array) -> Array:
    return np.real(x) + 0j


def smaller(x: Array, y: Array) -> Array:
    """Of two equal ones the first, whose gradient is thus taken."""
    return np.where(np.real(x) <= np.real(y), x, y)


def sequence(lp: Array, old: Array, m: Array) -> Array:
    return np.exp(np.sum(m * (lp - old), axis=-1, keepdims=True) / max(np.sum(m), 1)) * np.ones(len(m))


RATIO = {
    "token": lambda lp, old, m: np.exp(lp - old),
    "sequence": sequence,
    "sequence_token": lambda lp, old, m: stop(sequence(lp, old, m)) * np.exp(lp - stop(lp)),
}


def clip(w: Array, lp: Array, adv: Array, x: Algorithm) -> Array:
    high = x.epsilon if x.epsilon_high is None else x.epsilon_high
    inside = np.where(np.real(w) > 1 + high, 1 + high, np.where(np.real(w) < 1 - x.epsilon, 1 - x.epsilon, w))
    return -smaller((w if x.delta is None else smaller(w, x.delta + 0j)) * adv, inside * adv)


SURROGATE = {
    "clip": clip,
    "dual_clip": lambda w, lp, adv, x: np.where(
        adv < 0, smaller(clip(w, lp, adv, x), -x.dual_clip * adv + 0j), clip(w, lp, adv, x)
    ),
    "cispo": lambda w, lp, adv, x: -stop(smaller(w, x.cap + 0j)) * adv * lp,
    "reinforce": lambda w, lp, adv, x: -adv * lp,
    "sapo": lambda w, lp, adv, x: -adv * gate(w, np.where(adv > 0, x.sapo_positive, x.sapo_negative)),
}


def gate(w: Array, tau: Array) -> Array:
    return 4 / tau / (1 + np.exp(-tau * (w - 1)))


KL = {
    "k1": lambda d: -d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: np.exp(d) - d - 1,
}


RHO = {
    "token": lambda d, m: np.exp(d),
    "sequence": lambda d, m: np.full(len(m), np.exp(np.sum(d[m]))),
    "geometric": lambda d, m: np.full(len(m), np.exp(np.sum(d[m]) / max(np.sum(m), 1))),
}


CORRECTIONS = [name for name in get_args(Correction) if name != "none"]


def correction(x: Algorithm, old: Array, sampled: Array, m: Array) -> Array:
    if x.correction == "none":
        return np.ones(len(sampled))
    level, cut = x.correction.split("_")
    rho = RHO[level](old - sampled, m)
    default = 0 if cut == "truncate" else 1 / x.correction_cap
    low = default if x.correction_floor is None else x.correction_floor
    inside = (low <= rho) & (rho <= x.correction_cap)
    return np.clip(rho, low, x.correction_cap) if cut == "truncate" else np.where(inside, rho, 0.0)


AGGREGATE: dict[str, Callable[[Array, Array], float]] = {
    "sequence_mean": lambda sums, counts: np.mean(sums / np.maximum(counts, 1)),
    "token_mean": lambda sums, counts: np.sum(sums) / np.sum(counts),
    "constant": lambda sums, counts: np.sum(sums) / (len(sums) * MAX_NEW),
}


class Oracle:
    """The loss of a step and its gradients, per sample."""

    def __init__(self, x: Algorithm, samples: Sequence[Sample], beta: float, old: bool = True, ref: bool = True):
        self.x, self.samples, self.beta, self.old, self.ref = x, samples, beta, old, ref
        self.counts = np.array([s.kept.sum() for s in samples])
        zeros = [np.zeros(1) for _ in samples]
        sums = np.array([self.summed(s, z, z)[0].real for s, z in zip(samples, zeros, strict=True)])
        self.value, self.scale = self.aggregated(sums), self.aggregated(np.abs(sums))
        self.grad_logps = [self.gradient(i, 1, 0) for i in range(len(samples))]
        self.grad_entropy = [self.gradient(i, 0, 1) for i in range(len(samples))]

    def summed(self, s: Sample, move_logps: Array, move_entropy: Array) -> Array:
        """Sum over the tokens of the sample that are in the loss."""
        lp, entropy = s.logps + move_logps, s.entropy + move_entropy
        old = s.old if self.old else s.logps  # without stored ones: the log-probs at the point, held fixed
        loss = SURROGATE[self.x.surrogate](RATIO[self.x.ratio](lp + 0j, old, s.kept), lp + 0j, s.advantage, self.x)
        loss = loss * correction(self.x, old, s.sampled, s.kept) - self.x.entropy_bonus * entropy
        if self.ref and self.x.kl_in == "loss":
            loss = loss + self.beta * KL[self.x.kl](s.ref - lp)
        return np.sum(s.kept * np.atleast_2d(loss), axis=-1)

    def gradient(self, i: int, logps: int, entropy: int) -> Array:
        s = self.samples[i]
        moves = 1j * STEP * np.eye(len(s.logps))
        derivatives = self.summed(s, logps * moves, entropy * moves).imag / STEP
        only_i = np.arange(len(self.samples)) == i  # every aggregate is linear in the samples' sums
        return np.array([self.aggregated(np.where(only_i, d, 0.0)) for d in derivatives[: len(s.logps)]])

    def aggregated(self, sums: Array) -> float:
        return float(AGGREGATE[self.x.aggregate](sums, self.counts))


# --- the code under test, on rows


def laid(values: Sequence[Array], rows: Rows, padding: float = 0.0) -> Array:
    """Values of the samples, several to a row, in rows that are longer than what is in them."""
    out = np.full((len(rows), ROW), padding)
    for line, row in zip(out, rows, strict=True):
        filled = np.concatenate([values[i] for i in row] + [np.zeros(0)])
        line[: len(filled)] = filled
    return out


def repeated(numbers: Sequence[float], samples: Sequence[Sample]) -> list[Array]:
    """A number a sample, at each of its tokens."""
    return [np.full(len(s.logps), number) for number, s in zip(numbers, samples, strict=True)]


def computed(oracle: Oracle, rows: Rows, dtype: type) -> tuple[float, Array, Array]:
    """Loss and gradients by `policy_loss`; at padding the log-probs and entropies are any numbers at all."""
    samples, x = oracle.samples, oracle.x
    weights, denominator = AGGREGATES[x.aggregate](oracle.counts, MAX_NEW)
    places = {i: number for row in rows for number, i in enumerate(row, start=1)}
    segment_ids = laid(repeated([places[i] for i in range(len(samples))], samples), rows).astype(np.int32)

    def of(name: str, padding: float = 0.0) -> Array:
        return laid([getattr(s, name) for s in samples], rows, padding).astype(dtype)

    inputs = LossInputs(
        advantage=of("advantage"),
        weight=laid([weight * s.kept for weight, s in zip(weights, samples, strict=True)], rows).astype(dtype),
        rollout_logps=of("sampled"),
        beta=np.full((len(rows), 1), oracle.beta, dtype),
        old_logps=of("old") if oracle.old else None,
        ref_logps=of("ref") if oracle.ref else None,
    )
    loss = lambda lp, entropy: policy_loss(x, lp, entropy, segment_ids, inputs)[0] / denominator  # noqa: E731
    with jax.enable_x64(True) if dtype == np.float64 else nullcontext():
        points = jnp.asarray(of("logps", padding=7.0)), jnp.asarray(of("entropy", padding=7.0))
        value, grads = jax.value_and_grad(loss, (0, 1))(*points)
        return float(value), *(np.asarray(g) for g in grads)


def assert_agree(oracle: Oracle, rows: Rows, dtype: type = np.float32) -> None:
    """To 1e-5 of the largest entry in float32; in float64, entry by entry, to 1e-9."""
    relative, of_largest = (1e-5, 1e-5) if dtype == np.float32 else (1e-9, 1e-14)
    value, *grads = computed(oracle, rows, dtype)
    assert value == pytest.approx(oracle.value, rel=relative, abs=relative * oracle.scale)
    for got, want in zip(grads, (oracle.grad_logps, oracle.grad_entropy), strict=True):
        whole = laid(want, rows)
        np.testing.assert_allclose(got, whole, rtol=relative, atol=of_largest * np.abs(whole).max())


# --- inputs


def random_sample(rng: np.random.Generator, n: int, spread: float, kept: float = 1.0) -> Sample:
    """`kept` is the share of its tokens that are in the loss."""
    logps = rng.normal(size=n) - 3
    near = lambda scale: logps + rng.normal(size=n, scale=scale)  # noqa: E731
    advantage = rng.normal(size=n) if rng.random() < 0.3 else np.full(n, rng.choice([-1.5, -0.2, 0.0, 0.7, 2.0]))
    return Sample(logps, near(spread), near(0.7), near(0.5), rng.random(n) * 3, advantage, rng.random(n) < kept)


def at_ratio(ratio: float, advantage: float, n: int = 1) -> Sample:
    """Every token's ratio, and so the sample's, is `ratio` to float32."""
    logps = np.linspace(-0.5, -1.5, n)
    old, kept = logps - np.log(ratio), np.ones(n, bool)
    return Sample(logps, old, logps + 0.3, logps - 0.4, np.ones(n), np.full(n, advantage), kept)


def edges(x: Algorithm) -> Iterator[float]:
    """Just under and just over every number where a surrogate has a corner, and ratio 1."""
    corners = [1 - x.epsilon, 1 + x.high, x.dual_clip, x.cap, *([x.delta] if x.delta else [])]
    yield 1.0
    for corner, side in product(corners, (-1, 1)):
        yield corner * (1 + side * 3e-5)


def batch(x: Algorithm, seed: int = 0) -> list[Sample]:
    """Ragged, one-token, empty, masked and partly masked samples; the corners from both sides with advantages of both
    signs and 0.
    """
    rng = np.random.default_rng(seed)
    spread = 0.5 if x.epsilon > 0.01 else 5e-4
    ragged = [random_sample(rng, n, spread) for n in (5, 0, 9, 1, 1, 23)]
    masked = [random_sample(rng, n, 2 * spread, kept) for n, kept in ((4, 0.0), (1, 0.0), (7, 0.5), (12, 0.7))]
    corners = [at_ratio(r, a, n) for r, a, n in product(edges(x), (-1.5, 0.0, 2.0), (1, 3))]
    return [*ragged, *masked, *corners]


def some_rows(count: int, seed: int = 0) -> list[list[int]]:
    """Samples 0 to count − 1 in random order, up to ten to each of ten rows, the last ones empty."""
    order = [int(i) for i in np.random.default_rng(seed).permutation(count)]
    return [order[i : i + 10] for i in range(0, 100, 10)]


# --- the tests


def test_the_oracle_knows_every_name() -> None:
    """A function that is added must be added here too."""
    assert [RATIO.keys(), SURROGATE.keys(), KL.keys(), AGGREGATE.keys(), RHO.keys()] == [
        RATIOS.keys(), SURROGATES.keys(), KLS.keys(), AGGREGATES.keys(), CORRECTION_LEVELS.keys(),
    ]  # fmt: skip


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_every_combination(ratio: str, surrogate: str, dtype: type) -> None:
    """Ratio × surrogate × aggregate × KL, in the loss and out of it, on the adversarial batch.

    Every third pair of aggregate and KL has each of both, which enter beside ratio and surrogate. The others come with
    the next ratios, surrogates and types.
    """
    first = [*RATIOS].index(ratio) + [*SURROGATES].index(surrogate) + (dtype is np.float64)
    for number, (aggregate, kl) in list(enumerate(product(AGGREGATES, (*KLS, "none"))))[first % 3 :: 3]:
        x = replace(BASE, ratio=ratio, surrogate=surrogate, aggregate=aggregate, kl=kl.replace("none", "k3"))
        samples = batch(x, number)
        assert_agree(Oracle(x, samples, beta=0.3, ref=kl != "none"), some_rows(len(samples), number), dtype)


VARIANTS = {
    "clip higher": {"epsilon_high": 0.4},
    "two-sided": {"delta": 1.7},
    "two-sided below the clip": {"delta": 1.1},
    "dual clip, two-sided": {"surrogate": "dual_clip", "delta": 4.0},
    "dual clip within the clip": {"surrogate": "dual_clip", "dual_clip": 1.1},
    "small cap": {"surrogate": "cispo", "cap": 1.05},
    "hot gate": {"surrogate": "sapo", "sapo_positive": 0.5, "sapo_negative": 3.0},
    "entropy bonus": {"entropy_bonus": 0.1},
    "entropy malus": {"entropy_bonus": -0.1, "aggregate": "constant"},
    "kl in the reward": {"kl_in": "reward", "kl": "k1"},
    **{
        f"{correction}, {ratio}": {"correction": correction, "correction_cap": 1.2, "ratio": ratio}
        for correction in CORRECTIONS
        for ratio in ("token", "sequence")
    },
    **{
        f"{name}, two bounds": {"correction": name, "correction_cap": 1.2, "correction_floor": 0.9}
        for name in CORRECTIONS
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("old", [True, False])
def test_every_setting(name: str, old: bool) -> None:
    x = Algorithm.from_checked({key: getattr(BASE, key) for key in BASE.kinds} | VARIANTS[name])
    samples = batch(x)
    for dtype in (np.float32, np.float64):
        assert_agree(Oracle(x, samples, beta=0.1, old=old), some_rows(len(samples)), dtype)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_every_preset(name: str, old: bool, dtype: type) -> None:
    """With stored old log-probs, and without: then every ratio is 1 and has a gradient."""
    x = algorithm_of(GRPOConfig(name))
    samples = batch(x, seed=1)
    oracle = Oracle(x, samples, beta=x.beta, old=old, ref=x.beta > 0)
    assert_agree(oracle, some_rows(len(samples), seed=1), dtype)
    assert any(g.any() for g in oracle.grad_logps)


def test_the_batch_meets_every_corner() -> None:
    """What the tests above rest on: tokens on both sides of each corner, for each sign."""
    x = replace(BASE, delta=1.7)
    tokens = [(np.exp(lp - o), a) for s in batch(x) for lp, o, a in zip(s.logps, s.old, s.advantage, strict=True)]
    for sign, corner in product((-1, 0, 1), (0.8, 1.2, 1.7, x.dual_clip, x.cap)):
        near = [w - corner for w, a in tokens if np.sign(a) == sign and abs(w - corner) < 1e-3]
        assert min(near) < 0 < max(near)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.data())
def test_any_samples_in_any_rows(data: st.DataObject) -> None:
    """Random shapes, settings and rows; in float64, where no draw is too close to a corner to tell its side."""
    pick = lambda names: data.draw(st.sampled_from(sorted(names)))  # noqa: E731
    x = replace(
        BASE, ratio=pick(RATIOS), surrogate=pick(SURROGATES), aggregate=pick(AGGREGATES), kl=pick(KLS),
        entropy_bonus=0.01, correction=pick(["none", *CORRECTIONS]), delta=pick([1.5, 8.0]),
    )  # fmt: skip
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    one_of = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    samples = [random_sample(rng, n, one_of(0.0, 0.2, 3.0), one_of(1.0, 0.6)) for n in lengths]
    assume(any(s.kept.any() for s in samples))
    order = data.draw(st.permutations(range(len(samples))))
    cut, oracle = data.draw(st.integers(0, len(samples))), Oracle(x, samples, beta=0.05, old=data.draw(st.booleans()))
    assert_agree(oracle, [order[:cut], order[cut:], *[[]] * 8], np.float64)
