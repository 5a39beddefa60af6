"""Sample completions with continuous batching: slots are refilled while others are still decoding.

    schedule → prefill → insert → decode a chunk of steps → collect → schedule …

The scheduler decides which slot draws which sample, the model runner runs the programs, and a `Sequence` gathers the
tokens of each sample. A prompt is prefilled once; its keys and values are copied into the slot of each of its samples.

The noise of a token depends only on (seed, step, prompt index, sample index, token index), so the same completion is
drawn in any slot, batch, order or chunk size.

With a responder (a tool, an environment) a sample that halts gets a response. Its tokens are appended by a
prefill into the same slot; they count toward the limit and are marked in the mask. Then the sample is decoded on.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from covey.config.schema import RolloutConfig
from covey.models.decoder import Decoder
from covey.sampling import sequence
from covey.sampling.logits import SamplingParams
from covey.sampling.model_runner import Chunk, ModelRunner, SamplerStats
from covey.sampling.programs import Programs
from covey.sampling.responder import NewBranch, PendingResponses, Responder, Turn
from covey.sampling.scheduler import Sample, Scheduler, check_length
from covey.types import Completion


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
        self.graph, self.config, self.fixed_shapes = graph, config, fixed_shapes
        self.stop_ids = tuple(sorted(stop_ids))
        self.stats = SamplerStats()
        self.programs = Programs(graph, self.stop_ids, SamplingParams.from_config(config) if fixed_shapes else None)

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
        is_async, max_num_seqs = (False, None) if responder is None else (responder.is_async, responder.max_num_seqs)
        sizes = [len(r.prompt) for r in requests], [r.samples for r in requests]
        scheduler = self.scheduler(params, *sizes, config=config, is_async=is_async, max_num_seqs=max_num_seqs)
        demands = () if responder is None else (responder.pause_id, responder.turn_limit)
        size = len(scheduler.slots), scheduler.cache_length
        runner = ModelRunner(self.programs, params, config, *size, *demands)
        engine, self.stats, began = Engine(scheduler, runner, requests, responder), runner.stats, time.perf_counter()
        while scheduler.unfinished:
            engine.step()
            if progress is not None:
                progress(scheduler.finished, len(scheduler.samples))
        self.stats.seconds = time.perf_counter() - began
        return [[engine.completion(Sample(i, n)) for n in range(r.samples)] for i, r in enumerate(requests)]

    def scheduler(
        self,
        params: Any,
        prompt_lengths: Sequence[int],
        num_samples: Sequence[int],
        *,
        config: RolloutConfig | None = None,
        is_async: bool = False,
        max_num_seqs: int | None = None,
    ) -> Scheduler:
        """Return the scheduler of a call; arguments as for `Scheduler`, and whether its responses may come later."""
        return Scheduler(
            prompt_lengths,
            num_samples,
            config or self.config,
            resizes=self.programs.cache_layout(params).divided and not is_async,
            max_num_seqs=max_num_seqs,
            fixed_shapes=self.fixed_shapes,
        )


class Engine:
    """The sequences of a call, and the steps that finish them.

    Args:
        scheduler: assigns them to slots.
        runner: draws their tokens in these slots.
        requests: their prompts.
        responder: responds where the model halts.
    """

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, requests: Sequence[Request], responder: Responder | None
    ):
        self.scheduler, self.runner, self.requests = scheduler, runner, requests
        self._responses, self._masked = PendingResponses(responder), responder is not None
        where = {Sample(i, n): (r.step, r.index, r.first + n) for i, r in enumerate(requests) for n in range(r.samples)}
        keys = sequence.sample_keys(runner.config.seed, np.array(list(where.values()), np.uint32).reshape(-1, 3))
        self.sequences = {
            sample: sequence.Sequence(len(requests[sample.request].prompt), key)
            for sample, key in zip(where, keys, strict=True)
        }

    def step(self) -> None:
        """Take responses that are there, refill free slots, and decode a chunk of steps in those that are active."""
        self._take_responses(block=self.scheduler.stalled)
        self._exchange_slots()
        while self.scheduler.can_admit:
            self._admit()
        if self.scheduler.active:
            self._decode()

    def completion(self, sample: Sample) -> Completion:
        """Return a finished completion, without its text."""
        return self.sequences[sample].completion(self.runner.programs.stop_ids, masked=self._masked)

    def _admit(self) -> None:
        """Insert waiting samples into free slots, with their first tokens."""
        if batch := self.scheduler.next_prefill():
            self.runner.prefill([self.requests[i].prompt for i in batch], self.scheduler.prefill_shape)
        admitted = self.scheduler.admit()
        chunk = self.runner.insert((slot, row, self.sequences[sample].key) for slot, row, sample in admitted)
        self._collect({slot: sample for slot, _, sample in admitted}, chunk)

    def _exchange_slots(self) -> None:
        """Give the slots of samples that wait to others that can be decoded."""
        for slot, sample in self.scheduler.swap_out().items():
            self.sequences[sample].swapped = self.runner.swap_out(slot)
        for slot, sample in self.scheduler.swap_in().items():
            self.runner.swap_in(slot, self.sequences[sample].swapped)
            self.sequences[sample].swapped = None

    def _decode(self) -> None:
        """Append the responses of the samples in slots, and decode a chunk of steps."""
        while (slots := self.scheduler.resize()) is not None:
            self.runner.resize(slots, self.scheduler.cache_length)
        active = {slot: self.sequences[sample] for slot, sample in self.scheduler.active.items()}
        self.runner.resume({slot: s.response for slot, s in active.items() if s.response is not None})
        for resumed in active.values():
            resumed.response = None
        began = time.perf_counter()
        chunk = self.runner.decode()
        self.runner.stats.decode_seconds += time.perf_counter() - began
        self._collect(self.scheduler.active, chunk)

    def _collect(self, active: Mapping[int, Sample], chunk: Chunk) -> None:
        """Collect the tokens of a chunk, and ask for responses to the samples that have halted."""
        for slot, sample in active.items():
            if chunk.counts[slot]:
                self.sequences[sample].extend(chunk.of(slot))
        self.scheduler.update(chunk.counts)
        for slot, sample in active.items():
            if not chunk.active[slot]:
                self.scheduler.pause(sample)
                self._responses.submit(self._turn(sample))
        self._take_responses(block=False)

    def _turn(self, sample: Sample) -> Turn:
        tokens = self.sequences[sample].tokens
        return Turn(sample, tokens, self.runner.config.max_new_tokens - len(tokens))

    def _take_responses(self, *, block: bool) -> None:
        """Free the slots of samples that end, and let those with a response go on; with `block`, wait for one."""
        for sample, response in self._responses.collect(block=block):
            remaining = self._turn(sample).remaining_tokens
            if isinstance(response, NewBranch):
                assert 0 < len(response.tokens) < remaining, "a branch has room for its next turn"
                self._resume(sample, response, response.tokens)
            elif response is not None and len(response) < remaining:
                self._resume(sample, response, response)
            else:
                if response is not None:
                    self.sequences[sample].append(response[:remaining])
                self.scheduler.finish(sample)
                self.sequences[sample].swapped = None

    def _resume(self, sample: Sample, response: np.ndarray | NewBranch, tokens: np.ndarray) -> None:
        """Let a sample go on behind `tokens`, in a new branch if the response is one."""
        resumed = self.sequences[sample]
        before = resumed.length
        if isinstance(response, NewBranch):
            assert 0 <= response.kept < before, "a branch drops tokens"
            resumed.branch(response.kept)
        resumed.append(tokens)
        resumed.response = response
        self.scheduler.resume(sample, resumed.length - before)
