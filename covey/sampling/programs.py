"""Programs of the sampler: prefill, insert, append, decode, and those that move slots.

They are pure functions; `Programs` holds those compiled for a decoder, and `ModelRunner` calls them.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool, Float, Int, UInt32

from covey.config.schema import RolloutConfig
from covey.models.decoder import Decoder
from covey.parallel import mesh_of, processes
from covey.parallel.programs import Program, abstract
from covey.parallel.sharding import sharding_of
from covey.sampling.cache import (
    CACHE_AXES,
    CacheLayout,
    LayerCache,
    Prefix,
    append_attention,
    decode_attention,
    empty_block,
    insert_block,
    insert_prompts,
    keep_rows,
    keep_sharding,
    prefill_attention,
    put_slot,
    take_slot,
)
from covey.sampling.logits import SamplingParams, TracedSamplingParams
from covey.sampling.noise import token_keys
from covey.sampling.page_table import PageSizes
from covey.sampling.paged_cache import PageWrites, copy_pages, insert_pages, put_pages, take_pages
from covey.sampling.sharded_draw import draw_sharded

Tree = TypeVar("Tree")


class Slots(NamedTuple):
    """State of each slot but its cache. It stays on the device: programs write it where samples enter, go on or end.

    Attributes:
        key: random key of the completion.
        length: number of tokens in the cache; also the position of the next one.
        token: the last token drawn, not yet in the cache.
        num_tokens: number of tokens of the completion so far.
        active: whether the slot is still being decoded.
        limit: number of tokens of the completion at which the slot halts.
    """

    key: UInt32[Any, "S 2"]
    length: Int[Any, "S"]
    token: Int[Any, "S"]
    num_tokens: Int[Any, "S"]
    active: Bool[Any, "S"]
    limit: Int[Any, "S"]


class Drawn(NamedTuple):
    """Tokens that the slots drew in a chunk of steps, or with their prompts.

    Attributes:
        draws: tokens and their log-probs, see `logits.Draw`, [steps, S] each.
        counts: number of tokens of each slot: it was active in so many steps, from the first on.
        active: whether the slot is still active.
        steps: number of decode steps that were made.
    """

    draws: tuple[Any, ...]
    counts: Int[Any, "S"]
    active: Bool[Any, "S"]
    steps: Int[Any, ""]


def empty_slots(slots: int) -> Slots:
    """Create empty slots, on the host."""
    length, token, num_tokens, limit = np.zeros((4, slots), np.int32)
    return Slots(np.zeros((slots, 2), np.uint32), length, token, num_tokens, np.zeros(slots, bool), limit)


class Programs:
    """Programs of a decoder, compiled once for each shape and each setting of the sampling distribution.

    Args:
        graph: the decoder's `nnx.GraphDef`.
        stop_ids: tokens that end a completion.
        compiled_sampling_params: with fixed shapes, the settings of the sampling distribution for which there is a
            program. Another one, to which they are numbers, serves all others.
    """

    def __init__(
        self,
        graph: nnx.GraphDef[Decoder],
        stop_ids: tuple[int, ...],
        compiled_sampling_params: SamplingParams | None = None,
    ):
        self.graph, self.stop_ids, self.compiled_sampling_params = graph, stop_ids, compiled_sampling_params
        self.prefill = jax.jit(partial(prefill, graph))
        self.draw_first = jax.jit(partial(draw_first, stop_ids))
        self.insert = jax.jit(insert_block, donate_argnums=0)
        self.admit = jax.jit(partial(admit, stop_ids), donate_argnums=0)
        self.put_rows = jax.jit(put_rows)
        self.keep = jax.jit(keep_rows)
        self.take = jax.jit(take_slot)
        self.put = jax.jit(put_slot, donate_argnums=0)
        self.append = jax.jit(partial(append, graph), donate_argnums=1)
        self.insert_pages = jax.jit(insert_pages, donate_argnums=0)
        self.copy_pages = jax.jit(copy_pages, donate_argnums=0)
        self.take_pages = jax.jit(take_pages)
        self.put_pages = jax.jit(put_pages, donate_argnums=0)
        static = ("steps", "pause_id")
        self.decode = jax.jit(partial(decode, graph, stop_ids), static_argnames=static, donate_argnums=1)

    def as_decoded(
        self, sampling_params: SamplingParams | TracedSamplingParams
    ) -> SamplingParams | TracedSamplingParams:
        """Return these settings as `decode` takes them: as numbers unless there is a program for them."""
        if isinstance(sampling_params, SamplingParams) and self.compiled_sampling_params not in (None, sampling_params):
            return TracedSamplingParams.of(sampling_params)
        return sampling_params

    def empty_cache(self, params: Any, slots: int, start: int, end: int) -> list[LayerCache]:
        """Create each layer's blocks for the positions from `start`, the end of a block, to `end`."""
        model = nnx.merge(self.graph, params)
        layout = CacheLayout.of(model)
        return _empty_blocks(model, params, slots, layout.block_lengths(end)[len(layout.block_lengths(start)) :])

    def empty_pages(self, params: Any, sizes: PageSizes) -> list[LayerCache]:
        """Create each layer's pages."""
        return _empty_blocks(nnx.merge(self.graph, params), params, sizes.total, [sizes.size])

    def place_slots(self, params: Any, slots: Slots) -> Slots:
        """Put slots of the host onto the devices, as the programs return them."""
        sharding = _sharding(params, (), ())
        return slots if sharding is None else processes.here().put_host(slots, sharding)

    def prefill_program(self, params: Any, prompts: int, length: int) -> Program:
        """Return the program that prefills so many prompts of `length` tokens. `params` are arrays or shapes, here and
        in the methods below, and no array is made.
        """
        tokens, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((prompts, length), (prompts,)))
        return Program("prefill", self.prefill, (abstract(params), tokens, lengths))

    def insert_programs(
        self, params: Any, slots: int, cache_length: int, prompts: int, prompt_length: int, config: RolloutConfig
    ) -> list[Program]:
        """Return the programs that insert prefilled prompts into slots, one for each shape of a block; with fixed
        shapes, the program `admit`. `config` says whether the cache is paged.
        """
        prefill = self.prefill_program(params, prompts, prompt_length)
        prefilled = jax.eval_shape(prefill.function, *prefill.args)
        prefix, sizes = _placed(prefilled.cache, params), PageSizes.of(config, slots, cache_length)
        cache = self._abstract_cache(params, slots, cache_length, sizes)
        writes = None if sizes is None else _abstract_writes(slots * sizes.num_pages(prompt_length))
        number, inserted = (jax.ShapeDtypeStruct((slots,), dtype) for dtype in (jnp.int32, jnp.bool))
        if self.compiled_sampling_params is not None:
            logits = abstract(prefilled.logits, _sharding(params, prefilled.logits.shape, ("rows", "vocab")))
            numbers = TracedSamplingParams.of(self.compiled_sampling_params)
            samples = inserted, number, abstract(empty_slots(slots)), numbers, writes
            args = cache, _abstract_slots(params, slots), Prefix(prefix, logits), *samples
            return [Program("admit", self.admit, args)]
        if writes is not None:
            return [Program("insert", self.insert_pages, (cache, prefix, writes))]
        blocks = {(old.length, new.length): (old, new) for old, new in zip(cache[0], prefix[0], strict=False)}
        return [Program("insert", self.insert, (*pair, number, inserted)) for pair in blocks.values()]

    def decode_program(
        self, params: Any, slots: int, cache_length: int, config: RolloutConfig, pause_id: int | None = None
    ) -> Program:
        """Return the program of a chunk of decode steps; `pause_id` as for `decode`."""
        sizes = PageSizes.of(config, slots, cache_length)
        cache = self._abstract_cache(params, slots, cache_length, sizes)
        pages = None if sizes is None else jax.ShapeDtypeStruct((slots, sizes.per_slot), jnp.int32)
        sampling_params = self.as_decoded(SamplingParams.from_config(config))
        settings = {"steps": config.decode_chunk, "sampling_params": sampling_params, "pause_id": pause_id}
        return Program(
            "decode", self.decode, (abstract(params), cache, _abstract_slots(params, slots), pages), settings
        )

    def _abstract_cache(
        self, params: Any, slots: int, cache_length: int, sizes: PageSizes | None = None
    ) -> list[LayerCache]:
        if sizes is not None:
            return _placed(jax.eval_shape(lambda: self.empty_pages(params, sizes)), params)
        cache = jax.eval_shape(lambda: self.empty_cache(params, slots, 0, cache_length))
        return _placed(cache, params)


