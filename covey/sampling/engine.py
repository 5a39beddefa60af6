"""Sample completions with continuous batching: slots are refilled while others are still decoding.

A prompt is prefilled once; its keys and values are copied into the slot of each of its completions. Decode steps run in
chunks on the device; between chunks the host removes finished completions and admits waiting ones. When none are
waiting, the batch shrinks with the remaining completions. Scheduling is plain Python here; the device programs are in
`device`.

The noise of a token depends only on (seed, step, prompt index, sample index, token index), so the same completion is
drawn in any slot, batch, order or chunk size.

With a tool a slot also halts where a question ends. The host evaluates it between chunks, and the next steps force the
tokens of its answer: they pass through the same cache, count toward the limit and are marked in the mask.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from covey.config.schema import RolloutConfig
from covey.models.decoder import Decoder
from covey.sampling import device as steps
from covey.sampling.cache import NO_TOKEN, Prefix, empty_slots, resize
from covey.sampling.lengths import check_length, length_bucket, power_of_two, round_up_to_bucket
from covey.sampling.logits import SamplingParams
from covey.sampling.stats import SamplerStats
from covey.sampling.tools import MAX_FORCED_TOKENS, Tool
from covey.types import Completion, FinishReason

PREFILL_BATCH = 8
"""Maximum number of prompts that are prefilled together."""
SMALLEST_BATCH = 4


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


class _Sample(NamedTuple):
    """A completion in progress: its request, its sample index, its tokens so far, and which of them a tool forced."""

    request: int
    number: int
    parts: list[np.ndarray]
    forced: list[slice]

    @property
    def tokens(self) -> np.ndarray:
        """Tokens so far, int32 [n]."""
        return np.concatenate([part[0] for part in self.parts]).astype(np.int32)

    @property
    def drawn(self) -> np.ndarray:
        """Mask of the tokens that the model drew, bool [n]. An answer cut by the limit ends with the completion."""
        mask = np.ones(len(self.tokens), bool)
        for place in self.forced:
            mask[place] = False
        return mask


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
        self._prefill = jax.jit(partial(steps.prefill, graph))
        self._admit = jax.jit(
            partial(steps.insert, self.stop_ids), static_argnames=("sampling_params",), donate_argnums=(0,)
        )
        self._decode = jax.jit(
            partial(steps.decode, graph, self.stop_ids),
            static_argnames=("sampling_params", "steps", "pause_id"),
            donate_argnums=(1,),
        )

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
            tool: answers questions during sampling; every completion then has a mask.
            progress: called with (finished, total) completions after each chunk.

        Errors: DataError for an empty prompt or one longer than `max_prompt_length`.
        """
        config = config or self.config
        self.stats = SamplerStats()
        run = _Run(self, params, requests, config, tool)
        for finished in run.chunks():
            if progress is not None:
                progress(finished, run.total)
        return run.completions()


