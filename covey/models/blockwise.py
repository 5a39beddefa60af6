"""Blockwise attention, which never holds all scores: each block of queries reads only the keys up to its own end.

Rows and prompts are causal, so a run of queries needs only the keys up to its own end: half of the T × T scores, of
which one block exists at a time. The backward pass recomputes them from the logsumexp (Dao et al., 2022,
"FlashAttention"). Two numbers per token (`Spans`) replace the mask.

It runs on CPU; accelerators have kernels (`kernels`). `attention.dot_product_attention` is the oracle for all of them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from covey.models.layers import save_product
from covey.models.spans import MASKED_SCORE, Spans, span_mask

BLOCK_SIZE = 64
"""Number of queries in the smallest block (64 was the fastest of 32, 64 and 128 on CPU)."""
MAX_RUNS = 8
"""Number of runs of queries that a program unrolls; each run loops over blocks of twice `BLOCK_SIZE` queries."""


def blockwise_attention(
    q: Float[Array, "B T H W"],
    k: Float[Array, "B T K W"],
    v: Float[Array, "B T K W"],
    spans: Spans,
    softcap: float | None = None,
) -> Float[Array, "B T H W"]:
    """Compute grouped-query attention, with the softmax in float32 and memory linear in T.

    Args:
        q: already scaled queries.
        spans: the keys that each query attends to.
        softcap: scores become softcap · tanh(scores / softcap).
    """
    time = q.shape[1]
    padding = -time % (2 * BLOCK_SIZE if time > MAX_RUNS * 2 * BLOCK_SIZE else 1)

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, 0), (0, padding), (0, 0), (0, 0)])

    out = _attention(softcap, pad(q), pad(k), pad(v), spans.pad(time + padding))
    return out[:, :time]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(softcap: float | None, q: Array, k: Array, v: Array, spans: Spans) -> Array:
    return _forward(softcap, q, k, v, spans)[0]


def _forward(softcap: float | None, q: Array, k: Array, v: Array, spans: Spans) -> tuple[Array, Any]:
    (queries, keys, values), mask = _by_head(q, k, v), partial(span_mask, spans)

    def block(carry: None, at: Array, size: int, end: int) -> tuple[None, Any]:
        scores = _scores(queries, keys, at, size, end, softcap)[0]
        scores = jnp.where(mask(at, size, end)[:, None, None], scores, MASKED_SCORE)
        max_score = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - max_score)
        sum_exp = weights.sum(axis=-1, keepdims=True)
        mixed = _einsum("bkgnu,bkuw->bkgnw", weights.astype(v.dtype), values[:, :, :end])
        return None, (mixed / sum_exp, max_score + jnp.log(sum_exp))

    parts = [_map_blocks(block, None, run)[1] for run in _query_runs(q.shape[1])]
    mixed, logsumexp = (jnp.concatenate(x, axis=3) for x in zip(*parts, strict=True))
    # Saved like the projections' results, so that rematerialising a layer does not run attention again.
    out = save_product(_heads_last(mixed).astype(q.dtype))
    return out, (q, k, v, spans, out, save_product(logsumexp))


def _backward(softcap: float | None, saved: Any, grad: Array) -> tuple[Any, ...]:
    q, k, v, spans, out, logsumexp = saved
    (queries, keys, values), mask = _by_head(q, k, v), partial(span_mask, spans)
    grad_out = _heads_first(grad, k.shape[2])
    delta = _heads_first((grad.astype(jnp.float32) * out).sum(-1, keepdims=True), k.shape[2])

    def block(carry: tuple[Array, Array], at: Array, size: int, end: int) -> tuple[tuple[Array, Array], Array]:
        slice_queries = partial(jax.lax.dynamic_slice_in_dim, start_index=at, slice_size=size, axis=3)
        scores, softcap_grad = _scores(queries, keys, at, size, end, softcap)
        weights = jnp.where(mask(at, size, end)[:, None, None], jnp.exp(scores - slice_queries(logsumexp)), 0.0)
        grad_scores = _einsum("bkgnw,bkuw->bkgnu", slice_queries(grad_out), values[:, :, :end]) - slice_queries(delta)
        grad_scores = (weights * grad_scores * softcap_grad).astype(q.dtype)
        grad_q = _einsum("bkgnu,bkuw->bkgnw", grad_scores, keys[:, :, :end])
        new_k = _einsum("bkgnu,bkgnw->bkuw", grad_scores, slice_queries(queries))
        new_v = _einsum("bkgnu,bkgnw->bkuw", weights.astype(v.dtype), slice_queries(grad_out))
        return tuple(x.at[:, :, :end].add(new) for x, new in zip(carry, (new_k, new_v), strict=True)), grad_q  # type: ignore[return-value]

    carry, parts = (jnp.zeros(keys.shape, jnp.float32),) * 2, []
    for run in _query_runs(q.shape[1]):
        carry, grad_q = _map_blocks(block, carry, run)
        parts.append(grad_q)
    grad_q = _heads_last(jnp.concatenate(parts, axis=3)).astype(q.dtype)
    grad_k, grad_v = (x.transpose(0, 2, 1, 3).astype(k.dtype) for x in carry)
    return grad_q, grad_k, grad_v, None


_attention.defvjp(_forward, _backward)


def _by_head(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Return queries [B K G T W], keys and values [B K T W], with the heads of a group adjacent."""
    return _heads_first(q, k.shape[2]), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def _heads_first(x: Float[Array, "B T H W"], kv_heads: int) -> Float[Array, "B K G T W"]:
    return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1]).transpose(0, 2, 3, 1, 4)


def _heads_last(x: Float[Array, "B K G T W"]) -> Float[Array, "B T H W"]:
    return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], -1, x.shape[-1])


def _einsum(equation: str, a: Array, b: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b.astype(a.dtype), precision=precision, preferred_element_type=jnp.float32)


def _scores(
    queries: Array, keys: Array, start: Array, size: int, end: int, softcap: float | None
) -> tuple[Array, Array | float]:
    """Return the scores of `size` queries from index `start` with the first `end` keys, and their derivatives."""
    q = jax.lax.dynamic_slice_in_dim(queries, start, size, axis=3)
    scores = _einsum("bkgnw,bkuw->bkgnu", q, keys[:, :, :end])
    if softcap is None:
        return scores, 1.0
    tanh = jnp.tanh(scores / softcap)
    return softcap * tanh, 1.0 - jnp.square(tanh)


def _query_runs(time: int) -> list[tuple[int, int]]:
    """Return start and end of each run of queries: few runs, all of one size but the last."""
    size = BLOCK_SIZE * max(1, -(-time // (MAX_RUNS * BLOCK_SIZE)))
    size = size if size <= 2 * BLOCK_SIZE else 2 * BLOCK_SIZE * -(-size // (2 * BLOCK_SIZE))
    return [(start, min(start + size, time)) for start in range(0, time, size)]


def _map_blocks(block: Any, carry: Any, run: tuple[int, int]) -> tuple[Any, Any]:
    """Call `block(carry, at, size, end)` for each block of the run; return the carry and the results joined along T."""
    start, end = run
    size = min(end - start, 2 * BLOCK_SIZE)
    if size == end - start:
        carry, part = block(carry, start, size, end)
        return carry, part
    carry, parts = jax.lax.scan(lambda carry, at: block(carry, at, size, end), carry, jnp.arange(start, end, size))
    join = lambda x: jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, x.shape[-1])  # noqa: E731
    return carry, jax.tree.map(join, parts)
