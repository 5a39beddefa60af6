"""The collector: whose tokens they are, which samples are finished, which wait for the tool."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from covey.sampling.collector import Collector
from covey.sampling.device import Chunk, Draws
from covey.sampling.scheduler import Sample
from covey.types import FinishReason

STOP, CALL = 9, 7
A, B = Sample(0, 0), Sample(0, 1)


def chunk(tokens: list[list[int]], active: list[bool]) -> Chunk:
    """One row of tokens per slot, -1 where the slot was not active."""
    drawn = np.array(tokens, np.int32)
    logps = -drawn.astype(np.float32) / 3
    return Chunk(Draws(drawn, logps, logps / 2), (drawn >= 0).sum(1), np.array(active))


def tool(response: list[int]) -> Any:
    markers = SimpleNamespace(end=CALL)
    return SimpleNamespace(markers=markers, respond=lambda tokens: np.array(response, np.int32))


def test_tokens_of_all_chunks_are_joined_by_sample_wherever_it_lies() -> None:
    collector = Collector((STOP,), 8, None)
    assert collector.collect({0: A, 1: B}, chunk([[1, 2], [3, 4]], [True, True])) == ([], {})
    assert collector.collect({1: A, 0: B}, chunk([[STOP, -1], [5, 6]], [False, False])) == ([1, 0], {})
    first, second = collector.completion(A), collector.completion(B)
    assert (first.tokens.tolist(), first.finish) == ([1, 2, 5, 6], FinishReason.LENGTH)
    assert (second.tokens.tolist(), second.finish) == ([3, 4, STOP], FinishReason.STOP)
    assert first.mask is None
    assert [first.tokens.dtype, first.logps.dtype, first.sampler_logps.dtype] == [np.int32, np.float32, np.float32]


def test_token_ids_and_log_probs_stay_as_they_were_drawn() -> None:
    """The trap: ids on the way through floats."""
    ids = np.array([[2**24 + 1, 2**31 - 1]], np.int32)
    logps = np.array([[np.nextafter(np.float32(-1), 0), -1e-30]], np.float32)
    collector = Collector((), 2, None)
    collector.collect({0: A}, Chunk(Draws(ids, logps, logps), np.array([2]), np.array([False])))
    got = collector.completion(A)
    assert got.tokens.tolist() == ids[0].tolist()
    assert got.logps.tobytes() == logps.tobytes()


def test_a_call_pauses_for_its_response_which_is_masked() -> None:
    collector = Collector((STOP,), 8, tool([4, 5]))
    finished, responses = collector.collect({0: A}, chunk([[1, CALL]], [False]))
    assert finished == []
    assert responses[0].tolist() == [4, 5]
    assert collector.collect({0: A}, chunk([[4, 5, STOP]], [False])) == ([0], {})
    assert collector.completion(A).mask.tolist() == [True, True, False, False, True]


def test_a_call_at_the_limit_ends_the_completion_and_a_cut_response_ends_the_mask() -> None:
    collector = Collector((STOP,), 3, tool([4, 5]))
    assert collector.collect({0: A, 1: B}, chunk([[1, 1, CALL], [1, CALL, -1]], [False, False]))[0] == [0]
    assert collector.collect({1: B}, chunk([[-1], [4]], [True, False])) == ([1], {})
    assert collector.completion(A).mask.tolist() == [True] * 3
    assert collector.completion(B).mask.tolist() == [True, True, False]