@dataclass
class _Run:
    """State of one call of `generate`: the queue, the slots and the results."""

    sampler: Sampler
    params: Any
    requests: Sequence[Request]
    config: RolloutConfig
    tool: Tool | None
    waiting: deque[_Sample] = field(default_factory=deque)
    done: dict[tuple[int, int], _Sample] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, request in enumerate(self.requests):
            check_length(len(request.prompt), self.config, f"prompt {number}")
            self.waiting.extend(_Sample(number, sample, [], []) for sample in range(request.samples))
        self.total = len(self.waiting)
        self.sampling_params = SamplingParams.from_config(self.config)
        self.keys = self._sample_keys()
        longest = max((len(r.prompt) for r in self.requests), default=1)
        self.width = length_bucket(longest, smallest=16)
        self.prefill_rows = min(PREFILL_BATCH, power_of_two(len(self.requests)))
        self.prefix: Prefix | None = None
        self.prefix_first = self.prefix_end = 0
        size = min(self.config.slots, power_of_two(self.total))
        model = nnx.merge(self.sampler.graph, self.params)
        c = model.config
        self.time = self._room(longest)
        dtype = model.head_weight.dtype
        forced = 0 if self.tool is None else MAX_FORCED_TOKENS
        self.slots = empty_slots(
            size, self.time, c.num_layers, c.num_kv_heads, c.head_dim, dtype, max_forced_tokens=forced
        )
        self.held: list[_Sample | None] = [None] * size
        self.lengths = np.zeros(size, np.int64)

    def chunks(self) -> Iterator[int]:
        """Admit, decode and collect until every completion is finished; yield how many are after each chunk."""
        while self.waiting or any(self.held):
            self._admit_waiting()
            if not any(self.held):
                continue  # every admitted completion finished with its first token
            self._refit()
            self._decode_chunk()
            yield len(self.done)

    def completions(self) -> list[list[Completion]]:
        """Return the collected tokens as completions, in the order of the requests."""
        return [
            [self._completion(self.done[number, sample]) for sample in range(request.samples)]
            for number, request in enumerate(self.requests)
        ]

    def _completion(self, sample: _Sample) -> Completion:
        tokens, (_, logps, sampler_logps) = sample.tokens, np.concatenate(sample.parts, axis=1)
        stopped = int(tokens[-1]) in self.sampler.stop_ids
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        mask = None if self.tool is None else sample.drawn
        return Completion(tokens, logps.astype(np.float32), sampler_logps.astype(np.float32), reason, mask=mask)

    def _sample_keys(self) -> np.ndarray:
        rows = [(r.step, r.index, s) for r in self.requests for s in range(r.samples)]
        folded = np.zeros((power_of_two(max(len(rows), 1)), 3), np.uint32)
        folded[: len(rows)] = np.asarray(rows, np.uint32).reshape(-1, 3)
        return np.asarray(steps.sample_keys(self.config.seed, folded))

    def _key(self, sample: _Sample) -> np.ndarray:
        before = sum(r.samples for r in self.requests[: sample.request])
        key: np.ndarray = self.keys[before + sample.number]
        return key

    def _admit_waiting(self) -> None:
        """Fill free slots from the queue, one prefilled batch of prompts at a time."""
        while self.waiting and None in self.held:
            if self.waiting[0].request >= self.prefix_end:
                self._prefill_next(self.waiting[0].request)
            placed = {}
            for slot, held in enumerate(self.held):
                if held is None and self.waiting and self.waiting[0].request < self.prefix_end:
                    placed[slot] = self.waiting.popleft()
            self._place(placed)

    def _prefill_next(self, first: int) -> None:
        batch = self.requests[first : first + self.prefill_rows]
        tokens = np.zeros((self.prefill_rows, self.width), np.int32)
        lengths = np.ones(self.prefill_rows, np.int32)
        for row, request in enumerate(batch):
            tokens[row, : len(request.prompt)] = request.prompt
            lengths[row] = len(request.prompt)
        self.prefix = self.sampler._prefill(self.params, tokens, lengths)
        self.prefix_first, self.prefix_end = first, first + len(batch)
        self.sampler.stats.prompt_tokens += sum(len(r.prompt) for r in batch)
        self.sampler.stats.prefill_cells += tokens.size

    def _place(self, placed: dict[int, _Sample]) -> None:
        size = len(self.held)
        source, taken = np.zeros(size, np.int32), np.zeros(size, bool)
        keys = np.zeros((size, 2), np.uint32)
        for slot, sample in placed.items():
            source[slot], taken[slot], keys[slot] = sample.request - self.prefix_first, True, self._key(sample)
            self.held[slot] = sample
            self.lengths[slot] = len(self.requests[sample.request].prompt)
        self.sampler.stats.first_tokens += len(placed)
        limit = np.int32(self.config.max_new_tokens)
        self.slots, drawn = self.sampler._admit(
            self.slots, self.prefix, source, taken, keys, limit, sampling_params=self.sampling_params
        )
        self._collect(drawn, taken[None])

    def _decode_chunk(self) -> None:
        chunk, pause = self.config.decode_chunk, None if self.tool is None else self.tool.markers.end
        decode = partial(self.sampler._decode, sampling_params=self.sampling_params, steps=chunk, pause_id=pause)
        self.slots, drawn, valid, used = decode(self.params, self.slots)
        valid = np.asarray(valid)
        self.sampler.stats.slot_steps += int(used) * len(self.held)
        self.sampler.stats.chunks += 1
        self.lengths += valid.sum(0)
        self._collect(drawn, valid)

    def _collect(self, drawn: Any, valid: np.ndarray) -> None:
        """Append new tokens to their completions, free the slots of finished ones, force answers to tool questions."""
        drawn = np.stack([np.asarray(x, np.float64) for x in drawn])  # [3, steps, S]; token ids are exact in float64
        active = np.asarray(self.slots.active)
        answers = {}
        for slot, sample in enumerate(self.held):
            if sample is None:
                continue
            new = drawn[:, valid[:, slot], slot]
            self.sampler.stats.tokens += new.shape[1]
            if new.size:
                sample.parts.append(new)
            if active[slot]:
                continue
            if (answer := self._answer(sample)) is not None:
                answers[slot] = answer
            else:
                self.done[sample.request, sample.number] = sample
                self.held[slot] = None
        if answers:
            self._resume(answers)

    def _answer(self, sample: _Sample) -> np.ndarray | None:
        """Return the tool's answer tokens (maybe none) for a completion that asked it, or None when it is finished."""
        if self.tool is None:
            return None
        tokens = sample.tokens
        if tokens[-1] != self.tool.markers.end or len(tokens) >= self.config.max_new_tokens:
            return None
        answer = self.tool.respond(tokens)
        sample.forced.append(slice(len(tokens), len(tokens) + len(answer)))
        return answer

    def _resume(self, answers: dict[int, np.ndarray]) -> None:
        resumed = np.zeros(len(self.held), bool)
        forced = np.full((len(self.held), MAX_FORCED_TOKENS), NO_TOKEN, np.int32)
        for slot, answer in answers.items():
            resumed[slot], forced[slot, : len(answer)] = True, answer
        active, held = steps.resume(self.slots.active, self.slots.forced_tokens, resumed, forced)
        self.slots = self.slots._replace(active=active, forced_tokens=held)

    def _refit(self) -> None:
        """Resize the cache for the next chunk: the longest active completion plus the chunk's steps.

        Also reduce the slots once the queue is empty and at most three quarters of them are in use.
        """
        live = [slot for slot, held in enumerate(self.held) if held is not None]
        time = max(self.time, self._room(int(self.lengths[live].max())))
        size = len(self.held) if self.waiting else max(round_up_to_bucket(len(live)), SMALLEST_BATCH)
        if size >= len(self.held) and time == self.time:
            return
        idle = [slot for slot in range(len(self.held)) if self.held[slot] is None]
        rows = np.array((live + idle)[:size] if size < len(self.held) else range(len(self.held)))
        self.slots, self.time = resize(self.slots, rows, time), time
        self.held, self.lengths = [self.held[row] for row in rows], self.lengths[rows]

    def _room(self, length: int) -> int:
        """Return the cache size in tokens per slot for rows of up to `length` tokens plus the next chunk's steps.

        It is at most `kv_cache_size`: no prompt with its completion is longer, so a chunk draws no token beyond it.
        """
        room = length_bucket(length + self.config.decode_chunk)
        return min(room, self.config.kv_cache_size or room)
