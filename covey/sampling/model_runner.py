"""Decode batch of a call: its slots with their KV cache, and the programs that are run on them.

Only the KV cache stays on the device: the few numbers of each slot pass through the host between chunks, where samples
are admitted, resumed and moved without a program.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import numpy as np

from covey.config.schema import RolloutConfig
from covey.sampling.cache import LayerCache, Prefix, append_size
from covey.sampling.logits import SamplingParams, TracedSamplingParams
from covey.sampling.programs import Programs, Slots, empty_slots
from covey.sampling.responder import NewBranch
from covey.sampling.sequence import SampledTokens, uniform_noise


@dataclass
class SamplerStats:
    """Cost of a call, or the sum over several calls.

    Attributes:
        tokens: tokens that the model drew and that were kept; `first_tokens` of them at prefill, not in a decode step.
        slot_steps: decode steps × slots, used or not.
        chunks: calls of the decode program.
        prompt_tokens: prompt tokens prefilled; `prefill_cells` includes their padding.
        appended_tokens: tokens of tools and environments in the completions; `append_cells` includes their padding.
        seconds: time of the calls; `decode_seconds` of it in decode steps. They follow the clock.
    """

    tokens: int = 0
    first_tokens: int = 0
    slot_steps: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    prefill_cells: int = 0
    appended_tokens: int = 0
    append_cells: int = 0
    seconds: float = 0.0
    decode_seconds: float = 0.0

    def __add__(self, other: "SamplerStats") -> "SamplerStats":
        return SamplerStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def waste(self) -> float:
        """Fraction of the decode work that produced no token."""
        return 1.0 - (self.tokens - self.first_tokens) / self.slot_steps if self.slot_steps else 0.0

    @property
    def slot_waste(self) -> float:
        """Fraction of the slots' time in which they drew no token, by the clock: also while all samples wait for a
        response, and while prompts and responses are prefilled.

        >>> SamplerStats(tokens=30, slot_steps=40, seconds=8.0, decode_seconds=6.0).slot_waste  # 3/4 of 3/4 drew
        0.4375
        """
        return 1.0 - (1.0 - self.waste) * self.decode_seconds / self.seconds if self.seconds else 0.0


class SwappedSlot(NamedTuple):
    """Content of a slot: each layer's blocks [1, ...], the state of the slot and its random key."""

    cache: list[LayerCache]
    slot: Slots
    key: np.ndarray


class Chunk(NamedTuple):
    """Result of some steps of the decode batch.

    Attributes:
        tokens: arrays [S, steps].
        counts: int [S], number of tokens that the slot drew: it was active in so many steps, from the first on.
        active: bool [S], whether the slot is still active after the steps.
    """

    tokens: SampledTokens
    counts: np.ndarray
    active: np.ndarray

    def of(self, slot: int) -> SampledTokens:
        """Return the tokens that a slot drew."""
        return SampledTokens(*(x[slot, : self.counts[slot]] for x in self.tokens))


