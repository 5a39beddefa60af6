"""State of the sampler on the device, and the programs that change it: prefill, insert, decode, keep.

The programs are pure functions; `Programs` holds those compiled for a decoder, and `DeviceState` the arrays of a call.
Only the KV cache stays on the device: the few numbers of each slot pass through the host between chunks, where samples
are admitted, resumed and moved without a program.

The noise of a token depends only on its completion's key and its index in the completion; the key depends only on
(seed, step, prompt index, sample index). An appended token uses up an index, and the noise of that index is not used.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Float, Int

from covey.config.schema import RolloutConfig
from covey.models.decoder import Decoder
from covey.parallel.programs import Program, abstract
from covey.parallel.reshard import mesh_of
from covey.parallel.sharding import sharding_of
from covey.sampling.append import append, append_size
from covey.sampling.cache import (
    CACHE_AXES,
    CacheLayout,
    LayerCache,
    Prefix,
    decode_attention,
    empty_block,
    insert_block,
    keep_rows,
    keep_sharding,
    prefill_attention,
    put_slot,
    take_slot,
)
from covey.sampling.logits import SamplingNumbers, SamplingParams, draw
from covey.sampling.noise import uniform_noise
from covey.sampling.scheduler import Admission, Sample
from covey.sampling.stats import SamplerStats
from covey.sampling.turns import Rewrite

Tree = TypeVar("Tree")


class Slots(NamedTuple):
    """State of each slot but its cache: NumPy arrays between chunks.

    Attributes:
        length: number of tokens in the cache; also the position of the next one.
        token: the last token drawn, not yet in the cache.
        num_tokens: number of tokens of the completion so far.
        active: whether the slot is still being decoded.
        limit: number of tokens of the completion at which the slot halts.
    """

    length: Int[Any, "S"]
    token: Int[Any, "S"]
    num_tokens: Int[Any, "S"]
    active: Bool[Any, "S"]
    limit: Int[Any, "S"]


def empty_slots(slots: int) -> Slots:
    """Create empty slots."""
    length, token, num_tokens, limit = np.zeros((4, slots), np.int32)
    return Slots(length, token, num_tokens, np.zeros(slots, bool), limit)


class Draws(NamedTuple):
    """Tokens drawn: their ids (int32) and their log-probs under the full and the truncated distribution (float32)."""

    tokens: np.ndarray
    logps: np.ndarray
    sampler_logps: np.ndarray


class Parked(NamedTuple):
    """Content of a slot: each layer's blocks [1, ...], the state of the slot and its random key."""

    cache: list[LayerCache]
    slot: Slots
    key: np.ndarray


class Chunk(NamedTuple):
    """Result of some steps of the decode batch.

    Attributes:
        draws: arrays [S, steps].
        counts: int [S], number of tokens that the slot drew: it was active in so many steps, from the first on.
        active: bool [S], whether the slot is still active after the steps.
    """

    draws: Draws
    counts: np.ndarray
    active: np.ndarray


