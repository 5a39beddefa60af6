"""Sampling completions: slots that are refilled while others go on.

A prompt is prefilled once; its keys and values are copied into the slot of each of its samples. Decode steps run in
chunks on the device; between chunks the host takes out what is finished and admits what waits. When nothing waits any
more, the batch shrinks with the samples that are left. Policy is plain Python here; what runs on the device is
in `steps`.

The noise of a token depends on (seed, step, prompt index, sample index, token index) and on nothing else, so the same
sample is drawn in any slot, batch, order or chunk size.

With a tool a slot also halts where a question ends. The host answers it between chunks, and the next steps put the
answer's tokens in place of what they draw: through the same cache, counted toward the limit, marked in the mask.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from covey.config.schema import RolloutConfig
from covey.models.decoder import Decoder
from covey.sampling import device as steps
from covey.sampling.cache import NOTHING, Prefix, empty_slots, refit
from covey.sampling.lengths import bucket, check_length, few_above, power_of_two
from covey.sampling.logits import Warp
from covey.sampling.tools import MOST_FORCED, Tool
from covey.types import Completion, FinishReason

PREFILL_BATCH = 8
"""Most prompts that are prefilled together."""
SMALLEST_BATCH = 4


@dataclass(frozen=True)
class Request:
    """One prompt to be sampled `samples` times.

    Attributes:
        prompt: int32 [n] tokens.
        samples: how many completions.
        index: the prompt's number in the step; with `step` and the sample's number it seeds the noise.
        step: the training step (or any other number that tells calls apart).
    """

    prompt: np.ndarray
    samples: int
    index: int
    step: int = 0


@dataclass
class SamplerStats:
    """What a call cost, or several added up.

    Attributes:
        tokens: completion tokens kept; `first_tokens` of them were drawn with the prompt, not in a decode step.
        slot_steps: decode steps × slots, used or not.
        chunks: calls of the decode program.
        prompt_tokens: prompt tokens prefilled, and `prefill_cells` with their padding.
    """

    tokens: int = 0
    first_tokens: int = 0
    slot_steps: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    prefill_cells: int = 0

    def __add__(self, other: "SamplerStats") -> "SamplerStats":
        return SamplerStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def waste(self) -> float:
        """Share of the decode work that gave no token."""
        return 1.0 - (self.tokens - self.first_tokens) / self.slot_steps if self.slot_steps else 0.0


class _Sample(NamedTuple):
    """A completion on its way: which request, which of its samples, where its tokens gather, and which of them were
    put there by a tool.
    """

    request: int
    number: int
    parts: list[np.ndarray]
    forced: list[slice]

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n], as far as they are known."""
        return np.concatenate([part[0] for part in self.parts]).astype(np.int32)

    @property
    def drawn(self) -> np.ndarray:
        """bool [n]: not put there. An answer that the limit cut short ends with the sample."""
        mask = np.ones(len(self.tokens), bool)
        for place in self.forced:
            mask[place] = False
        return mask


