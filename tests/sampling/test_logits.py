"""The draw: its distribution, its truncation, its log-probs."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special  # comes with jax

from covey.sampling.logits import (
    SamplingParams,
    TracedSamplingParams,
    _ordered_bits,
    _search,
    draw,
    nucleus_threshold,
    race,
    sample_keys,
    token_keys,
    truncate,
)

DRAWS, WORDS = 20_000, 300
LOWEST = np.finfo(np.float32).min
jitted_threshold = jax.jit(nucleus_threshold)
jitted_truncate, jitted_draw = jax.jit(truncate), jax.jit(draw, static_argnums=2)
FAST = {"xla_backend_optimization_level": 1}
fast_draw = jax.jit(draw, static_argnums=2, compiler_options=FAST)
fast_draw_traced = jax.jit(draw, compiler_options=FAST)
fast_race = jax.jit(race, compiler_options=FAST)


def keys_of(count: int, seed: int = 0) -> np.ndarray:
    """Keys of so many samples' first tokens."""
    rows = np.arange(count)[:, None] * [[0, 0, 1]] + [[1, 2, 0]]
    return token_keys(sample_keys(seed, rows.astype(np.uint32)), np.zeros(count, np.int32))


def oracle(logits: np.ndarray, sampling_params: SamplingParams) -> np.ndarray:
    """The truncated distribution in float64 by sorting: temperature, top-k, top-p, min-p in that order."""
    scaled = logits.astype(np.float64) / sampling_params.temperature
    order = np.argsort(-scaled)
    kept = order[: sampling_params.top_k or None]
    mass = np.exp(scaled[kept] - scaled[kept].max())
    mass /= mass.sum()
    count = int(np.searchsorted(np.cumsum(mass), sampling_params.top_p - 1e-9)) + 1
    likely = mass[:count] >= sampling_params.min_p * mass[0] * (1 - 1e-6)  # ties, up to float32
    out = np.zeros_like(scaled)
    out[kept[:count]] = np.where(likely, mass[:count], 0) / mass[:count][likely].sum()
    return out


@pytest.mark.parametrize(
    "sampling_params",
    [
        SamplingParams(),
        pytest.param(SamplingParams(temperature=1.3, top_k=7), marks=pytest.mark.slow),
        pytest.param(SamplingParams(top_p=0.9), marks=pytest.mark.slow),
        pytest.param(SamplingParams(temperature=0.9, top_k=40, top_p=0.95), marks=pytest.mark.slow),
        pytest.param(SamplingParams(min_p=0.05), marks=pytest.mark.slow),
        pytest.param(SamplingParams(temperature=1.5, top_k=40, top_p=0.95, min_p=0.1), marks=pytest.mark.slow),
    ],
)
def test_draws_follow_the_truncated_distribution(sampling_params: SamplingParams) -> None:
    """And one program that takes the settings as numbers draws the same tokens."""
    logits = np.random.default_rng(3).normal(scale=1.5, size=WORDS).astype(np.float32)
    expected = oracle(logits, sampling_params)
    keys, rows = keys_of(DRAWS), jnp.broadcast_to(logits, (DRAWS, WORDS))
    token, logp, sampler_logp = fast_draw(rows, keys, sampling_params)
    traced = fast_draw_traced(rows, keys, sampling_params.of_rows(len(rows)))
    same = np.asarray(traced[0] == token)
    assert same.mean() > 0.9999  # a sum may be rounded otherwise
    for one, other in ((traced[1], logp), (traced[2], sampler_logp)):
        np.testing.assert_allclose(np.asarray(one)[same], np.asarray(other)[same], atol=1e-5)
    counts = np.bincount(np.asarray(token), minlength=WORDS)
    assert counts[expected == 0].sum() == 0
    common = expected * DRAWS >= 5
    rest = expected[~common].sum() * DRAWS
    observed, wanted = [*counts[common], counts[~common].sum()], [*(expected[common] * DRAWS), rest]
    if rest < 5:
        observed, wanted = observed[:-1], wanted[:-1]
        wanted = list(np.array(wanted) * sum(observed) / sum(wanted))
    from scipy import stats  # late: it takes as long as all other imports of this file

    assert stats.chisquare(observed, wanted).pvalue > 1e-3
    np.testing.assert_allclose(np.asarray(sampler_logp), np.log(expected[np.asarray(token)]), atol=1e-4)


