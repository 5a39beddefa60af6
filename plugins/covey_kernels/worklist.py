"""Lists of the pairs (block of queries, block of keys) that hold anything visible; the kernels visit no other pair.

With `Spans`, first and last token of two blocks decide: a few vector operations, made on the device, once for each
micro-batch and sliding window.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from covey.models.spans import Spans

FIRST, LAST, FULL = 1, 2, 4
"""Flags of a pair: first or last of its accumulator; every key is visible to every query."""


class BlockSizes(NamedTuple):
    """Number of queries and of keys in a block."""

    queries: int
    keys: int


class VisibleBlocks(NamedTuple):
    """Pairs of blocks in which any key is visible to any query, and those in which all are to all."""

    some: Bool[Array, "R Q U"]
    full: Bool[Array, "R Q U"]

    def by_key(self) -> "VisibleBlocks":
        """Return the same with the blocks of keys first."""
        return VisibleBlocks(self.some.swapaxes(1, 2), self.full.swapaxes(1, 2))


class Worklist(NamedTuple):
    """Visible pairs in the order in which they are accumulated. Lists have the length of causal attention.

    Attributes:
        outer: row × number of blocks + block, of the side that is accumulated.
        inner: the same of the other side.
        flags: sum of FIRST, LAST and FULL.
        num_pairs: number of pairs, after which lists have no meaning; an array, so that each device of a mesh has its
            own.
    """

    outer: Int[Array, "N"]
    inner: Int[Array, "N"]
    flags: Int[Array, "N"]
    num_pairs: Int[Array, "1"]


def visible_blocks(spans: Spans, sizes: BlockSizes) -> VisibleBlocks:
    """Return the pairs of blocks that hold anything visible; `sizes` divide the row."""
    rows, time = spans.start.shape
    start = spans.start.reshape(rows, -1, 1, sizes.queries)
    end = spans.end.reshape(rows, 1, -1, sizes.keys)
    first_query = jnp.arange(0, time, sizes.queries)[:, None]
    first_key = jnp.arange(0, time, sizes.keys)[None]
    last_query, last_key = first_query + sizes.queries - 1, first_key + sizes.keys - 1
    some = (first_key <= last_query) & (last_key >= start.min(-1)) & (end.max(-1) > first_query)
    full = (last_key <= first_query) & (first_key >= start.max(-1)) & (end.min(-1) > last_query)
    return VisibleBlocks(some, full)


def worklist(blocks: VisibleBlocks) -> Worklist:
    """Return the pairs of `blocks`, row by row and block by block of their first side."""
    rows, outer_blocks, inner_blocks = blocks.some.shape
    most = rows * _causal_pairs(outer_blocks, inner_blocks)
    row, outer, inner = jnp.nonzero(blocks.some, size=most, fill_value=0)
    count = blocks.some.sum()
    accumulator = row * outer_blocks + outer
    changes = accumulator[1:] != accumulator[:-1]
    first = jnp.pad(changes, (1, 0), constant_values=True)
    last = jnp.pad(changes, (0, 1), constant_values=True) | (jnp.arange(most) == count - 1)
    flags = FIRST * first + LAST * last + FULL * blocks.full[row, outer, inner]
    lists = (accumulator, row * inner_blocks + inner, flags, count[None])
    return Worklist(*(x.astype(jnp.int32) for x in lists))


def block_lists(blocks: VisibleBlocks) -> tuple[Int[Array, "R Q U"], Int[Array, "R Q"]]:
    """Return, for each block of the first side, the visible blocks of the other in ascending order, and their number.
    What follows in a list has no meaning.
    """
    order = jnp.argsort(~blocks.some, axis=-1, stable=True)
    return order.astype(jnp.int32), blocks.some.sum(-1).astype(jnp.int32)


def _causal_pairs(outer: int, inner: int) -> int:
    """Return the largest number of visible pairs in a row: those that a causal mask leaves."""
    return sum(min(inner, -(-(block + 1) * inner // outer)) for block in range(outer))
