"""Turns of samples with a responder: an engine opens this (`covey.turns`) with the first such request.

A sample that halts waits for its response. Its slot goes to another sample if one needs it; then its cache is copied,
and returns into any slot. The tokens of a response are appended by a prefill, count toward the limit of the completion
and are marked in its mask. Then the sample is decoded on. A new branch drops tokens of the slot first.

A response that comes later is taken as soon as it is there, or a fixed number of chunks after its turn
(`Responder.answer_lag`): then the programs that run, and their slots, do not follow the clock.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from covey.sampling.engine import Engine
from covey.sampling.model_runner import empty_slots
from covey.sampling.programs import Slots
from covey.sampling.responder import NewBranch, Responder, Response, Turn
from covey.sampling.scheduler import BatchRequirements, Sample, Scheduler
from covey.sampling.sequence import Ending, SampledTokens, Sequence
from covey.types import Branch, Completion, FinishReason


class TurnSequence(Sequence):
    """Sequence whose completion has turns of the model and responses to them.

    Args:
        responder: answers the turns of the model.
        arguments: arguments of `Sequence`.

    Attributes:
        branches: the prompt's branch, and the branches that the responder has begun.
        response: what goes into the cache before the next token is drawn; None for nothing.
        swapped: content of its slot while it has none; None otherwise.
        is_ahead: whether its slot has taken tokens after the end of the turn, which a stop condition found later.
        states: states after the prompt and after the last response, with the number of tokens that they have seen, in
            the order of these; None before the first chunk. Empty where layers have none.
    """

    def __init__(self, responder: Responder, *arguments: Any):
        super().__init__(*arguments)
        self.responder = responder
        self.branches = [Branch(0, len(self.prompt))]
        self.response: Any = None
        self.swapped: Any = None
        self._mask, self.is_ahead = np.empty(self.limit, bool), False
        self.states: list[tuple[int, Any]] | None = None

    @property
    def length(self) -> int:
        """Number of tokens of the last branch, with the tokens that it kept."""
        last = self.branches[-1]
        return last.kept + len(self.tokens) - last.start

    @property
    def remaining(self) -> int:
        """Number of tokens of the completion before its limit."""
        return self.limit - len(self.tokens)

    @property
    def turn_end(self) -> int:
        """Number of tokens of the completion at which the present turn must end."""
        return min(self.turn_start + (self.responder.turn_limit or self.limit), self.limit)

    @property
    def sequence(self) -> np.ndarray:
        """Tokens of the last branch and those that it kept, from the first token of the prompt on, int32 [n]."""
        sequence, ends = self.prompt, [*(branch.start for branch in self.branches[1:]), len(self.tokens)]
        for (start, kept), end in zip(self.branches, ends, strict=True):
            sequence = np.concatenate([sequence[:kept], self.tokens[start:end]])
        return sequence

    def extend(self, new: SampledTokens, version: int = 0, *, is_active: bool = True) -> int:
        """Add tokens that the model drew, as `Sequence` does."""
        count = super().extend(new, version, is_active=is_active)
        self.is_ahead = is_active or count < len(new.ids)
        return count

    def add(self, new: SampledTokens, *, drawn: bool = True) -> None:
        """Add tokens at the end, drawn by the model or not."""
        super().add(new)
        self._mask[self._count - len(new.ids) : self._count] = drawn

    def append(self, tokens: np.ndarray) -> None:
        """Append `tokens`, int32 [n], that the model did not draw; their log-probs are 0."""
        self.add(SampledTokens(tokens, np.zeros(1, np.float32), np.zeros(1, np.float32)), drawn=False)
        self.turn_start = len(self.tokens)

    def branch(self, kept: int) -> None:
        """Begin a branch that keeps this number of tokens of the sequence so far."""
        self.branches.append(Branch(len(self.tokens), kept))

    def take_response(self, response: Response) -> int | None:
        """Append the response to a turn, in a new branch if it is one. Return by how many tokens the sequence is longer
        then; None if it has ended.
        """
        if response is None:
            return None
        before, tokens = self.length, response.tokens if isinstance(response, NewBranch) else response
        if isinstance(response, NewBranch):
            assert 0 < len(tokens) < self.remaining, "a branch has room for its next turn"
            assert 0 <= response.kept < before, "a branch drops tokens"
            self.branch(response.kept)
        self.append(tokens[: self.remaining])
        if not self.remaining:
            self.ending = Ending(0, FinishReason.LENGTH)
            return None
        self.response, self.ending = response, None
        return self.length - before

    def completion(self) -> Completion:
        """Return the finished completion, without its text, with a mask of the model's tokens."""
        return replace(
            super().completion(), mask=self._mask[: self._count].copy(), branches=tuple(self.branches[1:]) or None
        )


