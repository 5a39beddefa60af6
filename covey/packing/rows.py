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
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from covey.models.attention import Attend
from covey.models.blockwise import Spans, spanned
from covey.packing.bins import Piece, bucket, cheapest
from covey.types import Group

Tree = TypeVar("Tree")


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


def pack(
    groups: Sequence[Group],
    row_length: int = 768,
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
    whole = list(_whole(groups))
    if packing == "dense":
        single = [piece.only([i]) for piece in whole for i in range(len(piece.completions))]
        length, rows = bucket(max((p.size for p in single), default=1)), [[p] for p in single]
    else:
        length, bins = cheapest(whole, row_length, micro_batch)
        rows = [b.pieces for b in bins]
    return Rows(*(np.stack(parts) for parts in zip(*(_fill(r, length) for r in rows), strict=True)))


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

    def before(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (1, 0)))[:, :-1]

    def latest(event: jax.Array) -> jax.Array:
        return jax.lax.cummax(jnp.where(event, place, 0), axis=1)

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
    positions: int = -(-count // together) * together * length
    return 1.0 - float((rows.group > 0).sum()) / positions


def _whole(groups: Sequence[Group]) -> Iterator[Piece]:
    """The groups, their completions numbered on."""
    number = 0
    for group in groups:
        tokens = tuple(np.asarray(c.tokens) for c in group.completions)
        yield Piece(np.asarray(group.prompt_tokens), tokens, tuple(range(number, number + len(tokens))))
        number += len(tokens)


def _fill(pieces: Sequence[Piece], length: int) -> Rows:
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
