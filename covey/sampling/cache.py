"""KV cache of the decode batch in blocks of time: insert prefilled prompts, attend while decoding, keep some slots.

A layer's cache is a list of blocks, each an array of its own: block b holds the keys and values of all slots for the
positions from the end of block b - 1 on. The cache grows by further blocks, without a copy. A decode step reads whole
blocks, as many as its longest active slot needs, so that one program serves all lengths at nearly the cost of the
tokens present. The slot axis shrinks between chunks of steps when few completions remain.

Keys are stored [S, K, W, B] and values [S, K, B, W]: a decode step then reads them in order (measured against
[S, B, K, W] on CPU: 5 times the bandwidth).

Tokens that the model did not draw are appended to a slot by a prefill: slot after slot, in pieces of a few sizes that
depend on the number of tokens alone. So the bits of a slot do not depend on other slots.

On accelerators a layer has one block of the cache's final length, in the order in which the kernel reads it
(`CacheLayout`); the kernel reads each slot's own tokens only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from covey.models.attention import Attend
from covey.models.decoder import Decoder
from covey.models.layers import apply_softcap
from covey.models.recurrence import Context, Order, Recur
from covey.models.span_attention import KERNELS, span_attention
from covey.models.spans import causal_spans
from covey.parallel.arrays import sharding_of
from covey.registry import offered
from covey.sampling.scheduler import block_lengths

APPEND_SIZES = (16, 64, 256)
"""Numbers of tokens that are appended together, padding included."""
LANES = 128
"""Numbers in a row of a TPU's tiles; a multiple of a GPU kernel's block of keys."""


class CacheLayout(NamedTuple):
    """Axis of time in keys and in values, 2 for [S, K, B, W] and 3 for [S, K, W, B], and whether the positions of a
    layer are divided into several blocks.
    """

    keys: int
    values: int
    divided: bool

    @classmethod
    def of(cls, model: Decoder) -> "CacheLayout":
        """Return the layout on the platform of `model`. TPUs store heads narrower than a row of lanes time last: XLA
        does so anyway, and would copy any other order.
        """
        if model.platform not in KERNELS:
            return cls(3, 2, divided=True)
        widths = {model.config.heads(layer)[1] % LANES for layer in range(model.config.num_layers)}
        return cls(3, 3, divided=False) if model.platform == "tpu" and any(widths) else cls(2, 2, divided=False)

    def block_lengths(self, length: int) -> list[int]:
        """Return the lengths of the blocks for `length` positions; a single one is a multiple of 128."""
        return block_lengths(length) if self.divided else [-(-length // LANES) * LANES] if length else []


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "values"], meta_fields=["layout"])
@dataclass(frozen=True)
class Block:
    """Keys and values of one layer for all slots and some positions, in the order of `layout`."""

    keys: Float[Array, "S K W B"] | Float[Array, "S K B W"]
    values: Float[Array, "S K W B"] | Float[Array, "S K B W"]
    layout: CacheLayout

    @property
    def length(self) -> int:
        """Number of positions."""
        return self.keys.shape[self.layout.keys]

    def map(self, function: Any, *others: "Block") -> "Block":
        """Return `function(array, axis of time, arrays of the others)` of keys and of values."""
        keys = function(self.keys, self.layout.keys, *(other.keys for other in others))
        return Block(keys, function(self.values, self.layout.values, *(x.values for x in others)), self.layout)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """State of one layer for all slots, in place of keys and values: arrays [S, ...] of four axes."""

    arrays: Any


LayerCache = list[Any]
"""Blocks of keys and values; of a layer with a state, one `SlotState`."""

CACHE_AXES = ("rows", "kv_heads", None, None)
"""Logical axes of keys and values, see `parallel.arrays`: on a mesh a device holds some heads of some slots."""


class Prefix(NamedTuple):
    """Prefilled prompts: each layer's cache, and the logits after their last tokens."""

    cache: list[LayerCache]
    logits: Float[Array, "P V"]


def empty_block(layout: CacheLayout, slots: int, time: int, heads: tuple[int, int], dtype: DTypeLike) -> Block:
    """Create a block of zeros for `time` positions of `slots` slots, with this number of key heads and their width."""
    shapes = {2: (slots, heads[0], time, heads[1]), 3: (slots, *heads, time)}
    return Block(jnp.zeros(shapes[layout.keys], dtype), jnp.zeros(shapes[layout.values], dtype), layout)


