"""Turns of samples: waiting for responses, appended tokens and branches, and requests with responders."""

import random
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from covey.config.schema import RolloutConfig
from covey.sampling.engine import Engine, Finished, Request, generate
from covey.sampling.logits import SamplingParams
from covey.sampling.responder import NewBranch, Response, Turn
from covey.sampling.scheduler import BatchRequirements, Sample
from covey.sampling.sequence import Ending, StopIds
from covey.types import FinishReason
from covey_envs.turns import TurnSequence, WaitingSamples
from tests.sampling import test_stop_strings as stop_strings
from tests.sampling.test_requests import PROMPT, finish, fresh, requests, same
from tests.sampling.test_scheduler import fitted
from tests.sampling.test_sequence import STOP, sampled

RESPONDER: Any = SimpleNamespace(turn_limit=None)


@pytest.fixture
def engine() -> Engine:
    return fresh(fixed_shapes=True)


def test_a_sample_that_waits_keeps_its_slot_until_others_need_it() -> None:
    scheduler = fitted([5, 5, 5], [1, 1, 1], RolloutConfig(slots=2), requirements=BatchRequirements(None, True, 3))
    waiting = WaitingSamples(scheduler)
    scheduler.next_prefill()
    first, second = [admission.sample for admission in scheduler.admit()]
    scheduler.update(np.ones(2, int))
    waiting.pause(first)
    assert not scheduler.can_admit
    assert waiting.swap_out() == {0: first}
    assert scheduler.can_admit
    (third,) = [admission.sample for admission in scheduler.admit()]
    assert scheduler.running == {0: third, 1: second}
    waiting.resume(first, 7)
    assert waiting.swap_out() == waiting.swap_in() == {}  # nobody waits
    waiting.pause(second)
    assert waiting.swap_out() == {1: second}
    assert waiting.swap_in() == {1: first}
    assert scheduler.lengths[1] == 5 + 7
    assert scheduler.active == {0: third, 1: first}
    waiting.finish(second)
    assert scheduler.num_live == 2


def test_no_more_samples_begin_than_may_be_live() -> None:
    scheduler = fitted([5] * 4, [1] * 4, RolloutConfig(slots=2), requirements=BatchRequirements(None, True, 2))
    waiting = WaitingSamples(scheduler)
    scheduler.next_prefill()
    for admission in scheduler.admit():
        waiting.pause(admission.sample)
    assert waiting.stalled
    assert waiting.swap_out() == {}


def test_waiting_samples_leave_and_return_in_the_order_of_requests() -> None:
    """Not in that of the clock: responses that come together in another order change nothing."""
    scheduler = fitted([5] * 4, [1] * 4, RolloutConfig(slots=2), requirements=BatchRequirements(None, True, 4))
    waiting = WaitingSamples(scheduler)
    scheduler.next_prefill()
    for _ in range(2):
        for admission in scheduler.admit():
            waiting.pause(admission.sample)
        waiting.swap_out()
    assert list(scheduler.swapped) == [Sample(1, 0), Sample(0, 0)]
    for request in (1, 0):
        waiting.resume(Sample(request, 0), 2)
    assert waiting.swap_out() == {1: Sample(3, 0), 0: Sample(2, 0)}
    assert waiting.swap_in() == {0: Sample(0, 0), 1: Sample(1, 0)}


def test_a_cancelled_request_leaves_no_sample_behind() -> None:
    scheduler = fitted([5] * 3, [2] * 3, RolloutConfig(slots=2), requirements=BatchRequirements(None, True, 4))
    waiting = WaitingSamples(scheduler)
    scheduler.next_prefill()
    for admission in scheduler.admit():
        waiting.pause(admission.sample)
    waiting.swap_out()
    waiting.resume(Sample(0, 1), 2)
    for request in (0, 2):
        assert scheduler.cancel(request) == []
        waiting.drop(request)
    assert [admission.sample for admission in scheduler.admit()] == [Sample(1, 0), Sample(1, 1)]
    assert scheduler.cancel(1) == [0, 1]
    assert not scheduler.unfinished


