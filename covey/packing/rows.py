"""Packing of ragged groups on the host into rows on the device: one row per group.

A row holds a prompt once and its completions end to end after it. Positions restart after the prompt for each
completion, and a token may attend to its own group's prompt and to its own completion's past, so that each completion
is computed as if it were alone. Short groups share a row; a group too long for one is split and its prompt repeated.
Lengths come from a small set of buckets.

A completion with branches is a tree: each branch continues the sequence so far, from which it drops some tokens at the
end. Its tokens are in depth-first order. The descendants of a token are the tokens after it, up to the first branch
that drops it.

A completion's last token is scored but is not an input: nothing is predicted from it. Hence a row has two parts, the
*inputs* (prompt and completions without their last tokens) and the *scored* tokens, each with the input position that
predicts it. The first tokens of all completions of a group are predicted from the last token of their one prompt.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from covey.models.attention import Attend
from covey.models.decoder import Decoder
from covey.models.layer_kinds import any_state
from covey.models.recurrence import Context, recur_over_trees
from covey.models.span_attention import span_attention
from covey.models.spans import Spans
from covey.packing.bins import Piece, Row, choose_row_length, row_length_bucket, rows_per_micro_batch
from covey.parallel.arrays import num_row_shards
from covey.types import Branch, Group

Tree = TypeVar("Tree")
Tokens = Sequence[np.ndarray] | Mapping[int, np.ndarray]
"""Arrays with one value per token, by the number of a group or a completion."""


class Rows(NamedTuple):
    """A batch of rows, a pytree of arrays: NumPy on the host, JAX on the device.

    Attributes:
        tokens, positions: input tokens and their positions.
        group_ids: number of each input token's group, counted from 1 in each row; 0 is padding.
        input_segment_ids: number of its completion, counted from 1 in each row; 0 is a prompt.
        gather_index: input position whose hidden state predicts each scored token.
        target: the scored tokens.
        segment_ids: number of each scored token's completion in the row (as in `input_segment_ids`); 0 is padding.
        scatter_index: index of that completion in the step, and of the token in the completion; -1 is padding.
        ends: index after the last descendant of each input token; None where no completion can have branches: the
            segments then tell the same.
    """

    tokens: Int[Any, "R L"]
    positions: Int[Any, "R L"]
    group_ids: Int[Any, "R L"]
    input_segment_ids: Int[Any, "R L"]
    gather_index: Int[Any, "R M"]
    target: Int[Any, "R M"]
    segment_ids: Int[Any, "R M"]
    scatter_index: Int[Any, "R M 2"]
    ends: Int[Any, "R L"] | None = None

    @property
    def scored(self) -> Bool[Any, "R M"]:
        """Mask that is True where a scored token is not padding."""
        return self.segment_ids > 0


def pack(
    groups: Sequence[Group],
    row_length: int = 768,
    *,
    packing: Literal["groups", "dense"] = "groups",
    max_tokens: int = 1,
    compile_cost: float = 0.0,
) -> Rows:
    """Pack groups into rows.

    Args:
        groups: their completions are numbered in order, group after group.
        row_length: most tokens in a row, raised to the longest single completion with its prompt.
        packing: "groups", or "dense" for one completion per row (the reference that tests compare with).
        max_tokens: maximum number of tokens in a micro-batch; the row length is chosen so that few of them are padding.
        compile_cost: cost of another row length than `row_length`, in tokens; see `packing.bins.compile_cost`.

    Returns:
        NumPy `Rows` with M = L, a bucket length, so that few shapes occur.
    """
    layout = make_layout(
        [shape_of(group) for group in groups],
        row_length,
        packing=packing,
        max_tokens=max_tokens,
        compile_cost=compile_cost,
    )
    completions = [np.asarray(c.tokens) for group in groups for c in group.completions]
    return layout.fill([np.asarray(group.prompt_tokens) for group in groups], completions)


def unpack(rows: Rows, values: Float[np.ndarray, "R M"], lengths: Sequence[int]) -> list[np.ndarray]:
    """Return per-token values in the order of the step: one float32 array per completion, `lengths[i]` long. They are 0
    for completions that are in no row.
    """
    out = np.split(np.zeros(sum(lengths), np.float32), np.cumsum(lengths, dtype=int)[:-1])
    for row, start, number in _completion_starts(rows):
        out[number][:] = values[row, start : start + len(out[number])]
    return out


def scatter_to_rows(rows: Rows, per_token: Tokens) -> Float[np.ndarray, "R M"]:
    """Scatter per-token values, one array per completion, to the scored tokens; 0 at padding and in rows that are not
    filled. Inverse of `unpack`.
    """
    out = np.zeros(rows.segment_ids.shape, np.float32)
    for row, start, number in _completion_starts(rows):
        out[row, start : start + len(per_token[number])] = per_token[number]
    return out


def _completion_starts(rows: Rows) -> Iterator[tuple[int, int, int]]:
    """Yield row and column of the first token of each completion in the rows that are filled, and its number."""
    for row in np.flatnonzero(rows.segment_ids[:, :1].any(1)).tolist():
        number, index = rows.scatter_index[row].T
        for column in np.flatnonzero(index == 0).tolist():
            yield row, column, int(number[column])


def tree_attention(model: Decoder, rows: Rows) -> Attend:
    """Return the `Attend` of a batch of rows: a token attends to its group's prompt and its own completion's past. For
    layers with a state it is a `Context`.
    """
    spans = attention_spans(rows)
    attend = span_attention(model, spans, rows.positions)
    if not any_state(model.config):
        return attend
    has_branches = rows.ends is not None
    return Context(attend, recur_over_trees(model.config, spans, rows.positions, rows.group_ids > 0, has_branches))


def attention_spans(rows: Rows) -> Spans:
    """Return the spans of the input tokens: a prompt's token ends with its group, a completion's with the completion,
    and both start where the group does.
    """
    group_ids, index = rows.group_ids, jnp.broadcast_to(jnp.arange(rows.group_ids.shape[1]), rows.group_ids.shape)

    def changes(x: jax.Array) -> jax.Array:
        """Return True at the first of each run of equal numbers."""
        return jnp.pad(x[:, 1:] != x[:, :-1], ((0, 0), (1, 0)), constant_values=True)

    def run_end(first: jax.Array) -> jax.Array:
        """Return the index after the run that each token is in."""
        next_first = jnp.where(first, index, index.shape[1])[:, 1:]
        return jax.lax.cummin(jnp.pad(next_first, ((0, 0), (0, 1)), constant_values=index.shape[1]), 1, reverse=True)

    new_group = changes(group_ids)
    new_segment = new_group | changes(rows.input_segment_ids)
    start = jax.lax.cummax(jnp.where(new_group, index, 0), axis=1)
    end = jnp.where(rows.input_segment_ids > 0, run_end(new_segment), run_end(new_group))
    end = end if rows.ends is None else rows.ends
    is_token = group_ids > 0
    return Spans(jnp.where(is_token, start, index), jnp.where(is_token, end, index + 1))


def split_micro_batches(tree: Tree, size: int) -> Iterator[Tree]:
    """Yield slices of `size` rows of every array; the last is padded with zeros, so that all have one shape."""
    for start in range(0, jax.tree.leaves(tree)[0].shape[0], size):
        yield jax.tree.map(partial(_slice_rows, start, size), tree)


def _slice_rows(start: int, size: int, x: np.ndarray) -> np.ndarray:
    part = x[start : start + size]
    missing = size - len(part)
    return np.pad(part, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else part


def rows_at_a_time(rows: Rows, mesh: Mesh | None, max_tokens: int, fixed_shapes: bool = False) -> int:
    """Return the number of rows computed together: at most `max_tokens`, but at least one for each device of `mesh`.
    For `fixed_shapes` see `packing.bins.rows_per_micro_batch`.
    """
    count, length = rows.tokens.shape
    return rows_per_micro_batch(count, length, max_tokens, num_row_shards(mesh), fixed_shapes)


def padding_fraction(rows: Rows, rows_at_once: int = 1) -> float:
    """Return the fraction of input positions that hold padding, including the rows that fill up the last micro-batch of
    `rows_at_once` rows.
    """
    count, length = rows.group_ids.shape
    return _padding_fraction(int((rows.group_ids > 0).sum()), count, length, rows_at_once)


def _padding_fraction(num_inputs: int, count: int, length: int, rows_at_once: int) -> float:
    return 1.0 - num_inputs / (-(-count // rows_at_once) * rows_at_once * length)


@dataclass(frozen=True)
class GroupShape:
    """Numbers of tokens of a group: all that its place in the rows depends on.

    Attributes:
        prompt: tokens of the prompt.
        lengths: tokens of each completion.
        branches: branches of each completion; None where it can have none.
    """

    prompt: int
    lengths: tuple[int, ...]
    branches: tuple[tuple[Branch, ...] | None, ...]


def shape_of(group: Group) -> GroupShape:
    """Return the numbers of tokens of a group."""
    completions = group.completions
    lengths, branches = tuple(len(c.tokens) for c in completions), tuple(c.branches for c in completions)
    return GroupShape(len(group.prompt_tokens), lengths, branches)


@dataclass(frozen=True)
class Layout:
    """Places of completions in rows. They depend on numbers of tokens alone, so that every process computes the same.

    Attributes:
        length: tokens of a row, inputs and scored ones.
        rows: the pieces of each row.
        branches: branches of each completion; None where no completion can have any.
    """

    length: int
    rows: Sequence[Row]
    branches: Sequence[Sequence[Branch]] | None = None

    def fill(self, prompts: Tokens, completions: Tokens, numbers: Iterable[int] | None = None) -> Rows:
        """Return NumPy rows. Rows that are not filled are zeros, which take no memory until they are read.

        Args:
            prompts, completions: tokens by number of the group and of the completion, of the rows that are filled.
            numbers: numbers of the rows to fill; None for all.
        """
        shape = len(self.rows), self.length
        ends = None if self.branches is None else np.zeros(shape, np.int32)
        rows = Rows._make([*np.zeros((7, *shape), np.int32), np.zeros((*shape, 2), np.int32), ends])
        for number in range(len(self.rows)) if numbers is None else numbers:
            row = jax.tree.map(itemgetter(number), rows)
            row.scatter_index[:] = -1
            self._fill_row(row, self.rows[number], prompts, completions)
        return rows

    def padding_fraction(self, rows_at_once: int) -> float:
        """Return the fraction of input positions that hold padding; see the function `padding_fraction`."""
        num_inputs = sum(map(attrgetter("num_inputs"), chain.from_iterable(self.rows)))
        return _padding_fraction(num_inputs, len(self.rows), self.length, rows_at_once)

    def _fill_row(self, row: Rows, pieces: Sequence[Piece], prompts: Tokens, completions: Tokens) -> None:
        input_end = scored_end = segment = 0
        for group, piece in enumerate(pieces, start=1):
            if row.ends is not None and self.branches is not None:
                row.ends[input_end : input_end + piece.num_inputs] = input_end + piece_ends(piece, self.branches)
            input_end = _write_tokens(row, input_end, prompts[piece.group], np.arange(piece.prompt), group, 0)
            prompt_end = input_end
            for number in piece.indices:
                segment, completion = segment + 1, completions[number]
                branches = () if self.branches is None else self.branches[number]
                positions = token_positions(piece.prompt, len(completion), branches)
                before = predecessors(piece.prompt, positions) if branches else np.arange(len(completion)) - 1
                scored = slice(scored_end, scored_end + len(completion))
                row.gather_index[scored] = before + np.where(before < 0, prompt_end, input_end)
                row.target[scored], row.segment_ids[scored] = completion, segment
                row.scatter_index[scored, 0], row.scatter_index[scored, 1] = number, np.arange(len(completion))
                input_end = _write_tokens(row, input_end, completion[:-1], positions[:-1], group, segment)
                scored_end = scored.stop


def make_layout(
    groups: Sequence[GroupShape],
    row_length: int = 768,
    *,
    packing: Literal["groups", "dense"] = "groups",
    max_tokens: int = 1,
    compile_cost: float = 0.0,
) -> Layout:
    """Assign the completions of groups to rows; arguments as for `pack`."""
    pieces, first = list[Piece](), 0
    for number, group in enumerate(groups):
        whole = Piece(group.prompt, group.lengths, tuple(range(first, first + len(group.lengths))), number)
        pieces += _separate(whole, group.branches) if any(group.branches) else [whole]
        first += len(group.lengths)
    if packing == "dense":
        dense = [piece.select(chosen) for piece in pieces for chosen in np.eye(len(piece.lengths), dtype=bool)]
        length, rows = row_length_bucket(max((p.row_length for p in dense), default=1)), [[p] for p in dense]
    else:
        length, rows = choose_row_length(pieces, row_length, max_tokens, compile_cost)
    branches = list(chain.from_iterable(map(attrgetter("branches"), groups)))
    if branches.count(None) == len(branches):
        return Layout(length, rows)
    return Layout(length, rows, [of_completion or () for of_completion in branches])


def _separate(piece: Piece, branches: Sequence[Sequence[Branch] | None]) -> Iterator[Piece]:
    """Yield a group as pieces. A completion with a branch that drops tokens of the prompt is a piece of its own: the
    others see the whole prompt.
    """
    drops = np.array([any(branch.kept < piece.prompt for branch in each or ()) for each in branches])
    if not drops.all():
        yield piece.select(~drops)
    yield from (piece.select(chosen) for chosen in np.eye(len(drops), dtype=bool)[drops])


def piece_ends(piece: Piece, branches: Sequence[Sequence[Branch]]) -> Int[np.ndarray, "n"]:
    """Return the index after the last descendant of each input token of a piece, counted from its first token."""
    ends, start = np.full(piece.num_inputs, piece.num_inputs), piece.prompt
    for number, length in zip(piece.indices, piece.lengths, strict=True):
        tree, end = branches[number], start + max(length - 1, 0)
        positions = token_positions(piece.prompt, end - start, tree)
        ends[start:end] = start + subtree_ends(positions, end - start, tree)
        # A completion that drops tokens of the prompt has the piece for itself.
        of_prompt = subtree_ends(np.arange(piece.prompt), len(ends) - piece.prompt, tree, first=-piece.prompt)
        ends[: piece.prompt] = np.minimum(ends[: piece.prompt], piece.prompt + of_prompt)
        start = end
    return ends


def _write_tokens(
    row: Rows, start: int, tokens: np.ndarray, positions: np.ndarray, group_id: int, segment_id: int
) -> int:
    end = start + len(tokens)
    row.tokens[start:end], row.positions[start:end] = tokens, positions
    row.group_ids[start:end], row.input_segment_ids[start:end] = group_id, segment_id
    return end


def token_positions(prompt: int, length: int, branches: Sequence[Branch]) -> Int[np.ndarray, "n"]:
    """Return the position in its sequence of each of the `length` tokens of a completion after `prompt` tokens.

    >>> token_positions(3, 5, [Branch(start=2, kept=4)]).tolist()
    [3, 4, 4, 5, 6]
    """
    positions = prompt + np.arange(length)
    for start, kept in branches:
        positions[start:] = kept + np.arange(length - start)
    return positions


def predecessors(prompt: int, positions: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """Return the token before each token in its sequence: its index in the completion, or below 0, counted from the end
    of the prompt. In depth-first order it is the latest token at the position before.

    >>> predecessors(3, np.array([3, 4, 4, 5, 2])).tolist()
    [-1, 0, 0, 2, -2]
    """
    latest = {position: position - prompt for position in range(prompt)}
    before = []
    for index, position in enumerate(positions.tolist()):
        before.append(latest.get(position - 1, -prompt))
        latest[position] = index
    return np.array(before, np.int64)


def subtree_ends(
    positions: Int[np.ndarray, "n"], length: int, branches: Sequence[Branch], first: int = 0
) -> Int[np.ndarray, "n"]:
    """Return the index in the completion after the last descendant of each token.

    Args:
        positions: positions of the tokens, which begin at index `first` of the completion.
        length: number of tokens of the completion.

    >>> subtree_ends(np.array([3, 4, 4, 5, 6]), 5, [Branch(start=2, kept=4)]).tolist()
    [5, 2, 5, 5, 5]
    """
    ends = np.full(len(positions), length)
    for start, kept in reversed(branches):
        dropped = (positions >= kept) & (first + np.arange(len(positions)) < start)
        ends[dropped] = start
    return ends
