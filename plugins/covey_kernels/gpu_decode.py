"""Attention of one new token per slot over its live cache on NVIDIA GPUs, by Pallas and Triton.

A program takes one slot, one key head and one part of its visible blocks, so that few slots fill a card too; the parts
are combined by their sums. What lies behind the end of a slot, or before its sliding window, is not read.

JAX's own `paged_attention` was not taken: it knows no sliding window, and no head of 80 numbers.
"""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from covey.models.spans import MASKED_SCORE
from covey_kernels.gpu import dot

BLOCK_SIZE = 64
"""Number of keys in a block; it divides the length of a slot."""
MAX_PARTS, PROGRAMS = 8, 256
"""Most parts of a slot's head, and the number of programs that fills a card, about two for each multiprocessor: with as
many slots and heads there is one part, and nothing is combined.
"""


class Tables(NamedTuple):
    """Indices of the keys that each slot sees; `end` is exclusive."""

    start: Int[Array, "S"]
    end: Int[Array, "S"]


def decode_tables(start: Int[Array, "S"], end: Int[Array, "S"], time: int) -> Tables:
    """Return the tables of slots in which keys `start` to `end` (exclusive) are visible, at least one in each."""
    return Tables(start.astype(jnp.int32), end.astype(jnp.int32))


def write(
    keys: Array, values: Array, new_keys: Float[Array, "S K W"], new_values: Float[Array, "S K W"],
    at: Int[Array, "S"], interpret: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Return keys and values with each slot's new ones at index `at`, unless that is behind its end."""
    place: Any = jnp.arange(len(at)), slice(None), at
    keys = keys.at[place].set(new_keys.astype(keys.dtype), mode="drop")
    return keys, values.at[place].set(new_values.astype(values.dtype), mode="drop")


def decode(
    q: Float[Array, "S K G W"],
    keys: Float[Array, "S K T W"],
    values: Float[Array, "S K T W"],
    tables: Tables,
    softcap: float | None,
    interpret: bool,
) -> Float[Array, "S K G W"]:
    """Compute attention of scaled queries."""
    slots, kv_heads, group, width = q.shape
    parts = min(MAX_PARTS, pl.next_power_of_2(pl.cdiv(PROGRAMS, slots * kv_heads)))
    rows, tile = max(16, pl.next_power_of_2(group)), pl.next_power_of_2(width)  # products are 16 wide or more
    number = pl.BlockSpec((None,), lambda slot, head, part: (slot,))
    cache = pl.BlockSpec((None, None, keys.shape[2], tile), lambda slot, head, part: (slot, head, 0, 0))
    out, logsumexp = pl.pallas_call(
        partial(_kernel, parts, group, width, softcap),
        grid=(slots, kv_heads, parts),
        in_specs=[
            number,
            number,
            pl.BlockSpec((None, None, rows, tile), lambda slot, head, part: (slot, head, 0, 0)),
            cache,
            cache,
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, rows, tile), lambda slot, head, part: (part, slot, head, 0, 0)),
            pl.BlockSpec((None, None, None, rows), lambda slot, head, part: (part, slot, head, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((parts, *q.shape), jnp.float32 if parts > 1 else q.dtype),
            jax.ShapeDtypeStruct((parts, *q.shape[:3]), jnp.float32),
        ],
        name="decode_attention",
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
    )(tables.start, tables.end, q, keys, values)
    # No reduction over an axis, so that XLA makes one kernel of it all.
    shares = [jnp.exp(one - reduce(jnp.maximum, list(logsumexp))) for one in logsumexp]
    mean: Array = sum(one * (share / sum(shares))[..., None] for one, share in zip(out, shares, strict=True))
    return (out[0] if parts == 1 else mean).astype(q.dtype)


def _kernel(
    parts: int, group: int, width: int, softcap: float | None, starts: Any, ends: Any, q: Any, keys: Any, values: Any,
    out: Any, logsumexp: Any,
) -> None:  # fmt: skip
    start, end = starts[...], ends[...]
    first, last = start // BLOCK_SIZE, pl.cdiv(end, BLOCK_SIZE)
    low = first + pl.program_id(2) * (each := pl.cdiv(last - first, parts))
    heads, in_head = (jnp.arange(q.shape[0]) < group)[:, None], (jnp.arange(q.shape[1]) < width)[None]
    queries = plt.load(q, mask=heads & in_head, other=0.0)

    def body(i: Array, carry: Any) -> Any:
        max_score, sum_exp, mixed = carry
        at = pl.ds(i * BLOCK_SIZE, BLOCK_SIZE)
        key = i * BLOCK_SIZE + jnp.arange(BLOCK_SIZE)
        scores = dot(queries, plt.load(keys.at[at, :], mask=in_head, other=0.0).T)
        scores = scores if softcap is None else softcap * jnp.tanh(scores * (1 / softcap))
        scores = jnp.where(((start <= key) & (key < end))[None], scores, MASKED_SCORE)
        new_max = jnp.maximum(max_score, scores.max(-1))
        weights, decay = jnp.exp(scores - new_max[:, None]), jnp.exp(max_score - new_max)
        added = dot(weights.astype(values.dtype), plt.load(values.at[at, :], mask=in_head, other=0.0))
        return new_max, sum_exp * decay + weights.sum(-1), mixed * decay[:, None] + added

    zeros = jnp.zeros(q.shape[0], jnp.float32)
    init = (zeros + MASKED_SCORE, zeros, jnp.zeros(q.shape, jnp.float32))
    max_score, sum_exp, mixed = jax.lax.fori_loop(low, jnp.minimum(low + each, last), body, init)
    sum_exp = jnp.maximum(sum_exp, 1e-30)
    plt.store(out, (mixed / sum_exp[:, None]).astype(out.dtype), mask=heads & in_head)
    plt.store(logsumexp, max_score + jnp.log(sum_exp), mask=jnp.arange(q.shape[0]) < group)
