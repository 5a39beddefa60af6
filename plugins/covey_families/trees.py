"""Rows of trees cut into pieces for layers with a state, on the device, from the spans that attention has.

A piece goes on until it is full, or until a token whose predecessor is neither in it nor the token before it. Such a
token continues a shorter sequence than the piece began with: the next completion of a prompt after the remainder of
another, or the next group. So a row without branches has at most three pieces for each full one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from covey.errors import EpisodeError
from covey.models.spans import Spans
from covey_families.delta_rule import Pieces

PIECE = 64
"""Most tokens of a piece."""
TOKENS_A_BRANCH = 8
"""Mean number of tokens between branches for which there is room."""


class TreeTables(NamedTuple):
    """Where the tokens of rows lie in pieces.

    Attributes:
        pieces: how the pieces hang together.
        tokens: index in the row of each token of a piece; the length of the row for none.
        places: place of each token of the row in its pieces.
        before: index of the tokens 1, 2, ... before each token in its sequence; the length of the row for none.
        fits: 1, or not a number for a row with more pieces than there is room for, which `check_branches` refuses:
            nothing is computed wrongly.
    """

    pieces: Pieces
    tokens: Int[Array, "B N C"]
    places: Int[Array, "B T"]
    before: tuple[Int[Array, "B T"], ...]
    fits: Float[Array, "B"]


def num_pieces(time: int, size: int, has_branches: bool) -> int:
    """Return the number of pieces for which there is room.

    >>> num_pieces(64, 64, False), num_pieces(256, 64, False), num_pieces(256, 64, True)
    (1, 10, 42)
    """
    full = -(-time // size)
    return min(3 * full - 2 + (time // TOKENS_A_BRANCH if has_branches else 0), time)


def piece_size(time: int, size: int = PIECE) -> int:
    """Return the most tokens of a piece of rows of `time` tokens, a power of two."""
    return min(size, 1 << (time - 1).bit_length())


def check_branches(groups: Int[np.ndarray, "R T"], positions: Int[np.ndarray, "R T"], size: int = PIECE) -> None:
    """Refuse rows with branches that need more pieces than there is room for.

    Args:
        groups: number of each token's group in its row; 0 is padding.
        size: most tokens of a piece, a power of two.

    Raises:
        EpisodeError: a row needs more.
    """
    time = positions.shape[1]
    room = num_pieces(time, piece_size(time, size), True)
    for row in zip(groups.tolist(), positions.tolist(), strict=True):
        needed = _count_pieces(_parents(*row), piece_size(time, size))
        if needed > room:
            raise EpisodeError(
                f"the branches of episodes divide a row of {time} tokens into {needed} pieces, and there is room for"
                f" {room}: layers with a state cannot compute the row",
                want=f"branches of {TOKENS_A_BRANCH} tokens or more in the mean",
                fix="--envs.history sampled, which makes no branches; or longer turns",
                where="envs.history",
            )


def _parents(groups: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return the index of the token before each token in its sequence, the latest at its position; -1 for none."""
    latest, parents = dict[tuple[int, int], int](), []
    for index, (group, position) in enumerate(zip(groups, positions, strict=True)):
        parents.append(latest.get((group, position - 1), -1))
        latest[group, position] = index
    return parents


def _count_pieces(parents: Sequence[int], size: int) -> int:
    """Return the number of pieces of a row, cut as by `_starts`."""
    count, start, entry = 0, 0, -1
    for index, parent in enumerate(parents):
        if index in (0, start + size) or (parent < start and parent != entry):
            count, start, entry = count + 1, index, parent
    return count


def tree_tables(
    spans: Spans, positions: Int[Array, "B T"], width: int, has_branches: bool, size: int = PIECE
) -> TreeTables:
    """Return the pieces of rows.

    Args:
        width: number of tokens that a convolution sees.
        has_branches: whether completions may have branches.
        size: most tokens of a piece, a power of two.
    """
    time, size = spans.time, piece_size(spans.time, size)
    before = tuple(_before(spans, positions, distance) for distance in range(1, width))
    parent = before[0] if before else _before(spans, positions, 1)
    starts, end = _starts(parent, size, num_pieces(time, size, has_branches))
    stops = jnp.concatenate([starts[:, 1:], end[:, None]], axis=1)
    places = jnp.arange(time)
    owner = jax.vmap(lambda starts: jnp.searchsorted(starts, places, side="right") - 1)(starts)
    tokens = starts[:, :, None] + jnp.arange(size)
    tokens = jnp.where(tokens < stops[:, :, None], tokens, time)
    first = jnp.take_along_axis(_padded(parent), jnp.minimum(starts, time), axis=1)
    entry = jnp.where(first < time, jnp.take_along_axis(_padded(owner), first, axis=1), -1)
    entry_token = first - jnp.take_along_axis(starts, jnp.maximum(entry, 0), axis=1)
    ends = jax.vmap(lambda ends, at: ends[at])(jnp.pad(spans.end, ((0, 0), (0, 1))), tokens)
    query, key = tokens[..., :, None], tokens[..., None, :]
    begin = jax.vmap(lambda start, at: start[at])(_padded(spans.start), tokens)[..., None]
    ancestors = (begin <= key) & (key <= query) & (query < ends[..., None, :]) & (query < time)
    at = owner * size + places - jnp.take_along_axis(starts, owner, axis=1)
    fits = jnp.where(end < time, jnp.nan, 1.0)
    return TreeTables(Pieces(ancestors, entry, jnp.where(entry < 0, 0, entry_token)), tokens, at, before, fits)


def _before(spans: Spans, positions: Int[Array, "B T"], distance: int) -> Int[Array, "B T"]:
    """Return the index of the token `distance` before each token in its sequence; T for none."""
    found = spans.limit(positions, distance + 1).start
    is_there = jnp.take_along_axis(positions, found, axis=1) == positions - distance
    return jnp.where(is_there, found, spans.time)


def _starts(parent: Int[Array, "B T"], size: int, count: int) -> tuple[Int[Array, "B N"], Int[Array, "B"]]:
    """Return the first token of each piece, and the token after the last piece; T where there is none."""
    time = parent.shape[1]
    index = jnp.arange(time)

    def cut(start: Array, _: None) -> tuple[Array, Array]:
        entry = jnp.take_along_axis(_padded(parent), start[:, None], axis=1)
        is_other = ((parent < start[:, None]) | (parent == time)) & (parent != entry)
        stop = jnp.where(is_other & (index > start[:, None]), index, time).min(axis=1)
        return jnp.minimum(jnp.minimum(start + size, stop), time), start

    end, starts = jax.lax.scan(cut, jnp.zeros_like(parent[:, 0]), None, length=count)
    return starts.T, end


def _padded(x: Int[Array, "B T"]) -> Int[Array, "B T+1"]:
    """Return `x` with the entry T at T, for what has no token."""
    return jnp.pad(x, ((0, 0), (0, 1)), constant_values=x.shape[1])