class Programs:
    """Programs of a decoder, compiled once for each shape and each setting of the sampling distribution.

    Args:
        graph: the decoder's `nnx.GraphDef`.
        stop_ids: tokens that end a completion.
        own: with fixed shapes: the settings of the sampling distribution for which there is a program. Another one, to
            which they are numbers, serves all others.
    """

    def __init__(self, graph: nnx.GraphDef[Decoder], stop_ids: tuple[int, ...], own: SamplingParams | None = None):
        self.graph, self.stop_ids, self.own = graph, stop_ids, own
        self.prefill = jax.jit(partial(prefill, graph))
        self.draw_first = jax.jit(draw_first, static_argnames="sampling_params")
        self.insert = jax.jit(insert_block, donate_argnums=0)
        self.admit = jax.jit(admit, donate_argnums=0)
        self.keep = jax.jit(keep_rows)
        self.take = jax.jit(take_slot)
        self.put = jax.jit(put_slot, donate_argnums=0)
        self.append = jax.jit(partial(append, graph), donate_argnums=1)
        static = ("sampling_params", "pause_id")
        self.decode = jax.jit(partial(decode, graph, stop_ids), static_argnames=static, donate_argnums=1)
        self.decode_others = jax.jit(partial(decode, graph, stop_ids), static_argnames="pause_id", donate_argnums=1)

    def decode_with(self, sampling_params: SamplingParams) -> Any:
        """Return the program of a chunk of decode steps with these settings, as a function of its other arguments."""
        if self.own in (None, sampling_params):
            return partial(self.decode, sampling_params=sampling_params)
        return partial(self.decode_others, sampling_params=SamplingNumbers.of(sampling_params))

    def cache_layout(self, params: Any) -> CacheLayout:
        """Return the layout of the KV cache on the decoder's platform."""
        return CacheLayout.of(nnx.merge(self.graph, params))

    def empty_cache(self, params: Any, slots: int, start: int, end: int) -> list[LayerCache]:
        """Create each layer's blocks for the positions from `start`, the end of a block, to `end`."""
        model = nnx.merge(self.graph, params)
        c, layout = model.config, CacheLayout.of(model)
        make = _empty_block(_cache_sharding(params, (slots, c.num_kv_heads, 1, 1)))
        shape = (c.num_kv_heads, c.head_dim, model.embed.embedding.get_value().dtype)
        sizes = layout.block_lengths(end)[len(layout.block_lengths(start)) :]
        return [[make(layout, slots, size, *shape) for size in sizes] for _ in range(c.num_layers)]

    def prefill_program(self, params: Any, prompts: int, length: int) -> Program:
        """Return the program that prefills so many prompts of `length` tokens. `params` are arrays or shapes, here and
        in the methods below, and no array is made.
        """
        tokens, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((prompts, length), (prompts,)))
        return Program("prefill", self.prefill, (abstract(params), tokens, lengths))

    def insert_programs(
        self, params: Any, slots: int, cache_length: int, prompts: int, prompt_length: int
    ) -> list[Program]:
        """Return the programs that insert prefilled prompts into slots, one for each shape of a block; with `own`, the
        program `admit`.
        """
        prefill = self.prefill_program(params, prompts, prompt_length)
        prefilled = jax.eval_shape(prefill.function, *prefill.args)
        number, inserted = (jax.ShapeDtypeStruct((slots,), dtype) for dtype in (jnp.int32, jnp.bool))
        whole = self._abstract_cache(params, slots, cache_length)
        if self.own is not None:
            prefilled = Prefix(_placed(prefilled.cache, params), prefilled.logits)
            noise, numbers = jax.ShapeDtypeStruct((slots,), jnp.float32), SamplingNumbers.of(self.own)
            return [Program("admit", self.admit, (whole, prefilled, number, inserted, noise, numbers))]
        prefix, cache = _placed(prefilled.cache[0], params), whole[0]
        blocks = {(old.length, new.length): (old, new) for old, new in zip(cache, prefix, strict=False)}
        return [Program("insert", self.insert, (*pair, number, inserted)) for pair in blocks.values()]

    def decode_program(
        self, params: Any, slots: int, cache_length: int, config: RolloutConfig, pause_id: int | None = None
    ) -> Program:
        """Return the program of a chunk of decode steps; `pause_id` as for `decode`."""
        state = empty_slots(slots)
        noise = jax.ShapeDtypeStruct((slots, config.decode_chunk), jnp.float32)
        cache = self._abstract_cache(params, slots, cache_length)
        function = self.decode_with(SamplingParams.from_config(config))
        settings = {**function.keywords, "pause_id": pause_id}
        return Program("decode", function.func, (abstract(params), cache, abstract(state), noise), settings)

    def _abstract_cache(self, params: Any, slots: int, cache_length: int) -> list[LayerCache]:
        cache = jax.eval_shape(lambda: self.empty_cache(params, slots, 0, cache_length))
        return _placed(cache, params)