def prefill_attention(model: Decoder, length: Int[Array, "P"], time: int) -> Attend:
    """Return causal attention over prompts right-padded to `time`, which also outputs each layer's keys and values as
    cached.
    """
    positions = jnp.broadcast_to(jnp.arange(time), (length.shape[0], time))
    inner, layout = span_attention(model, causal_spans(length, time), positions), CacheLayout.of(model)
    orders = {2: (0, 2, 1, 3), 3: (0, 2, 3, 1)}

    def attend(
        q: Array, k: Array, v: Array, cache: Any, *, window: Any, softcap: float | None, write: bool = True
    ) -> tuple[Array, Any]:
        out, _ = inner(q, k, v, None, window=window, softcap=softcap)
        ends = np.cumsum(layout.block_lengths(time))[:-1]
        keys = jnp.split(k.transpose(orders[layout.keys]), ends, axis=layout.keys)
        values = jnp.split(v.transpose(orders[layout.values]), ends, axis=layout.values)
        return out, [Block(*pair, layout) for pair in zip(keys, values, strict=True)]

    def recur(mixer: Any, inputs: Any, cache: Any) -> tuple[Any, Any]:
        out, state = mixer.scan(inputs, None, Order(positions < length[:, None]))
        return out, [SlotState(state)]

    return Context(attend, recur)


def decode_attention(
    model: Decoder,
    length: Int[Array, "S"],
    active: Bool[Array, "S"],
    *,
    interpret: bool = False,
) -> Attend:
    """Return attention of one new token per slot: it writes its key and value at `length` and attends up to it.

    Blocks beyond the longest `active` slot are skipped. The output of a slot that is not active has no meaning.
    `interpret` as in `span_attention`.
    """
    if model.platform in KERNELS:
        return Context(_kernel_attention(model, length, active, interpret), _recur_of_active(active))
    longest = jnp.where(active, length, 0).max()

    def attend(
        q: Array, k: Array, v: Array, cache: Any, *, window: Any, softcap: float | None, write: bool = True
    ) -> tuple[Array, Any]:
        cache = _write_tokens(cache, k, v, length) if write else cache
        parts, start = [], 0
        for block in cache:
            positions = start + jnp.arange(block.length)[None, :]
            visible = positions <= length[:, None]
            if window is not None:
                visible = visible & (length[:, None] - positions < window)
            attend_block = partial(_attend_block, q[:, 0], block, visible, softcap)
            skip_block = partial(_skip_block, q[:, 0], cache[0].keys.shape[1])
            parts.append(jax.lax.cond(start <= longest, attend_block, skip_block) if start else attend_block())
            start += block.length
        return _combine(parts).reshape(q.shape).astype(q.dtype), cache

    return Context(attend, _recur_of_active(active))


def _recur_of_active(active: Bool[Array, "S"]) -> Recur:
    """Return the recurrence of one new token per slot; a slot that is not active keeps its state."""

    def recur(mixer: Any, inputs: Any, cache: Any) -> tuple[Any, Any]:
        out, state = mixer.scan(inputs, cache[0].arrays, Order(active[:, None]))
        return out, [SlotState(state)]

    return recur


def _write_tokens(
    cache: LayerCache, k: Float[Array, "S 1 K W"], v: Float[Array, "S 1 K W"], at: Int[Array, "S"]
) -> LayerCache:
    """Write a key and a value of each slot at position `at`."""
    starts = np.cumsum([0, *(block.length for block in cache)])
    return [
        _write(block, k[:, 0], v[:, 0], at - start, jnp.arange(len(at)))
        for block, start in zip(cache, starts, strict=False)
    ]


