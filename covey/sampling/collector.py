"""Collect the tokens of each sample on the host: those that the model drew, and those that were appended."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from covey.sampling.device import Chunk, Draws
from covey.sampling.scheduler import Sample
from covey.sampling.turns import Turn
from covey.types import Branch, Completion, FinishReason


class Collector:
    """Tokens and log-probs of each sample.

    Args:
        stop_ids: tokens that end a completion.
        max_new_tokens: maximum number of tokens in a completion.
        masked: whether every completion gets a mask, because tokens may be appended.
    """

    def __init__(self, stop_ids: Sequence[int], max_new_tokens: int, masked: bool):
        self.stop_ids, self.max_new_tokens, self.masked = stop_ids, max_new_tokens, masked
        self._draws: dict[Sample, list[Draws]] = defaultdict(list)
        self._drawn: dict[Sample, list[np.ndarray]] = defaultdict(list)
        self._branches: dict[Sample, list[Branch]] = defaultdict(list)

    def collect(self, active: Mapping[int, Sample], chunk: Chunk) -> list[int]:
        """Append the chunk's tokens to the sample of each slot that was `active`; return the slots that have halted."""
        tokens, logps, sampler_logps = chunk.draws
        for slot, sample in active.items():
            if count := chunk.counts[slot]:
                new = Draws(tokens[slot, :count], logps[slot, :count], sampler_logps[slot, :count])
                self._extend(sample, new, drawn=True)
        return [slot for slot in active if not chunk.active[slot]]

    def append(self, sample: Sample, tokens: np.ndarray) -> None:
        """Append `tokens`, int32 [n], that the model did not draw; their log-probs are 0."""
        zeros = np.zeros(len(tokens), np.float32)
        self._extend(sample, Draws(tokens, zeros, zeros), drawn=False)

    def branch(self, sample: Sample, kept: int) -> None:
        """Begin a branch that keeps so many tokens of the sequence so far."""
        self._branches[sample].append(Branch(len(self._concatenate(sample).tokens), kept))

    def sequence_length(self, sample: Sample, prompt: int) -> int:
        """Return the number of tokens of the sequence so far after `prompt` tokens: those of the last branch, and those
        that it kept.
        """
        last = self._branches[sample][-1] if self._branches[sample] else Branch(0, prompt)
        return last.kept + len(self._concatenate(sample).tokens) - last.start

    def turn(self, sample: Sample) -> Turn:
        """Return the sample as it is so far."""
        tokens = self._concatenate(sample).tokens
        return Turn(sample, tokens, self.max_new_tokens - len(tokens))

    def completion(self, sample: Sample) -> Completion:
        """Return a finished sample as a completion, without its text."""
        draws = self._concatenate(sample)
        finish = FinishReason.STOP if int(draws.tokens[-1]) in self.stop_ids else FinishReason.LENGTH
        mask = np.concatenate(self._drawn[sample]) if self.masked else None
        return Completion(*draws, finish, mask=mask, branches=tuple(self._branches[sample]) or None)

    def _extend(self, sample: Sample, new: Draws, *, drawn: bool) -> None:
        self._draws[sample].append(new)
        self._drawn[sample].append(np.full(len(new.tokens), drawn))

    def _concatenate(self, sample: Sample) -> Draws:
        return Draws(*map(np.concatenate, zip(*self._draws[sample], strict=True)))
