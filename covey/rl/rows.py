"""Ragged groups on the host become rows on the device: one group, one row.

A row holds a prompt once and its completions end to end behind it. Positions restart behind the prompt for each
completion, and a token may attend to its own group's prompt and to its own completion's past, so that each sample is
computed as if it were alone. Short groups share a row; a group too long for one is split and its prompt repeated.
Lengths come from a small set of buckets.

A completion's last token is scored but never fed: nothing is predicted from it. Hence a row has two parts, the *inputs*
(prompt and completions without their last tokens) and the *scored* tokens, each with the input position that predicts
it. The first tokens of all completions of a group are predicted from the one last prompt token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from covey.models.attention import Attend
from covey.models.blockwise import Spans, spanned
from covey.sampling.lengths import power_of_two
from covey.types import Group

Tree = TypeVar("Tree")

ROW_BUCKETS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Row lengths; above the last, multiples of it."""


class Rows(NamedTuple):
    """A batch of rows, a pytree of arrays: NumPy on the host, JAX on the device.

    Attributes:
        tokens, positions: the inputs.
        group: which group a token belongs to, counted from 1 in each row; 0 is padding.
        sample: which completion, counted from 1 in each row; 0 is a prompt.
        source: for each scored token, the input position whose hidden state predicts it.
        target: the scored token.
        owner: for each scored token, its completion's number in the row (as in `sample`); 0 is padding.
        home: where results go: number of that completion in the step, and its token's place in it; -1 is padding.
    """

    tokens: Int[Any, "R L"]
    positions: Int[Any, "R L"]
    group: Int[Any, "R L"]
    sample: Int[Any, "R L"]
    source: Int[Any, "R M"]
    target: Int[Any, "R M"]
    owner: Int[Any, "R M"]
    home: Int[Any, "R M 2"]

    @property
    def scored(self) -> Bool[Any, "R M"]:
        """True where a scored token is not padding."""
        return self.owner > 0


@dataclass(frozen=True)
class _Piece:
    """A prompt and those of its completions that go into one row; numbers are the completions' in the step."""

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    numbers: tuple[int, ...]

    @property
    def size(self) -> int:
        """Room it takes: its inputs, or its scored tokens where many short completions make those the more."""
        return _room(self.prompt, self.completions)


def pack(
    groups: Sequence[Group],
    row_length: int = 512,
    packing: Literal["groups", "dense"] = "groups",
    micro_batch: int = 1,
) -> Rows:
    """Lays groups out as rows.

    Args:
        groups: their completions are numbered in order, group after group.
        row_length: most tokens in a row, raised to the longest single sample.
        packing: "groups", or "dense" for one sample a row (the oracle of the other).
        micro_batch: tokens that will be computed at once; the row length is chosen so that few of them are padding.

    Returns:
        NumPy `Rows` with M = L, a bucket, so that few shapes occur.
    """
    pieces = list(_pieces(groups, row_length, packing))
    capacity = _bucket(max([p.size for p in pieces], default=1))
    if packing == "groups":
        capacity = _cheapest(pieces, capacity, max(capacity, _bucket(row_length)), micro_batch)
    bins = [[p] for p in pieces] if packing == "dense" else _first_fit(pieces, capacity)
    rows = [_fill(b, capacity) for b in bins]
    return Rows(*(np.stack(parts) for parts in zip(*rows, strict=True)))


def unpack(rows: Rows, values: Float[np.ndarray, "R M"], lengths: Sequence[int]) -> list[np.ndarray]:
    """Per-token values back in the order of the step: one float32 array a completion, `lengths[i]` long."""
    out = [np.zeros(n, np.float32) for n in lengths]
    number, place = rows.home[..., 0], rows.home[..., 1]
    for row, column in zip(*np.nonzero(number >= 0), strict=True):
        out[number[row, column]][place[row, column]] = values[row, column]
    return out


def spread(rows: Rows, per_sample: np.ndarray) -> Float[np.ndarray, "R M"]:
    """A value a completion, laid at each of its scored tokens; 0 at padding."""
    number = rows.home[..., 0]
    return np.where(number >= 0, np.asarray(per_sample, np.float32)[number], np.float32(0))


def lay(rows: Rows, per_token: Sequence[np.ndarray]) -> Float[np.ndarray, "R M"]:
    """Values a token, one array a completion, laid at the scored tokens; 0 at padding. The inverse of `unpack`."""
    starts = np.concatenate([[0], np.cumsum([len(v) for v in per_token])])
    flat = np.concatenate([*per_token, np.zeros(1)]).astype(np.float32)
    number, place = rows.home[..., 0], rows.home[..., 1]
    return np.where(number >= 0, flat[np.where(number >= 0, starts[number] + place, -1)], np.float32(0))


def tree_attention(rows: Rows) -> Attend:
    """The `Attend` of a batch of rows: a token sees its group's prompt and its own completion's past."""
    return spanned(spans_of(rows), rows.positions)


def spans_of(rows: Rows) -> Spans:
    """What each input token sees, as places in its row. A prompt's token sees no more than its own past."""
    group, answer = rows.group, rows.sample > 0
    place = jnp.broadcast_to(jnp.arange(group.shape[1]), group.shape)
    before = lambda x: jnp.pad(x, ((0, 0), (1, 0)))[:, :-1]  # noqa: E731
    latest = lambda event: jax.lax.cummax(jnp.where(event, place, 0), axis=1)  # noqa: E731
    new_group = group != before(group)
    new_sample = new_group | (rows.sample != before(rows.sample))
    until = latest(answer & (new_group | ~before(answer)))
    own = jnp.where(group > 0, latest(new_sample), group.shape[1])
    return Spans(latest(new_group), jnp.where(answer & (group > 0), until, 0), own)


