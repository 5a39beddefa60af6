"""Decode batch of an engine: its slots with their KV cache, and the programs that are run on them.

The slots stay on the device. The host launches programs on them without a look at what they hold: what it writes to a
slot it knows from the sequence there. It reads what the slots drew, in one transfer for each chunk.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from covey.models.decoder import Decoder
from covey.parallel import mesh_of, processes
from covey.parallel.arrays import sharding_of
from covey.sampling import programs
from covey.sampling.cache import CACHE_AXES, LayerCache, Prefix, SlotState, append_size, keep_rows, put_slot, take_slot
from covey.sampling.logits import TracedSamplingParams
from covey.sampling.programs import Drawn, Slots
from covey.sampling.scheduler import Admission
from covey.sampling.sequence import SampledTokens, Sequence


@dataclass
class SamplerStats:
    """Cost of a call, or the sum over several calls.

    Attributes:
        tokens: tokens that the model drew and that were kept; `first_tokens` of them at prefill, not in a decode step.
        slot_steps: decode steps × slots, used or not.
        chunks: calls of the decode program.
        prompt_tokens: prompt tokens prefilled.
        appended_tokens: tokens of tools and environments in the completions.
        seconds: time of the steps, and between them while the device works; `decode_seconds` of it in decode steps.
            They follow the clock.
    """

    tokens: int = 0
    first_tokens: int = 0
    slot_steps: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    appended_tokens: int = 0
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


class Chunk(NamedTuple):
    """Tokens that the slots drew, read by the host.

    Attributes:
        tokens: arrays [S, steps].
        counts: int [S], number of tokens of each slot.
        active: bool [S], whether the slot is still active.
    """

    tokens: SampledTokens
    counts: np.ndarray
    active: np.ndarray

    def of(self, slot: int) -> SampledTokens:
        """Return the tokens that a slot drew."""
        return SampledTokens(*(x[slot, : self.counts[slot]] for x in self.tokens))


def empty_slots(slots: int) -> Slots:
    """Create empty slots, on the host."""
    length, token, num_tokens, limit = np.zeros((4, slots), np.int32)
    return Slots(np.zeros((slots, 2), np.uint32), length, token, num_tokens, np.zeros(slots, bool), limit)


def front(cache: list[LayerCache], prefix: list[LayerCache]) -> list[LayerCache]:
    """Return the blocks into which a prefix is inserted."""
    return [blocks[: len(new)] for blocks, new in zip(cache, prefix, strict=True)]


class Programs:
    """Programs of a decoder, compiled once for each shape; settings of the sampling distribution are arguments.

    Args:
        graph: the decoder's `nnx.GraphDef`.
        stop_ids: tokens that end a completion.
    """

    def __init__(self, graph: nnx.GraphDef[Decoder], stop_ids: tuple[int, ...]):
        self.prefill = jax.jit(partial(programs.prefill, graph))
        self.admit = jax.jit(partial(programs.admit, stop_ids), donate_argnums=0)
        # All arguments are kept, since the cache is made on the devices of the weights.
        self.empty_cache = jax.jit(partial(programs.empty_cache, graph), static_argnums=(1, 2, 3), keep_unused=True)
        self.put_rows = jax.jit(programs.put_rows)
        self.keep = jax.jit(keep_rows)
        self.take = jax.jit(take_slot)
        self.put = jax.jit(put_slot, donate_argnums=0)
        self.append = jax.jit(partial(programs.append, graph), donate_argnums=1)
        self.decode = jax.jit(
            partial(programs.decode, graph, stop_ids), static_argnames=("steps", "pause_id"), donate_argnums=1
        )

    def place_slots(self, params: Any, slots: Slots) -> Slots:
        """Put slots of the host onto the devices, as the programs return them."""
        sharding = sharding_for(params, (), ())
        return slots if sharding is None else processes.here().put_host(slots, sharding)


def sharding_for(params: Any, shape: tuple[int, ...], axes: tuple[str | None, ...] = CACHE_AXES) -> Sharding | None:
    """Return the sharding of an array with these logical axes, by default of keys or values; on one device the sharding
    of the weights.
    """
    mesh = mesh_of(params)
    if mesh is None:
        return getattr(jax.tree.leaves(params)[0], "sharding", None)
    sharding: Sharding = sharding_of(axes, shape, mesh)
    return sharding


class ModelRunner:
    """Runs the programs of a decoder on slots, and on the prompts that were prefilled last.

    Args:
        programs: programs of the decoder.

    Attributes:
        params: the decoder's state; None without weights.
        slots: state of each slot.
        cache_length: number of tokens for which each slot has room.
        prefix_lengths: lengths of the prompts that were prefilled last; none after new weights.
    """

    def __init__(self, programs: Programs, params: Any):
        self.programs, self.params = programs, params
        self.stats = SamplerStats()
        self.release()

    def release(self) -> None:
        """Free the cache and forget all slots."""
        self.slots, self.cache, self.cache_length = empty_slots(0), list[LayerCache](), 0
        self.prefix: Prefix | None = None
        self.prefix_tokens, self.prefix_lengths = np.zeros((0, 0), np.int32), np.zeros(0, np.int32)

    def allocate(self, slots: int, cache_length: int) -> None:
        """Empty all slots, and make a cache unless that which is there has these sizes."""
        if (slots, cache_length) != (len(self.slots.token), self.cache_length):
            self.release()
            self.cache = self.programs.empty_cache(self.params, slots, 0, cache_length)
        self.slots, self.cache_length = self.programs.place_slots(self.params, empty_slots(slots)), cache_length

    def prefill(self, prompts: Collection[np.ndarray], shape: tuple[int, int]) -> None:
        """Prefill `prompts` (int32 [n] each), padded to a batch of this shape, unless they were prefilled last."""
        tokens, lengths = np.zeros(shape, np.int32), np.ones(shape[0], np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        if np.array_equal(tokens, self.prefix_tokens) and np.array_equal(lengths, self.prefix_lengths):
            return
        self.prefix = self.programs.prefill(self.params, tokens, lengths)
        self.prefix_tokens, self.prefix_lengths = tokens, lengths
        self.stats.prompt_tokens += sum(map(len, prompts))

    def insert(self, admitted: Collection[Admission], sequences: Mapping[int, Sequence]) -> Drawn:
        """Insert prefilled prompts and draw the first tokens of the sequences in these slots."""
        drawn: Drawn
        assert self.prefix is not None, "prompts are prefilled before they are inserted"
        entering = empty_slots(len(self.slots.token))
        inserted, prompt = np.zeros_like(entering.active), np.zeros_like(entering.length)
        for slot, row, _ in admitted:
            one = sequences[slot]
            inserted[slot], prompt[slot], entering.key[slot], entering.limit[slot] = True, row, one.key, one.turn_end
        entering.length[:] = self.prefix_lengths[prompt]
        samples, changed = (inserted, prompt, entering), front(self.cache, self.prefix.cache)
        changed, self.slots, drawn = self.programs.admit(
            changed, self.slots, self.prefix, *samples, self._numbers(sequences)
        )
        self.cache = [new + blocks[len(new) :] for new, blocks in zip(changed, self.cache, strict=True)]
        return drawn

    def _numbers(self, sequences: Mapping[int, Sequence]) -> TracedSamplingParams:
        """Return the settings of each slot; a free slot has the settings of another."""
        default = next(iter(sequences.values()))
        slots = range(len(self.slots.token))
        return TracedSamplingParams.stack([sequences.get(slot, default).sampling_params for slot in slots])

    def decode(self, sequences: Mapping[int, Sequence], steps: int, pause_id: int | None = None) -> Drawn:
        """Launch a chunk of decode steps for the sequences in slots that are active."""
        drawn: Drawn
        self.cache, self.slots, drawn = self.programs.decode(
            self.params, self.cache, self.slots, self._numbers(sequences), steps=steps, pause_id=pause_id
        )
        self.stats.chunks += 1
        return drawn

    def read(self, drawn: Drawn) -> Chunk:
        """Wait for the tokens that a program drew, and return them."""
        draws, counts, active, steps = jax.device_get(drawn)  # all at once: the host waits for one transfer
        self.stats.slot_steps += int(steps) * len(counts)
        # Copies, since the device may use its buffers again.
        return Chunk(SampledTokens(*(x.T.copy() for x in draws)), counts, active)

    def count_tokens(self, number: int, *, first: bool) -> None:
        """Count tokens that were kept; `first` if they were drawn at prefill."""
        self.stats.tokens += number
        self.stats.first_tokens += number if first else 0

    def halt(self, slots: Collection[int]) -> None:
        """Empty these slots."""
        self.put_rows(slots, empty_slots(len(self.slots.token)))

    def put_rows(self, slots: Collection[int], rows: Slots) -> None:
        """Write the state that these slots have in `rows`."""
        if slots:
            chosen = np.isin(np.arange(len(self.slots.token)), list(slots))
            self.slots = self.programs.put_rows(self.slots, chosen, rows)

    def append(self, pieces: Mapping[int, tuple[int, np.ndarray]]) -> None:
        """Append tokens, int32 [n], to the cache of each slot from a position on, piece by piece."""
        while pieces:
            sizes = {slot: append_size(len(tokens)) for slot, (_, tokens) in pieces.items()}
            for size in sorted(set(sizes.values())):
                alike = {slot: piece for slot, piece in pieces.items() if sizes[slot] == size}
                self._append_pieces({slot: (start, tokens[:size]) for slot, (start, tokens) in alike.items()}, size)
            pieces = {
                slot: (start + sizes[slot], tokens[sizes[slot] :])
                for slot, (start, tokens) in pieces.items()
                if len(tokens) > sizes[slot]
            }

    def _append_pieces(self, pieces: Mapping[int, tuple[int, np.ndarray]], size: int) -> None:
        number = len(self.slots.token)
        padded, (slots, starts, counts) = np.zeros((number, size), np.int32), np.zeros((3, number), np.int32)
        for row, (slot, (start, piece)) in enumerate(pieces.items()):
            padded[row, : len(piece)] = piece
            slots[row], starts[row], counts[row] = slot, start, len(piece)
        arguments = slots, padded, starts, counts, np.int32(len(pieces))
        self.cache = self.programs.append(self.params, self.cache, *arguments)
        self.stats.appended_tokens += int(counts.sum())

    def swap_out(self, slot: int) -> list[LayerCache]:
        """Return a copy of the cache of a slot, which `swap_in` restores in any slot, bit for bit."""
        copy: list[LayerCache] = self.programs.take(self.cache, np.int32(slot))
        return copy

    def swap_in(self, slot: int, cache: list[LayerCache]) -> None:
        """Restore the cache of a slot in a free one, before its response is appended. The whole must have its size of
        then.
        """
        self.cache = self.programs.put(self.cache, cache, np.int32(slot))

    def take_states(self, slot: int) -> list[LayerCache]:
        """Return a copy of the states of a slot, without keys and values, for `put_states`."""
        copy: list[LayerCache] = self.programs.take(self._states(), np.int32(slot))
        return copy

    def put_states(self, slot: int, states: list[LayerCache]) -> None:
        """Restore the states of a slot, whose keys and values stay: those of later tokens are written over."""
        written = self.programs.put(self._states(), states, np.int32(slot))
        self.cache = [new or old for new, old in zip(written, self.cache, strict=True)]

    def _states(self) -> list[LayerCache]:
        """Return the cache of layers with a state, and no blocks of the other layers."""
        return [blocks if any(isinstance(x, SlotState) for x in blocks) else [] for blocks in self.cache]

    def resize(self, indices: np.ndarray, cache_length: int) -> None:
        """Give slots the content of the slots at `indices`, and room for `cache_length` tokens; new slots are free."""
        if len(indices) != (old := len(self.slots.token)):
            # On the host, which has read all there is: a program more for each size would only cost its compiling.
            slots = jax.tree.map(lambda x: x[indices], jax.device_get(self.slots))
            slots.active[old:] = False
            self.slots = self.programs.place_slots(self.params, slots)
            for blocks in self.cache:  # one block after the other: the whole cache is never there twice
                for i, block in enumerate(blocks):
                    blocks[i] = self.programs.keep(block, indices)
        if cache_length > self.cache_length:
            new = self.programs.empty_cache(self.params, len(indices), self.cache_length, cache_length)
            self.cache = [old + more for old, more in zip(self.cache, new, strict=True)]
            self.cache_length = cache_length
