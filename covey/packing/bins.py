"""Assignment of completions to rows: bin-packing in which a prompt is repeated in each row that has some of its group.

A group stays whole where it fits. One that does not is split, and the remainder goes where there is room. The row
length is the one of least total cost: padding, repeated prompts, rows that fill up the last micro-batch, attention, and
the programs that another row length needs. The result depends on the lengths and the run's settings alone, so that a
repeated step is packed the same way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int

from covey.sampling.scheduler import power_of_two

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
    """A prompt and those of its completions that go into one row, by their numbers of tokens.

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
        """Number of input tokens; the last of a completion is not an input."""
        return self.prompt + sum(max(length - 1, 0) for length in self.lengths)

    @cached_property
    def num_scored(self) -> int:
        """Number of completion tokens."""
        return sum(self.lengths)

    @property
    def row_length(self) -> int:
        """Row length it needs: its inputs, or its scored tokens where many short completions make those more."""
        return max(self.num_inputs, self.num_scored)

    @property
    def longest_sample(self) -> int:
        """Row length that its longest completion needs alone with the prompt."""
        return max((max(self.prompt + length - 1, self.prompt, length) for length in self.lengths), default=0)

    def select(self, indices: Sequence[int]) -> "Piece":
        """Return the piece with the completions at `indices` alone."""
        lengths, numbers = (tuple(each[i] for i in indices) for each in (self.lengths, self.indices))
        return Piece(self.prompt, lengths, numbers, self.group)

    def select_fitting(self, inputs: int, scored: int) -> list[int]:
        """Return indices of the completions that fit with the prompt into so many free inputs and scored tokens, the
        longest tried first.
        """
        inputs, indices = inputs - self.prompt, []
        for index in sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i]):
            length = self.lengths[index]
            if max(length - 1, 0) <= inputs and length <= scored:
                inputs, scored = inputs - max(length - 1, 0), scored - length
                indices.append(index)
        return sorted(indices)


Row = list[Piece]
"""The pieces of a row, in order."""


class Bins:
    """Rows of `capacity` tokens that are being filled. Their free tokens stand in one array, in which the best row for
    a piece is found among thousands at once.

    Attributes:
        rows: the pieces of each row.
    """

    def __init__(self, capacity: int):
        self.rows: list[Row] = []
        self._capacity, self._free_tokens = capacity, np.zeros((2, 64), np.int64)

    @property
    def _free(self) -> Int[np.ndarray, "2 bins"]:
        """Free input tokens and free scored tokens of each row."""
        return self._free_tokens[:, : len(self.rows)]

    def add(self, piece: Piece, row: int | None) -> None:
        """Add `piece` to a row; None begins a new one."""
        if row is None:
            row = len(self.rows)
            if row == self._free_tokens.shape[1]:
                self._free_tokens = np.concatenate([self._free_tokens, np.zeros_like(self._free_tokens)], axis=1)
            self._free_tokens[:, row] = self._capacity
            self.rows.append([])
        self.rows[row].append(piece)
        self._free_tokens[:, row] -= piece.num_inputs, piece.num_scored

    def find(self, piece: Piece, split: bool) -> tuple[int | None, list[int]]:
        """Return the row that the piece fits best, or with `split` the one with most space, and the indices of the
        completions to put there; None and those that fit into a new row where there is none.
        """
        inputs, scored = self._free
        least = np.minimum(inputs, scored)
        fits = (inputs >= piece.num_inputs) & (scored >= piece.num_scored)
        if fits.any():
            return int(np.where(fits, least, self._capacity + 1).argmin()), list(range(len(piece.lengths)))
        if split and self.rows:
            emptiest = int(least.argmax())
            chosen = piece.select_fitting(int(inputs[emptiest]), int(scored[emptiest]))
            if sum(piece.lengths[i] for i in chosen) > piece.prompt:
                return emptiest, chosen
        return None, piece.select_fitting(self._capacity, self._capacity)


def compile_cost(parameters: int, steps: int, fixed_shapes: bool) -> float:
    """Return the cost of another row length than the default in each of the steps that use it, in tokens of training:
    the time to compile its programs, divided among those steps. It is infinite with fixed shapes.

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
    """Return the row length that costs least, and the rows.

    Args:
        groups: whole groups; they are split where necessary.
        row_length: default length, and the greatest unless a single completion with its prompt is longer.
        max_tokens: maximum number of tokens in a micro-batch.
        compile_cost: cost of another length than the default, in tokens; see `compile_cost`.
    """
    shortest = row_length_bucket(max((piece.longest_sample for piece in groups if piece.lengths), default=1))
    default = max(shortest, row_length_bucket(row_length))

    def cost(count: int, length: int) -> float:
        tokens = _cost(count, length, max_tokens)
        return tokens if length == default else RECOMPILE_MARGIN * tokens + compile_cost

    candidates = [
        (cost(len(rows), length), length, rows)
        for length in sorted({default, *(b for b in ROW_BUCKETS if shortest <= b < default)})
        for rows in (fill_bins(groups, length, split) for split in (False, True))
    ]
    _, length, rows = min(candidates, key=lambda candidate: candidate[0])
    return length, rows


def fill_bins(groups: Sequence[Piece], capacity: int, split: bool) -> list[Row]:
    """Fill rows of `capacity` by best fit, the largest group first (near-minimal: Johnson, 1973).

    Args:
        split: split groups also where they need not be, when completions longer than the prompt fill up a row.
    """
    bins = Bins(capacity)
    for piece in sorted(groups, key=lambda p: -p.row_length):
        remaining = piece
        while remaining.lengths:
            row, chosen = bins.find(remaining, split)
            assert chosen, f"no completion fits into {capacity} tokens"
            bins.add(remaining.select(chosen), row)
            taken = set(chosen)
            remaining = remaining.select([i for i in range(len(remaining.lengths)) if i not in taken])
    return bins.rows


def _cost(count: int, length: int, max_tokens: int) -> float:
    """Compute the cost in tokens: padding of the last micro-batch, attention at this length and calls included."""
    rows_at_once = rows_per_micro_batch(count, length, max_tokens)
    return -(-count // rows_at_once) * (
        rows_at_once * length * (1 + length / ATTENTION_COST_LENGTH) + LAUNCH_COST_TOKENS
    )


def rows_per_micro_batch(
    count: int, length: int, max_tokens: int, num_shards: int = 1, fixed_shapes: bool = False
) -> int:
    """Return the number of rows of a micro-batch: of `count` rows of `length` tokens, with at most `max_tokens` tokens,
    a positive multiple of `num_shards`. It is the one of least padding among a few sizes, so that few shapes occur.

    Args:
        fixed_shapes: choose among `micro_batch_sizes` alone.
    """
    most, needed = most_rows(length, max_tokens, num_shards) // num_shards, -(-count // num_shards)
    sizes = {most, -(-3 * most // 4), -(-most // 2), power_of_two(needed)}
    if fixed_shapes:
        sizes = {rows // num_shards for rows in micro_batch_sizes(length, max_tokens, num_shards)}
    return min((s for s in sizes if s <= most), key=lambda s: (-(-needed // s) * s, -s)) * num_shards


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
    step = ROW_BUCKETS[-1]
    return next((b for b in ROW_BUCKETS if b >= length), -(-length // step) * step)
