"""Collect the tokens of each sample on the host, decide which samples are finished, and ask the tool for responses."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from covey.sampling.device import Chunk, Draws
from covey.sampling.scheduler import Sample
from covey.sampling.tools import Tool
from covey.types import Completion, FinishReason


class Collector:
    """Tokens and log-probs of each sample.

    Args:
        stop_ids: tokens that end a completion.
        max_new_tokens: maximum number of tokens in a completion.
        tool: responds to calls; every completion then has a mask.
    """

    def __init__(self, stop_ids: Sequence[int], max_new_tokens: int, tool: Tool | None):
        self.stop_ids, self.max_new_tokens, self.tool = stop_ids, max_new_tokens, tool
        self._draws: dict[Sample, list[Draws]] = defaultdict(list)
        self._forced: dict[Sample, list[slice]] = defaultdict(list)

    def collect(self, running: Mapping[int, Sample], chunk: Chunk) -> tuple[list[int], dict[int, np.ndarray]]:
        """Append the chunk's tokens to the sample of each slot that is `running`.

        Returns the slots of finished samples, and by slot the tool's response (int32 [n], maybe no tokens) to those
        that pause for it.
        """
        (tokens, logps, sampler_logps), finished, responses = chunk.draws, [], {}
        for slot, sample in running.items():
            if count := chunk.counts[slot]:
                new = Draws(tokens[slot, :count], logps[slot, :count], sampler_logps[slot, :count])
                self._draws[sample].append(new)
            if chunk.active[slot]:
                continue
            if (response := self._respond(sample)) is None:
                finished.append(slot)
            else:
                responses[slot] = response
        return finished, responses

    def completion(self, sample: Sample) -> Completion:
        """Return a finished sample as a completion, without its text."""
        draws = self._concatenate(sample)
        finish = FinishReason.STOP if int(draws.tokens[-1]) in self.stop_ids else FinishReason.LENGTH
        drawn = np.ones(len(draws.tokens), bool)
        for forced in self._forced[sample]:
            drawn[forced] = False  # a response cut by the limit ends with the completion
        return Completion(*draws, finish, mask=None if self.tool is None else drawn)

    def _concatenate(self, sample: Sample) -> Draws:
        return Draws(*map(np.concatenate, zip(*self._draws[sample], strict=True)))

    def _respond(self, sample: Sample) -> np.ndarray | None:
        """Return the tool's response to a sample that called it, or None when the sample is finished."""
        if self.tool is None:
            return None
        tokens = self._concatenate(sample).tokens
        if tokens[-1] != self.tool.markers.end or len(tokens) >= self.max_new_tokens:
            return None
        response = self.tool.respond(tokens)
        self._forced[sample].append(slice(len(tokens), len(tokens) + len(response)))
        return response