def _empty_blocks(model: Decoder, params: Any, rows: int, lengths: Sequence[int]) -> list[LayerCache]:
    """Create each layer's blocks of these lengths for so many slots, or pages."""
    c, layout = model.config, CacheLayout.of(model)
    make = _empty_block(_sharding(params, (rows, c.num_kv_heads, 1, 1)))
    shape = (c.num_kv_heads, c.head_dim, model.embed.embedding.get_value().dtype)
    return [[make(layout, rows, length, *shape) for length in lengths] for _ in range(c.num_layers)]


@cache
def _empty_block(sharding: Sharding | None) -> Any:
    return jax.jit(empty_block, static_argnums=(0, 1, 2, 3, 4, 5), out_shardings=sharding)


def _sharding(params: Any, shape: tuple[int, ...], axes: tuple[str | None, ...] = CACHE_AXES) -> Sharding | None:
    """Return the sharding of an array with these logical axes, by default keys or values; on one device that of the
    weights.
    """
    mesh = mesh_of(params)
    if mesh is None:
        return getattr(jax.tree.leaves(params)[0], "sharding", None)
    sharding: Sharding = sharding_of(axes, shape, mesh)
    return sharding


def _abstract_slots(params: Any, slots: int) -> Slots:
    return abstract(empty_slots(slots), _sharding(params, (), ()))


