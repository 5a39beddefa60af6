"""Assignment of completions to rows: bin-packing in which a prompt is repeated in each row that has some of its group.

A group stays whole where it fits. One that does not is split, and the remainder goes where there is room. The row
length is the one of least total cost: padding, repeated prompts, rows that fill up the last micro-batch, attention, and
the programs that another row length needs. The result depends on the lengths and the run's settings alone, so that a
repeated step is packed the same way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from covey.sampling.scheduler import power_of_two
from covey.types import Branch

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
    """A prompt and those of its completions that go into one row; `indices` number the completions in the step.

    `branches` are those of each completion; None where no completion can have any.
    """

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    indices: tuple[int, ...]
    branches: tuple[tuple[Branch, ...], ...] | None = None

    @property
    def num_inputs(self) -> int:
        """Number of input tokens; the last of a completion is not an input."""
        return len(self.prompt) + sum(max(len(c) - 1, 0) for c in self.completions)

    @property
    def num_scored(self) -> int:
        """Number of completion tokens."""
        return sum(map(len, self.completions))

    @property
    def row_length(self) -> int:
        """Row length it needs: its inputs, or its scored tokens where many short completions make those more."""
        return max(self.num_inputs, self.num_scored)

    def select(self, indices: Sequence[int]) -> "Piece":
        """Return the piece with the completions at `indices` alone."""
        branches = self.branches and tuple(self.branches[i] for i in indices)
        completions = tuple(self.completions[i] for i in indices)
        return Piece(self.prompt, completions, tuple(self.indices[i] for i in indices), branches)


@dataclass
class Bin:
    """A row that is being filled."""

    capacity: int
    pieces: list[Piece] = field(default_factory=list)
    num_inputs: int = 0
    num_scored: int = 0

    @property
    def free(self) -> int:
        return self.capacity - max(self.num_inputs, self.num_scored)

    def fits(self, inputs: int, scored: int) -> bool:
        return self.num_inputs + inputs <= self.capacity and self.num_scored + scored <= self.capacity

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.num_inputs, self.num_scored = self.num_inputs + piece.num_inputs, self.num_scored + piece.num_scored

    def select_fitting(self, piece: Piece) -> list[int]:
        """Return indices of the completions that fit together with their prompt, the longest tried first."""
        inputs, scored, indices = len(piece.prompt), 0, []
        for index in sorted(range(len(piece.completions)), key=lambda i: -len(piece.completions[i])):
            length = len(piece.completions[index])
            if self.fits(inputs + max(length - 1, 0), scored + length):
                inputs, scored = inputs + max(length - 1, 0), scored + length
                indices.append(index)
        return sorted(indices)


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
) -> tuple[int, list[Bin]]:
    """Return the row length that costs least, and the rows.

    Args:
        groups: whole groups; they are split where necessary.
        row_length: default length, and the greatest unless a single completion with its prompt is longer.
        max_tokens: maximum number of tokens in a micro-batch.
        compile_cost: cost of another length than the default, in tokens; see `compile_cost`.
    """
    longest_sample = max((p.select([i]).row_length for p in groups for i in range(len(p.completions))), default=1)
    shortest = row_length_bucket(longest_sample)
    default = max(shortest, row_length_bucket(row_length))

    def cost(count: int, length: int) -> float:
        tokens = _cost(count, length, max_tokens)
        return tokens if length == default else RECOMPILE_MARGIN * tokens + compile_cost

    candidates = [
        (cost(len(bins), length), length, bins)
        for length in sorted({default, *(b for b in ROW_BUCKETS if shortest <= b < default)})
        for bins in (fill_bins(groups, length, split) for split in (False, True))
    ]
    _, length, bins = min(candidates, key=lambda candidate: candidate[0])
    return length, bins


def fill_bins(groups: Sequence[Piece], capacity: int, split: bool) -> list[Bin]:
    """Fill rows of `capacity` by best fit, the largest group first (near-minimal: Johnson, 1973).

    Args:
        split: split groups also where they need not be, when completions longer than the prompt fill up a row.
    """
    bins: list[Bin] = []
    for piece in sorted(groups, key=lambda p: -p.row_length):
        remaining = piece
        while remaining.completions:
            target, chosen = _find_bin(bins, remaining, split)
            if target is None:
                target = Bin(capacity)
                bins.append(target)
                chosen = target.select_fitting(remaining)
                assert chosen, f"no completion fits into {capacity} tokens"
            target.add(remaining.select(chosen))
            remaining = remaining.select([i for i in range(len(remaining.completions)) if i not in chosen])
    return bins


def _find_bin(bins: Sequence[Bin], piece: Piece, split: bool) -> tuple[Bin | None, list[int]]:
    """Return the row the piece fits best, or with `split` the one with most space, and the completions to put there."""
    inputs, scored = piece.num_inputs, piece.num_scored
    if fitting := [b for b in bins if b.fits(inputs, scored)]:
        return min(fitting, key=lambda b: b.free), list(range(len(piece.completions)))
    if split and bins:
        emptiest = max(bins, key=lambda b: b.free)
        chosen = emptiest.select_fitting(piece)
        if piece.select(chosen).num_scored > len(piece.prompt):
            return emptiest, chosen
    return None, []


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