def test_appended_tokens_are_masked_and_a_branch_counts_what_it_kept() -> None:
    resumed = TurnSequence(RESPONDER, np.zeros(3, np.int32), 64, SamplingParams(), [StopIds([STOP])])
    resumed.extend(sampled(1, 7))
    resumed.append(np.array([4, 5], np.int32))
    assert resumed.length == 3 + 4
    resumed.branch(2)
    resumed.extend(sampled(3, STOP))
    assert resumed.length == 2 + 2
    completion = resumed.completion()
    assert completion.tokens.tolist() == [1, 7, 4, 5, 3, STOP]
    assert completion.mask is not None
    assert completion.mask.tolist() == [True, True, False, False, True, True]
    assert completion.logps[2:4].tolist() == [0, 0]
    assert completion.branches == ((4, 2),)


def test_a_turn_drops_what_was_drawn_after_its_end() -> None:
    """The trap: tokens of the same chunk, and of a turn before."""

    def third(tokens: np.ndarray, new: int) -> Ending | None:
        return Ending(3, FinishReason.STOP_STRING, 6) if len(tokens) >= 3 else None

    turns = TurnSequence(RESPONDER, np.zeros(3, np.int32), 64, SamplingParams(), [third])
    turns.extend(sampled(1, 2, 3, 4))
    assert turns.take_response(np.array([8, 8], np.int32)) == 2
    assert (turns.extend(sampled(5, 6)), turns.ending) == (2, None)
    assert turns.extend(sampled(7, 7)) == 1
    assert turns.completion().tokens.tolist() == [1, 2, 3, 8, 8, 5, 6, 7]


def step_until_stalled(engine: Engine) -> None:
    """Step until all samples wait for a response."""
    engine.step()
    while engine.turns is None or not engine.turns.stalled:
        engine.step()


class Echo:
    """A responder that appends the turn's last token, later if it is asynchronous; the second turn is the last one."""

    pause_id, turn_limit, max_num_seqs, answer_lag = None, 3, None, None

    def __init__(self, is_async: bool = False):
        self.is_async, self.futures = is_async, list[tuple[Future[Response], Response]]()

    def answer(self, turn: Turn) -> Any:
        response = turn.tokens[-1:] if len(turn.tokens) < 4 else None
        if not self.is_async:
            return response
        self.futures.append((Future(), response))
        return self.futures[-1][0]

    def release(self, count: int | None = None) -> None:
        """Let so many responses come; by default all."""
        for future, response in self.futures[:count]:
            future.set_result(response)
        del self.futures[:count]


def test_requests_with_different_responders_wait_for_each_other(engine: Engine) -> None:
    plain, answered = Request(PROMPT, 2), Request(PROMPT, 2, responder=Echo())
    asking = replace(answered, responder=(echo := Echo(is_async=True)))
    ids = [engine.add(one) for one in (plain, asking, answered)]
    ended: dict[tuple[int, int], Finished] = {}
    while engine.unfinished:
        ended |= {(one.request, one.number): one for one in engine.step()}
        echo.release()
    assert list(ended) == sorted(ended, key=lambda key: (ids.index(key[0]), list(ended).index(key)))
    alone = generate(engine, [plain])[0]
    for n in range(2):
        same(ended[ids[0], n].completion, alone[n])
        same(ended[ids[1], n].completion, ended[ids[2], n].completion)
        assert ended[ids[2], n].completion.mask is not None


class Rewriter(Echo):
    """An echo that rewrites the history of every second sample, with more samples begun than there are slots."""

    max_num_seqs = 7

    def answer(self, turn: Turn) -> Any:
        if len(turn.tokens) < 4 and turn.sample.number % 2:
            branch = NewBranch(3, turn.tokens[-2:])
            self.futures.append((Future(), branch))
            return self.futures[-1][0] if self.is_async else branch
        return super().answer(turn)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_engine_that_runs_ahead_draws_the_same_behind_responses(is_async: bool) -> None:
    """Also with a request that is cancelled under way, and answers that come in another order each time."""
    drawn = []
    for runs_ahead in (False, True):
        engine, rewriter, rng = fresh(fixed_shapes=True, runs_ahead=runs_ahead), Rewriter(is_async), random.Random(3)
        for index, request in enumerate(requests(5, 4)):
            engine.add(replace(request, prompt=np.resize(request.prompt, 9), id=index, responder=rewriter))
        ended: dict[tuple[int, int], Finished] = {}
        while engine.unfinished:
            ended |= {(one.request, one.number): one for one in engine.step()}
            if 1 in engine.sequences and len(ended) > 3:
                engine.cancel(1)
            rng.shuffle(rewriter.futures)
            rewriter.release(rng.randrange(1, 5))
        assert not engine.runner.slots.active.any()
        drawn.append({key: one for key, one in ended.items() if key[0] != 1})
    assert drawn[0].keys() == drawn[1].keys()
    assert any(one.completion.branches for one in drawn[0].values())
    for key, one in drawn[0].items():
        same(one.completion, drawn[1][key].completion)


