"""Append tokens that the model did not draw to the KV cache of a slot: a prefill behind what the slot holds.

A call appends to several slots one after the other, in pieces of a few sizes that depend on the number of tokens alone.
So the bits of a slot's keys and values depend on nothing that other slots do.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from covey.models.attention import Attend
from covey.models.layers import apply_softcap
from covey.sampling.cache import Block, LayerCache, keep_sharding

SIZES = (16, 64, 256)
"""Numbers of tokens of a piece, its padding included."""


def append_size(count: int) -> int:
    """Return the size of the next piece of `count` tokens: the smallest that holds all, or the largest.

    >>> append_size(10), append_size(64), append_size(300)
    (16, 64, 256)
    """
    return next((size for size in SIZES if size >= count), SIZES[-1])


def append(
    graph: Any,
    params: Any,
    cache: list[LayerCache],
    slots: Int[Array, "S"],
    tokens: Int[Array, "S n"],
    start: Int[Array, "S"],
    count: Int[Array, "S"],
    rows: Int[Array, ""],
) -> list[LayerCache]:
    """Write the keys and values of the first `count` of the `tokens` of a row to the positions of its slot from `start`
    on, for each of the first `rows`.
    """
    model = nnx.merge(graph, params)

    def append_row(row: Int[Array, ""], cache: list[LayerCache]) -> list[LayerCache]:
        positions = start[row] + jnp.arange(tokens.shape[1])
        attend = append_attention(slots[row], positions, count[row])
        _, cache = model(tokens[row][None], positions[None], attend, cache)
        return keep_sharding(cache, model.embed.embedding[...])

    appended: list[LayerCache] = jax.lax.fori_loop(0, rows, append_row, cache)
    return appended


def append_attention(slot: Int[Array, ""], positions: Int[Array, "n"], count: Int[Array, ""]) -> Attend:
    """Return attention of new tokens of one slot: the first `count` write their keys and values at `positions`, and all
    attend to the positions up to their own.
    """
    written = jnp.where(jnp.arange(len(positions)) < count, positions, jnp.iinfo(jnp.int32).max)

    def attend(q: Array, k: Array, v: Array, cache: Any, *, window: Any, softcap: float | None) -> tuple[Array, Any]:
        starts = np.cumsum([0, *(block.length for block in cache)])[:-1]
        blocks = [_write(block, slot, k[0], v[0], written - start) for block, start in zip(cache, starts, strict=True)]
        keys = jnp.concatenate([_time_at(-1, block.keys[slot], block.layout.keys) for block in blocks], axis=-1)
        values = jnp.concatenate([_time_at(-2, block.values[slot], block.layout.values) for block in blocks], axis=-2)
        distance = positions[:, None] - jnp.arange(keys.shape[-1])
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return _attend(q[0], keys, values, visible, softcap).reshape(q.shape).astype(q.dtype), blocks

    return attend


def _write(
    block: Block, slot: Int[Array, ""], k: Float[Array, "n K W"], v: Float[Array, "n K W"], at: Int[Array, "n"]
) -> Block:
    """Write keys and values at positions `at` of the slot's block, except those that lie in another block."""
    at = jnp.where(at < 0, block.length, at)

    def write(x: Array, axis: int, new: Array) -> Array:
        place: Any = (slot, slice(None), slice(None), at) if axis == 3 else (slot, slice(None), at)
        return x.at[place].set(new.astype(x.dtype), mode="drop")

    return block.map(write, Block(k, v, block.layout))


def _time_at(axis: int, x: Array, time: int) -> Array:
    """Return keys or values of one slot with time, axis `time` of a block, as the last axis (-1) or the one before."""
    return x if time - 4 == axis else x.swapaxes(-1, -2)


def _attend(
    q: Float[Array, "n H W"],
    keys: Float[Array, "K W T"],
    values: Float[Array, "K T W"],
    visible: Array,
    softcap: float | None,
) -> Float[Array, "n H W"]:
    """Compute attention with scores and sums in float32, as a decode step does."""
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    (count, _, width), kv_heads = q.shape, keys.shape[0]
    grouped = q.reshape(count, kv_heads, -1, width).astype(keys.dtype)
    scores = jnp.einsum("nkgw,kwt->nkgt", grouped, keys, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], apply_softcap(scores, softcap), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True)).astype(values.dtype)
    out = jnp.einsum("nkgt,ktw->nkgw", weights, values, precision=precision, preferred_element_type=jnp.float32)
    return out.reshape(q.shape)
