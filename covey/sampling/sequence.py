"""Sequences: the tokens of a completion while it is sampled, and its random key."""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from covey.sampling.logits import SamplingParams
from covey.sampling.responder import NewBranch, Responder, Response
from covey.types import Branch, Completion, FinishReason


class SampledTokens(NamedTuple):
    """Tokens drawn: their ids (int32) and their log-probs under the full and the truncated distribution (float32)."""

    ids: np.ndarray
    logps: np.ndarray
    sampler_logps: np.ndarray


class Sequence:
    """A prompt with one completion so far.

    Args:
        prompt: int32 [n].
        limit: maximum number of tokens of the completion.
        sampling_params: settings of its distribution.
        responder: responds where the model halts.

    Attributes:
        key: random key, uint32 [2].
        num_tokens: number of tokens of the completion so far.
        versions: versions of the weights that drew the first and the last token.
        branches: branches that the responder has begun.
        response: what goes into the cache before the next token is drawn; None for nothing.
        swapped: content of its slot while another sequence has that; None otherwise.
    """

    def __init__(
        self, prompt: np.ndarray, limit: int, sampling_params: SamplingParams, responder: Responder | None = None
    ):
        self.prompt, self.limit, self.sampling_params, self.responder = prompt, limit, sampling_params, responder
        self.key = np.zeros(2, np.uint32)
        self.branches, self.num_tokens, self.versions = [Branch(0, len(prompt))], 0, (0, 0)
        self.response: Any = None
        self.swapped: Any = None
        self._turn_start = 0
        self._parts: list[SampledTokens] = []
        self._drawn: list[np.ndarray] = []

    @property
    def tokens(self) -> np.ndarray:
        """The completion so far, int32 [n]."""
        return np.concatenate([part.ids for part in self._parts])

    @property
    def length(self) -> int:
        """Number of tokens: those of the last branch, and those that it kept."""
        last = self.branches[-1]
        return last.kept + self.num_tokens - last.start

    @property
    def remaining(self) -> int:
        """Number of tokens of the completion before its limit."""
        return self.limit - self.num_tokens

    @property
    def turn_end(self) -> int:
        """Number of tokens of the completion at which the present turn ends."""
        limit = None if self.responder is None else self.responder.turn_limit
        return min(self._turn_start + (limit or self.limit), self.limit)

    def extend(self, new: SampledTokens, version: int = 0) -> None:
        """Add tokens that the model drew with weights of this version."""
        self.versions = (self.versions[0] if self.num_tokens else version), version
        self._extend(new, drawn=True)

    def append(self, tokens: np.ndarray) -> None:
        """Add `tokens`, int32 [n], that the model did not draw; their log-probs are 0."""
        zeros = np.zeros(len(tokens), np.float32)
        self._extend(SampledTokens(tokens, zeros, zeros), drawn=False)
        self._turn_start = self.num_tokens

    def branch(self, kept: int) -> None:
        """Begin a branch that keeps so many tokens of the sequence so far."""
        self.branches.append(Branch(self.num_tokens, kept))

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
        self.response = response
        return self.length - before if self.remaining else None

    def completion(self, stop_ids: Collection[int]) -> Completion:
        """Return the finished completion, without its text; with a responder it has a mask of the model's tokens."""
        parts = SampledTokens(*map(np.concatenate, zip(*self._parts, strict=True)))
        finish = FinishReason.STOP if int(parts.ids[-1]) in stop_ids else FinishReason.LENGTH
        mask = None if self.responder is None else np.concatenate(self._drawn)
        return Completion(*parts, finish, mask=mask, branches=tuple(self.branches[1:]) or None, key=self.key)

    def _extend(self, new: SampledTokens, *, drawn: bool) -> None:
        self.num_tokens += len(new.ids)
        self._parts.append(new)
        self._drawn.append(np.full(len(new.ids), drawn))
