"""KV cache of the decode batch in blocks of time: insert prefilled prompts, attend while decoding, keep some slots.

A layer's cache is a list of blocks, each an array of its own: block b holds the keys and values of all slots for the
positions from the end of block b - 1 on. The cache grows by further blocks, without a copy. A decode step reads whole
blocks, as many as its longest active slot needs, so that one program serves all lengths at nearly the cost of the
tokens present. The slot axis shrinks between chunks of steps when few completions remain.

Keys are stored [S, K, W, B] and values [S, K, B, W]: a decode step then reads them in order (measured against
[S, B, K, W] on CPU: 5 times the bandwidth).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from covey.models.attention import Attend
from covey.models.decoder import Decoder
from covey.models.layers import apply_softcap
from covey.models.span_attention import span_attention
from covey.models.spans import causal_spans
from covey.sampling.lengths import block_lengths


class Block(NamedTuple):
    """Keys and values of one layer for all slots and some positions."""

    keys: Float[Array, "S K W B"]
    values: Float[Array, "S K B W"]

    @property
    def length(self) -> int:
        """Number of positions."""
        return self.keys.shape[-1]


LayerCache = list[Block]

CACHE_AXES = ("rows", "kv_heads", None, None)
"""Logical axes of keys and values, see `parallel.sharding`: on a mesh a device holds some heads of some slots."""


class Prefix(NamedTuple):
    """Prefilled prompts: each layer's cache, and the logits after their last tokens."""

    cache: list[LayerCache]
    logits: Float[Array, "P V"]


def empty_block(slots: int, time: int, kv_heads: int, head_dim: int, dtype: DTypeLike) -> Block:
    """Create a block of zeros for `time` positions of `slots` slots."""
    return Block(
        jnp.zeros((slots, kv_heads, head_dim, time), dtype), jnp.zeros((slots, kv_heads, time, head_dim), dtype)
    )


def prefill_attention(model: Decoder, length: Int[Array, "P"], time: int) -> Attend:
    """Return causal attention over prompts right-padded to `time`, which also outputs each layer's keys and values as
    cached.
    """
    positions = jnp.broadcast_to(jnp.arange(time), (length.shape[0], time))
    inner = span_attention(model, causal_spans(length, time), positions)

    def attend(q: Array, k: Array, v: Array, cache: Any, *, window: Any, softcap: float | None) -> tuple[Array, Any]:
        out, _ = inner(q, k, v, None, window=window, softcap=softcap)
        ends = np.cumsum(block_lengths(time))[:-1]
        parts = jnp.split(k.transpose(0, 2, 3, 1), ends, axis=3), jnp.split(v.transpose(0, 2, 1, 3), ends, axis=2)
        return out, list(map(Block, *parts))

    return attend


def decode_attention(length: Int[Array, "S"], active: Bool[Array, "S"]) -> Attend:
    """Return attention of one new token per slot: it writes its key and value at `length` and attends up to it.

    Blocks beyond the longest `active` slot are skipped. The output of a slot that is not active has no meaning.
    """
    longest = jnp.where(active, length, 0).max()

    def attend(q: Array, k: Array, v: Array, cache: Any, *, window: Any, softcap: float | None) -> tuple[Array, Any]:
        starts = np.cumsum([0, *(block.length for block in cache)])
        blocks = [_write(block, k[:, 0], v[:, 0], length - start) for block, start in zip(cache, starts, strict=False)]
        parts = []
        for block, start in zip(blocks, starts, strict=False):
            positions = start + jnp.arange(block.length)[None, :]
            visible = positions <= length[:, None]
            if window is not None:
                visible = visible & (length[:, None] - positions < window)
            attend_block = partial(_attend_block, q[:, 0], block, visible, softcap)
            skip_block = partial(_skip_block, q[:, 0], block)
            parts.append(jax.lax.cond(start <= longest, attend_block, skip_block) if start else attend_block())
        return _combine(parts).reshape(q.shape).astype(q.dtype), blocks

    return attend


def _write(block: Block, k: Float[Array, "S K W"], v: Float[Array, "S K W"], at: Int[Array, "S"]) -> Block:
    """Write each slot's key and value at position `at` of the block, unless that lies in another block."""
    slots, at = jnp.arange(len(at)), jnp.where(at < 0, block.length, at)
    return Block(
        block.keys.at[slots, :, :, at].set(k.astype(block.keys.dtype), mode="drop"),
        block.values.at[slots, :, at].set(v.astype(block.values.dtype), mode="drop"),
    )


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


def _skip_block(q: Float[Array, "S H W"], block: Block) -> BlockAttention:
    """Return the part of a block without a visible position."""
    slots, heads, width = q.shape
    shape = (slots, block.keys.shape[1], heads // block.keys.shape[1])
    return BlockAttention(jnp.zeros((*shape, width)), jnp.full(shape, jnp.finfo(jnp.float32).min), jnp.zeros(shape))


def _combine(parts: Sequence[BlockAttention]) -> Float[Array, "S K G W"]:
    """Return the attention over the positions of all blocks: the outputs weighted by their shares of sum_exp."""
    if len(parts) == 1:
        return parts[0].output
    outputs, max_scores, sums = map(jnp.stack, zip(*parts, strict=True))
    shares = sums * jnp.exp(max_scores - max_scores.max(0))
    return (outputs * shares[..., None]).sum(0) / shares.sum(0)[..., None]


def insert_block(block: Block, prefix: Block, prompt: Int[Array, "S"], inserted: Bool[Array, "S"]) -> Block:
    """Copy row `prompt[s]` of `prefix` to the front of every slot that is `inserted`."""
    rows, time = inserted[:, None, None, None], min(prefix.length, block.length)
    front = Block(block.keys[..., :time], block.values[:, :, :time])
    keys = jnp.where(rows, prefix.keys[prompt, ..., :time].astype(front.keys.dtype), front.keys)
    values = jnp.where(rows, prefix.values[prompt, :, :time].astype(front.values.dtype), front.values)
    return Block(block.keys.at[..., :time].set(keys), block.values.at[:, :, :time].set(values))


def keep_rows(block: Block, rows: Int[Array, "n"]) -> Block:
    """Keep only the slots in `rows`, in that order."""
    return Block(block.keys[rows], block.values[rows])
