"""Cache of a slot between the turns of a sample: responses are appended, and a slot is given up and taken again."""

from collections.abc import Mapping

import numpy as np

from covey.sampling.cache import LayerCache, SlotState
from covey.sampling.model_runner import ModelRunner

APPEND_SIZES = (16, 64, 256)
"""Numbers of tokens that are appended together, padding included."""


def append(runner: ModelRunner, pieces: Mapping[int, tuple[int, np.ndarray]]) -> None:
    """Append tokens, int32 [n], to the cache of each slot from a position on, piece by piece."""
    while pieces:
        sizes = {slot: append_size(len(tokens)) for slot, (_, tokens) in pieces.items()}
        for size in sorted(set(sizes.values())):
            alike = {slot: piece for slot, piece in pieces.items() if sizes[slot] == size}
            _append_pieces(runner, {slot: (start, tokens[:size]) for slot, (start, tokens) in alike.items()}, size)
        pieces = {
            slot: (start + sizes[slot], tokens[sizes[slot] :])
            for slot, (start, tokens) in pieces.items()
            if len(tokens) > sizes[slot]
        }


def _append_pieces(runner: ModelRunner, pieces: Mapping[int, tuple[int, np.ndarray]], size: int) -> None:
    number = len(runner.slots.token)
    padded, (slots, starts, counts) = np.zeros((number, size), np.int32), np.zeros((3, number), np.int32)
    for row, (slot, (start, piece)) in enumerate(pieces.items()):
        padded[row, : len(piece)] = piece
        slots[row], starts[row], counts[row] = slot, start, len(piece)
    arguments = slots, padded, starts, counts, np.int32(len(pieces))
    runner.cache = runner.programs.append(runner.params, runner.cache, *arguments)
    runner.stats.appended_tokens += int(counts.sum())


def append_size(count: int) -> int:
    """Return the size of the next piece of `count` tokens: the smallest that holds all, or the largest.

    >>> append_size(10), append_size(64), append_size(300)
    (16, 64, 256)
    """
    return next((size for size in APPEND_SIZES if size >= count), APPEND_SIZES[-1])


def swap_out(runner: ModelRunner, slot: int) -> list[LayerCache]:
    """Return a copy of the cache of a slot, which `swap_in` restores in any slot, bit for bit."""
    copy: list[LayerCache] = runner.programs.take(runner.cache, np.int32(slot))
    return copy


def swap_in(runner: ModelRunner, slot: int, cache: list[LayerCache]) -> None:
    """Restore the cache of a slot in a free one, before its response is appended. The whole must have its size of
    then.
    """
    runner.cache = runner.programs.put(runner.cache, cache, np.int32(slot))


def take_states(runner: ModelRunner, slot: int) -> list[LayerCache]:
    """Return a copy of the states of a slot, without keys and values, for `put_states`."""
    copy: list[LayerCache] = runner.programs.take(_states(runner), np.int32(slot))
    return copy


def put_states(runner: ModelRunner, slot: int, states: list[LayerCache]) -> None:
    """Restore the states of a slot, whose keys and values stay: those of later tokens are written over."""
    written = runner.programs.put(_states(runner), states, np.int32(slot))
    runner.cache = [new or old for new, old in zip(written, runner.cache, strict=True)]


def _states(runner: ModelRunner) -> list[LayerCache]:
    """Return the cache of layers with a state, and no blocks of the other layers."""
    return [blocks if any(isinstance(x, SlotState) for x in blocks) else [] for blocks in runner.cache]
