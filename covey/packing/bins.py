"""Assignment of completions to rows: bin-packing in which a prompt is repeated in each row that has some of its group.

A group stays whole where it fits. One that does not is split, and the remainder goes where there is room. The row
length is the one of least total cost: padding, repeated prompts, rows that fill up the last micro-batch, attention, and
the programs that another row length needs. The result depends on the lengths and the run's settings alone, so that a
repeated step is packed the same way.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, product
from operator import attrgetter

import numpy as np
from jaxtyping import Bool

ROW_BUCKETS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024)
"""Row lengths; above the last, row lengths are its multiples."""
ATTENTION_COST_LENGTH = 2048
"""Row length at which attention costs as much as the rest of a layer (measured at SmolLM2's width, on CPU)."""
LAUNCH_COST_TOKENS = 200
"""Fixed cost of a micro-batch, in tokens (measured like ATTENTION_COST_LENGTH)."""
RECOMPILE_MARGIN = 1.08
"""Factor by which the default row length may cost more than another: each length is a program to compile."""
COMPILE_FLOPS = 6e11
"""Work that a CPU core could do while it compiles the programs of a row length (measured; they hardly depend on the
width of the model)."""
OTHER_LENGTH_FRACTION = 0.05
"""Fraction of the steps in which another row length than the default is expected to be chosen. Real fractions are
larger, but several lengths compete for them: in simulated runs of 20, 100 and 1000 steps this number costs least, or
2 % more."""


@dataclass(frozen=True)
class Piece:
    """A prompt and some of its completions, which go into one row, by their numbers of tokens.

    Attributes:
        prompt: tokens of the prompt.
        lengths: tokens of each completion.
        indices: numbers of the completions in the step.
        group: number of the group in the step.
    """

    prompt: int
    lengths: tuple[int, ...]
    indices: tuple[int, ...]
    group: int = 0

    @cached_property
    def num_inputs(self) -> int:
        """Number of input tokens; the last token of a completion is not an input."""
        return self.prompt + self.num_scored - len(self.lengths) + self.lengths.count(0)

    @cached_property
    def num_scored(self) -> int:
        """Number of completion tokens."""
        return sum(self.lengths)

    @property
    def row_length(self) -> int:
        """Row length that the piece needs: its inputs, or its scored tokens where short completions have more."""
        return max(self.num_inputs, self.num_scored)

    @property
    def longest_sample(self) -> int:
        """Row length that the longest completion needs alone with the prompt."""
        longest = max(self.lengths, default=0)
        return max(self.prompt + max(longest - 1, 0), longest) if self.lengths else 0

    def select(self, chosen: Bool[np.ndarray, "n"]) -> "Piece":
        """Return the piece with the chosen completions alone."""
        lengths, indices = compress(self.lengths, chosen), compress(self.indices, chosen)
        return Piece(self.prompt, tuple(lengths), tuple(indices), self.group)

    def fitting(self, inputs: int, scored: int) -> Bool[np.ndarray, "n"]:
        """Choose completions that fit with the prompt into this number of free inputs and of scored tokens, the longest
        first.
        """
        inputs, chosen = inputs - self.prompt, np.zeros(len(self.lengths), bool)
        for index in np.argsort(np.negative(self.lengths), kind="stable").tolist():
            length = self.lengths[index]
            if max(length - 1, 0) <= inputs and length <= scored:
                inputs, scored = inputs - max(length - 1, 0), scored - length
                chosen[index] = True
        return chosen


Row = list[Piece]
"""The pieces of a row, in order."""


class Bins:
    """Rows of `capacity` tokens that are being filled. One array has their free tokens, so that the best row for a
    piece is searched among thousands at once.

    Attributes:
        rows: the pieces of each row.
    """

    def __init__(self, capacity: int):
        self.rows: list[Row] = []
        self._capacity, self._free = capacity, np.zeros((2, 64), np.int64)

    def add(self, piece: Piece, row: int) -> None:
        """Add `piece` to a row; the number after the last begins a new row."""
        if row == len(self.rows):
            if row == self._free.shape[1]:
                self._free = np.concatenate([self._free, np.zeros_like(self._free)], axis=1)
            self._free[:, row] = self._capacity
            self.rows.append([])
        self.rows[row].append(piece)
        self._free[:, row] -= piece.num_inputs, piece.num_scored

    def find(self, piece: Piece, split: bool) -> tuple[int, Bool[np.ndarray, "n"]]:
        """Return the row that the piece fits best, or with `split` the row with most space, and the completions to put
        there; else the number of a new row and the completions that fit into it.
        """
        inputs, scored = self._free[:, : len(self.rows)]
        least = np.minimum(inputs, scored)
        fits = (inputs >= piece.num_inputs) & (scored >= piece.num_scored)
        if fits.any():
            return int(np.where(fits, least, self._capacity + 1).argmin()), np.ones(len(piece.lengths), bool)
        if split and self.rows:
            emptiest = int(least.argmax())
            chosen = piece.fitting(int(inputs[emptiest]), int(scored[emptiest]))
            if np.array(piece.lengths)[chosen].sum() > piece.prompt:
                return emptiest, chosen
        return len(self.rows), piece.fitting(self._capacity, self._capacity)


def compile_cost(parameters: int, steps: int, fixed_shapes: bool) -> float:
    """Return the cost of another row length than the default in each step that uses it, in tokens of training: the time
    to compile its programs, divided among these steps. It is infinite with fixed shapes.

    Args:
        parameters: number of the model's parameters; a token costs 6 floating-point operations for each.
        steps: number of steps of the run.
        fixed_shapes: see `Decoder.fixed_shapes`.
    """
    if fixed_shapes:
        return math.inf
    return COMPILE_FLOPS / (6 * max(parameters, 1)) / max(OTHER_LENGTH_FRACTION * steps, 1)


def choose_row_length(
    groups: Sequence[Piece], row_length: int, max_tokens: int, compile_cost: float = 0.0
) -> tuple[int, list[Row]]:
    """Return the row length of least cost, and the rows.

    Args:
        groups: whole groups; they are split where necessary.
        row_length: default length, and the greatest unless a single completion with its prompt is longer.
        max_tokens: maximum number of tokens in a micro-batch.
        compile_cost: cost of another length than the default, in tokens; see `compile_cost`.
    """
    shortest = row_length_bucket(max(map(attrgetter("longest_sample"), groups), default=1))
    default = max(shortest, row_length_bucket(row_length))
    shorter = ROW_BUCKETS[bisect_left(ROW_BUCKETS, shortest) : bisect_left(ROW_BUCKETS, default)]
    least, best = math.inf, (default, list[Row]())
    for length, split in product((*shorter, default), (False, True)):
        rows = fill_bins(groups, length, split)
        cost = _cost(len(rows), length, max_tokens)
        if length != default:
            cost = RECOMPILE_MARGIN * cost + compile_cost
        if cost < least:
            least, best = cost, (length, rows)
    return best


def fill_bins(groups: Sequence[Piece], capacity: int, split: bool) -> list[Row]:
    """Fill rows of `capacity` by best fit, the largest group first (near-minimal: Johnson, 1973).

    Args:
        split: split groups also where they need not be, when completions longer than the prompt fill up a row.
    """
    bins = Bins(capacity)
    for piece in sorted(groups, key=attrgetter("row_length"), reverse=True):
        remaining = piece
        while remaining.lengths:
            row, chosen = bins.find(remaining, split)
            assert chosen.any(), f"no completion fits into {capacity} tokens"
            bins.add(remaining.select(chosen), row)
            remaining = remaining.select(~chosen)
    return bins.rows


def _cost(count: int, length: int, max_tokens: int) -> float:
    """Compute the cost in tokens, with padding of the last micro-batch, attention at this length, and calls."""
    rows_at_once = rows_per_micro_batch(count, length, max_tokens)
    cost = rows_at_once * length * (1 + length / ATTENTION_COST_LENGTH) + LAUNCH_COST_TOKENS
    return -(-count // rows_at_once) * cost


def rows_per_micro_batch(
    count: int, length: int, max_tokens: int, num_shards: int = 1, fixed_shapes: bool = False
) -> int:
    """Return the number of rows of a micro-batch: of `count` rows of `length` tokens, with at most `max_tokens` tokens,
    a positive multiple of `num_shards`. It has the least padding among a few sizes, so that few shapes occur.

    Args:
        fixed_shapes: choose among `micro_batch_sizes` alone.
    """
    most, needed = most_rows(length, max_tokens, num_shards) // num_shards, -(-count // num_shards)
    sizes = [most, -(-3 * most // 4), -(-most // 2), min(1 << max(needed - 1, 0).bit_length(), most)]
    if fixed_shapes:
        sizes = [rows // num_shards for rows in micro_batch_sizes(length, max_tokens, num_shards)]
    _, negative = min((-(-needed // size) * size, -size) for size in sizes)
    return -negative * num_shards


def micro_batch_sizes(length: int, max_tokens: int, num_shards: int = 1) -> list[int]:
    """Return the numbers of rows of `length` tokens that a micro-batch may have on an accelerator, the largest first:
    the most that `max_tokens` allow, and half of that where a device has four rows or more.

    >>> micro_batch_sizes(1024, 2048), micro_batch_sizes(1024, 8192, num_shards=2)
    ([2], [8, 4])
    """
    most = most_rows(length, max_tokens, num_shards) // num_shards
    return [size * num_shards for size in ((most,) if most < 4 else (most, -(-most // 2)))]


def most_rows(length: int, max_tokens: int, num_shards: int = 1) -> int:
    """Return the number of rows of `length` tokens in the largest micro-batch of at most `max_tokens` tokens."""
    return max(max_tokens // (length * num_shards), 1) * num_shards


def row_length_bucket(length: int) -> int:
    """Return the shortest row length that holds `length` tokens."""
    step, index = ROW_BUCKETS[-1], bisect_left(ROW_BUCKETS, length)
    return ROW_BUCKETS[index] if index < len(ROW_BUCKETS) else -(-length // step) * step