class ModelRunner:
    """Runs the programs of a decoder on the slots of a call, and on the prompts that were prefilled last.

    Args:
        programs: those of the decoder.
        params: the decoder's state.
        config: settings of the call.
        slots: number of slots.
        cache_length: number of tokens for which each slot has room.
        pause_id: token behind which a slot halts, beside the stop tokens; None for none.
        turn_limit: maximum number of tokens that a slot draws before it halts.
    """

    def __init__(
        self,
        programs: Programs,
        params: Any,
        config: RolloutConfig,
        slots: int,
        cache_length: int,
        pause_id: int | None = None,
        turn_limit: int | None = None,
    ):
        self.programs, self.params, self.config = programs, params, config
        self.sampling_params = SamplingParams.from_config(config)
        self.pause_id, self.turn_limit = pause_id, turn_limit or config.max_new_tokens
        self.slots = empty_slots(slots)
        self.keys = np.zeros((slots, 2), np.uint32)
        self.cache, self.cache_length = programs.empty_cache(params, slots, 0, cache_length), cache_length
        self.prefix: Prefix
        self.prefix_lengths: np.ndarray
        self.stats = SamplerStats()

    def prefill(self, prompts: Sequence[np.ndarray], shape: tuple[int, int]) -> None:
        """Prefill `prompts` (int32 [n] each), padded to a batch of this shape."""
        tokens, lengths = np.zeros(shape, np.int32), np.ones(shape[0], np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        self.prefix, self.prefix_lengths = self.programs.prefill(self.params, tokens, lengths), lengths
        self.stats.prompt_tokens += sum(map(len, prompts))
        self.stats.prefill_cells += tokens.size

    def insert(self, admitted: Iterable[tuple[int, int, np.ndarray]]) -> Chunk:
        """Insert prefilled prompts and draw the first tokens: slot, row of the prompt, and random key of each."""
        size = len(self.slots.token)
        inserted, prompt = np.zeros(size, bool), np.zeros(size, np.int32)
        for slot, row, key in admitted:
            inserted[slot], prompt[slot], self.keys[slot] = True, row, key
        tokens = self._insert(prompt, inserted, uniform_noise(self.keys, np.zeros(size, np.int32)))
        self._start(inserted, self.prefix_lengths[prompt], np.asarray(tokens[0]))
        self.stats.first_tokens += int(inserted.sum())
        return self._chunk(tuple(x[None] for x in map(np.asarray, tokens)), inserted[None])

    def _insert(self, prompt: np.ndarray, inserted: np.ndarray, noise: np.ndarray) -> tuple[Any, ...]:
        """Insert the prefilled `prompt[s]` into each slot that is `inserted`; return the first tokens."""
        programs = self.programs
        if programs.compiled_sampling_params is not None:
            traced = TracedSamplingParams.of(self.sampling_params)
            self.cache, tokens = programs.admit(self.cache, self.prefix, prompt, inserted, noise, traced)
            return tuple(tokens)
        for blocks, new in zip(self.cache, self.prefix.cache, strict=True):
            blocks[: len(new)] = [programs.insert(*pair, prompt, inserted) for pair in zip(blocks, new, strict=False)]
        return tuple(programs.draw_first(self.prefix.logits, prompt, noise, sampling_params=self.sampling_params))

    def decode(self) -> Chunk:
        """Run a chunk of decode steps."""
        index = self.slots.num_tokens[:, None] + np.arange(self.config.decode_chunk)
        decode, noise = self.programs.decode_with(self.sampling_params), uniform_noise(self.keys[:, None], index)
        self.cache, slots, tokens, valid, steps = decode(
            self.params, self.cache, self.slots, noise, pause_id=self.pause_id
        )
        self.slots = jax.tree.map(np.array, slots)
        self.stats.slot_steps += int(steps) * len(self.slots.token)
        self.stats.chunks += 1
        return self._chunk(tokens, np.asarray(valid))

    def resume(self, responses: Mapping[int, np.ndarray | NewBranch]) -> None:
        """Append a response, int32 [n], to each of these slots, which have halted, and let them go on. A new branch
        drops the last tokens of the slot first.
        """
        slots, cached = self.slots, {}
        for slot, response in responses.items():
            if isinstance(response, NewBranch):
                count, tokens, slots.length[slot] = len(response.tokens), response.tokens, response.kept
            else:
                count, tokens = len(response), np.append(slots.token[slot], response)
            cached[slot], slots.token[slot] = tokens[:-1], tokens[-1]
            slots.num_tokens[slot] += count
            slots.active[slot] = True
            slots.limit[slot] = min(slots.num_tokens[slot] + self.turn_limit, self.config.max_new_tokens)
        self._append({slot: tokens for slot, tokens in cached.items() if len(tokens)})

    def _append(self, tokens: Mapping[int, np.ndarray]) -> None:
        """Append `tokens`, int32 [n], to the cache of each slot, piece by piece."""
        while tokens:
            sizes = {slot: append_size(len(new)) for slot, new in tokens.items()}
            for size in sorted(set(sizes.values())):
                self._append_pieces({slot: tokens[slot][:size] for slot in tokens if sizes[slot] == size}, size)
            tokens = {slot: new[sizes[slot] :] for slot, new in tokens.items() if len(new) > sizes[slot]}

    def _append_pieces(self, pieces: Mapping[int, np.ndarray], size: int) -> None:
        number = len(self.slots.token)
        padded, (slots, start, count) = np.zeros((number, size), np.int32), np.zeros((3, number), np.int32)
        for row, (slot, piece) in enumerate(pieces.items()):
            padded[row, : len(piece)] = piece
            slots[row], start[row], count[row] = slot, self.slots.length[slot], len(piece)
            self.slots.length[slot] += len(piece)
        rows = np.int32(len(pieces))
        self.cache = self.programs.append(self.params, self.cache, slots, padded, start, count, rows)
        self.stats.append_cells += len(pieces) * size
        self.stats.appended_tokens += int(count.sum())

    def swap_out(self, slot: int) -> SwappedSlot:
        """Return a copy of the content of a slot, which `swap_in` restores in any slot, bit for bit."""
        state = jax.tree.map(lambda x: x[slot], self.slots)
        return SwappedSlot(self.programs.take(self.cache, np.int32(slot)), state, self.keys[slot].copy())

    def swap_in(self, slot: int, swapped: SwappedSlot) -> None:
        """Restore a swapped slot in a free one; the cache must not have been resized since."""
        self.cache = self.programs.put(self.cache, swapped.cache, np.int32(slot))
        for array, value in zip((*self.slots, self.keys), (*swapped.slot, swapped.key), strict=True):
            array[slot] = value

    def resize(self, indices: np.ndarray, cache_length: int) -> None:
        """Keep only the slots at `indices`, in that order, each with room for `cache_length` tokens."""
        if len(indices) < len(self.slots.token):
            self.slots, self.keys = jax.tree.map(lambda x: x[indices], (self.slots, self.keys))
            for blocks in self.cache:  # one block after the other: the whole cache is never there twice
                for i, block in enumerate(blocks):
                    blocks[i] = self.programs.keep(block, indices)
        if cache_length > self.cache_length:
            new = self.programs.empty_cache(self.params, len(indices), self.cache_length, cache_length)
            self.cache = [old + more for old, more in zip(self.cache, new, strict=True)]
            self.cache_length = cache_length

    def _start(self, inserted: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> None:
        """Let the slots that were `inserted` begin after prompts of these lengths with these first tokens."""
        limit = min(self.turn_limit, self.config.max_new_tokens)
        active = ~np.isin(tokens, self.programs.stop_ids) & (limit > 1)
        new = Slots(lengths, tokens, np.full_like(tokens, 1), active, np.full_like(tokens, limit))
        for array, value in zip(self.slots, new, strict=True):
            array[inserted] = value[inserted]

    def _chunk(self, tokens: tuple[Any, ...], valid: np.ndarray) -> Chunk:
        counts = valid.sum(0)
        self.stats.tokens += int(counts.sum())
        # Copies, since the device may use its buffers again.
        host = SampledTokens(*(np.asarray(x).T.copy() for x in tokens))
        return Chunk(host, counts, self.slots.active.copy())
