"""Attention over packed trees on NVIDIA GPUs, by Pallas and Triton: forward, gradient of queries, of keys and values.

A program takes one block of queries of one head and walks the list of the blocks of keys that it sees; in the gradient
of keys and values it takes one block of keys of one key head, and walks the blocks of queries that see it, for each
head of the group. Arrays are read as the projections write them, [R, T, H, W]. Triton's blocks are powers of two, so
that heads of 80 and 96 lie in tiles of 128, whose rest is neither read nor written.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from covey.models.spans import MASKED_SCORE, Spans
from covey_kernels.rows import RowKernel, kernel_attention
from covey_kernels.worklist import BlockSizes, block_lists, visible_blocks

NUM_WARPS, NUM_STAGES = 8, 2
"""Warps of a program (with 4, registers of a H100 spill) and stages of its loads."""


class KernelSizes(NamedTuple):
    """Sizes of the blocks of each kernel."""

    forward: BlockSizes
    dq: BlockSizes
    dkv: BlockSizes


class Lists(NamedTuple):
    """Blocks that each block visits, and their number."""

    order: Int[Array, "R Q U"]
    length: Int[Array, "R Q"]


class Tables(NamedTuple):
    """Visibility as the kernels read it, for all layers with one sliding window."""

    spans: Spans
    forward: Lists
    dq: Lists
    dkv: Lists


MAX_WIDTH = 256
"""Widest heads. The sums of 128 queries with heads of 512 would take all registers of a multiprocessor."""


def block_sizes(width: int) -> KernelSizes:
    """Return the sizes of blocks for heads of `width`: the largest whose registers do not spill on a H100."""
    keys = 64 if width <= 128 else 32
    return KernelSizes(BlockSizes(128, keys), BlockSizes(64, keys), BlockSizes(64, keys))


def tables(spans: Spans, group: int, width: int, sizes: KernelSizes | None = None) -> Tables:
    """Return the tables of rows whose length the sizes of blocks divide."""
    spans = Spans(*(x.astype(jnp.int32) for x in spans))
    forward, dq, dkv = (visible_blocks(spans, one) for one in sizes or block_sizes(width))
    return Tables(spans, *(Lists(*block_lists(blocks)) for blocks in (forward, dq, dkv.by_key())))


def forward(
    q: Float[Array, "R T H W"],
    k: Float[Array, "R T K W"],
    v: Float[Array, "R T K W"],
    tables: Tables,
    softcap: float | None,
    interpret: bool,
) -> tuple[Float[Array, "R T H W"], Float[Array, "R H T"]]:
    """Compute attention of scaled queries, and the logsumexp of their scores."""
    rows, time, heads, _ = q.shape
    call = _Call(q, k, _sizes(tables.forward, time), softcap, interpret)
    out, logsumexp = call.run(
        "tree_attention_forward",
        _forward_kernel,
        [*tables.forward, *tables.spans, q, k, v],
        [*call.query_lists, call.query_vector, call.row_vector, call.query_block, call.head, call.head],
        [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((rows, heads, time), jnp.float32)],
        [call.query_block, call.query_statistic],
    )
    return out, logsumexp


def backward(
    saved: tuple[Array, Array, Array, Array, Array], grad: Array, tables: Tables, softcap: float | None, interpret: bool
) -> tuple[Float[Array, "R T H W"], Float[Array, "R T K W"], Float[Array, "R T K W"]]:
    """Compute the gradients of q, k and v; `saved` holds them, then the results of `forward`."""
    q, k, v, out, logsumexp = saved
    delta = (grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    arrays = [q, k, v, grad, logsumexp, delta]
    call = _Call(q, k, _sizes(tables.dq, q.shape[1]), softcap, interpret)
    queries = [*call.query_lists, call.query_vector, call.row_vector, call.query_block, call.head, call.head]
    (dq,) = call.run(
        "tree_attention_dq",
        _dq_kernel,
        [*tables.dq, *tables.spans, *arrays],
        [*queries, call.query_block, call.query_statistic, call.query_statistic],
        [_like(q)],
        [call.query_block],
    )
    call = _Call(q, k, _sizes(tables.dkv, q.shape[1], by_key=True), softcap, interpret)
    keys = [*call.key_lists, call.row_vector, call.key_vector, call.group, call.key_block, call.key_block]
    dk, dv = call.run(
        "tree_attention_dkv",
        _dkv_kernel,
        [*tables.dkv, *tables.spans, *arrays],
        [*keys, call.group, call.group_statistic, call.group_statistic],
        [_like(k), _like(v)],
        [call.key_block, call.key_block],
        by_key=True,
    )
    return dq, dk, dv


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _sizes(lists: Lists, time: int, by_key: bool = False) -> BlockSizes:
    outer, inner = (time // blocks for blocks in lists.order.shape[1:])
    return BlockSizes(inner, outer) if by_key else BlockSizes(outer, inner)


class _Call:
    """A call of a kernel: the grid is (blocks, heads, rows), and the attributes say which part of an array a program
    has.
    """

    def __init__(self, q: Array, k: Array, sizes: BlockSizes, softcap: float | None, interpret: bool):
        self.shape, self.kv_heads, self.sizes = q.shape, k.shape[2], sizes
        self.softcap, self.interpret = softcap, interpret
        _, time, heads, width = q.shape
        group, tile = heads // self.kv_heads, pl.next_power_of_2(width)
        spec = pl.BlockSpec
        self.query_block = spec((None, sizes.queries, None, tile), lambda i, h, r: (r, i, h, 0))
        self.key_block = spec((None, sizes.keys, None, tile), lambda i, h, r: (r, i, h, 0))
        self.head = spec((None, time, None, tile), lambda i, h, r: (r, 0, h // group, 0))
        self.group = spec((None, time, group, tile), lambda i, h, r: (r, 0, h, 0))
        self.query_vector = spec((None, sizes.queries), lambda i, h, r: (r, i))
        self.key_vector = spec((None, sizes.keys), lambda i, h, r: (r, i))
        self.row_vector = spec((None, time), lambda i, h, r: (r, 0))
        self.query_statistic = spec((None, None, sizes.queries), lambda i, h, r: (r, h, i))
        self.group_statistic = spec((None, group, time), lambda i, h, r: (r, h, 0))
        length = spec((None, None), lambda i, h, r: (r, i))
        self.query_lists = spec((None, None, time // sizes.keys), lambda i, h, r: (r, i, 0)), length
        self.key_lists = spec((None, None, time // sizes.queries), lambda i, h, r: (r, i, 0)), length

    def run(
        self,
        name: str,
        kernel: Callable[..., None],
        inputs: list[Array],
        in_specs: list[Any],
        out_shape: list[jax.ShapeDtypeStruct],
        out_specs: list[Any],
        by_key: bool = False,
    ) -> list[Array]:
        """Run `kernel` over all blocks of queries of all heads; or over those of keys of all key heads."""
        rows, time, heads, width = self.shape
        grid = (time // self.sizes.keys, self.kv_heads) if by_key else (time // self.sizes.queries, heads)
        other = self.sizes.queries if by_key else self.sizes.keys
        result: list[Array] = pl.pallas_call(
            partial(kernel, _Settings(other, width, self.softcap)),
            grid=(*grid, rows),
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=out_shape,
            name=name,
            interpret=self.interpret,
            compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=NUM_STAGES),
        )(*inputs)
        return result


class _Settings(NamedTuple):
    """Constants of a kernel: size of the blocks it walks, width of a head, soft-cap."""

    size: int
    width: int
    softcap: float | None

    def load(self, ref: Any) -> Array:
        """Load a block whose last axis is a head's, with zeros behind it."""
        mask = (jnp.arange(ref.shape[-1]) < self.width)[None]
        return plt.load(ref, mask=mask, other=0.0)

    def store(self, ref: Any, value: Array) -> None:
        """Store a block whose last axis is a head's."""
        plt.store(ref, value.astype(ref.dtype), mask=(jnp.arange(ref.shape[-1]) < self.width)[None])

    def scores(self, q: Array, k: Array) -> tuple[Array, Array | None]:
        """Return the scores [queries, keys] after the soft-cap, and the soft-cap's derivative."""
        scores = dot(q, k.T)
        if self.softcap is None:
            return scores, None
        tanh = jnp.tanh(scores * (1 / self.softcap))
        return self.softcap * tanh, 1 - tanh * tanh


