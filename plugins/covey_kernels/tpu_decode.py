"""Attention of one new token per slot over its live cache on TPUs, by Pallas and Mosaic.

The grid walks the blocks of keys that hold a visible token: what lies behind the end of a slot, or before its sliding
window, is neither read nor stepped over. Arrays are read as they are stored: heads as wide as a row of lanes [S, K, T,
W], others [S, K, W, T], which is how XLA lays them out in either case, so that nothing is copied or padded.

The paged kernels of JAX were not taken: `paged_attention` knows no sliding window and no head of 64 or 80 numbers, and
`ragged_paged_attention` wants keys and values in turn in one array.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from covey.models.spans import MASKED_SCORE
from covey_kernels.tpu import dot
from covey_kernels.worklist import FIRST, LAST


class Tables(NamedTuple):
    """Pairs (slot, block of keys) with a visible token, slot after slot; lists have room for all.

    Attributes:
        block: number of the block among those of the slot.
        start, end: indices of the keys that each slot sees, `end` exclusive.
        num_pairs: as in `worklist.Worklist`.
    """

    slot: Int[Array, "N"]
    block: Int[Array, "N"]
    flags: Int[Array, "N"]
    num_pairs: Int[Array, "1"]
    start: Int[Array, "S"]
    end: Int[Array, "S"]


def block_size(time: int) -> int:
    """Return the number of keys in a block: a divisor of `time`, itself a multiple of 128."""
    return 256 if time % 256 == 0 else 128


def block_heads(kv_heads: int) -> int:
    """Return the number of key heads in a step of the grid: half of them, where that divides them."""
    half = max(1, kv_heads // 2)
    return 1 if kv_heads % half else half


def decode_tables(start: Int[Array, "S"], end: Int[Array, "S"], time: int) -> Tables:
    """Return the tables of slots of `time` positions, in which keys `start` to `end` (exclusive) are visible, at least
    one in each.
    """
    size, slots = block_size(time), len(start)
    first, in_slot = start // size, time // size
    until = jnp.cumsum(-(-end // size) - first)
    pair = jnp.arange(slots * in_slot)
    slot = jnp.minimum((pair[:, None] >= until).sum(1), slots - 1)
    number = pair - jnp.where(slot == 0, 0, until[slot - 1])
    flags = FIRST * (number == 0) + LAST * (pair == until[slot] - 1)
    block = jnp.minimum(first[slot] + number, in_slot - 1)
    return Tables(*(x.astype(jnp.int32) for x in (slot, block, flags, until[-1:], start, end)))


def write(
    keys: Array, values: Array, new_keys: Float[Array, "S K W"], new_values: Float[Array, "S K W"],
    at: Int[Array, "S"], interpret: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Return keys and values with each slot's new ones at index `at`, unless that is behind its end; in place, since a
    scatter would copy the whole cache into another order.
    """
    time_last, heads = _time_last(keys, new_keys.shape[-1]), new_keys.shape[1]
    size, axis = (128, 3) if time_last else (16, 2)
    shape = [None, *keys.shape[1:]]
    shape[axis], last = size, keys.shape[axis] // size - 1

    def index(slot: Any, at: Any) -> tuple[Any, ...]:
        block = jnp.minimum(jax.lax.div(at[slot], size), last)
        return (slot, 0, 0, block) if time_last else (slot, 0, block, 0)

    cache, new = pl.BlockSpec(shape, index), jnp.expand_dims(jnp.stack([new_keys, new_values], 1), axis + 1)
    out: list[Array] = pl.pallas_call(
        partial(_write_kernel, size, axis, last),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(at),),
            in_specs=[
                pl.BlockSpec((None, 2, heads, *new.shape[3:]), lambda slot, *_: (slot, 0, 0, 0, 0)),
                cache,
                cache,
            ],
            out_specs=[cache, cache],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values)],
        input_output_aliases={2: 0, 3: 1},
        name="write_cache",
        interpret=interpret,
    )(at.astype(jnp.int32), new.astype(keys.dtype), keys, values)
    return out[0], out[1]


