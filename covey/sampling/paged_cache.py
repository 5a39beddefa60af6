"""KV cache by pages: a layer is one block [P, ...] of pages that slots share, and a table [S, n] names those of each
slot in their order (`page_table.PageTable` assigns them).

Page 0 is the null page (`page_table.NULL_PAGE`): places of the table without a page name it, and slots that draw
nothing write there.

Attention reads pages by the table (`cache.decode_attention`). Here are the programs that write and move them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from covey.sampling.cache import Block, LayerCache, gather_pages, slot_axes


class PageWrites(NamedTuple):
    """Pages to fill with parts of prefilled prompts; only the first `number` have a meaning.

    Attributes:
        page: the page.
        row: row of the prompt.
        part: number of the page among those of the prompt.
    """

    page: Int[Any, "M"]
    row: Int[Any, "M"]
    part: Int[Any, "M"]
    number: Int[Any, ""]


def insert_pages(cache: list[LayerCache], prefix: list[LayerCache], writes: PageWrites) -> list[LayerCache]:
    """Fill pages with parts of `prefix`, in all layers, one after the other, which touches no other page."""
    insert, (mesh, _, heads) = _insert, slot_axes(cache)
    prefix = [[_in_whole_pages(blocks, layer[0].length)] for blocks, layer in zip(prefix, cache, strict=True)]
    if not mesh.empty:
        pages, replicated = PartitionSpec(None, heads), PartitionSpec()
        insert = jax.shard_map(insert, mesh=mesh, in_specs=(pages, pages, replicated), out_specs=pages, check_vma=False)
    return insert(cache, prefix, writes)


def _in_whole_pages(blocks: LayerCache, size: int) -> Block:
    """Return prompts as one block, padded to whole pages of `size` positions unless they fit one."""
    length = sum(block.length for block in blocks)
    padding = -length % size if length > size else 0

    def join(x: Array, axis: int, *others: Array) -> Array:
        joined = jnp.concatenate([x, *others], axis)
        return jnp.pad(joined, [(0, padding if i == axis else 0) for i in range(4)]) if padding else joined

    return blocks[0].map(join, *blocks[1:])


def _insert(cache: list[LayerCache], prefix: list[LayerCache], writes: PageWrites) -> list[LayerCache]:
    def insert(turn: Int[Array, ""], cache: list[LayerCache]) -> list[LayerCache]:
        page, row, part = writes.page[turn], writes.row[turn], writes.part[turn]
        return [[old.map(partial(copy, page, row, part), new)] for (old,), (new,) in zip(cache, prefix, strict=True)]

    def copy(page: Array, row: Array, part: Array, x: Array, axis: int, prompts: Array) -> Array:
        size = min(x.shape[axis], prompts.shape[axis])
        of_row = jax.lax.dynamic_slice_in_dim(prompts, row, 1)
        new = jax.lax.dynamic_slice_in_dim(of_row, part * x.shape[axis], size, axis)
        return jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), page, 0)

    inserted: list[LayerCache] = jax.lax.fori_loop(0, writes.number, insert, cache)
    return inserted


def copy_pages(cache: list[LayerCache], source: Int[Array, "M"], target: Int[Array, "M"], count: Array) -> Any:
    """Copy the first `count` of the pages `source` to those at `target`."""

    def copy(turn: Int[Array, ""], cache: list[LayerCache]) -> list[LayerCache]:
        def move(x: Array) -> Array:
            page = jax.lax.dynamic_slice_in_dim(x, source[turn], 1)
            return jax.lax.dynamic_update_slice_in_dim(x, page, target[turn], 0)

        copied: list[LayerCache] = jax.tree.map(move, cache)
        return copied

    return jax.lax.fori_loop(0, count, copy, cache)


def take_pages(cache: list[LayerCache], pages: Int[Array, "n"]) -> list[LayerCache]:
    """Return a copy of these pages as the cache of one slot, [1, ...]."""
    return [[gather_pages(block, pages[None])] for (block,) in cache]


def put_pages(
    cache: list[LayerCache], rows: list[LayerCache], pages: Int[Array, "n"], start: Any = 0, end: Any = None
) -> list[LayerCache]:
    """Write the cache of one slot, as `take_pages` returned it, to its pages, or to those that hold its positions from
    `start` to `end`, exclusive.
    """
    size = cache[0][0].length
    end = rows[0][0].length if end is None else end

    def put(number: Int[Array, ""], cache: list[LayerCache]) -> list[LayerCache]:
        return [[old.map(partial(write, number), new)] for (old,), (new,) in zip(cache, rows, strict=True)]

    def write(number: Int[Array, ""], x: Array, axis: int, row: Array) -> Array:
        page = jax.lax.dynamic_slice_in_dim(row, number * size, size, axis)
        return jax.lax.dynamic_update_slice_in_dim(x, page, pages[number], 0)

    written: list[LayerCache] = jax.lax.fori_loop(start // size, -(-end // size), put, cache)
    return written