@pytest.mark.slow
def test_tokens_are_those_of_the_golden_file() -> None:
    """Those of `tests/parity/make_draw_golden.py` in float64, whose logits are exact numbers without a near tie."""
    golden = json.loads((Path(__file__).parents[1] / "parity" / "golden" / "draw.json").read_text())
    keys = np.array([row["key"] for row in golden["keys"]], np.uint32)
    for size in {row["size"] for row in golden["tokens"]}:
        rows = [row for row in golden["tokens"] if row["size"] == size]
        logits = (np.arange(1, size + 1, dtype=np.uint64) * 2654435761 % 2**32 >> 8) / 2**21
        numbers = TracedSamplingParams.stack([SamplingParams(**row["settings"]) for row in rows for _ in keys])
        every = np.broadcast_to(logits.astype(np.float32), (len(numbers.top_k), size))
        token, _, _ = fast_draw_traced(every, np.tile(keys, (len(rows), 1)), numbers)
        assert token.reshape(len(rows), -1).tolist() == [row["tokens"] for row in rows]


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.lists(st.floats(-30, 30, width=32), min_size=8, max_size=8),
    st.floats(0.1, 3.0),
    st.sampled_from([(0, 1.0), (5, 0.7)]),
    st.floats(0.0, 1.0),
)
def test_what_min_p_keeps_is_never_empty_and_within_what_it_was_given(
    logits: list[float], temperature: float, others: tuple[int, float], min_p: float
) -> None:
    top_k, top_p = others
    scaled = jnp.asarray([logits]) / temperature
    before = np.asarray(jitted_truncate(scaled, SamplingParams(top_k=top_k, top_p=top_p).of_rows(1)))[0]
    after = np.asarray(jitted_truncate(scaled, SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p).of_rows(1)))[0]
    kept = after > LOWEST
    assert kept[np.argmax(logits)]
    assert not (kept & (before == LOWEST)).any()
    ratio = np.exp((before - before.max()).astype(np.float64))
    assert kept[ratio > min_p * (1 + 1e-3)].all()
    assert not kept[(ratio < min_p * (1 - 1e-3)) & (min_p > 0)].any()


@pytest.mark.slow
def test_min_p_worked_by_hand() -> None:
    """0.5, 0.3 and 0.2: with 0.5 only what has at least 0.25 is kept, of the full distribution's log-probs."""
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]] * 64))
    token, logp, sampler_logp = jitted_draw(logits, keys_of(64), SamplingParams(min_p=0.5))
    assert set(token.tolist()) == {0, 1}
    np.testing.assert_allclose(np.exp(logp), np.array([0.5, 0.3])[token], rtol=1e-6)
    np.testing.assert_allclose(np.exp(sampler_logp), np.array([0.625, 0.375])[token], rtol=1e-6)


@pytest.mark.slow
def test_logps_are_of_the_untruncated_distribution_at_the_temperature() -> None:
    """What the trainer recomputes: comparing it with log-probs at temperature 1 would be wrong (a trap)."""
    logits = np.random.default_rng(0).normal(size=(64, 300)).astype(np.float32)
    token, logp, _ = jitted_draw(jnp.asarray(logits), keys_of(64), SamplingParams(0.6, 0.8, 20))
    want = jax.nn.log_softmax(jnp.asarray(logits) / 0.6)[jnp.arange(64), token]
    np.testing.assert_allclose(logp, want, atol=1e-5)


def test_temperature_zero_is_greedy_and_divides_by_nothing() -> None:
    logits = jnp.array([[0.0, 3.0, 1.0], [5.0, 5.0, -1.0]])
    token, logp, sampler_logp = jitted_draw(logits, keys_of(2), SamplingParams(temperature=0.0))
    assert token.tolist() == [1, 0]
    np.testing.assert_allclose(logp, jax.nn.log_softmax(logits)[jnp.arange(2), token], atol=1e-6)
    assert sampler_logp.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("size", "k"), [(1, 1), (100, 7), (128, 128), (129, 1), (700, 5), (700, 6), (700, 699), (5000, 50)]
)
def test_kth_largest_is_exact_ties_included(size: int, k: int) -> None:
    values = np.random.default_rng(k).normal(size=(30, size)).round(1).astype(np.float32)
    kept = np.asarray(jitted_truncate(jnp.asarray(values), SamplingParams(top_k=k).of_rows(30)))
    assert np.array_equal(np.min(kept, 1, where=kept > LOWEST, initial=np.inf), np.sort(values, axis=1)[:, -k])


@pytest.mark.slow
@given(st.sampled_from([1, 40, 400]), st.floats(0.01, 0.999), st.integers(0, 99), st.sampled_from([0.1, 1.0, 30.0]))
def test_nucleus_is_the_smallest_set_that_reaches_p(size: int, top_p: float, seed: int, scale: float) -> None:
    logits = np.random.default_rng(seed).normal(size=(2, size), scale=scale).astype(np.float32)
    threshold = np.asarray(jitted_threshold(jnp.asarray(logits), top_p))[:, None]
    mass = np.asarray(jax.nn.softmax(jnp.asarray(logits)))
    for row, kept in zip(mass, logits >= threshold, strict=True):
        assert row[kept].sum() >= top_p - 1e-5
        assert row[kept].sum() - row[kept].min() < top_p + 1e-5


