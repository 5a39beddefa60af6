"""Helpers by their known names: against float64 NumPy, against the loop's own rows, and by their properties."""

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import covey
from covey import (
    build_positions_from_mask,
    compute_advantages,
    get_per_token_logps,
    make_causal_attn_mask,
    make_completion_mask,
    pad_to_length,
    selective_log_softmax,
)
from covey.errors import RewardError
from covey.losses.logprobs import token_logps
from covey.packing.rows import pack, unpack

shapes = st.sampled_from([(1, 1), (3, 7)])  # few: each is compiled
masks = hnp.arrays(np.bool_, shapes)
tokens = hnp.arrays(np.int32, shapes, elements=st.integers(0, 5))


# selective_log_softmax


def oracle(logits: np.ndarray, index: np.ndarray) -> np.ndarray:
    """float64, term by term."""
    z = logits.astype(np.float64)
    top = z.max(axis=-1, keepdims=True)
    normaliser = top[..., 0] + np.log(np.exp(z - top).sum(axis=-1))
    return np.take_along_axis(z, index[..., None], axis=-1)[..., 0] - normaliser


@pytest.mark.slow
@given(st.integers(0, 2**31), st.sampled_from([(5,), (2, 3, 4)]), st.sampled_from([0.1, 1.0, 30.0, 1e4]))
def test_selective_log_softmax_is_the_log_softmax_at_the_index(seed: int, shape: tuple[int, ...], scale: float) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(*shape, 17)) * scale).astype(np.float32)
    index = rng.integers(0, 17, shape)
    got = selective_log_softmax(logits, index)
    assert got.shape == shape
    np.testing.assert_allclose(got, oracle(logits, index), rtol=1e-5, atol=1e-5 * max(1, scale / 30))


def test_logits_in_bfloat16_are_summed_in_float32() -> None:
    logits = jnp.zeros((1, 50_000), jnp.bfloat16)
    got = selective_log_softmax(logits, np.array([7]))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [-np.log(50_000)], rtol=1e-6)


def test_an_index_outside_the_vocabulary_is_no_number() -> None:
    assert np.isnan(selective_log_softmax(np.zeros((1, 4)), np.array([4]))).all()


@pytest.mark.slow
def test_its_gradient_is_one_minus_the_softmax() -> None:
    logits = np.random.default_rng(0).normal(size=6).astype(np.float32)
    got = jax.grad(lambda z: selective_log_softmax(z, jnp.asarray(2)))(jnp.asarray(logits))
    p = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    np.testing.assert_allclose(got, np.eye(6)[2] - p, atol=1e-6)


# get_per_token_logps


per_token = nnx.jit(get_per_token_logps, static_argnames=("logits_to_keep", "temperature"))


def padded(groups, prompt_length, completion_length):
    """Prompts left-padded, completions right-padded, and the mask of what is real."""
    rows, real = [], []
    for group in groups:
        for c in group.completions:
            front, back = prompt_length - len(group.prompt_tokens), completion_length - len(c.tokens)
            rows.append(np.concatenate([np.zeros(front), group.prompt_tokens, c.tokens, np.zeros(back)]))
            real.append([0] * front + [1] * (len(group.prompt_tokens) + len(c.tokens)) + [0] * back)
    return np.array(rows, np.int32), np.array(real, bool)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_per_token_logps_agree_with_the_loops_own_rows(decoder, groups_of, temperature):
    """Prompt once with completions behind it, and one padded sample per line: the same numbers, at each temperature."""
    groups = groups_of([(5, [7, 1, 4]), (9, [3, 8, 2])])
    lengths = [len(c.tokens) for g in groups for c in g.completions]
    model, rows = decoder(), pack(groups, 64)
    graph, params = nnx.split(model)
    scores = jax.jit(lambda params, rows: token_logps(graph, params, rows, temperature).logps)(params, rows)
    wanted = unpack(rows, np.asarray(scores), lengths)
    ids, mask = padded(groups, 9, 8)
    positions, attention = build_positions_from_mask(mask), make_causal_attn_mask(mask)
    got = np.asarray(per_token(model, ids, positions, attention, 8, temperature))
    assert got.shape == (6, 8)
    for line, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(line[: len(want)], want, atol=1e-5)


