"""Sample completions with continuous batching: slots are refilled while others are still decoding.

    schedule → prefill → insert → decode a chunk of steps → collect → schedule …

The scheduler decides which slot draws which sample, the device state runs the programs, and the collector gathers the
tokens. A prompt is prefilled once; its keys and values are copied into the slot of each of its samples.

The noise of a token depends only on (seed, step, prompt index, sample index, token index), so the same completion is
drawn in any slot, batch, order or chunk size.

With a responder (`turns`: a tool, an environment) a sample that halts gets a response. Its tokens are appended by a
prefill into the same slot; they count toward the limit and are marked in the mask. Then the sample is decoded on.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from covey.config.schema import RolloutConfig
from covey.models.decoder import Decoder
from covey.sampling.device import Chunk, DeviceState, Draws, Parked, Programs
from covey.sampling.logits import SamplingParams
from covey.sampling.noise import sample_keys
from covey.sampling.scheduler import Sample, Scheduler, check_length
from covey.sampling.stats import SamplerStats
from covey.sampling.turns import Responder, Rewrite, Turn, Turns
from covey.types import Branch, Completion, FinishReason


@dataclass(frozen=True)
class Request:
    """One prompt with the number of completions to sample.

    Attributes:
        prompt: int32 [n] tokens.
        samples: number of completions.
        index: the prompt's index in the step; with `step` and the sample index it seeds the noise.
        step: the training step (or any other number that distinguishes calls).
        first: number of the first completion among those of the prompt's index.
    """

    prompt: np.ndarray
    samples: int
    index: int
    step: int = 0
    first: int = 0


class Sampler:
    """Generate completions in batches from a decoder.

    Args:
        graph: the decoder's `nnx.GraphDef`; each call passes its state, so that new weights need no new sampler.
        stop_ids: tokens that end a completion; the stop token is kept as its last token.
        config: lengths, temperature, truncation, slots, seed.
        fixed_shapes: whether all sizes follow the settings, and other settings of the sampling distribution than those
            of `config` share a program.
    """

    def __init__(
        self, graph: nnx.GraphDef[Decoder], stop_ids: Sequence[int], config: RolloutConfig, fixed_shapes: bool = False
    ):
        self.graph, self.config = graph, config
        self.stop_ids = tuple(sorted(stop_ids))
        self.stats = SamplerStats()
        own = SamplingParams.from_config(config) if fixed_shapes else None
        self.programs = Programs(graph, self.stop_ids, own)

    def generate(
        self,
        params: Any,
        requests: Sequence[Request],
        *,
        config: RolloutConfig | None = None,
        responder: Responder | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]:
        """Generate all completions, by request and sample index, without their text.

        Args:
            params: the decoder's state.
            requests: prompts; lengths may differ.
            config: settings for this call instead of the sampler's own.
            responder: responds where the model halts; every completion then has a mask.
            progress: called with (finished, total) completions after each chunk.

        Errors: DataError for an empty prompt or one longer than `max_prompt_length`.
        """
        config = config or self.config
        for number, request in enumerate(requests, 1):
            check_length(len(request.prompt), config, f"prompt {number}")
        is_async, max_num_seqs = (False, None) if responder is None else (responder.waits, responder.max_live)
        sizes = [len(r.prompt) for r in requests], [r.samples for r in requests]
        scheduler = self.scheduler(params, *sizes, config=config, is_async=is_async, max_live=max_num_seqs)
        call = _Call(self.programs, params, requests, config, responder, scheduler)
        self.stats, began = call.device.stats, time.perf_counter()
        while scheduler.unfinished:
            call.take_responses(block=scheduler.stalled)
            call.exchange()
            while scheduler.can_admit:
                call.admit()
            if scheduler.active:
                call.decode()
            if progress is not None:
                progress(scheduler.finished, len(scheduler.samples))
        self.stats.seconds = time.perf_counter() - began
        return [[call.collector.completion(Sample(i, n)) for n in range(r.samples)] for i, r in enumerate(requests)]

    def scheduler(
        self,
        params: Any,
        prompt_lengths: Sequence[int],
        num_samples: Sequence[int],
        *,
        config: RolloutConfig | None = None,
        is_async: bool = False,
        max_live: int | None = None,
    ) -> Scheduler:
        """Return the scheduler of a call; arguments as for `Scheduler`, and whether its responses may come later."""
        resizes = self.programs.cache_layout(params).divided and not is_async
        fixed, config = self.programs.own is not None, config or self.config
        return Scheduler(prompt_lengths, num_samples, config, resizes=resizes, max_live=max_live, fixed=fixed)


class _Call:
    """State of a call of `Sampler.generate`: the batch, the tokens collected, the responses under way."""

    def __init__(
        self,
        programs: Programs,
        params: Any,
        requests: Sequence[Request],
        config: RolloutConfig,
        responder: Responder | None,
        scheduler: Scheduler,
    ):
        self.scheduler = scheduler
        self.requests, self.keys = requests, _sample_keys(requests, config.seed)
        size = len(self.scheduler.slots), self.scheduler.cache_length
        demands = () if responder is None else (responder.pause_id, responder.turn_limit)
        self.device = DeviceState(programs, params, config, *size, *demands)
        self.collector = Collector(programs.stop_ids, config.max_new_tokens, masked=responder is not None)
        self.turns = Turns(responder)
        self._responses: dict[Sample, np.ndarray | Rewrite] = {}
        self._parked: dict[Sample, Parked] = {}

    def admit(self) -> None:
        """Insert waiting samples into free slots, with their first tokens."""
        if batch := self.scheduler.next_prefill():
            self.device.prefill([self.requests[i].prompt for i in batch], self.scheduler.prefill_shape)
        admitted = self.scheduler.admit()
        self._collect({slot: sample for slot, _, sample in admitted}, self.device.insert(admitted, self.keys))

    def exchange(self) -> None:
        """Give the slots of samples that wait to others that can be decoded."""
        for slot, sample in self.scheduler.park().items():
            self._parked[sample] = self.device.park(slot)
        for slot, sample in self.scheduler.unpark().items():
            self.device.unpark(slot, self._parked.pop(sample))

    def decode(self) -> None:
        """Append the responses of the samples in slots, and decode a chunk of steps."""
        while (kept := self.scheduler.resize()) is not None:
            self.device.resize(kept, self.scheduler.cache_length)
        ready = [sample for sample in self._responses if sample not in self.scheduler.parked]
        self.device.resume({self.scheduler.slot_of(sample): self._responses.pop(sample) for sample in ready})
        began = time.perf_counter()
        chunk = self.device.decode()
        self.device.stats.decode_seconds += time.perf_counter() - began
        self._collect(self.scheduler.active, chunk)

    def take_responses(self, *, block: bool) -> None:
        """Free the slots of samples that end, and let those with a response go on; with `block`, wait for one."""
        for sample, response in self.turns.answered(block=block):
            if isinstance(response, Rewrite):
                self._rewrite(sample, response)
                continue
            if response is not None and len(response):
                room = self.collector.turn(sample).room
                self.collector.append(sample, response[:room])
                response = response if len(response) < room else None
            if response is None:
                self.scheduler.finish(sample)
                self._parked.pop(sample, None)
            else:
                self.scheduler.resume(sample, len(response))
                self._responses[sample] = response

    def _rewrite(self, sample: Sample, response: Rewrite) -> None:
        """Let a sample go on as a new branch."""
        before = self.collector.sequence_length(sample, len(self.requests[sample.request].prompt))
        assert 0 <= response.kept < before, "a branch drops tokens"
        assert 0 < len(response.tokens) < self.collector.turn(sample).room, "a branch has room for its next turn"
        self.collector.branch(sample, response.kept)
        self.collector.append(sample, response.tokens)
        self.scheduler.resume(sample, response.kept + len(response.tokens) - before)
        self._responses[sample] = response

    def _collect(self, active: Mapping[int, Sample], chunk: Chunk) -> None:
        """Collect the tokens of a chunk, and ask for responses to the samples that have halted."""
        halted = self.collector.collect(active, chunk)
        self.scheduler.update(chunk.counts)
        for slot in halted:
            self.scheduler.pause(active[slot])
            self.turns.submit(self.collector.turn(active[slot]))
        self.take_responses(block=False)


def _sample_keys(requests: Sequence[Request], seed: int) -> dict[Sample, np.ndarray]:
    """Return the random key of each sample, uint32 [2]."""
    samples = {Sample(i, n): (r.step, r.index, r.first + n) for i, r in enumerate(requests) for n in range(r.samples)}
    rows = np.array(list(samples.values()), np.uint32).reshape(-1, 3)
    return dict(zip(samples, sample_keys(seed, rows), strict=True))


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