def _abstract_writes(most: int) -> PageWrites:
    numbers = jax.ShapeDtypeStruct((most,), jnp.int32)
    return PageWrites(numbers, numbers, numbers, jax.ShapeDtypeStruct((), jnp.int32))


def _replicated(tree: Tree, like: Array) -> Tree:
    """Constrain arrays that a program returns to be the same on every device of the mesh of `like`, where each process
    reads them and the next program takes them.
    """
    mesh = jax.typeof(like).sharding.mesh
    if mesh.empty:
        return tree
    constrained: Tree = jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))
    return constrained


def _placed(cache: Tree, params: Any) -> Tree:
    """Return the shapes of a cache with its shardings."""
    shapes: Tree = jax.tree.map(lambda x: abstract(x, _sharding(params, x.shape)), cache)
    return shapes


def prefill(graph: Any, params: Any, tokens: Int[Array, "P T"], length: Int[Array, "P"]) -> Prefix:
    """Run right-padded prompts through the model; return their caches and the logits after their last tokens."""
    model = nnx.merge(graph, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend = prefill_attention(model, length, tokens.shape[1])
    hidden, cache = model(tokens, positions, attend, [None] * model.config.num_layers)
    last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]
    return Prefix(keep_sharding(cache, model.embed.embedding[...]), model.logits(last))


def put_rows(slots: Slots, rows: Bool[Array, "S"], new: Slots) -> Slots:
    """Return `slots` with the state that `new` has in `rows`."""

    def put(old: Array, x: Array) -> Array:
        return jnp.where(rows[:, None] if x.ndim > 1 else rows, x, old)

    after: Slots = jax.tree.map(put, slots, new)
    return _replicated(after, slots.token)


def draw_first(
    stop_ids: tuple[int, ...],
    slots: Slots,
    logits: Float[Array, "P V"],
    inserted: Bool[Array, "S"],
    prompt: Int[Array, "S"],
    entering: Slots,
    sampling_params: SamplingParams | TracedSamplingParams,
) -> tuple[Slots, Drawn]:
    """Draw the first token of each sample that enters a slot, and begin the slot with it.

    Args:
        slots: state of all slots.
        logits: those after each prompt.
        inserted: whether a sample enters the slot; what the next two have of other slots has no meaning.
        prompt: row of its prompt in `logits`.
        entering: key of its completion, length of its prompt, and limit.
        sampling_params: settings of the distribution.
    """
    keys = token_keys(entering.key, jnp.zeros_like(entering.length))
    draws = draw_sharded(logits[prompt], keys, sampling_params)
    token, ones = draws[0], jnp.ones_like(draws[0])
    active = ~_is_any(token, stop_ids) & (entering.limit > 1)
    started = put_rows(slots, inserted, entering._replace(token=token, num_tokens=ones, active=active))
    drawn = Drawn(tuple(x[None] for x in draws), inserted.astype(jnp.int32), started.active, jnp.int32(0))
    return started, _replicated(drawn, slots.token)


def admit(
    stop_ids: tuple[int, ...],
    cache: list[LayerCache],
    slots: Slots,
    prefix: Prefix,
    inserted: Bool[Array, "S"],
    prompt: Int[Array, "S"],
    entering: Slots,
    sampling_params: TracedSamplingParams,
    writes: PageWrites | None = None,
) -> tuple[list[LayerCache], Slots, Drawn]:
    """Insert the prompt of each sample that enters a slot, in all layers, and draw its first token, see `draw_first`.
    Of a paged cache, fill the pages that `writes` names.
    """
    if writes is None:
        admitted = insert_prompts(cache, prefix.cache, prompt, inserted)
    else:
        admitted = insert_pages(cache, prefix.cache, writes)
    started, drawn = draw_first(stop_ids, slots, prefix.logits, inserted, prompt, entering, sampling_params)
    return keep_sharding(admitted, cache[0][0].keys), started, drawn


