"""The collector: whose tokens they are, which the model drew, which samples have halted."""

import numpy as np

from covey.sampling.collector import Collector
from covey.sampling.device import Chunk, Draws
from covey.sampling.scheduler import Sample
from covey.types import FinishReason

STOP = 9
A, B = Sample(0, 0), Sample(0, 1)


def chunk(tokens: list[list[int]], active: list[bool]) -> Chunk:
    """One row of tokens per slot, -1 where the slot was not active."""
    drawn = np.array(tokens, np.int32)
    logps = -drawn.astype(np.float32) / 3
    return Chunk(Draws(drawn, logps, logps / 2), (drawn >= 0).sum(1), np.array(active))


def test_tokens_of_all_chunks_are_joined_by_sample_wherever_it_lies() -> None:
    collector = Collector((STOP,), 8, masked=False)
    assert collector.collect({0: A, 1: B}, chunk([[1, 2], [3, 4]], [True, True])) == []
    assert collector.collect({1: A, 0: B}, chunk([[STOP, -1], [5, 6]], [False, False])) == [1, 0]
    first, second = collector.completion(A), collector.completion(B)
    assert (first.tokens.tolist(), first.finish) == ([1, 2, 5, 6], FinishReason.LENGTH)
    assert (second.tokens.tolist(), second.finish) == ([3, 4, STOP], FinishReason.STOP)
    assert first.mask is None
    assert [first.tokens.dtype, first.logps.dtype, first.sampler_logps.dtype] == [np.int32, np.float32, np.float32]


def test_token_ids_and_log_probs_stay_as_they_were_drawn() -> None:
    """The trap: ids on the way through floats."""
    ids = np.array([[2**24 + 1, 2**31 - 1]], np.int32)
    logps = np.array([[np.nextafter(np.float32(-1), 0), -1e-30]], np.float32)
    collector = Collector((), 2, masked=False)
    collector.collect({0: A}, Chunk(Draws(ids, logps, logps), np.array([2]), np.array([False])))
    got = collector.completion(A)
    assert got.tokens.tolist() == ids[0].tolist()
    assert got.logps.tobytes() == logps.tobytes()


def test_appended_tokens_are_masked_and_a_turn_tells_what_room_is_left() -> None:
    collector = Collector((STOP,), 8, masked=True)
    assert collector.collect({0: A}, chunk([[1, 7]], [False])) == [0]
    turn = collector.turn(A)
    assert (turn.sample, turn.tokens.tolist(), turn.room) == (A, [1, 7], 6)
    collector.append(A, np.array([4, 5], np.int32))
    assert collector.collect({0: A}, chunk([[3, STOP]], [False])) == [0]
    got = collector.completion(A)
    assert got.tokens.tolist() == [1, 7, 4, 5, 3, STOP]
    assert got.mask.tolist() == [True, True, False, False, True, True]
    assert got.logps[2:4].tolist() == [0, 0]
    assert (got.tokens.dtype, got.logps.dtype) == (np.int32, np.float32)