def test_a_cancelled_request_waits_for_no_response(engine: Engine) -> None:
    echo = Echo(is_async=True)
    asking, other = (engine.add(Request(PROMPT, 2, index, responder=echo)) for index in range(2))
    step_until_stalled(engine)
    engine.cancel(asking)
    echo.release()
    while engine.unfinished:
        assert all(one.request == other for one in engine.step())
        echo.release()


def test_what_a_responder_raises_cancels_its_request_alone(engine: Engine) -> None:
    echo = Echo(is_async=True)
    failing, other = (engine.add(Request(PROMPT, 2, index, responder=echo)) for index in range(2))
    step_until_stalled(engine)
    echo.futures.pop(0)[0].set_exception(ConnectionError("gone"))
    with pytest.raises(ConnectionError):
        engine.step()
    assert set(engine.sequences) == {other} != {failing}
    while engine.unfinished:
        echo.release()
        engine.step()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_what_a_responder_raises_at_once_leaves_those_that_halted_beside_it(runs_ahead: bool) -> None:
    class Refusing(Echo):
        def answer(self, turn: Turn) -> Any:
            if turn.sample == (failing, 0):
                raise ConnectionError("gone")
            return super().answer(turn)

    engine = fresh(fixed_shapes=True, runs_ahead=runs_ahead)
    failing, other = (engine.add(Request(PROMPT, 2, responder=refusing)) for refusing in [Refusing()] * 2)
    with pytest.raises(ConnectionError):
        finish(engine)
    ended = finish(engine)
    assert set(ended) == {(other, 0), (other, 1)}
    for n, completion in enumerate(generate(engine, [Request(PROMPT, 2, responder=Echo())])[0]):
        same(ended[other, n].completion, completion)


class Repeat:
    """A responder that appends the first token of each turn, three times."""

    pause_id, turn_limit, max_num_seqs, answer_lag, is_async = None, 7, None, None, False

    def __init__(self) -> None:
        self.texts: dict[Any, list[str]] = {}

    def answer(self, turn: Turn) -> np.ndarray | None:
        turns = self.texts.setdefault(turn.sample, [])
        turns.append(f"{turn.ending.reason}: {turn.ending.visible(stop_strings.TOKENIZER.decode(turn.tokens))}")
        return turn.tokens[:1] if len(turns) < 3 and turn.remaining_tokens > 1 else None


def test_a_turn_ends_at_a_stop_string_and_goes_on_after_the_response() -> None:
    """A string in the tokens that a responder appends ends nothing."""
    drawn = []
    for how in ({}, {"decode_chunk": 1}, {"shapes": True, "runs_ahead": True, "decode_chunk": 5}):
        responder = Repeat()
        drawn.append(
            stop_strings.sample(
                stop_strings.requests(stop_conditions=(stop_strings.CONDITION,), responder=responder), **how
            )
        )
        assert any("stop_string" in text for texts in responder.texts.values() for text in texts[:-1])
        drawn[-1].append(responder.texts)  # type: ignore[arg-type]
    for other in drawn[1:]:
        assert drawn[0][-1] == other[-1]
        for one, again in zip(drawn[0][:-1], other[:-1], strict=True):
            assert one.tokens.tolist() == again.tokens.tolist()
            assert (one.finish, one.hidden) == (again.finish, again.hidden)
            np.testing.assert_allclose(one.logps, again.logps, rtol=0, atol=1e-5)