def append(
    graph: Any,
    params: Any,
    cache: list[LayerCache],
    slots: Int[Array, "S"],
    tokens: Int[Array, "S n"],
    start: Int[Array, "S"],
    count: Int[Array, "S"],
    rows: Int[Array, ""],
    pages: Int[Array, "S n"] | None = None,
) -> list[LayerCache]:
    """Write the keys and values of the first `count` of the `tokens` of a row to the positions of its slot from `start`
    on, for each of the first `rows`. `pages` is the table of a paged cache.
    """
    model = nnx.merge(graph, params)
    in_place = pages is None and cache[0][0].layout.divided

    def append_row(row: Int[Array, ""], cache: list[LayerCache]) -> list[LayerCache]:
        positions = start[row] + jnp.arange(tokens.shape[1])
        # XLA for TPUs writes tokens to a copy of an array in another order: of the slot, not of the whole cache.
        held, slot = (cache, slots[row]) if in_place else (_take(cache, slots[row], pages), jnp.int32(0))
        attend = append_attention(slot, positions, count[row])
        _, held = model(tokens[row][None], positions[None], attend, held)
        if pages is not None:
            appended = put_pages(cache, held, pages[slots[row]], start[row], start[row] + count[row])
        else:
            appended = held if in_place else put_slot(cache, held, slots[row])
        return keep_sharding(appended, model.embed.embedding[...])

    appended: list[LayerCache] = jax.lax.fori_loop(0, rows, append_row, cache)
    return appended


def _take(cache: list[LayerCache], slot: Int[Array, ""], pages: Int[Array, "S n"] | None) -> list[LayerCache]:
    return take_slot(cache, slot) if pages is None else take_pages(cache, pages[slot])


def decode(
    graph: Any,
    stop_ids: tuple[int, ...],
    params: Any,
    cache: list[LayerCache],
    slots: Slots,
    pages: Int[Array, "S n"] | None = None,
    *,
    steps: int,
    sampling_params: SamplingParams | TracedSamplingParams,
    pause_id: int | None = None,
) -> tuple[list[LayerCache], Slots, Drawn]:
    """Run up to `steps` decode steps; return the cache, the slots and what they drew.

    A slot halts at a stop token, at its limit and at the token `pause_id`; it may be resumed.

    Args:
        pages: table of a paged cache, with the pages of all positions to which slots come in these steps.
    """
    halt_ids = stop_ids if pause_id is None else (*stop_ids, pause_id)
    model = nnx.merge(graph, params)
    size = len(slots.token)
    zeros = jnp.zeros((steps, size))
    draws = (jnp.zeros((steps, size), jnp.int32), zeros, zeros)

    def unfinished(carry: Any) -> Array:
        step, _, slots, _ = carry
        more: Array = (step < steps) & slots.active.any()
        return more

    def body(carry: Any) -> Any:
        step, cache, slots, draws = carry
        length, active = slots.length, slots.active
        token, position = slots.token[:, None], length[:, None]
        hidden, cache = model(token, position, decode_attention(model, length, active, pages), cache)
        keys = token_keys(slots.key, slots.num_tokens)
        drawn = draw_sharded(model.logits(hidden[:, 0]), keys, sampling_params)
        count = slots.num_tokens + active
        after = slots._replace(
            length=length + active,
            token=jnp.where(active, drawn[0], slots.token),
            num_tokens=count,
            active=active & ~_is_any(drawn[0], halt_ids) & (count < slots.limit),
        )
        draws = tuple(buffer.at[step].set(new) for buffer, new in zip(draws, drawn, strict=True))
        return step + 1, cache, after, draws

    made, cache, after, draws = jax.lax.while_loop(unfinished, body, (jnp.int32(0), cache, slots, draws))
    results = after, Drawn(draws, after.num_tokens - slots.num_tokens, after.active, made)
    like = model.embed.embedding[...]
    return keep_sharding(cache, like), *_replicated(results, like)


def _is_any(token: Int[Array, "S"], ids: tuple[int, ...]) -> Bool[Array, "S"]:
    return jnp.isin(token, jnp.array(ids, jnp.int32)) if ids else jnp.zeros_like(token, dtype=bool)