class Sampler:
    """Batched generation from a decoder.

    Args:
        graph: the decoder's `nnx.GraphDef`; its state comes with every call, so that new weights need no new sampler.
        stop_ids: tokens that end a completion; each is kept as its last token.
        config: lengths, temperature, truncation, slots, seed.
    """

    def __init__(self, graph: nnx.GraphDef[Decoder], stop_ids: Sequence[int], config: RolloutConfig):
        self.graph, self.config = graph, config
        self.stop_ids = tuple(sorted(stop_ids))
        self.stats = SamplerStats()
        self._prefill = jax.jit(partial(steps.prefill, graph))
        self._admit = jax.jit(partial(steps.start, self.stop_ids), static_argnames=("warp",), donate_argnums=(0,))
        self._decode = jax.jit(
            partial(steps.decode, graph, self.stop_ids), static_argnames=("warp", "steps", "pause"), donate_argnums=(1,)
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
        """All completions, by request and sample, without their text.

        Args:
            params: the decoder's state.
            requests: prompts; lengths may differ.
            config: settings for this call in place of the sampler's own.
            tool: answers questions while they are sampled; every completion then has a mask.
            progress: called with (finished, total) samples after each chunk.

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
    """One call of `generate`: the queue, the slots, and what came out."""

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
        self.warp = Warp.of(self.config)
        self.keys = self._sample_keys()
        longest = max((len(r.prompt) for r in self.requests), default=1)
        self.width = bucket(longest, smallest=16)
        self.prefill_rows = min(PREFILL_BATCH, power_of_two(len(self.requests)))
        self.prefix: Prefix | None = None
        self.prefix_first = self.prefix_end = 0
        size = min(self.config.slots, power_of_two(self.total))
        model = nnx.merge(self.sampler.graph, self.params)
        c = model.config
        self.time = self._room(longest)
        dtype = model.head_weight.dtype
        forced = 0 if self.tool is None else MOST_FORCED
        self.slots = empty_slots(size, self.time, c.num_layers, c.num_kv_heads, c.head_dim, dtype, forced=forced)
        self.held: list[_Sample | None] = [None] * size
        self.lengths = np.zeros(size, np.int64)

    def chunks(self) -> Iterator[int]:
        """Admits, decodes and collects until every sample is done; yields how many are."""
        while self.waiting or any(self.held):
            self._admit_waiting()
            if not any(self.held):
                continue  # every sample admitted was finished by its first token
            self._refit()
            self._decode_chunk()
            yield len(self.done)

    def completions(self) -> list[list[Completion]]:
        """The tokens gathered, as completions in the order of the requests."""
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
        """Fills free slots from the queue, one prefilled batch of prompts at a time."""
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
        self.slots, drawn = self.sampler._admit(self.slots, self.prefix, source, taken, keys, limit, warp=self.warp)
        self._collect(drawn, taken[None])

    def _decode_chunk(self) -> None:
        chunk, pause = self.config.decode_chunk, None if self.tool is None else self.tool.markers.end
        decode = partial(self.sampler._decode, warp=self.warp, steps=chunk, pause=pause)
        self.slots, drawn, valid, used = decode(self.params, self.slots)
        valid = np.asarray(valid)
        self.sampler.stats.slot_steps += int(used) * len(self.held)
        self.sampler.stats.chunks += 1
        self.lengths += valid.sum(0)
        self._collect(drawn, valid)

    def _collect(self, drawn: Any, valid: np.ndarray) -> None:
        """Moves new tokens to their samples, finished samples out of their slots, answers to those that asked."""
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
        """The tokens to put behind a sample that asked the tool, maybe none; None when it is finished."""
        if self.tool is None:
            return None
        tokens = sample.tokens
        if tokens[-1] != self.tool.markers.end or len(tokens) >= self.config.max_new_tokens:
            return None
        answer = self.tool.answer(tokens)
        sample.forced.append(slice(len(tokens), len(tokens) + len(answer)))
        return answer

    def _resume(self, answers: dict[int, np.ndarray]) -> None:
        resumed = np.zeros(len(self.held), bool)
        forced = np.full((len(self.held), MOST_FORCED), NOTHING, np.int32)
        for slot, answer in answers.items():
            resumed[slot], forced[slot, : len(answer)] = True, answer
        active, held = steps.resume(self.slots.active, self.slots.forced, resumed, forced)
        self.slots = self.slots._replace(active=active, forced=held)

    def _refit(self) -> None:
        """Room for the next chunk: the longest live sample and the chunk's steps. And fewer slots, once nothing waits
        and at most three quarters of them are in use.
        """
        live = [slot for slot, held in enumerate(self.held) if held is not None]
        time = max(self.time, self._room(int(self.lengths[live].max())))
        size = len(self.held) if self.waiting else max(few_above(len(live)), SMALLEST_BATCH)
        if size >= len(self.held) and time == self.time:
            return
        idle = [slot for slot in range(len(self.held)) if self.held[slot] is None]
        rows = np.array((live + idle)[:size] if size < len(self.held) else range(len(self.held)))
        self.slots, self.time = refit(self.slots, rows, time), time
        self.held, self.lengths = [self.held[row] for row in rows], self.lengths[rows]

    def _room(self, length: int) -> int:
        """Tokens that a slot of the cache gets where its samples have up to `length`, for the next chunk's steps too.

        Never more than `kv_cache_size`: no prompt with its answer is longer, so what a chunk would add beyond is not
        drawn.
        """
        room = bucket(length + self.config.decode_chunk)
        return min(room, self.config.kv_cache_size or room)