def micro_batches(tree: Tree, size: int) -> Iterator[Tree]:
    """Slices of `size` rows of every array; the last is filled up with zeros, which are padding, so that one shape
    serves all.
    """
    count = jax.tree.leaves(tree)[0].shape[0]

    def cut(start: int, x: np.ndarray) -> np.ndarray:
        part = x[start : start + size]
        return np.pad(part, [(0, size - len(part))] + [(0, 0)] * (x.ndim - 1))

    for start in range(0, count, size):
        yield jax.tree.map(partial(cut, start), tree)


def padding_waste(rows: Rows, together: int = 1) -> float:
    """Share of input positions that hold padding, those of the rows that fill up the last micro-batch of `together`
    rows with them.
    """
    count, length = rows.group.shape
    return 1.0 - float((rows.group > 0).sum()) / (-(-count // together) * together * length)


def _pieces(groups: Sequence[Group], row_length: int, packing: str) -> Iterator[_Piece]:
    number = 0
    for group in groups:
        prompt, tokens = np.asarray(group.prompt_tokens), [np.asarray(c.tokens) for c in group.completions]
        parts = [[i] for i in range(len(tokens))] if packing == "dense" else _split(prompt, tokens, row_length)
        for part in parts:
            yield _Piece(prompt, tuple(tokens[i] for i in part), tuple(number + i for i in part))
        number += len(tokens)


def _split(prompt: np.ndarray, completions: Sequence[np.ndarray], row_length: int) -> list[list[int]]:
    """The completions in as few runs as fit into rows, and those as even as the buckets let them be."""
    parts = _filled(prompt, completions, row_length)
    for length in ROW_BUCKETS if len(parts) > 1 else ():
        even = _filled(prompt, completions, length)
        if len(even) == len(parts):
            return even
    return parts


def _filled(prompt: np.ndarray, completions: Sequence[np.ndarray], row_length: int) -> list[list[int]]:
    parts: list[list[int]] = []
    for i, completion in enumerate(completions):
        if parts and _room(prompt, [*(completions[j] for j in parts[-1]), completion]) <= row_length:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def _room(prompt: np.ndarray, completions: Sequence[np.ndarray]) -> int:
    inputs = len(prompt) + sum(max(len(c) - 1, 0) for c in completions)
    return max(inputs, sum(len(c) for c in completions))


def _cheapest(pieces: Sequence[_Piece], smallest: int, largest: int, micro_batch: int) -> int:
    """The bucket whose rows cost least: tokens, those of filled-up micro-batches included, and the square that
    attention pays.
    """
    lengths = [b for b in ROW_BUCKETS if smallest <= b <= largest] or [smallest]

    def cost(length: int) -> float:
        count = len(_first_fit(pieces, length))
        together = rows_together(count, length, micro_batch)
        return -(-count // together) * together * length * (1 + length / 4096)

    return min(lengths, key=cost)


def rows_together(count: int, length: int, micro_batch: int, ways: int = 1) -> int:
    """How many of `count` rows of `length` tokens make a micro-batch of at most `micro_batch` tokens: a multiple of
    `ways`, never 0. Of a few sizes, so that few shapes occur, the one that leaves least to fill up.
    """
    most, needed = max(micro_batch // (length * ways), 1), -(-count // ways)
    sizes = {most, -(-3 * most // 4), -(-most // 2), power_of_two(needed)}
    return min((s for s in sizes if s <= most), key=lambda s: (-(-needed // s) * s, -s)) * ways


def _first_fit(pieces: Sequence[_Piece], capacity: int) -> list[list[_Piece]]:
    """First-fit decreasing: near-minimal rows (Johnson, 1973)."""
    bins: list[list[_Piece]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda p: -p.size):
        place = next((i for i, free in enumerate(room) if free >= piece.size), None)
        if place is None:
            bins.append([])
            room.append(capacity)
            place = len(bins) - 1
        bins[place].append(piece)
        room[place] -= piece.size
    return bins


def _fill(pieces: Sequence[_Piece], length: int) -> Rows:
    none, nowhere = [np.zeros(length, np.int32) for _ in range(7)], np.full((length, 2), -1, np.int32)
    row = Rows._make([*none, nowhere])
    at = out = owner = 0
    for group, piece in enumerate(pieces, start=1):
        prompt = len(piece.prompt)
        at = _write(row, at, piece.prompt, 0, group, 0)
        last_of_prompt = at - 1
        for completion, number in zip(piece.completions, piece.numbers, strict=True):
            owner += 1
            start, end = at, out + len(completion)
            at = _write(row, at, completion[:-1], prompt, group, owner)
            row.source[out:end] = [last_of_prompt, *range(start, at)][: len(completion)]
            row.target[out:end] = completion
            row.owner[out:end] = owner
            row.home[out:end, 0], row.home[out:end, 1] = number, np.arange(len(completion))
            out = end
    return row


def _write(row: Rows, at: int, tokens: np.ndarray, position: int, group: int, sample: int) -> int:
    end = at + len(tokens)
    row.tokens[at:end], row.positions[at:end] = tokens, position + np.arange(len(tokens))
    row.group[at:end], row.sample[at:end] = group, sample
    return end


def _bucket(length: int) -> int:
    step = ROW_BUCKETS[-1]
    return next((b for b in ROW_BUCKETS if b >= length), -(-length // step) * step)
