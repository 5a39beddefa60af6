"""The tokens of a sequence."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from covey.sampling.logits import SamplingParams
from covey.sampling.model_runner import Chunk
from covey.sampling.sequence import SampledTokens, Sequence
from covey.types import FinishReason

STOP = 9


def sampled(*ids: int) -> SampledTokens:
    tokens = np.array(ids, np.int32)
    logps = -tokens.astype(np.float32) / 3
    return SampledTokens(tokens, logps, logps / 2)


def a_sequence(responder: Any = None) -> Sequence:
    return Sequence(np.zeros(3, np.int32), 64, SamplingParams(), responder)


def test_a_chunk_gives_each_slot_the_tokens_that_it_drew() -> None:
    tokens = SampledTokens(*(np.array([[1, 2], [3, -1]], dtype) for dtype in (np.int32, np.float32, np.float32)))
    chunk = Chunk(tokens, np.array([2, 1]), np.array([True, False]))
    assert [chunk.of(slot).ids.tolist() for slot in range(2)] == [[1, 2], [3]]


def test_a_sequence_joins_its_tokens_bit_for_bit() -> None:
    """The trap: ids on the way through floats."""
    stopped, cut = a_sequence(), a_sequence()
    logps = np.array([np.nextafter(np.float32(-1), 0), -1e-30], np.float32)
    cut.extend(sampled(1))
    cut.extend(SampledTokens(np.array([2**24 + 1, 2**31 - 1], np.int32), logps, logps))
    stopped.extend(sampled(3, STOP))
    first, second = (one.completion((STOP,)) for one in (cut, stopped))
    assert (first.tokens.tolist(), first.finish, first.mask) == ([1, 2**24 + 1, 2**31 - 1], FinishReason.LENGTH, None)
    assert first.logps[1:].tobytes() == logps.tobytes()
    assert [first.tokens.dtype, first.logps.dtype, first.sampler_logps.dtype] == [np.int32, np.float32, np.float32]
    assert second.finish == FinishReason.STOP


def test_appended_tokens_are_masked_and_a_branch_counts_what_it_kept() -> None:
    resumed = a_sequence(SimpleNamespace())
    resumed.extend(sampled(1, 7))
    resumed.append(np.array([4, 5], np.int32))
    assert resumed.length == 3 + 4
    resumed.branch(2)
    resumed.extend(sampled(3, STOP))
    assert resumed.length == 2 + 2
    completion = resumed.completion((STOP,))
    assert completion.tokens.tolist() == [1, 7, 4, 5, 3, STOP]
    assert completion.mask is not None
    assert completion.mask.tolist() == [True, True, False, False, True, True]
    assert completion.logps[2:4].tolist() == [0, 0]
    assert completion.branches == ((4, 2),)
