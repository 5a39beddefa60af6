"""Attention block by block against plain attention under a mask, itself held to float64 in test_layers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from covey.models import blockwise as module
from covey.models.attention import dot_product_attention, within_window
from covey.models.blockwise import (
    IMPLEMENTATIONS,
    Spans,
    blockwise_attention,
    causal_spans,
    choose_implementation,
    span_attention,
    span_mask,
)
from covey.models.config import ModelConfig
from covey.models.decoder import Decoder
from covey.parallel.sharding import shardings

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def heads(time: int, rows: int = 2, dtype: object = jnp.float32) -> list[jax.Array]:
    """Queries, keys, values, and a gradient of the result."""
    rng = np.random.default_rng(time)
    sizes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [jnp.asarray(rng.normal(size=(rows, time, n, WIDTH)), dtype) for n in sizes]


def layout(time: int, rows: int = 2) -> tuple[Spans, jax.Array]:
    """Rows of a prompt with completions, of two groups, or of one long sample, with padding behind; and positions."""
    first, until, own, positions = (np.zeros((rows, time), np.int32) for _ in range(4))
    own[:] = time
    for row in range(rows):
        at = 0
        for share, samples in ((0.5, 3), (0.4, 1 + row)):
            start, room = at, int(share * time)
            prompt = max(1, room // (samples + 1))
            for number in range(samples + 1):
                end = start + room if number == samples else at + prompt
                first[row, at:end], until[row, at:end] = start, start + prompt if number else 0
                own[row, at:end] = at
                positions[row, at:end] = (prompt if number else 0) + np.arange(end - at)
                at = end
    return Spans(*map(jnp.asarray, (first, until, own))), jnp.asarray(positions)


def plain(
    q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans, positions: jax.Array, window: object, softcap: float | None
) -> jax.Array:
    """The oracle."""
    allowed = span_mask(spans, jnp.arange(q.shape[1]), q.shape[1])
    return dot_product_attention(
        q, k, v, allowed if window is None else allowed & within_window(positions, positions, window), softcap
    )


def values_and_gradients(
    compute: object, time: int, window: int | None, softcap: float | None, dtype: object = jnp.float32
) -> list[np.ndarray]:
    """The mixture and its three gradients, zero where a query is padding."""
    (*qkv, grad), (spans, positions) = heads(time, dtype=dtype), layout(time)
    live = (spans.segment_start < time)[..., None, None]
    run = lambda *a: compute(*a, spans, positions, window, softcap)  # type: ignore[operator]  # noqa: E731
    out, pull = jax.vjp(jax.jit(run), *qkv)
    return [np.asarray(x, np.float32) for x in (jnp.where(live, out, 0), *pull(grad * live.astype(grad.dtype)))]


@pytest.mark.parametrize(
    ("time", "window", "softcap"),
    [(1, None, None), (40, 7, None), (64, None, 3.0), (130, 20, 2.0), (320, None, None), (200, 70, None)],
)
def test_values_and_gradients_are_those_of_plain_attention(
    time: int, window: int | None, softcap: float | None
) -> None:
    got, want = (values_and_gradients(how, time, window, softcap) for how in (blockwise_attention, plain))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
def test_rows_longer_than_all_runs_go_in_loops() -> None:
    """Beyond 1,024 the program does not grow: here 1,500, which no block divides."""
    assert len(module._query_runs(1536)) <= module.MAX_RUNS
    got, want = (values_and_gradients(how, 1500, 300, 5.0) for how in (blockwise_attention, plain))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)


def test_16_bits_give_values_and_gradients_near_those_of_32() -> None:
    got = values_and_gradients(blockwise_attention, 130, None, None, jnp.bfloat16)
    want = values_and_gradients(plain, 130, None, None)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max())


def test_16_bits_keep_their_softmax_in_float32() -> None:
    """Against one in 16 bits, of the same rounded queries and keys."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 300, 1, WIDTH)), jnp.bfloat16) for _ in range(3))
    spans, positions = causal_spans(jnp.array([300]), 300), jnp.arange(300)[None]
    got = blockwise_attention(q, k, v, spans, positions).astype(jnp.float32)
    want = plain(*(x.astype(jnp.float32) for x in (q, k, v)), spans, positions, None, None)
    scores = jnp.where(jnp.tri(300, dtype=bool), jnp.einsum("btnw,bunw->btu", q, k), -jnp.inf)
    narrow = jnp.einsum("btu,bunw->btnw", jax.nn.softmax(scores.astype(jnp.bfloat16)), v).astype(jnp.float32)
    error, narrow_error = (float(jnp.sqrt(jnp.mean(jnp.square(x - want)))) for x in (got, narrow))
    assert error < narrow_error / 2


