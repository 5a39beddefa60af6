"""Assignment of completions to rows: bin-packing in which a prompt is repeated in each row that has some of its group.

A group stays whole where it fits. One that does not is split, and the remainder goes where there is room. The row
length is the one of least total cost: padding, repeated prompts, rows that fill up the last micro-batch, and attention.
The result depends on the lengths alone, so that a repeated step is packed the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from covey.sampling.lengths import power_of_two

ROW_BUCKETS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024)
"""Row lengths; above the last, row lengths are its multiples."""
ATTENTION = 2048
"""Row length at which attention costs as much as the rest of a layer (measured at SmolLM2's width, on CPU)."""
LAUNCH_COST_TOKENS = 200
"""Fixed cost of a micro-batch, in tokens (measured like ATTENTION)."""
MARGIN = 1.08
"""Factor by which the usual row length may cost more than another: each length is a program to compile."""


@dataclass(frozen=True)
class Piece:
    """A prompt and those of its completions that go into one row; `numbers` index the completions of the step."""

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    numbers: tuple[int, ...]

    @property
    def inputs(self) -> int:
        """Number of input tokens; the last of a completion is not an input."""
        return len(self.prompt) + sum(max(len(c) - 1, 0) for c in self.completions)

    @property
    def scored(self) -> int:
        """Number of completion tokens."""
        return sum(map(len, self.completions))

    @property
    def size(self) -> int:
        """Row length it needs: its inputs, or its scored tokens where many short completions make those more."""
        return max(self.inputs, self.scored)

    def only(self, places: Sequence[int]) -> "Piece":
        """Return the piece with the completions at `places` alone."""
        return Piece(self.prompt, tuple(self.completions[i] for i in places), tuple(self.numbers[i] for i in places))


@dataclass
class Bin:
    """A row that is being filled."""

    capacity: int
    pieces: list[Piece] = field(default_factory=list)
    inputs: int = 0
    scored: int = 0

    @property
    def room(self) -> int:
        return self.capacity - max(self.inputs, self.scored)

    def takes(self, inputs: int, scored: int) -> bool:
        return self.inputs + inputs <= self.capacity and self.scored + scored <= self.capacity

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.inputs, self.scored = self.inputs + piece.inputs, self.scored + piece.scored

    def share_of(self, piece: Piece) -> list[int]:
        """Return indices of the completions that fit together with their prompt, the longest tried first."""
        inputs, scored, places = len(piece.prompt), 0, []
        for place in sorted(range(len(piece.completions)), key=lambda i: -len(piece.completions[i])):
            length = len(piece.completions[place])
            if self.takes(inputs + max(length - 1, 0), scored + length):
                inputs, scored = inputs + max(length - 1, 0), scored + length
                places.append(place)
        return sorted(places)


def cheapest(groups: Sequence[Piece], row_length: int, micro_batch: int) -> tuple[int, list[Bin]]:
    """Return the row length that costs least, and the rows.

    Args:
        groups: whole groups; they are split where necessary.
        row_length: usual length, and the greatest unless a single completion with its prompt is longer.
        micro_batch: tokens that will be computed at once.
    """
    least = bucket(max((p.only([i]).size for p in groups for i in range(len(p.completions))), default=1))
    usual = max(least, bucket(row_length))
    found = [
        (_cost(len(bins), length, micro_batch) * (1 if length == usual else MARGIN), length, bins)
        for length in sorted({usual, *(b for b in ROW_BUCKETS if least <= b < usual)})
        for bins in (filled(groups, length, apart) for apart in (False, True))
    ]
    _, length, bins = min(found, key=lambda way: way[0])
    return length, bins


def filled(groups: Sequence[Piece], capacity: int, apart: bool) -> list[Bin]:
    """Fill rows of `capacity` by best fit, the largest group first (near-minimal: Johnson, 1973).

    Args:
        apart: split groups also where they need not be, when completions longer than the prompt fill up a row.
    """
    bins: list[Bin] = []
    for piece in sorted(groups, key=lambda p: -p.size):
        left = piece
        while left.completions:
            place, taken = _place(bins, left, apart)
            if place is None:
                place = Bin(capacity)
                bins.append(place)
                taken = place.share_of(left)
                assert taken, f"no completion fits into {capacity} tokens"
            place.add(left.only(taken))
            left = left.only([i for i in range(len(left.completions)) if i not in taken])
    return bins


def _place(bins: Sequence[Bin], piece: Piece, apart: bool) -> tuple[Bin | None, list[int]]:
    """Return the row the piece fits best, or with `apart` the one with most room, and the completions to put there."""
    inputs, scored = piece.inputs, piece.scored
    if whole := [b for b in bins if b.takes(inputs, scored)]:
        return min(whole, key=lambda b: b.room), list(range(len(piece.completions)))
    if apart and bins:
        widest = max(bins, key=lambda b: b.room)
        taken = widest.share_of(piece)
        if piece.only(taken).scored > len(piece.prompt):
            return widest, taken
    return None, []


def _cost(count: int, length: int, micro_batch: int) -> float:
    """Compute the cost in tokens: padding of the last micro-batch, attention at this length and calls included."""
    together = rows_together(count, length, micro_batch)
    return -(-count // together) * (together * length * (1 + length / ATTENTION) + LAUNCH_COST_TOKENS)


def rows_together(count: int, length: int, micro_batch: int, ways: int = 1) -> int:
    """Return how many of `count` rows of `length` tokens make a micro-batch of at most `micro_batch` tokens: a positive
    multiple of `ways`. It is the one of least padding among a few sizes, so that few shapes occur.
    """
    most, needed = max(micro_batch // (length * ways), 1), -(-count // ways)
    sizes = {most, -(-3 * most // 4), -(-most // 2), power_of_two(needed)}
    return min((s for s in sizes if s <= most), key=lambda s: (-(-needed // s) * s, -s)) * ways


def bucket(length: int) -> int:
    """Return the shortest row length that holds `length` tokens."""
    step = ROW_BUCKETS[-1]
    return next((b for b in ROW_BUCKETS if b >= length), -(-length // step) * step)