def of_responder(responder: Responder) -> tuple[Callable[..., TurnSequence], BatchRequirements]:
    """Return the maker of sequences with this responder, and its requirements on the batch."""
    requirements = BatchRequirements(responder.pause_id, responder.is_async, responder.max_num_seqs)
    return partial(TurnSequence, responder), requirements


class WaitingSamples:
    """Samples of a scheduler that wait for responses, in slots or out of them."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self._ready: set[Sample] = set()

    @property
    def stalled(self) -> bool:
        """Whether nothing can be done before a response comes."""
        return not (self.scheduler.active or self.scheduler.can_admit or self._ready)

    def pause(self, sample: Sample) -> None:
        """Let a running sample wait for a response."""
        self.scheduler.paused.add(sample)

    def resume(self, sample: Sample, appended: int) -> None:
        """Let a sample that waited go on with this number of appended tokens, as soon as it has a slot."""
        scheduler = self.scheduler
        scheduler.paused.remove(sample)
        if sample in scheduler.swapped:
            scheduler.swapped[sample] += appended
            self._ready.add(sample)
        else:
            scheduler.lengths[scheduler.slots.index(sample)] += appended

    def finish(self, sample: Sample) -> None:
        """Remove a sample that has ended."""
        scheduler = self.scheduler
        scheduler.paused.remove(sample)
        if scheduler.swapped.pop(sample, None) is None:
            scheduler.slots[scheduler.slots.index(sample)] = None

    def swap_out(self) -> dict[int, Sample]:
        """Take paused samples out of the slots that others could use, the last ones first; return them by slot."""
        scheduler = self.scheduler
        others = len(self._ready) + min(scheduler.num_waiting, scheduler.max_num_seqs - scheduler.num_live)
        paused = [(sample, slot) for slot, sample in scheduler.running.items() if sample in scheduler.paused]
        leaving = sorted(paused, reverse=True)[: max(others - len(scheduler.free), 0)]
        for sample, slot in leaving:
            scheduler.swapped[sample], scheduler.slots[slot] = int(scheduler.lengths[slot]), None
        return {slot: sample for sample, slot in leaving}

    def swap_in(self) -> dict[int, Sample]:
        """Give free slots to samples that can go on, the first ones first; return them by slot."""
        scheduler = self.scheduler
        returning = dict(zip(scheduler.free, sorted(self._ready), strict=False))
        for slot, sample in returning.items():
            scheduler.slots[slot], scheduler.lengths[slot] = sample, scheduler.swapped.pop(sample)
        self._ready.difference_update(returning.values())
        return returning

    def drop(self, request: int) -> None:
        """Forget the samples of a request."""
        for samples in (self.scheduler.paused, self._ready):
            samples.difference_update([sample for sample in samples if sample.request == request])
        for sample in [sample for sample in self.scheduler.swapped if sample.request == request]:
            del self.scheduler.swapped[sample]


class Pending(NamedTuple):
    """A response that may not be there yet.

    Attributes:
        response: the response, or its future.
        due: number of chunks of decode steps after which it is taken, and waited for; None to take it when it is there.
    """

    response: "Response | Future[Response]"
    due: int | None

    def is_taken(self, chunks: int) -> bool:
        """Return whether it is taken after this number of chunks."""
        if self.due is not None:
            return self.due <= chunks
        return not isinstance(self.response, Future) or self.response.done()


class Turns:
    """Turns of an engine's samples that responders have not answered yet.

    Time is counted in chunks of decode steps: a response that is due is taken then, whenever it came.
    """

    def __init__(self, engine: Engine):
        self._engine, self._waiting = engine, WaitingSamples(engine.scheduler)
        self._pending: dict[Sample, Pending] = {}
        self._chunks = 0

    @property
    def stalled(self) -> bool:
        """Whether nothing can be done before a response comes."""
        return self._waiting.stalled

    def submit(self, halted: Iterable[Sample]) -> None:
        """Let samples that have halted wait for responses, and take the responses that are there."""
        for sample in halted:
            self._waiting.pause(sample)
            self._ask(sample)
        self.take(block=False)

    def _ask(self, sample: Sample) -> None:
        """Ask for the response to a turn. An exception of the responder is raised where the response is taken."""
        halted = self._sequence(sample)
        assert halted.ending is not None, "a turn is answered where it has ended"
        response: Response | Future[Response]
        try:
            response = halted.responder.answer(Turn(sample, halted.tokens, halted.remaining, halted.ending))
        except Exception as error:
            response = Future()
            response.set_exception(error)
        lag = halted.responder.answer_lag if isinstance(response, Future) else None
        self._pending[sample] = Pending(response, None if lag is None else self._chunks + lag)

    def proceed(self) -> None:
        """Take responses, where nothing else can be done wait for one, and give slots to samples that can use them."""
        self.take(block=self.stalled)
        runner = self._engine.runner
        for slot, sample in self._waiting.swap_out().items():
            self._sequence(sample).swapped = runner.swap_out(slot)
        for slot, sample in self._waiting.swap_in().items():
            one = self._sequence(sample)
            runner.swap_in(slot, one.swapped)
            one.swapped = None

    def take(self, *, block: bool) -> None:
        """End or continue the samples whose responses are there or due; with `block`, wait for a response."""
        if block and not any(one.is_taken(self._chunks) for one in self._pending.values()):
            self._pass_time()
        for sample, one in list(self._pending.items()):
            if one.is_taken(self._chunks):
                del self._pending[sample]
                appended = self._sequence(sample).take_response(self._response(sample, one.response))
                if appended is None:
                    self._waiting.finish(sample)
                    self._engine.finish(sample)
                else:
                    self._waiting.resume(sample, appended)

    def _response(self, sample: Sample, response: "Response | Future[Response]") -> Response:
        """Return a response, maybe wait for it; cancel the request of a responder that raises."""
        try:
            return response.result() if isinstance(response, Future) else response
        except BaseException:
            self._engine.cancel(sample.request)
            raise

    def _pass_time(self) -> None:
        """Go on to the next response that will be due; where none will, wait for one to come."""
        if due := [one.due for one in self._pending.values() if one.due is not None]:
            self._chunks = min(due)
        else:
            futures = [one.response for one in self._pending.values() if isinstance(one.response, Future)]
            wait(futures, return_when=FIRST_COMPLETED)

    def begin_chunk(self, active: Mapping[int, Any]) -> None:
        """Count a chunk of decode steps, before which the responses of the sequences in slots go into the cache."""
        self._chunks += 1
        turns = {slot: one for slot, one in active.items() if isinstance(one, TurnSequence)}
        self._keep_states({slot: one for slot, one in turns.items() if one.states is None})
        resumed = {slot: one for slot, one in turns.items() if one.response is not None}
        pieces, rows = dict[int, tuple[int, np.ndarray]](), empty_slots(len(self._engine.runner.slots.token))
        for slot, one in resumed.items():
            response, length, tokens = one.response, one.length - 1, one.tokens
            # Without a branch, the last token that was drawn is not in the cache either.
            start = response.kept if isinstance(response, NewBranch) else length - len(response)
            if self._engine.has_state and (one.is_ahead or isinstance(response, NewBranch)):
                start = self._rewind(slot, one, start)
                pieces[slot] = start, one.sequence[start:length]
            elif start < length:
                pieces[slot] = start, tokens[start - length - 1 : -1]
            state = Slots(one.key, length, tokens[-1], len(tokens), True, one.turn_end)
            for array, value in zip(rows, state, strict=True):
                array[slot] = value
            one.response = None
        self._engine.runner.append(pieces)
        self._keep_states(resumed)
        self._engine.runner.put_rows(resumed, rows)

    def _keep_states(self, sequences: Mapping[int, TurnSequence]) -> None:
        """Keep the states of slots whose last token, or whose first drawn one, is not in them yet."""
        for slot, one in sequences.items() if self._engine.has_state else ():
            seen = len(one.prompt) if one.states is None else one.length - 1
            one.states = [*(one.states or [])[:1], (seen, self._engine.runner.take_states(slot))]

    def _rewind(self, slot: int, one: TurnSequence, end: int) -> int:
        """Restore the last states of a slot that have seen at most `end` tokens. Return how many; 0 for no states."""
        one.states = [kept for kept in one.states or [] if kept[0] <= end]
        seen, states = one.states[-1] if one.states else (0, None)
        if states is not None:
            self._engine.runner.put_states(slot, states)
        return seen

    def drop(self, request: int) -> None:
        """Forget the turns of a request: nobody waits for their responses."""
        self._pending = {sample: one for sample, one in self._pending.items() if sample.request != request}
        self._waiting.drop(request)

    def _sequence(self, sample: Sample) -> TurnSequence:
        one = self._engine.sequences[sample.request][sample.number]
        assert isinstance(one, TurnSequence), "a sample that waits has a responder"
        return one