def test_padding_is_finite_and_passes_nothing_on() -> None:
    q, k, v, grad = heads(70)
    spans = causal_spans(jnp.array([50, 0]), 70)
    positions = jnp.broadcast_to(jnp.arange(70), (2, 70))
    out, pull = jax.vjp(jax.jit(lambda *a: blockwise_attention(*a, spans, positions)), q, k, v)
    assert jnp.isfinite(out).all()
    grads = pull(grad)
    assert all(jnp.isfinite(g).all() and not g[0, 50:].any() and not g[1].any() for g in grads)


def test_a_causal_span_is_a_triangle_over_the_tokens_there_are() -> None:
    allowed = span_mask(causal_spans(jnp.array([3, 5]), 5), jnp.arange(5), 5)
    triangle = np.tril(np.ones((5, 5), bool))
    np.testing.assert_array_equal(allowed[1], triangle)
    np.testing.assert_array_equal(allowed[0, :3], triangle[:3])
    assert not allowed[0, 3:].any()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_square_of_the_row() -> None:
    """The same number of tokens in rows four times as long; plain attention takes four times the memory."""

    def temporary(compute: object, rows: int, time: int) -> int:
        (*qkv, grad), (spans, positions) = heads(time, rows), layout(time, rows)
        run = lambda *a: jax.vjp(lambda *b: compute(*b, spans, positions, None, None), *a)[1](grad)  # type: ignore[operator]  # noqa: E731
        return int(jax.jit(run).lower(*qkv).compile().memory_analysis().temp_size_in_bytes)

    assert temporary(plain, 1, 4096) > 3.5 * temporary(plain, 4, 1024)
    assert temporary(blockwise_attention, 1, 4096) < 1.5 * temporary(blockwise_attention, 4, 1024)
    assert temporary(blockwise_attention, 1, 4096) < temporary(plain, 1, 4096) / 6


def test_a_layer_computed_again_does_not_attend_again() -> None:
    """Mixtures and log-normalisers are kept with the results of projections. Counted in the traced program."""
    shape = ModelConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8
    )
    tokens = jnp.zeros((1, 96), jnp.int32)
    positions = jnp.arange(96)[None]
    attend = span_attention(causal_spans(jnp.array([96]), 96), positions, "cpu")

    def exponentials(keeps: str) -> int:
        graph, state = nnx.split(Decoder(shape, rngs=nnx.Rngs(0), remat_keeps=keeps))
        total = lambda s: nnx.merge(graph, s)(tokens, positions, attend)[0].sum()  # noqa: E731
        return jax.jit(jax.grad(total)).lower(state).as_text().count("stablehlo.exponential ")

    assert exponentials("nothing") - exponentials("products") == len(module._query_runs(96))


@pytest.mark.parametrize(
    ("platform", "dtype", "width", "softcap", "name"),
    [
        ("cpu", jnp.bfloat16, 64, None, "blocks"),
        ("tpu", jnp.bfloat16, 128, None, "blocks"),
        ("gpu", jnp.bfloat16, 64, None, "blocks"),
        ("cuda", jnp.bfloat16, 64, None, "cudnn"),
        ("cuda", jnp.float16, 128, None, "cudnn"),
        ("cuda", jnp.float32, 64, None, "blocks"),
        ("cuda", jnp.bfloat16, 256, None, "blocks"),
        ("cuda", jnp.bfloat16, 64, 50.0, "blocks"),
    ],
)
def test_the_implementation_is_one_that_can(
    platform: str, dtype: object, width: int, softcap: float | None, name: str
) -> None:
    assert choose_implementation(platform, jnp.zeros((1, 2, 2, width), dtype), softcap) == name
    assert name in IMPLEMENTATIONS


def test_on_a_mesh_attention_goes_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the queries as a divided model makes them, while it is traced."""
    shape = ModelConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8
    )
    chosen = []
    choose = module.choose_implementation

    def noted(platform: str, q: jax.Array, softcap: float | None) -> str:
        chosen.append(choose(platform, q.astype(jnp.bfloat16), softcap))
        return "blocks"

    monkeypatch.setattr(module, "choose_implementation", noted)
    attend = span_attention(causal_spans(jnp.array([8, 8]), 8), jnp.broadcast_to(jnp.arange(8), (2, 8)), "cuda")
    graph, state = nnx.split(Decoder(shape, rngs=nnx.Rngs(0)))
    run = lambda s: nnx.merge(graph, s)(jnp.zeros((2, 8), jnp.int32), jnp.zeros((2, 8), jnp.int32), attend)[0]  # noqa: E731
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    for params in (state, jax.device_put(state, shardings(state, mesh))):
        jax.jit(run).lower(params)
    assert chosen == ["cudnn", "blocks"]


@pytest.mark.parametrize("window", [None, 9])
def test_the_call_of_fused_attention_means_the_same(window: int | None) -> None:
    """With XLA's own implementation in place of cuDNN's: the arguments are the same."""
    fused = partial(module._cudnn_attention, implementation="xla")
    for a, b in zip(*(values_and_gradients(how, 60, window, None) for how in (fused, plain)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