def _write_kernel(size: int, axis: int, last: int, at: Any, new: Any, keys: Any, values: Any, *outs: Any) -> None:
    index = at[pl.program_id(0)]
    place = index - size * jnp.minimum(jax.lax.div(index, size), last)  # behind the end: at no position of the block
    shape = (1, 1, size) if axis == 3 else (1, size, 1)
    here = jax.lax.broadcasted_iota(jnp.int32, shape, axis - 1) == place
    for number, (old, out) in enumerate(zip((keys, values), outs, strict=True)):
        chosen = jnp.where(here, new[number].astype(jnp.float32), old[...].astype(jnp.float32))
        out[...] = chosen.astype(out.dtype)


def _time_last(keys: Array, width: int) -> bool:
    return keys.shape[2] == width and width % 128 != 0


def decode(
    q: Float[Array, "S K G W"], keys: Array, values: Array, tables: Tables, softcap: float | None, interpret: bool
) -> Float[Array, "S K G W"]:
    """Compute attention of scaled queries; keys and values are [S, K, T, W], or [S, K, W, T]."""
    _, kv_heads, group, width = q.shape
    time_last = _time_last(keys, width)
    time = keys.shape[3 if time_last else 2]
    size, heads = block_size(time), block_heads(kv_heads)
    query = pl.BlockSpec((None, heads, group, width), lambda head, pair, slot, *_: (slot[pair], head, 0, 0))
    shape, place = (
        ((size, width), lambda block: (block, 0)) if not time_last else ((width, size), lambda block: (0, block))
    )
    cache = pl.BlockSpec(
        (None, heads, *shape),
        lambda head, pair, slot, block, *_: (slot[pair], head, *place(block[pair])),
    )
    column = pltpu.VMEM((heads, group, 1), jnp.float32)
    out: Array = pl.pallas_call(
        partial(_kernel, heads, time_last, softcap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(kv_heads // heads, tables.num_pairs[0]),
            in_specs=[query, cache, cache],
            out_specs=query,
            scratch_shapes=[column, column, pltpu.VMEM((heads, group, width), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="decode_attention",
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )(tables.slot, tables.block, tables.flags, tables.start, tables.end, q, keys, values)
    return out


def _kernel(
    heads: int, time_last: bool, softcap: float | None, slots: Any, blocks: Any, flags: Any, starts: Any,
    ends: Any, q: Any, keys: Any, values: Any, out: Any, max_score: Any, sum_exp: Any, mixed: Any,
) -> None:  # fmt: skip
    pair = pl.program_id(1)
    slot, size = slots[pair], keys.shape[2 if time_last else 1]
    time_axis, width_axis = (1, 0) if time_last else (0, 1)

    @pl.when(flags[pair] & FIRST != 0)
    def _() -> None:
        max_score[...] = jnp.full_like(max_score, MASKED_SCORE)
        sum_exp[...], mixed[...] = jnp.zeros_like(sum_exp), jnp.zeros_like(mixed)

    key = blocks[pair] * size + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
    visible = (starts[slot] <= key) & (key < ends[slot])
    for head in range(heads):
        scores = dot(q[head], keys[head], 1, width_axis)
        scores = scores if softcap is None else softcap * jnp.tanh(scores * (1 / softcap))
        scores = jnp.where(visible, scores, MASKED_SCORE)
        new_max = jnp.maximum(max_score[head], scores.max(axis=1, keepdims=True))
        weights, decay = jnp.exp(scores - new_max), jnp.exp(max_score[head] - new_max)
        max_score[head] = new_max
        sum_exp[head] = sum_exp[head] * decay + weights.sum(axis=1, keepdims=True)
        mixed[head] = mixed[head] * decay + dot(weights.astype(values.dtype), values[head], 1, time_axis)

    @pl.when(flags[pair] & LAST != 0)
    def _() -> None:
        out[...] = (mixed[...] / sum_exp[...]).astype(out.dtype)
