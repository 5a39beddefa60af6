"""Attention block by block against plain attention under a mask, itself held to float64 in test_layers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from covey.models import blockwise as module
from covey.models.attention import dot_product_attention
from covey.models.blockwise import blockwise_attention
from covey.models.config import ModelConfig
from covey.models.decoder import abstract_decoder
from covey.models.span_attention import span_attention
from covey.models.spans import MAX_ROW_LENGTH, NO_WINDOW, Spans, causal_spans, span_mask

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def heads(time: int, rows: int = 2, dtype: object = jnp.float32) -> list[jax.Array]:
    """Queries, keys, values, and a gradient of the result."""
    rng = np.random.default_rng(time)
    sizes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [jnp.asarray(rng.normal(size=(rows, time, n, WIDTH)).astype(np.float32), dtype) for n in sizes]


def layout(time: int, rows: int = 2) -> tuple[Spans, jax.Array]:
    """Rows of a prompt with completions, of two groups, or of one long sample, with padding behind; and positions."""
    index = np.broadcast_to(np.arange(time, dtype=np.int32), (rows, time))
    start, end, positions = index.copy(), index + 1, np.zeros((rows, time), np.int32)
    for row in range(rows):
        at = 0
        for share, samples in ((0.5, 3), (0.4, 1 + row)):
            first, room = at, int(share * time)
            prompt = max(1, room // (samples + 1))
            for number in range(samples + 1):
                until = first + room if number == samples else at + prompt
                start[row, at:until] = first
                end[row, at:until] = until if number else first + room
                positions[row, at:until] = (prompt if number else 0) + np.arange(until - at)
                at = until
    return Spans(jnp.asarray(start), jnp.asarray(end)), jnp.asarray(positions)


def plain(q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans, softcap: float | None) -> jax.Array:
    """The same from all scores at once."""
    return dot_product_attention(q, k, v, span_mask(spans), softcap)


def formula(q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans, softcap: float | None) -> jax.Array:
    """The oracle, in the type of its arguments."""
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    scores = jnp.einsum("bthw,buhw->bhtu", q, k)
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    weights = jax.nn.softmax(jnp.where(span_mask(spans)[:, None], scores, jnp.finfo(q.dtype).min))
    return jnp.einsum("bhtu,buhw->bthw", weights, v)


def in_float64(time: int, window: int | None, softcap: float | None) -> list[np.ndarray]:
    """What `values_and_gradients` should be."""
    with jax.enable_x64(True):
        return values_and_gradients(formula, time, window, softcap, jnp.float64)


def assert_rounded(got: list[np.ndarray], want: list[np.ndarray], time: int) -> None:
    """Compare float32 with float64: a number is a sum over `time` tokens of products of sums over `WIDTH`."""
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=(time + 4 * WIDTH) * 2.0**-24 * np.abs(b).max())


def values_and_gradients(
    compute: object, time: int, window: int | None, softcap: float | None, dtype: object = jnp.float32
) -> list[np.ndarray]:
    """The mixture and its three gradients, zero where a query is padding."""
    (*qkv, grad), (spans, positions) = heads(time, dtype=dtype), layout(time)
    live = (spans.end > jnp.arange(time) + 1)[..., None, None]
    run = lambda *a: compute(*a, spans.limit(positions, window or NO_WINDOW), softcap)  # type: ignore[operator]  # noqa: E731
    out, pull = jax.vjp(jax.jit(run), *qkv)
    return [np.asarray(x, np.float64) for x in (jnp.where(live, out, 0), *pull(grad * live.astype(grad.dtype)))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("time", "window", "softcap"),
    [(1, None, None), (64, 7, 3.0), (130, 20, 2.0), (200, None, None)],
)
def test_values_and_gradients_are_those_of_plain_attention(
    time: int, window: int | None, softcap: float | None
) -> None:
    got, want = values_and_gradients(blockwise_attention, time, window, softcap), in_float64(time, window, softcap)
    assert_rounded(got, want, time)


@pytest.mark.slow
def test_rows_longer_than_all_runs_go_in_loops() -> None:
    """Beyond 1,024 the program does not grow: here 1,100, which no block divides."""
    assert len(module._query_runs(1536)) <= module.MAX_RUNS
    assert_rounded(values_and_gradients(blockwise_attention, 1100, 300, 5.0), in_float64(1100, 300, 5.0), 300)


@pytest.mark.slow
def test_16_bits_give_values_and_gradients_near_those_of_32() -> None:
    got = values_and_gradients(blockwise_attention, 130, None, None, jnp.bfloat16)
    want = in_float64(130, None, None)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max())


@pytest.mark.slow
def test_16_bits_keep_their_softmax_in_float32() -> None:
    """Against one in 16 bits, of the same rounded queries and keys."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 300, 1, WIDTH)), jnp.bfloat16) for _ in range(3))
    spans = causal_spans(jnp.array([300]), 300)

    @jax.jit
    def compute(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        scores = jnp.where(jnp.tri(300, dtype=bool), jnp.einsum("btnw,bunw->btu", q, k), -jnp.inf)
        narrow = jnp.einsum("btu,bunw->btnw", jax.nn.softmax(scores.astype(jnp.bfloat16)), v)
        want = plain(*(x.astype(jnp.float32) for x in (q, k, v)), spans, None)
        return blockwise_attention(q, k, v, spans), narrow, want

    got, narrow, want = (np.asarray(x, np.float32) for x in compute(q, k, v))
    error, narrow_error = (np.sqrt(np.mean(np.square(x - want))) for x in (got, narrow))
    assert error < narrow_error / 2


@pytest.mark.slow
def test_padding_is_finite_and_passes_nothing_on_to_tokens() -> None:
    """Padding attends to itself alone, and no token attends to padding."""
    q, k, v, grad = heads(70)
    spans = causal_spans(jnp.array([50, 0]), 70)
    out, pull = jax.vjp(jax.jit(lambda *a: blockwise_attention(*a, spans)), q, k, v)
    np.testing.assert_allclose(out[1], jnp.repeat(v[1], HEADS // KV_HEADS, axis=1), atol=1e-6)
    for a, b in zip(pull(grad), pull(grad.at[0, 50:].set(0).at[1].set(0)), strict=True):
        assert jnp.isfinite(a).all()
        np.testing.assert_array_equal(a[0, :50], b[0, :50])
        assert not b[0, 50:].any()
        assert not b[1].any()


def test_a_causal_span_is_a_triangle_over_the_tokens_there_are() -> None:
    allowed = span_mask(causal_spans(jnp.array([3, 5]), 5))
    triangle = np.tril(np.ones((5, 5), bool))
    np.testing.assert_array_equal(allowed[1], triangle)
    np.testing.assert_array_equal(allowed[0, :3], triangle[:3])
    np.testing.assert_array_equal(allowed[0, 3:], np.eye(5, dtype=bool)[3:])


def test_a_window_counts_the_token_itself() -> None:
    """By hand: a prompt of 3 tokens with two completions of 3; under a window of 2 a token sees itself and one more."""
    spans = Spans(jnp.zeros((1, 9), jnp.int32), jnp.array([[9, 9, 9, 6, 6, 6, 9, 9, 9]]))
    positions = jnp.array([[0, 1, 2, 3, 4, 5, 3, 4, 5]])
    allowed = span_mask(spans.limit(positions, 2))[0]
    seen = [np.flatnonzero(row).tolist() for row in np.asarray(allowed)]
    assert seen == [[0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [2, 6], [6, 7], [7, 8]]
    np.testing.assert_array_equal(span_mask(spans.limit(positions, 1))[0], np.eye(9, dtype=bool))


@pytest.mark.slow
def test_each_layer_has_its_own_window() -> None:
    """The trap: windows that are the same for all layers, or none."""
    shape = ModelConfig(
        vocab_size=50, hidden_size=32, intermediate_size=24, num_layers=2, num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=WIDTH, windows=(None, 5),
    )  # fmt: skip
    (q, k, v, _), (spans, positions) = heads(40), layout(40)
    attend = span_attention(abstract_decoder(shape), spans, positions)
    for window in (None, 5):
        got, _ = jax.jit(partial(attend, cache=None, window=window, softcap=None))(q, k, v)
        want = jax.jit(partial(plain, softcap=None))(q, k, v, spans.limit(positions, window or NO_WINDOW))
        np.testing.assert_allclose(got, want, atol=(40 + 4 * WIDTH) * 2.0**-24 * np.abs(want).max())


def test_windows_are_found_in_the_longest_rows() -> None:
    """Position and index of a token are one number of 32 bits."""
    assert np.iinfo(np.uint32).max >= MAX_ROW_LENGTH**2 - 1
    index = jnp.arange(MAX_ROW_LENGTH)[None]
    spans = causal_spans(jnp.array([MAX_ROW_LENGTH]), MAX_ROW_LENGTH)
    np.testing.assert_array_equal(spans.limit(index, 3).start, jnp.maximum(index - 2, 0))
    with pytest.raises(AssertionError, match="rows are shorter"):
        causal_spans(jnp.array([1]), MAX_ROW_LENGTH + 1).limit(jnp.arange(MAX_ROW_LENGTH + 1)[None], 3)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_square_of_the_row() -> None:
    """The same number of tokens in rows four times as long; plain attention takes four times the memory."""

    def temporary(compute: object, rows: int, time: int) -> int:
        (*qkv, grad), (spans, _) = heads(time, rows), layout(time, rows)
        run = lambda *a: jax.vjp(lambda *b: compute(*b, spans, None), *a)[1](grad)  # type: ignore[operator]  # noqa: E731
        return int(jax.jit(run).lower(*qkv).compile().memory_analysis().temp_size_in_bytes)

    whole, by_block = temporary(plain, 1, 4096), temporary(blockwise_attention, 1, 4096)
    assert whole > 3.5 * temporary(plain, 4, 1024)
    assert by_block < 1.5 * temporary(blockwise_attention, 4, 1024)
    assert by_block < whole / 6


@pytest.mark.slow
def test_a_layer_computed_again_does_not_attend_again() -> None:
    """Mixtures and log-normalisers are kept with the results of projections. Counted in the traced program."""
    shape = ModelConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8
    )
    tokens = jnp.zeros((1, 96), jnp.int32)
    positions = jnp.arange(96)[None]

    def exponentials(keeps: str) -> int:
        graph, state = nnx.split(abstract_decoder(shape, remat_keeps=keeps))

        def total(state: nnx.State) -> jax.Array:
            model = nnx.merge(graph, state)
            attend = span_attention(model, causal_spans(jnp.array([96]), 96), positions)
            return model(tokens, positions, attend)[0].sum()

        return str(jax.make_jaxpr(jax.grad(total))(state)).count("= exp ")

    assert exponentials("nothing") - exponentials("products") == len(module._query_runs(96))