def _kernel_attention(
    model: Decoder,
    length: Int[Array, "S"],
    active: Bool[Array, "S"],
    interpret: bool,
) -> Attend:
    """Return `decode_attention` by a kernel that reads the tokens of each active slot; of another, one block."""
    kernel = offered("covey.decoding", model.platform)
    mesh, end = model.mesh, jnp.where(active, length + 1, 1)

    def attend(
        q: Array, k: Array, v: Array, cache: Any, *, window: Any, softcap: float | None, write: bool = True
    ) -> tuple[Array, Any]:
        (block,) = cache
        start = jnp.zeros_like(end) if window is None else jnp.maximum(end - window, 0)

        def run(q: Array, k: Array, v: Array, keys: Array, values: Array, indices: Any) -> tuple[Array, ...]:
            length, start, end = indices
            keys, values = kernel.write(keys, values, k, v, length, interpret) if write else (keys, values)
            tables = kernel.decode_tables(start, end, block.length)
            return kernel.decode(q, keys, values, tables, softcap, interpret), keys, values

        if not mesh.empty:
            heads = sharding_of(CACHE_AXES, block.keys.shape, mesh).spec
            new, rows = PartitionSpec(*heads[:2]), PartitionSpec(heads[0])
            specs = (heads, new, new, heads, heads, rows)
            run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(heads,) * 3, check_vma=False)
        grouped = q.reshape(len(q), block.keys.shape[1], -1, q.shape[-1]).astype(block.keys.dtype)
        out, keys, values = run(grouped, k[:, 0], v[:, 0], block.keys, block.values, (length, start, end))
        return out.reshape(q.shape).astype(q.dtype), [Block(keys, values, block.layout)]

    return attend


def _write(
    block: Block, k: Float[Array, "n K W"], v: Float[Array, "n K W"], at: Int[Array, "n"], slots: Int[Array, "*n"]
) -> Block:
    """Write keys and values at positions `at` of these slots, or all of one slot, except those in another block."""
    at = jnp.where(at < 0, block.length, at)

    def write(x: Array, axis: int, new: Array) -> Array:
        place: Any = (slots, slice(None), slice(None), at) if axis == 3 else (slots, slice(None), at)
        return x.at[place].set(new.astype(x.dtype), mode="drop")

    return block.map(write, Block(k, v, block.layout))


def _write_in_order(
    block: Block, k: Float[Array, "n K W"], v: Float[Array, "n K W"], at: Int[Array, "n"], slot: Int[Array, ""]
) -> Block:
    """Write keys and values at the adjacent positions `at` of a block's only slot. XLA for TPUs scatters, as `_write`
    does, into another order of an array, and would copy the whole cache into it and back.
    """
    time, end = jnp.arange(block.length), at[0] + (at < block.length).sum()

    def write(x: Array, axis: int, new: Array) -> Array:
        order = (1, 0, 2) if axis == 2 else (1, 2, 0)
        padding = [(block.length, block.length) if i == axis - 1 else (0, 0) for i in range(3)]
        padded = jnp.pad(new.transpose(order).astype(x.dtype), padding)
        moved = jax.lax.dynamic_slice_in_dim(padded, block.length - at[0], block.length, axis - 1)
        here = (time >= at[0]) & (time < end)
        return jnp.where(here[:, None] if axis == 2 else here, moved, x)

    return block.map(write, Block(k, v, block.layout))


class BlockAttention(NamedTuple):
    """Attention over the positions of one block: output, maximum of the scores, and sum of exp(score - maximum)."""

    output: Float[Array, "S K G W"]
    max_score: Float[Array, "S K G"]
    sum_exp: Float[Array, "S K G"]


def _attend_block(
    q: Float[Array, "S H W"], block: Block, visible: Bool[Array, "S B"], softcap: float | None
) -> BlockAttention:
    (slots, _, width), kv_heads = q.shape, block.keys.shape[1]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    grouped = q.reshape(slots, kv_heads, -1, width).astype(block.keys.dtype)
    scores = apply_softcap(product("skgw,skwt->skgt", grouped, block.keys), softcap)
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    max_score = scores.max(-1)
    weights = jnp.exp(scores - max_score[..., None])
    sum_exp = weights.sum(-1)
    weights = (weights / sum_exp[..., None]).astype(block.values.dtype)
    return BlockAttention(product("skgt,sktw->skgw", weights, block.values), max_score, sum_exp)


