"""Programs of the sampler: prefill, insert, append, decode, and those that move slots.

They are pure functions; `Programs` holds those compiled for a decoder, and `ModelRunner` calls them.
"""

from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Float, Int, UInt32

from covey.config.schema import RolloutConfig
from covey.models.decoder import Decoder
from covey.parallel.programs import Program, abstract
from covey.parallel.reshard import mesh_of
from covey.parallel.sharding import sharding_of
from covey.sampling.cache import (
    CACHE_AXES,
    CacheLayout,
    LayerCache,
    Prefix,
    append,
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
from covey.sampling.sharded_draw import draw_sharded

Tree = TypeVar("Tree")


class Slots(NamedTuple):
    """State of each slot but its cache: NumPy arrays between chunks.

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


def empty_slots(slots: int) -> Slots:
    """Create empty slots."""
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
        self.draw_first = jax.jit(draw_first, static_argnames="sampling_params")
        self.draw_first_traced = jax.jit(draw_first)
        self.insert = jax.jit(insert_block, donate_argnums=0)
        self.admit = jax.jit(admit, donate_argnums=0)
        self.keep = jax.jit(keep_rows)
        self.take = jax.jit(take_slot)
        self.put = jax.jit(put_slot, donate_argnums=0)
        self.append = jax.jit(partial(append, graph), donate_argnums=1)
        static = ("steps", "pause_id")
        self.decode_traced = jax.jit(partial(decode, graph, stop_ids), static_argnames=static, donate_argnums=1)
        static_too = ("sampling_params", *static)
        self.decode = jax.jit(partial(decode, graph, stop_ids), static_argnames=static_too, donate_argnums=1)

    def decode_with(self, sampling_params: SamplingParams | TracedSamplingParams) -> Any:
        """Return the program of a chunk of decode steps with these settings, as a function of its other arguments."""
        if isinstance(sampling_params, SamplingParams):
            if self.compiled_sampling_params in (None, sampling_params):
                return partial(self.decode, sampling_params=sampling_params)
            sampling_params = TracedSamplingParams.of(sampling_params)
        return partial(self.decode_traced, sampling_params=sampling_params)

    def empty_cache(self, params: Any, slots: int, start: int, end: int) -> list[LayerCache]:
        """Create each layer's blocks for the positions from `start`, the end of a block, to `end`."""
        model = nnx.merge(self.graph, params)
        c, layout = model.config, CacheLayout.of(model)
        make = _empty_block(_sharding(params, (slots, c.num_kv_heads, 1, 1)))
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
        """Return the programs that insert prefilled prompts into slots, one for each shape of a block; with fixed
        shapes, the program `admit`.
        """
        prefill = self.prefill_program(params, prompts, prompt_length)
        prefilled = jax.eval_shape(prefill.function, *prefill.args)
        number, inserted = (jax.ShapeDtypeStruct((slots,), dtype) for dtype in (jnp.int32, jnp.bool))
        whole = self._abstract_cache(params, slots, cache_length)
        if self.compiled_sampling_params is not None:
            logits = abstract(prefilled.logits, _sharding(params, prefilled.logits.shape, ("rows", "vocab")))
            prefilled = Prefix(_placed(prefilled.cache, params), logits)
            keys, numbers = (
                jax.ShapeDtypeStruct((slots, 2), jnp.uint32),
                TracedSamplingParams.of(self.compiled_sampling_params),
            )
            return [Program("admit", self.admit, (whole, prefilled, number, inserted, keys, numbers))]
        prefix, cache = _placed(prefilled.cache[0], params), whole[0]
        blocks = {(old.length, new.length): (old, new) for old, new in zip(cache, prefix, strict=False)}
        return [Program("insert", self.insert, (*pair, number, inserted)) for pair in blocks.values()]

    def decode_program(
        self, params: Any, slots: int, cache_length: int, config: RolloutConfig, pause_id: int | None = None
    ) -> Program:
        """Return the program of a chunk of decode steps; `pause_id` as for `decode`."""
        state = empty_slots(slots)
        cache = self._abstract_cache(params, slots, cache_length)
        function = self.decode_with(SamplingParams.from_config(config))
        settings = {**function.keywords, "steps": config.decode_chunk, "pause_id": pause_id}
        return Program("decode", function.func, (abstract(params), cache, abstract(state)), settings)

    def _abstract_cache(self, params: Any, slots: int, cache_length: int) -> list[LayerCache]:
        cache = jax.eval_shape(lambda: self.empty_cache(params, slots, 0, cache_length))
        return _placed(cache, params)


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


def draw_first(
    logits: Float[Array, "P V"],
    prompt: Int[Array, "S"],
    keys: UInt32[Array, "S 2"],
    *,
    sampling_params: SamplingParams | TracedSamplingParams,
) -> tuple[Array, ...]:
    """Draw the first token of each slot after prompt `prompt[s]`."""
    return draw_sharded(logits[prompt], keys, sampling_params)


def admit(
    cache: list[LayerCache],
    prefix: Prefix,
    prompt: Int[Array, "S"],
    inserted: Bool[Array, "S"],
    keys: UInt32[Array, "S 2"],
    sampling_params: TracedSamplingParams,
) -> tuple[list[LayerCache], tuple[Array, ...]]:
    """Insert prompt `prompt[s]` into each slot that is `inserted`, in all layers, and draw the first tokens."""
    admitted = insert_prompts(cache, prefix.cache, prompt, inserted)
    draws = draw_first(prefix.logits, prompt, keys, sampling_params=sampling_params)
    return keep_sharding(admitted, cache[0][0].keys), draws


def decode(
    graph: Any,
    stop_ids: tuple[int, ...],
    params: Any,
    cache: list[LayerCache],
    slots: Slots,
    *,
    steps: int,
    sampling_params: SamplingParams | TracedSamplingParams,
    pause_id: int | None = None,
) -> tuple[list[LayerCache], Slots, tuple[Array, ...], Array, Array]:
    """Run up to `steps` decode steps; return the cache, the slots, the draws [steps, S], their validity mask and the
    steps made.

    A slot halts at a stop token, at its limit and at the token `pause_id`; it may be resumed.
    """
    halt_ids = stop_ids if pause_id is None else (*stop_ids, pause_id)
    model = nnx.merge(graph, params)
    size = len(slots.token)
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
        return step + 1, cache, after, draws, valid.at[step].set(active)

    start = (jnp.int32(0), cache, Slots(*slots), draws, jnp.zeros((steps, size), bool))
    steps_made, cache, slots, draws, valid = jax.lax.while_loop(unfinished, body, start)
    return keep_sharding(cache, model.embed.embedding[...]), slots, draws, valid, steps_made


def _is_any(token: Int[Array, "S"], ids: tuple[int, ...]) -> Bool[Array, "S"]:
    return jnp.isin(token, jnp.array(ids, jnp.int32)) if ids else jnp.zeros_like(token, dtype=bool)
