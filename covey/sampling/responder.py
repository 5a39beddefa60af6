"""Responders: where the model halts, a responder returns tokens to append before the completion goes on, or ends it.

    … tokens of the model ─▶ halt ─▶ responder ─▶ tokens to append ─▶ tokens of the model …

A tool is a responder that answers at once; an environment may take seconds. The sampler knows neither: it asks for a
response, and decodes other samples until the response is there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple, Protocol

import numpy as np

from covey.sampling.scheduler import NO_REQUIREMENTS, BatchRequirements, Sample
from covey.text.tokenizer import Tokenizer
from covey.types import Completion, Prompt


class NewBranch(NamedTuple):
    """Response that rewrites the history: the sequence goes on as a new branch.

    Attributes:
        kept: number of tokens that stay of the sequence so far, which begins with the prompt; fewer than it has.
        tokens: tokens to append to those, int32 [n], at least one.
    """

    kept: int
    tokens: np.ndarray


Response = np.ndarray | NewBranch | None
"""Tokens to append, int32 [n], maybe none; or a new branch; or None when the completion ends here."""


class Turn(NamedTuple):
    """A sample that has halted: at a stop token, at the responder's token, or at a limit.

    Attributes:
        sample: the sample, by its request and its number.
        tokens: int32 [n], the completion so far.
        remaining_tokens: number of tokens that the completion may still have, those of the response included.
    """

    sample: Sample
    tokens: np.ndarray
    remaining_tokens: int


class Responder(Protocol):
    """Responder to the turns of completions.

    Attributes:
        pause_id: token behind which a sample halts, beside the stop tokens; None for none.
        turn_limit: maximum number of tokens that the model draws in a turn; None for no other limit than that of the
            completion.
        is_async: whether a response may come later. The sampler then uses shapes that do not depend on the time at
            which responses come, so that neither do the samples.
        answer_lag: number of chunks of decode steps behind a turn at which a response that comes later is taken, and
            waited for, so that no order depends on the time either; None to take it as soon as it is there.
        max_num_seqs: maximum number of samples begun and not finished; None for the number of slots. While a sample
            waits, another may have its slot.
    """

    @property
    def pause_id(self) -> int | None: ...
    @property
    def turn_limit(self) -> int | None: ...
    @property
    def is_async(self) -> bool: ...
    @property
    def answer_lag(self) -> int | None: ...
    @property
    def max_num_seqs(self) -> int | None: ...

    def answer(self, turn: Turn) -> "Response | Future[Response]":
        """Return the response to `turn`, now or later. One that exceeds `turn.remaining_tokens` is cut there and ends
        the completion; a `NewBranch` must not. An exception, the future's too, comes out of `Engine.step`, and the
        request is cancelled.
        """
        ...


class SamePrompt(NamedTuple):
    """Samples of a row that begin with the same prompt: a request to the sampler.

    Attributes:
        row: index of the row.
        first: number of the first of them among the samples of the row.
        size: number of them.
    """

    row: int
    first: int
    size: int


class Conversations(Responder, Protocol):
    """Responder that begins and ends the samples of a call too, as the episodes of an environment.

    Attributes:
        requests: samples that begin with the same prompt, in the order of the prompts that `begin` returns.
    """

    requests: list[SamePrompt]

    def begin(self) -> list[Prompt]:
        """Return the prompt of each of `requests`."""
        ...

    def encode_prompt(self, prompt: Prompt) -> np.ndarray:
        """Encode a prompt that `begin` returned to int32 [n]."""
        ...

    def completion(self, request: int, number: int, completion: Completion) -> Completion:
        """Return a finished completion with its text and how it ended."""
        ...

    def warn_of_waiting(self, slots: int, seconds: float, chunk_seconds: float) -> None:
        """Warn if the slots waited much for responses."""
        ...


class ResponderFactory(Protocol):
    """Maker of the responders of each call, as `envs.runner.EnvironmentRunner` is, which explains its attributes and
    methods: learners and rollouts know no more of environments.
    """

    name: str
    scores: bool
    failed: int

    @property
    def rehearses(self) -> bool: ...
    @property
    def groups_prompts(self) -> bool: ...
    def prepare(self, template: str | None) -> None: ...
    def keep_order(self) -> None: ...
    def prompt_encoder(self, tokenizer: Tokenizer) -> Callable[[Prompt], np.ndarray] | None: ...
    def episodes(self, rows: Sequence[Mapping[str, Any]], samples: int, tokenizer: Tokenizer) -> Conversations: ...
    def rehearse(self, rows: Sequence[Mapping[str, Any]]) -> None: ...
    def count_elsewhere(self, failures: int, total: int) -> None: ...


def requirements_of(responder: Responder | None) -> BatchRequirements:
    """Return the requirements of a responder on the batch."""
    if responder is None:
        return NO_REQUIREMENTS
    return BatchRequirements(responder.pause_id, responder.is_async, responder.max_num_seqs)


class Pending(NamedTuple):
    """A response that may not be there yet.

    Attributes:
        response: the response, or its future.
        due: number of chunks of decode steps behind which it is taken, and waited for; None for when it is there.
    """

    response: "Response | Future[Response]"
    due: int | None


class PendingResponses:
    """Turns that responders have not answered yet. Time is counted in chunks of decode steps: what is due behind so
    many of them is taken then, whenever it came.
    """

    def __init__(self) -> None:
        self._pending: dict[Sample, Pending] = {}
        self._chunks = 0

    def count_chunk(self) -> None:
        """Count a chunk of decode steps that was launched."""
        self._chunks += 1

    def submit(self, turn: Turn, responder: Responder | None) -> None:
        """Ask for the response to a turn; without a responder it is the end of the completion. What the responder
        raises is raised where the response is taken.
        """
        response: Response | Future[Response]
        try:
            response = None if responder is None else responder.answer(turn)
        except Exception as error:
            response = Future()
            response.set_exception(error)
        lag = responder.answer_lag if responder is not None and isinstance(response, Future) else None
        self._pending[turn.sample] = Pending(response, None if lag is None else self._chunks + lag)

    def collect(self, *, block: bool) -> "Iterator[tuple[Sample, Response | Future[Response]]]":
        """Yield each sample whose response is there or due, with it; with `block`, let the time pass until there is
        one. A response that is due may have to be waited for.
        """
        if block and not any(map(self._is_taken, self._pending.values())):
            self._pass_time()
        for sample, one in list(self._pending.items()):
            if self._is_taken(one):
                del self._pending[sample]
                yield sample, one.response

    def _is_taken(self, one: Pending) -> bool:
        if one.due is not None:
            return one.due <= self._chunks
        return not isinstance(one.response, Future) or one.response.done()

    def _pass_time(self) -> None:
        """Go on to the next response that will be due; where none will, wait for one to come."""
        if due := [one.due for one in self._pending.values() if one.due is not None]:
            self._chunks = min(due)
        else:
            futures = [one.response for one in self._pending.values() if isinstance(one.response, Future)]
            wait(futures, return_when=FIRST_COMPLETED)

    def drop(self, request: int) -> None:
        """Forget the turns of a request: nobody waits for their responses."""
        self._pending = {sample: one for sample, one in self._pending.items() if sample.request != request}