def _forward_kernel(
    c: _Settings, order: Any, length: Any, starts: Any, ends: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any
) -> None:
    first_query, queries, start = pl.program_id(0) * q.shape[0], c.load(q), starts[...]

    def body(i: Array, carry: Any) -> Any:
        max_score, sum_exp, mixed = carry
        at = pl.ds(order[i] * c.size, c.size)
        scores, _ = c.scores(queries, c.load(k.at[at, :]))
        scores = jnp.where(_mask(first_query, order[i] * c.size, start, ends[at]), scores, MASKED_SCORE)
        new_max = jnp.maximum(max_score, scores.max(-1))
        weights, decay = jnp.exp(scores - new_max[:, None]), jnp.exp(max_score - new_max)
        mixed = mixed * decay[:, None] + dot(weights.astype(v.dtype), c.load(v.at[at, :]))
        return new_max, sum_exp * decay + weights.sum(-1), mixed

    zeros = jnp.zeros(q.shape[0], jnp.float32)
    init = (zeros + MASKED_SCORE, zeros, jnp.zeros(q.shape, jnp.float32))
    max_score, sum_exp, mixed = jax.lax.fori_loop(0, length[...], body, init)
    c.store(out, mixed / sum_exp[:, None])
    logsumexp[...] = max_score + jnp.log(sum_exp)


