"""The tokens of a sequence."""

import numpy as np

from covey.sampling.logits import SamplingParams
from covey.sampling.model_runner import Chunk
from covey.sampling.sequence import Ending, SampledTokens, Sequence, StopCondition, StopIds
from covey.types import FinishReason

STOP = 9


def sampled(*ids: int) -> SampledTokens:
    tokens = np.array(ids, np.int32)
    logps = -tokens.astype(np.float32) / 3
    return SampledTokens(tokens, logps, logps / 2)


def a_sequence(*conditions: StopCondition) -> Sequence:
    return Sequence(np.zeros(3, np.int32), 64, SamplingParams(), [StopIds([STOP]), *conditions])


def test_a_chunk_gives_each_slot_the_tokens_that_it_drew() -> None:
    tokens = SampledTokens(*(np.array([[1, 2], [3, -1]], dtype) for dtype in (np.int32, np.float32, np.float32)))
    chunk = Chunk(tokens, np.array([2, 1]), np.array([True, False]))
    assert [chunk.of(slot).ids.tolist() for slot in range(2)] == [[1, 2], [3]]


def test_a_sequence_joins_its_tokens_bit_for_bit() -> None:
    """The trap: ids on the way through floats."""
    stopped, cut = a_sequence(), a_sequence()
    logps = np.array([np.nextafter(np.float32(-1), 0), -1e-30], np.float32)
    cut.extend(sampled(1))
    cut.extend(SampledTokens(np.array([2**24 + 1, 2**31 - 1], np.int32), logps, logps), is_active=False)
    stopped.extend(sampled(3, STOP), is_active=False)
    first, second = (one.completion() for one in (cut, stopped))
    assert (first.tokens.tolist(), first.finish, first.mask) == ([1, 2**24 + 1, 2**31 - 1], FinishReason.LENGTH, None)
    assert first.logps[1:].tobytes() == logps.tobytes()
    assert [first.tokens.dtype, first.logps.dtype, first.sampler_logps.dtype] == [np.int32, np.float32, np.float32]
    assert second.finish == FinishReason.STOP


def test_the_first_end_of_all_conditions_counts_and_what_was_drawn_after_it_is_dropped() -> None:
    """The trap: tokens of the same chunk, and of a turn before."""

    def third(tokens: np.ndarray, new: int) -> Ending | None:
        return Ending(3, FinishReason.STOP_STRING, 6) if len(tokens) >= 3 else None

    one = a_sequence(third)
    assert (one.extend(sampled(1, 2)), one.ending) == (2, None)
    assert one.extend(sampled(4, 5, STOP), is_active=False) == 1
    assert one.completion().tokens.tolist() == [1, 2, 4]
    assert one.completion().finish is FinishReason.STOP_STRING
    assert one.completion().with_text(lambda tokens: "ab</end>"[: 8 * len(tokens)]).text == "ab"