@pytest.mark.parametrize("keep", [12, 13, 0, -1])
def test_the_first_token_has_no_log_prob(decoder, keep):
    ids = np.zeros((1, 12), np.int32)
    mask = np.ones((1, 12), bool)
    with pytest.raises(AssertionError, match="the first has none"):
        get_per_token_logps(decoder(), ids, build_positions_from_mask(mask), make_causal_attn_mask(mask), keep)


# Masks and positions


@given(tokens, st.sets(st.integers(0, 5), min_size=2, max_size=2))
def test_completion_mask_is_one_up_to_and_including_the_first_stop_token(ids: np.ndarray, eos: set[int]) -> None:
    got = np.asarray(make_completion_mask(ids, tuple(eos)))
    for line, mask in zip(ids.tolist(), got.tolist(), strict=True):
        first = next((i for i, token in enumerate(line) if token in eos), len(line) - 1)
        assert mask == [1] * (first + 1) + [0] * (len(line) - first - 1)


@given(masks)
def test_causal_mask_shows_the_real_past(mask: np.ndarray) -> None:
    got = np.asarray(make_causal_attn_mask(mask))
    B, T = mask.shape
    wanted = [[[bool(mask[b, k]) and k <= q for k in range(T)] for q in range(T)] for b in range(B)]
    assert got.tolist() == wanted


@given(masks)
def test_positions_count_real_tokens_from_zero(mask: np.ndarray) -> None:
    got = np.asarray(build_positions_from_mask(mask))
    assert (got >= 0).all()
    for line, real in zip(got, mask, strict=True):
        assert line[real].tolist() == list(range(real.sum()))


@given(hnp.arrays(np.float32, (2, 3, 4)), st.sampled_from([0, 3, 5]), st.booleans(), st.data())
def test_pad_to_length_fills_one_side_of_one_axis(x: np.ndarray, target: int, left: bool, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    got = np.asarray(pad_to_length(x, target, pad_value=-7, left=left, axis=axis))
    added = max(target - x.shape[axis], 0)
    filling, kept = np.split(got, [added], axis) if left else np.split(got, [got.shape[axis] - added], axis)[::-1]
    np.testing.assert_array_equal(kept, x)
    assert (filling == -7).all()
    assert filling.shape[axis] == added
    assert got.dtype == x.dtype


def test_the_helpers_can_be_compiled() -> None:
    mask = np.array([[0, 1, 1]])
    jitted = jax.jit(lambda m: (make_causal_attn_mask(m), build_positions_from_mask(m), make_completion_mask(m, (1,))))
    for got, want in zip(jitted(mask), jitted.__wrapped__(mask), strict=True):
        np.testing.assert_array_equal(got, want)


# compute_advantages


@given(st.integers(1, 4), st.integers(2, 6), st.data())
def test_advantages_of_flat_rewards_by_the_formula(P: int, G: int, data: st.DataObject) -> None:
    rewards = data.draw(hnp.arrays(np.float64, P * G, elements=st.floats(-10, 10, width=16)))
    got = compute_advantages(rewards, G)
    for i in range(P):
        group = rewards[i * G : (i + 1) * G]
        deviation = np.sqrt(sum((r - sum(group) / G) ** 2 for r in group) / (G - 1))
        wanted = [(r - sum(group) / G) / (deviation + 1e-4) for r in group]
        np.testing.assert_allclose(got[i * G : (i + 1) * G], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rewards", [[1.0] * 5, [[1.0, 2.0]], 3.0])
def test_rewards_that_are_no_groups_are_refused(rewards: object) -> None:
    with pytest.raises(RewardError, match="for groups of 2"):
        compute_advantages(rewards, 2)


# The page


def page() -> str:
    return (Path(__file__).parents[3] / "docs" / "low-level.md").read_text()


def test_the_page_lists_every_function_with_its_arguments() -> None:
    calls = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", page(), re.M))
    assert set(calls) == {name for name, home in covey._modules().items() if home == "covey_functions.padded"}
    for name, arguments in calls.items():
        parameters = inspect.signature(getattr(covey, name)).parameters.values()
        assert arguments == ", ".join(re.sub(r":.*?( = |$)", lambda m: m[1].strip(), str(p)) for p in parameters)
