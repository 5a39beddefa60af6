"""Sample completions with continuous batching: slots are refilled while others are still decoding.

    schedule → prefill → insert → decode a chunk of steps → collect → schedule …

The scheduler decides which slot draws which sample, the device state runs the programs, and the collector gathers the
tokens. A prompt is prefilled once; its keys and values are copied into the slot of each of its samples.

The noise of a token depends only on (seed, step, prompt index, sample index, token index), so the same completion is
drawn in any slot, batch, order or chunk size.

With a tool a slot also halts where a call ends. The host evaluates it between chunks, and the next steps force the
tokens of the response: they pass through the same cache, count toward the limit and are marked in the mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from covey.config.schema import RolloutConfig
from covey.models.decoder import Decoder
from covey.sampling.collector import Collector
from covey.sampling.device import Chunk, DeviceState, Programs
from covey.sampling.lengths import check_length
from covey.sampling.noise import sample_keys
from covey.sampling.scheduler import Sample, Scheduler
from covey.sampling.stats import SamplerStats
from covey.sampling.tools import Tool
from covey.types import Completion


@dataclass(frozen=True)
class Request:
    """One prompt with the number of completions to sample.

    Attributes:
        prompt: int32 [n] tokens.
        samples: number of completions.
        index: the prompt's index in the step; with `step` and the sample index it seeds the noise.
        step: the training step (or any other number that distinguishes calls).
    """

    prompt: np.ndarray
    samples: int
    index: int
    step: int = 0


class Sampler:
    """Generate completions in batches from a decoder.

    Args:
        graph: the decoder's `nnx.GraphDef`; each call passes its state, so that new weights need no new sampler.
        stop_ids: tokens that end a completion; the stop token is kept as its last token.
        config: lengths, temperature, truncation, slots, seed.
    """

    def __init__(self, graph: nnx.GraphDef[Decoder], stop_ids: Sequence[int], config: RolloutConfig):
        self.graph, self.config = graph, config
        self.stop_ids = tuple(sorted(stop_ids))
        self.stats = SamplerStats()
        self.programs = Programs(graph, self.stop_ids)

    def generate(
        self,
        params: Any,
        requests: Sequence[Request],
        *,
        config: RolloutConfig | None = None,
        tool: Tool | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]:
        """Generate all completions, by request and sample index, without their text.

        Args:
            params: the decoder's state.
            requests: prompts; lengths may differ.
            config: settings for this call instead of the sampler's own.
            tool: responds to calls during sampling; every completion then has a mask.
            progress: called with (finished, total) completions after each chunk.

        Errors: DataError for an empty prompt or one longer than `max_prompt_length`.
        """
        config = config or self.config
        for i, request in enumerate(requests):
            check_length(len(request.prompt), config, f"prompt {i}")
        divided = self.programs.cache_layout(params).divided
        prompts, samples = [len(r.prompt) for r in requests], [r.samples for r in requests]
        scheduler = Scheduler(prompts, samples, config, resizes=divided)
        device = DeviceState(self.programs, params, config, tool, len(scheduler.slots), scheduler.cache_length)
        collector = Collector(self.stop_ids, config.max_new_tokens, tool)
        keys, self.stats = _sample_keys(requests, config.seed), device.stats
        while scheduler.unfinished:
            while scheduler.can_admit:
                if batch := scheduler.next_prefill():
                    device.prefill([requests[i].prompt for i in batch], scheduler.prefill_shape)
                _collect(device.insert(scheduler.admit(), keys), scheduler, device, collector)
            if not scheduler.running:
                continue  # every admitted sample finished with its first token
            while (kept := scheduler.resize()) is not None:
                device.resize(kept, scheduler.cache_length)
            _collect(device.decode(), scheduler, device, collector)
            if progress is not None:
                progress(scheduler.finished, len(scheduler.samples))
        return [[collector.completion(Sample(i, n)) for n in range(r.samples)] for i, r in enumerate(requests)]


def _collect(chunk: Chunk, scheduler: Scheduler, device: DeviceState, collector: Collector) -> None:
    """Collect the tokens of a chunk, free the slots of finished samples, force the tool's responses on the others."""
    finished, responses = collector.collect(scheduler.running, chunk)
    scheduler.update(chunk.counts, finished)
    if responses:
        device.resume(responses)


def _sample_keys(requests: Sequence[Request], seed: int) -> dict[Sample, np.ndarray]:
    """Return the random key of each sample, uint32 [2]."""
    samples = {Sample(i, n): (r.step, r.index, n) for i, r in enumerate(requests) for n in range(r.samples)}
    rows = np.array(list(samples.values()), np.uint32).reshape(-1, 3)
    return dict(zip(samples, sample_keys(seed, rows), strict=True))