class DeviceState:
    """Decode batch of a call: its slots with their KV cache, and the prompts that were prefilled last.

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

    def insert(self, admitted: Sequence[Admission], keys: Mapping[Sample, np.ndarray]) -> Chunk:
        """Insert prefilled prompts into slots, with the random key of each sample; draw the first tokens."""
        size = len(self.slots.token)
        inserted, prompt = np.zeros(size, bool), np.zeros(size, np.int32)
        for slot, row, sample in admitted:
            inserted[slot], prompt[slot], self.keys[slot] = True, row, keys[sample]
        draws = self._insert(prompt, inserted, uniform_noise(self.keys, np.zeros(size, np.int32)))
        self._start(inserted, self.prefix_lengths[prompt], np.asarray(draws[0]))
        self.stats.first_tokens += len(admitted)
        return self._chunk(tuple(x[None] for x in map(np.asarray, draws)), inserted[None])

    def _insert(self, prompt: np.ndarray, inserted: np.ndarray, noise: np.ndarray) -> tuple[Any, ...]:
        """Insert the prefilled `prompt[s]` into each slot that is `inserted`; return the first draws."""
        programs = self.programs
        if programs.own is not None:
            numbers = SamplingNumbers.of(self.sampling_params)
            self.cache, draws = programs.admit(self.cache, self.prefix, prompt, inserted, noise, numbers)
            return tuple(draws)
        for blocks, new in zip(self.cache, self.prefix.cache, strict=True):
            blocks[: len(new)] = [programs.insert(*pair, prompt, inserted) for pair in zip(blocks, new, strict=False)]
        return tuple(programs.draw_first(self.prefix.logits, prompt, noise, sampling_params=self.sampling_params))

    def decode(self) -> Chunk:
        """Run a chunk of decode steps."""
        index = self.slots.num_tokens[:, None] + np.arange(self.config.decode_chunk)
        decode, noise = self.programs.decode_with(self.sampling_params), uniform_noise(self.keys[:, None], index)
        self.cache, slots, draws, valid, steps = decode(
            self.params, self.cache, self.slots, noise, pause_id=self.pause_id
        )
        self.slots = jax.tree.map(np.array, slots)
        self.stats.slot_steps += int(steps) * len(self.slots.token)
        self.stats.chunks += 1
        return self._chunk(draws, np.asarray(valid))

    def resume(self, responses: Mapping[int, np.ndarray | Rewrite]) -> None:
        """Append a response, int32 [n], to each of these slots, which have halted, and let them go on. A rewrite drops
        the last tokens of the slot first.
        """
        slots, cached = self.slots, {}
        for slot, response in responses.items():
            if isinstance(response, Rewrite):
                slots.length[slot], cached[slot] = response.kept, response.tokens[:-1]
            elif len(response):
                cached[slot] = np.append(slots.token[slot], response[:-1])
        self._append({slot: tokens for slot, tokens in cached.items() if len(tokens)})
        for slot, response in responses.items():
            new = response.tokens if isinstance(response, Rewrite) else response
            slots.token[slot] = new[-1] if len(new) else slots.token[slot]
            slots.num_tokens[slot] += len(new)
            slots.active[slot] = True
            slots.limit[slot] = min(slots.num_tokens[slot] + self.turn_limit, self.config.max_new_tokens)

    def _append(self, tokens: Mapping[int, np.ndarray]) -> None:
        """Write `tokens`, int32 [n], into the cache of each slot behind those that it holds, piece by piece."""
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

    def park(self, slot: int) -> Parked:
        """Return a copy of what a slot holds, from which `unpark` restores it in any slot, bit for bit."""
        state = jax.tree.map(lambda x: x[slot], self.slots)
        return Parked(self.programs.take(self.cache, np.int32(slot)), state, self.keys[slot].copy())

    def unpark(self, slot: int, parked: Parked) -> None:
        """Restore what `park` returned in a free slot. The cache must have its size of then."""
        self.cache = self.programs.put(self.cache, parked.cache, np.int32(slot))
        for array, value in zip(self.slots, parked.slot, strict=True):
            array[slot] = value
        self.keys[slot] = parked.key

    def resize(self, kept: np.ndarray, cache_length: int) -> None:
        """Keep only the slots `kept`, in that order, each with room for `cache_length` tokens."""
        if len(kept) < len(self.slots.token):
            self.slots, self.keys = jax.tree.map(lambda x: x[kept], (self.slots, self.keys))
            for blocks in self.cache:  # one block after the other: the whole cache is never there twice
                for i, block in enumerate(blocks):
                    blocks[i] = self.programs.keep(block, kept)
        if cache_length > self.cache_length:
            new = self.programs.empty_cache(self.params, len(kept), self.cache_length, cache_length)
            self.cache = [old + more for old, more in zip(self.cache, new, strict=True)]
            self.cache_length = cache_length

    def _start(self, inserted: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> None:
        """Let the slots that were `inserted` begin after prompts of these lengths with these first tokens."""
        slots, limit = self.slots, min(self.turn_limit, self.config.max_new_tokens)
        slots.length[inserted], slots.token[inserted], slots.num_tokens[inserted] = (
            lengths[inserted],
            tokens[inserted],
            1,
        )
        slots.limit[inserted] = limit
        unfinished = ~np.isin(tokens, self.programs.stop_ids) & (limit > 1)
        slots.active[inserted] = unfinished[inserted]

    def _chunk(self, draws: tuple[Any, ...], valid: np.ndarray) -> Chunk:
        counts = valid.sum(0)
        self.stats.tokens += int(counts.sum())
        # Copies, since the device may use its buffers again.
        host = Draws(*(np.asarray(x).T.copy() for x in draws))
        return Chunk(host, counts, self.slots.active.copy())


@cache
def _empty_block(sharding: Sharding | None) -> Any:
    return jax.jit(empty_block, static_argnums=(0, 1, 2, 3, 4, 5), out_shardings=sharding)


def _cache_sharding(params: Any, shape: tuple[int, ...]) -> Sharding | None:
    """Return the sharding of keys or values of this shape: by `CACHE_AXES`, or on one device that of the weights."""
    mesh = mesh_of(params)
    if mesh is None:
        return getattr(jax.tree.leaves(params)[0], "sharding", None)
    sharding: Sharding = sharding_of(CACHE_AXES, shape, mesh)
    return sharding


def _placed(cache: Tree, params: Any) -> Tree:
    """Return the shapes of a cache with its shardings."""
    shapes: Tree = jax.tree.map(lambda x: abstract(x, _cache_sharding(params, x.shape)), cache)
    return shapes


def _by_slot(logits: Float[Array, "S V"], model: Decoder) -> Float[Array, "S V"]:
    """Constrain logits, of which devices computed parts of the vocabulary, to be divided by slots: on accelerators each
    device draws for its slots. Otherwise top-k would gather the logits of all on every device, in each step.
    """
    if model.mesh.empty or model.platform == "cpu":
        return logits
    for axes in (("rows", "vocab"), ("slots", None)):  # without the first, the head itself would be gathered
        logits = jax.lax.with_sharding_constraint(logits, sharding_of(axes, logits.shape, model.mesh))
    return logits


def prefill(graph: Any, params: Any, tokens: Int[Array, "P T"], length: Int[Array, "P"]) -> Prefix:
    """Run right-padded prompts through the model; return their caches and the logits after their last tokens."""
    model = nnx.merge(graph, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend = prefill_attention(model, length, tokens.shape[1])
    hidden, cache = model(tokens, positions, attend, [None] * model.config.num_layers)
    last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]
    return Prefix(keep_sharding(cache, model.embed.embedding[...]), model.logits(last))


def draw_first(
    logits: Float[Array, "P V"],
    prompt: Int[Array, "S"],
    noise: Float[Array, "S"],
    *,
    sampling_params: SamplingParams | SamplingNumbers,
) -> tuple[Array, ...]:
    """Draw the first token of each slot after prompt `prompt[s]`."""
    return draw(logits[prompt], noise, sampling_params)


def admit(
    cache: list[LayerCache],
    prefix: Prefix,
    prompt: Int[Array, "S"],
    inserted: Bool[Array, "S"],
    noise: Float[Array, "S"],
    sampling_params: SamplingNumbers,
) -> tuple[list[LayerCache], tuple[Array, ...]]:
    """Insert prompt `prompt[s]` into each slot that is `inserted`, in all layers, and draw the first tokens."""
    admitted = [
        [*(insert_block(*pair, prompt, inserted) for pair in zip(blocks, new, strict=False)), *blocks[len(new) :]]
        for blocks, new in zip(cache, prefix.cache, strict=True)
    ]
    draws = draw_first(prefix.logits, prompt, noise, sampling_params=sampling_params)
    return keep_sharding(admitted, cache[0][0].keys), draws


def decode(
    graph: Any,
    stop_ids: tuple[int, ...],
    params: Any,
    cache: list[LayerCache],
    slots: Slots,
    noise: Float[Array, "S steps"],
    *,
    sampling_params: SamplingParams | SamplingNumbers,
    pause_id: int | None = None,
) -> tuple[list[LayerCache], Slots, tuple[Array, ...], Array, Array]:
    """Run up to `steps` decode steps; return the cache, the slots, the draws [steps, S], their validity mask and the
    steps made.

    A slot halts at a stop token, at its limit and at the token `pause_id`; it may be resumed.

    Args:
        noise: number in [0, 1) that draws the token of each slot in each step.
    """
    halt_ids = stop_ids if pause_id is None else (*stop_ids, pause_id)
    model = nnx.merge(graph, params)
    size, steps = noise.shape
    zeros = jnp.zeros((steps, size))
    draws = (jnp.zeros((steps, size), jnp.int32), zeros, zeros)

    def unfinished(carry: Any) -> Array:
        step, _, slots, _, _ = carry
        more: Array = (step < steps) & slots.active.any()
        return more

    def body(carry: Any) -> Any:
        step, cache, slots, draws, valid = carry
        length, active = slots.length, slots.active
        hidden, cache = model(slots.token[:, None], length[:, None], decode_attention(model, length, active), cache)
        drawn = draw(_by_slot(model.logits(hidden[:, 0]), model), noise[:, step], sampling_params)
        count = slots.num_tokens + active
        after = Slots(
            length=length + active,
            token=jnp.where(active, drawn[0], slots.token),
            num_tokens=count,
            active=active & ~_is_any(drawn[0], halt_ids) & (count < slots.limit),
            limit=slots.limit,
        )
        draws = tuple(buffer.at[step].set(new) for buffer, new in zip(draws, drawn, strict=True))
        return step + 1, cache, after, draws, valid.at[step].set(active)

    start = (jnp.int32(0), cache, Slots(*slots), draws, jnp.zeros((steps, size), bool))
    steps_made, cache, slots, draws, valid = jax.lax.while_loop(unfinished, body, start)
    return keep_sharding(cache, model.embed.embedding[...]), slots, draws, valid, steps_made


def _is_any(token: Int[Array, "S"], ids: tuple[int, ...]) -> Bool[Array, "S"]:
    return jnp.isin(token, jnp.array(ids, jnp.int32)) if ids else jnp.zeros_like(token, dtype=bool)