def _skip_block(q: Float[Array, "S H W"], kv_heads: int) -> BlockAttention:
    """Return the part of a block without a visible position."""
    slots, heads, width = q.shape
    shape = (slots, kv_heads, heads // kv_heads)
    return BlockAttention(jnp.zeros((*shape, width)), jnp.full(shape, jnp.finfo(jnp.float32).min), jnp.zeros(shape))


def _combine(parts: Sequence[BlockAttention]) -> Float[Array, "S K G W"]:
    """Return the attention over the positions of all blocks: the outputs weighted by their shares of sum_exp."""
    if len(parts) == 1:
        return parts[0].output
    outputs, max_scores, sums = map(jnp.stack, zip(*parts, strict=True))
    shares = sums * jnp.exp(max_scores - max_scores.max(0))
    return (outputs * shares[..., None]).sum(0) / shares.sum(0)[..., None]


def keep_sharding(cache: list[LayerCache], like: Array) -> list[LayerCache]:
    """Constrain a cache that a program returns to the sharding of a new one, on the mesh of `like`: otherwise the
    compiler chooses, and the next program is compiled once for each choice.
    """
    mesh = jax.typeof(like).sharding.mesh
    if mesh.empty:
        return cache
    shardings = jax.tree.map(lambda x: sharding_of(CACHE_AXES, x.shape, mesh), cache)
    constrained: list[LayerCache] = jax.lax.with_sharding_constraint(cache, shardings)
    return constrained


def insert_prompts(
    cache: list[LayerCache], prefix: list[LayerCache], prompt: Int[Array, "S"], inserted: Bool[Array, "S"]
) -> list[LayerCache]:
    """Copy row `prompt[s]` of `prefix` to every slot that is `inserted`, in all layers. `cache` has only the blocks
    that a prompt reaches.
    """
    if not is_divided(cache):
        return _insert_in_place(cache, prefix, prompt, inserted)
    return [
        [insert_block(*pair, prompt, inserted) for pair in zip(blocks, new, strict=False)]
        for blocks, new in zip(cache, prefix, strict=True)
    ]


def _insert_in_place(
    cache: list[LayerCache], prefix: list[LayerCache], prompt: Int[Array, "S"], inserted: Bool[Array, "S"]
) -> list[LayerCache]:
    """Return `insert_prompts` of layers with one block, where each device inserts into its own slots."""
    insert, (mesh, rows, slots) = _insert_slots, slot_axes(cache)
    if not mesh.empty:
        prompts = jax.tree.map(_without_rows, slots)
        specs = (slots, prompts, PartitionSpec(rows), PartitionSpec(rows))
        insert = jax.shard_map(insert, mesh=mesh, in_specs=specs, out_specs=slots, check_vma=False)
    return insert(cache, prefix, prompt, inserted)


def is_divided(cache: list[LayerCache]) -> bool:
    """Return whether the positions of a layer are divided into several blocks."""
    layouts = [block.layout for blocks in cache for block in blocks if isinstance(block, Block)]
    return not layouts or layouts[0].divided


def slot_axes(cache: list[LayerCache]) -> tuple[AbstractMesh, Any, list[Any]]:
    """Return the mesh of a cache, the mesh axes that divide its slots, and the axes of slots and heads of each array:
    layers may differ in their number of heads.
    """
    arrays = jax.tree.leaves(cache)
    mesh = jax.typeof(arrays[0]).sharding.mesh
    if mesh.empty:
        return mesh, None, []
    specs = jax.tree.map(lambda x: PartitionSpec(*sharding_of(CACHE_AXES, x.shape, mesh).spec[:2]), cache)
    return mesh, jax.tree.leaves(specs)[0][0], specs


def _without_rows(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(None, *spec[1:])


def _insert_slots(
    cache: list[LayerCache], prefix: list[LayerCache], prompt: Int[Array, "S"], inserted: Bool[Array, "S"]
) -> list[LayerCache]:
    """Insert slot after slot, which touches no other one. Selected for all slots at once, XLA for TPUs would copy the
    whole cache.
    """
    order = jnp.argsort(~inserted, stable=True)

    def insert(turn: Int[Array, ""], cache: list[LayerCache]) -> list[LayerCache]:
        slot = order[turn]
        inserted: list[LayerCache] = jax.tree.map(partial(_insert_row, slot, prompt[slot]), cache, prefix)
        return inserted

    filled: list[LayerCache] = jax.lax.fori_loop(0, inserted.sum(), insert, cache)
    return filled


def _insert_row(slot: Int[Array, ""], row: Int[Array, ""], x: Array, prefix: Array) -> Array:
    """Copy `prefix[row]` to the front of `x[slot]`."""
    front = jax.lax.dynamic_slice_in_dim(prefix, row, 1)[:, :, : x.shape[2], : x.shape[3]]
    return jax.lax.dynamic_update_slice_in_dim(x, front.astype(x.dtype), slot, 0)


def insert_block(block: Any, prefix: Any, prompt: Int[Array, "S"], inserted: Bool[Array, "S"]) -> Any:
    """Copy row `prompt[s]` of `prefix` to the front of every slot that is `inserted`, in one block; or the state."""
    if isinstance(block, SlotState):
        return jax.tree.map(
            lambda x, new: jnp.where(inserted[:, None, None, None], new[prompt].astype(x.dtype), x), block, prefix
        )
    rows, time = inserted[:, None, None, None], min(prefix.length, block.length)

    def insert(x: Array, axis: int, new: Array) -> Array:
        front = (slice(None),) * axis + (slice(time),)
        return x.at[front].set(jnp.where(rows, new[(prompt, *front[1:])].astype(x.dtype), x[front]))

    return block.map(insert, prefix)


def take_slot(cache: list[LayerCache], slot: Int[Array, ""]) -> list[LayerCache]:
    """Return a copy of the cache of one slot."""
    take, (mesh, rows, slots) = partial(_take_rows, None), slot_axes(cache)
    if rows is not None and not is_divided(cache):
        take = partial(_take_rows, rows)
        specs = (slots, PartitionSpec()), jax.tree.map(_without_rows, slots)
        take = jax.shard_map(take, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    return take(cache, slot)


def _take_rows(axes: Any, cache: list[LayerCache], slot: Int[Array, ""]) -> list[LayerCache]:
    """Return the row of a slot, which one of the devices along `axes` has: the compiler would gather all slots."""

    def take(x: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(x, slot % len(x) if axes else slot, 1)
        if not axes:
            return row
        each = jax.lax.all_gather(row, axes, tiled=True)
        return jax.lax.dynamic_slice_in_dim(each, slot // len(x), 1)

    rows: list[LayerCache] = jax.tree.map(take, cache)
    return rows


def put_slot(cache: list[LayerCache], rows: list[LayerCache], slot: Int[Array, ""]) -> list[LayerCache]:
    """Write the cache of one slot, as `take_slot` returned it."""
    put: list[LayerCache] = jax.tree.map(
        lambda x, row: jax.lax.dynamic_update_slice_in_dim(x, row, slot, 0), cache, rows
    )
    return put


def keep_rows(block: Any, rows: Int[Array, "n"]) -> Any:
    """Keep only the slots in `rows`, in that order."""
    return jax.tree.map(lambda x: x[rows], block)


def append_size(count: int) -> int:
    """Return the size of the next piece of `count` tokens: the smallest that holds all, or the largest.

    >>> append_size(10), append_size(64), append_size(300)
    (16, 64, 256)
    """
    return next((size for size in APPEND_SIZES if size >= count), APPEND_SIZES[-1])


def append_attention(slot: Int[Array, ""], positions: Int[Array, "n"], count: Int[Array, ""]) -> Attend:
    """Return attention of new tokens of one slot: the first `count` write their keys and values at `positions`, and all
    attend to the positions up to their own.
    """
    written = jnp.where(jnp.arange(len(positions)) < count, positions, jnp.iinfo(jnp.int32).max)

    def attend(
        q: Array, k: Array, v: Array, cache: Any, *, window: Any, softcap: float | None, write: bool = True
    ) -> tuple[Array, Any]:
        starts = np.cumsum([0, *(block.length for block in cache)])[:-1]
        put, pairs = _write if cache[0].layout.divided else _write_in_order, zip(cache, starts, strict=True)
        blocks = [put(block, k[0], v[0], written - start, slot) if write else block for block, start in pairs]
        keys = jnp.concatenate([_time_at(-1, block.keys[slot], block.layout.keys) for block in blocks], axis=-1)
        values = jnp.concatenate([_time_at(-2, block.values[slot], block.layout.values) for block in blocks], axis=-2)
        distance = positions[:, None] - jnp.arange(keys.shape[-1])
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return _attend_slot(q[0], keys, values, visible, softcap).reshape(q.shape).astype(q.dtype), blocks

    def recur(mixer: Any, inputs: Any, cache: Any) -> tuple[Any, Any]:
        # A sequence that is appended from its first token on has no state before it.
        before = jax.tree.map(lambda x: jnp.where(positions[0] == 0, 0.0, x[slot][None]), cache[0].arrays)
        out, state = mixer.scan(inputs, before, Order((jnp.arange(len(positions)) < count)[None]))
        return out, [SlotState(jax.tree.map(lambda x, new: x.at[slot].set(new[0]), cache[0].arrays, state))]

    return Context(attend, recur)


def _time_at(axis: int, x: Array, time: int) -> Array:
    """Return keys or values of one slot with time, axis `time` of a block, as the last axis (-1) or the one before."""
    return x if time - 4 == axis else x.swapaxes(-1, -2)


def _attend_slot(
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
