"""Decode batch of an engine: its slots with their KV cache, and the programs that are run on them.

Only the KV cache stays on the device: the few numbers of each slot pass through the host between chunks, where samples
are admitted, resumed and moved without a program.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import UInt32

from covey.sampling.cache import LayerCache, Prefix, append_size
from covey.sampling.logits import SamplingParams, TracedSamplingParams
from covey.sampling.noise import token_keys
from covey.sampling.programs import Programs, Slots, empty_slots
from covey.sampling.responder import NewBranch
from covey.sampling.sequence import SampledTokens, Sequence


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
    """Content of a slot: each layer's blocks [1, ...], and the state of the slot."""

    cache: list[LayerCache]
    slot: Slots


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
    """Runs the programs of a decoder on slots, and on the prompts that were prefilled last.

    Args:
        programs: those of the decoder.

    Attributes:
        params: the decoder's state; None without weights.
        slots: state of each slot.
        cache_length: number of tokens for which each slot has room.
    """

    def __init__(self, programs: Programs, params: Any):
        self.programs, self.params = programs, params
        self.stats = SamplerStats()
        self.release()

    def release(self) -> None:
        """Free the cache and forget all slots."""
        self.slots, self.cache, self.cache_length = empty_slots(0), list[LayerCache](), 0
        self.prefix: Prefix | None = None
        self.prefix_lengths = np.zeros(0, np.int32)

    def allocate(self, slots: int, cache_length: int) -> None:
        """Empty all slots, and make a cache unless that which is there has these sizes."""
        if (slots, cache_length) != (len(self.slots.token), self.cache_length):
            self.release()
            self.cache = self.programs.empty_cache(self.params, slots, 0, cache_length)
        self.slots, self.cache_length = empty_slots(slots), cache_length

    def prefill(self, prompts: Collection[np.ndarray], shape: tuple[int, int]) -> None:
        """Prefill `prompts` (int32 [n] each), padded to a batch of this shape."""
        tokens, lengths = np.zeros(shape, np.int32), np.ones(shape[0], np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        self.prefix, self.prefix_lengths = self.programs.prefill(self.params, tokens, lengths), lengths
        self.stats.prompt_tokens += sum(map(len, prompts))
        self.stats.prefill_cells += tokens.size

    def insert(self, rows: Mapping[int, int], sequences: Mapping[int, Sequence]) -> Chunk:
        """Insert prefilled prompts and draw the first tokens: row of the prompt, and sequence, of each slot."""
        size = len(self.slots.token)
        inserted, prompt = np.zeros(size, bool), np.zeros(size, np.int32)
        for slot, row in rows.items():
            inserted[slot], prompt[slot] = True, row
        keys = self._keys(sequences)
        first = token_keys(keys, np.zeros(size, np.int32))
        tokens = jax.device_get(self._insert(prompt, inserted, first, self._sampling_params(sequences)))
        self._start(sequences, inserted, keys, self.prefix_lengths[prompt], tokens[0])
        self.stats.first_tokens += int(inserted.sum())
        return self._chunk(tuple(x[None] for x in tokens), inserted[None])

    def _insert(
        self,
        prompt: np.ndarray,
        inserted: np.ndarray,
        keys: np.ndarray,
        sampling_params: SamplingParams | TracedSamplingParams,
    ) -> tuple[Any, ...]:
        """Insert the prefilled `prompt[s]` into each slot that is `inserted`; return the first tokens."""
        programs, prefix = self.programs, self.prefix
        assert prefix is not None, "prompts are prefilled before they are inserted"
        if programs.compiled_sampling_params is not None:
            if isinstance(sampling_params, SamplingParams):
                sampling_params = TracedSamplingParams.of(sampling_params)
            self.cache, tokens = programs.admit(self.cache, prefix, prompt, inserted, keys, sampling_params)
            return tuple(tokens)
        for blocks, new in zip(self.cache, prefix.cache, strict=True):
            blocks[: len(new)] = [programs.insert(*pair, prompt, inserted) for pair in zip(blocks, new, strict=False)]
        traced = isinstance(sampling_params, TracedSamplingParams)
        draw_first = programs.draw_first_traced if traced else programs.draw_first
        return tuple(draw_first(prefix.logits, prompt, keys, sampling_params=sampling_params))

    def _keys(self, sequences: Mapping[int, Sequence]) -> UInt32[np.ndarray, "S 2"]:
        """Return the random key of the sequence in each slot; 0 in the others."""
        keys = np.zeros((len(self.slots.token), 2), np.uint32)
        for slot, one in sequences.items():
            keys[slot] = one.key
        return keys

    def _sampling_params(self, sequences: Mapping[int, Sequence]) -> SamplingParams | TracedSamplingParams:
        """Return the settings that these sequences share; where they differ, the numbers of each slot."""
        different = {one.sampling_params for one in sequences.values()}
        if len(different) == 1:
            return different.pop()
        default = next(iter(sequences.values()))
        slots = range(len(self.slots.token))
        return TracedSamplingParams.stack([sequences.get(slot, default).sampling_params for slot in slots])

    def decode(self, sequences: Mapping[int, Sequence], steps: int, pause_id: int | None = None) -> Chunk:
        """Run a chunk of decode steps for the sequences in slots that are active."""
        decode = self.programs.decode_with(self._sampling_params(sequences))
        self.cache, *results = decode(self.params, self.cache, self.slots, steps=steps, pause_id=pause_id)
        slots, tokens, valid, made = jax.device_get(results)  # all at once: the host waits for one transfer
        self.slots = jax.tree.map(np.array, slots)
        self.stats.slot_steps += int(made) * len(self.slots.token)
        self.stats.chunks += 1
        return self._chunk(tokens, valid)

    def resume(self, sequences: Mapping[int, Sequence]) -> None:
        """Append the responses of sequences that have halted in these slots, and let them go on. A new branch drops the
        last tokens of the slot first.
        """
        slots, cached = self.slots, {}
        for slot, resumed in sequences.items():
            response = resumed.response
            if isinstance(response, NewBranch):
                count, tokens, slots.length[slot] = len(response.tokens), response.tokens, response.kept
            else:
                count, tokens = len(response), np.append(slots.token[slot], response)
            cached[slot], slots.token[slot] = tokens[:-1], tokens[-1]
            slots.num_tokens[slot] += count
            slots.active[slot], slots.limit[slot] = True, resumed.turn_end
            resumed.response = None
        self._append({slot: tokens for slot, tokens in cached.items() if len(tokens)})

    def halt(self, slots: list[int]) -> None:
        """Decode these slots no further."""
        self.slots.active[slots] = False

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
        return SwappedSlot(self.programs.take(self.cache, np.int32(slot)), state)

    def swap_in(self, slot: int, swapped: SwappedSlot) -> None:
        """Restore a swapped slot in a free one; the cache must not have been resized since."""
        self.cache = self.programs.put(self.cache, swapped.cache, np.int32(slot))
        for array, value in zip(self.slots, swapped.slot, strict=True):
            array[slot] = value

    def resize(self, indices: np.ndarray, cache_length: int) -> None:
        """Give the slots the content of those at `indices`, and room for `cache_length` tokens each. Slots behind those
        that there were are free.
        """
        if len(indices) != (old := len(self.slots.token)):
            self.slots = jax.tree.map(lambda x: x[indices], self.slots)
            self.slots.active[old:] = False
            for blocks in self.cache:  # one block after the other: the whole cache is never there twice
                for i, block in enumerate(blocks):
                    blocks[i] = self.programs.keep(block, indices)
        if cache_length > self.cache_length:
            new = self.programs.empty_cache(self.params, len(indices), self.cache_length, cache_length)
            self.cache = [old + more for old, more in zip(self.cache, new, strict=True)]
            self.cache_length = cache_length

    def _start(
        self,
        sequences: Mapping[int, Sequence],
        inserted: np.ndarray,
        keys: np.ndarray,
        lengths: np.ndarray,
        tokens: np.ndarray,
    ) -> None:
        """Let the slots that were `inserted` begin after prompts of these lengths with these first tokens."""
        limit = np.ones_like(tokens)
        for slot, one in sequences.items():
            limit[slot] = one.turn_end
        active = ~np.isin(tokens, self.programs.stop_ids) & (limit > 1)
        new = Slots(keys, lengths, tokens, np.ones_like(tokens), active, limit)
        for array, value in zip(self.slots, new, strict=True):
            array[inserted] = value[inserted]

    def _chunk(self, tokens: tuple[Any, ...], valid: np.ndarray) -> Chunk:
        counts = valid.sum(0)
        self.stats.tokens += int(counts.sum())
        # Copies, since the device may use its buffers again.
        host = SampledTokens(*(x.T.copy() for x in tokens))
        return Chunk(host, counts, self.slots.active.copy())