def _dq_kernel(
    c: _Settings, order: Any, length: Any, starts: Any, ends: Any, q: Any, k: Any, v: Any, grad_out: Any,
    logsumexp: Any, delta: Any, dq: Any,
) -> None:  # fmt: skip
    first_query, queries, grads, start = pl.program_id(0) * q.shape[0], c.load(q), c.load(grad_out), starts[...]
    statistics = logsumexp[...], delta[...]

    def body(i: Array, total: Array) -> Array:
        at = pl.ds(order[i] * c.size, c.size)
        keys = c.load(k.at[at, :])
        mask = _mask(first_query, order[i] * c.size, start, ends[at])
        _, grad_scores = _weights(c, queries, keys, c.load(v.at[at, :]), grads, statistics, mask)
        return total + dot(grad_scores.astype(keys.dtype), keys)

    c.store(dq, jax.lax.fori_loop(0, length[...], body, jnp.zeros(q.shape, jnp.float32)))


def _dkv_kernel(
    c: _Settings, order: Any, length: Any, starts: Any, ends: Any, q: Any, k: Any, v: Any, grad_out: Any,
    logsumexp: Any, delta: Any, dk: Any, dv: Any,
) -> None:  # fmt: skip
    first_key, keys, values, end = pl.program_id(0) * k.shape[0], c.load(k), c.load(v), ends[...]

    def head(g: Array, carry: Any) -> Any:
        def body(i: Array, carry: Any) -> Any:
            at = pl.ds(order[i] * c.size, c.size)
            queries, grads = c.load(q.at[at, g, :]), c.load(grad_out.at[at, g, :])
            mask = _mask(order[i] * c.size, first_key, starts[at], end)
            weights, grad_scores = _weights(c, queries, keys, values, grads, (logsumexp[g, at], delta[g, at]), mask)
            sum_k = carry[0] + dot(grad_scores.astype(queries.dtype).T, queries)
            return sum_k, carry[1] + dot(weights.astype(grads.dtype).T, grads)

        return jax.lax.fori_loop(0, length[...], body, carry)

    zeros = jnp.zeros(k.shape, jnp.float32)
    sum_k, sum_v = jax.lax.fori_loop(0, q.shape[1], head, (zeros, zeros))
    c.store(dk, sum_k)
    c.store(dv, sum_v)


def _weights(
    c: _Settings, q: Array, k: Array, v: Array, grad_out: Array, statistics: tuple[Array, Array], mask: Array
) -> tuple[Array, Array]:
    """Return the softmax's weights [queries, keys], recomputed from the logsumexp, and the gradient of the scores."""
    logsumexp, delta = statistics
    scores, slope = c.scores(q, k)
    weights = jnp.where(mask, jnp.exp(scores - logsumexp[:, None]), 0.0)
    grad_scores = weights * (dot(grad_out, v.T) - delta[:, None])
    return weights, grad_scores if slope is None else grad_scores * slope


def _mask(first_query: Any, first_key: Any, start: Array, end: Array) -> Array:
    query = (first_query + jnp.arange(start.shape[0]))[:, None]
    key = (first_key + jnp.arange(end.shape[0]))[None]
    visible: Array = (start[:, None] <= key) & (key <= query) & (query < end[None])
    return visible


def dot(a: Array, b: Array) -> Array:
    """Return the product of two blocks, summed in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    result: Array = plt.dot(a, b, precision=precision)
    return result


attention = partial(kernel_attention, RowKernel(tables, forward, backward, MAX_WIDTH))
"""Function that `covey.attention` offers."""
