"""Sequences: the tokens of a completion while it is sampled, its random key, and where and why it ends."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from covey.config.schema import SamplingConfig
from covey.types import Completion, FinishReason


class SampledTokens(NamedTuple):
    """Tokens drawn: their ids (int32) and their log-probs under the full and the truncated distribution (float32)."""

    ids: np.ndarray
    logps: np.ndarray
    sampler_logps: np.ndarray


class Ending(NamedTuple):
    """End of a completion, or of a turn of the model in it.

    Attributes:
        length: number of tokens that the model drew since the completion or the turn began.
        reason: why it ends there.
        hidden: number of characters at the end of its text that are left out.
    """

    length: int
    reason: FinishReason
    hidden: int = 0

    def visible(self, text: str) -> str:
        """Return the text of a turn with this end without the characters that are left out."""
        return text[: len(text) - self.hidden]


StopCondition = Callable[[np.ndarray, int], Ending | None]
"""Function that finds the end of a completion or of a turn: from its tokens so far, int32 [n], and the number of new
tokens among them, to the end; None if it goes on.
"""


class StopIds(frozenset[int]):
    """Stop condition: a token is one of these ids. Programs draw nothing after a stop token of the engine; after one of
    a request alone they may.
    """

    def __call__(self, tokens: np.ndarray, new: int) -> Ending | None:
        """Return the end at the first of the `new` tokens that has such an id."""
        ends = [*map(self.__contains__, tokens[-new:].tolist())]
        return Ending(len(tokens) - new + ends.index(True) + 1, FinishReason.STOP) if any(ends) else None


class Sequence:
    """A prompt with one completion so far.

    Args:
        prompt: int32 [n].
        limit: maximum number of tokens of the completion.
        sampling_params: settings of its distribution.
        stop_conditions: say where it ends; the first that does counts.

    Attributes:
        responder: answers the turns of the model; None if the completion is a single turn.
        key: random key, uint32 [2].
        versions: versions of the weights that drew the first and the last token.
        turn_start: number of tokens of the completion before the present turn of the model.
        ending: end of the completion or of its turn; None while it is drawn.
    """

    responder: Any = None

    def __init__(
        self,
        prompt: np.ndarray,
        limit: int,
        sampling_params: SamplingConfig,
        stop_conditions: Iterable[StopCondition] = (),
    ):
        self.prompt, self.limit = prompt, limit
        self.sampling_params, self.stop_conditions = sampling_params, stop_conditions
        self._drawn = SampledTokens(*map(partial(np.empty, limit), (np.int32, np.float32, np.float32)))
        self.key, self.versions, self.turn_start, self._count = np.zeros(2, np.uint32), (0, 0), 0, 0
        self.ending: Ending | None = None

    @property
    def tokens(self) -> np.ndarray:
        """The completion so far, int32 [n]."""
        return self._drawn.ids[: self._count]

    @property
    def drawn(self) -> SampledTokens:
        """A copy of the completion so far, with the log-probs of its tokens."""
        return SampledTokens(*(values[: self._count].copy() for values in self._drawn))

    @property
    def turn_end(self) -> int:
        """Number of tokens of the completion at which its turn must end."""
        return self.limit

    def extend(self, new: SampledTokens, version: int = 0, *, is_active: bool = True) -> int:
        """Add tokens that the model drew, up to the first end that a stop condition finds; return their number.

        Args:
            new: at least one token.
            version: version of the weights that drew them.
            is_active: whether more are drawn after them; otherwise a stop token or a limit was reached.
        """
        before = self._count
        self.versions = (self.versions[0] if before else version), version
        self.add(new)
        turn = self.tokens[self.turn_start :]
        found = [condition(turn, len(new.ids)) for condition in self.stop_conditions]
        if not is_active:
            found.append(Ending(len(turn), FinishReason.LENGTH))
        self.ending = min(filter(None, found), key=lambda ending: ending.length, default=None)
        self._count = self._count if self.ending is None else self.turn_start + self.ending.length
        return self._count - before

    def add(self, new: SampledTokens) -> None:
        """Add tokens at the end."""
        start, self._count = self._count, self._count + len(new.ids)
        for drawn, values in zip(self._drawn, new, strict=True):
            drawn[start : self._count] = values

    def completion(self) -> Completion:
        """Return the finished completion, without its text."""
        assert self.ending is not None, "a completion is finished where it has ended"
        return Completion(*self.drawn, self.ending.reason, hidden=self.ending.hidden, key=self.key)