@pytest.mark.parametrize("bits", [1, 4])
def test_a_search_ends_on_the_exact_boundary(bits: int) -> None:
    """Masses are whole numbers, whose sums are exact in any order."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(64, 500), scale=5).round(1).astype(np.float32)
    values[:, ::9] = LOWEST
    ordered, mass = np.asarray(_ordered_bits(jnp.asarray(values))), rng.integers(0, 4, values.shape).astype(np.float32)
    least = np.linspace(1, mass.sum(1), 64).diagonal().astype(np.float32)
    found = np.asarray(jax.jit(_search, static_argnums=0)(bits, ordered, mass, least))
    assert (np.where(ordered >= found[:, None], mass, 0).sum(1) >= least).all()
    assert (np.where(ordered > found[:, None], mass, 0).sum(1) < least).all()


def test_on_gpus_a_draw_has_no_loop() -> None:
    """Whose kernels the host would launch one by one."""
    logits, keys = jax.ShapeDtypeStruct((8, 4096), jnp.float32), jax.ShapeDtypeStruct((8, 2), jnp.uint32)
    traced = jax.jit(draw, static_argnums=2).trace(logits, keys, SamplingParams(top_k=50, top_p=0.9))
    loops = {name: "while" in traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "tpu", "cuda")}
    assert loops == {"cpu": True, "tpu": True, "cuda": False}


@pytest.mark.parametrize("size", [1, 5, 128, 129, 1000])
def test_a_token_that_is_cut_is_never_drawn(size: int) -> None:
    rng = np.random.default_rng(size)
    kept = rng.random((256, size)) < 0.1
    kept[:, rng.integers(size)] = True
    logits = np.where(kept, rng.normal(scale=20, size=kept.shape), LOWEST).astype(np.float32)
    token, total = fast_race(logits, keys_of(256))
    assert kept[np.arange(256), np.asarray(token)].all()
    np.testing.assert_allclose(total, special.logsumexp(np.where(kept, logits, -np.inf), axis=1), rtol=1e-6)


def both_draw(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The probability, for each entry, that races of masses p and q with the same noise both take it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        pairs = np.maximum(p[..., None, :] / p[..., None], q[..., None, :] / q[..., None])
    return np.where((p > 0) & (q > 0), 1 / pairs.sum(-1), 0.0)


def test_two_distributions_differ_as_rarely_as_the_formula_says() -> None:
    """The trap of the inverse CDF: it moves all boundaries behind a token whose probability changes, and disagrees in
    about a third of these draws.
    """
    rng, size = np.random.default_rng(5), 500
    logits = rng.normal(scale=1.5, size=size).astype(np.float32)
    near = (logits + rng.normal(scale=0.1, size=size)).astype(np.float32)
    drawn = [fast_race(jnp.broadcast_to(x, (DRAWS, size)), keys_of(DRAWS))[0] for x in (logits, near)]
    p, q = (special.softmax(np.float64(x)) for x in (logits, near))
    in_blocks = [np.pad(x, (0, 12)).reshape(4, 128).T for x in (p, q)]  # [blocks, places]
    of_blocks = [x.sum(-1) for x in in_blocks]
    wanted = 1 - (both_draw(*of_blocks) * both_draw(*in_blocks).sum(-1)).sum()
    total, total_blocks = (np.abs(a - b).sum() / 2 for a, b in ((p, q), of_blocks))
    assert total < wanted < 2 * total_blocks / (1 + total_blocks) + 2 * total
    differing = int((np.asarray(drawn[0]) != np.asarray(drawn[1])).sum())
    from scipy import stats

    assert stats.binomtest(differing, DRAWS, wanted).pvalue > 1e-3


def test_a_longer_vocabulary_without_mass_changes_no_token() -> None:
    logits = np.random.default_rng(2).normal(size=(64, 300)).astype(np.float32)
    padded = np.pad(logits, ((0, 0), (0, 700)), constant_values=LOWEST)
    assert np.array_equal(fast_race(logits, keys_of(64))[0], fast_race(padded, keys_of(64))[0])


@pytest.mark.slow
def test_no_sort_of_the_vocabulary_in_the_program() -> None:
    """A full sort costs more than the model on CPU."""
    program = (
        jax.jit(draw, static_argnums=2).lower(jnp.zeros((8, 49152)), keys_of(8), SamplingParams(0.9, 0.95, 0)).as_text()
    )
    assert "stablehlo.sort" not in program
    assert "top_k" not in program
