"""Programs of the sampler as pure functions: make a cache, prefill, admit, append, decode, write slots.

`model_runner` compiles and calls them.
"""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, UInt32

from covey.models.layer_kinds import find_kind
from covey.models.lora import join_adapters
from covey.sampling.cache import (
    CacheLayout,
    LayerCache,
    Prefix,
    SlotState,
    append_attention,
    decode_attention,
    empty_block,
    insert_prompts,
    is_divided,
    keep_sharding,
    prefill_attention,
    put_slot,
    take_slot,
)
from covey.sampling.logits import TracedSamplingParams, token_keys
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
        counts: number of tokens of each slot: it was active in this number of steps, from the first on.
        active: whether the slot is still active.
        steps: number of decode steps that were made.
    """

    draws: tuple[Any, ...]
    counts: Int[Any, "S"]
    active: Bool[Any, "S"]
    steps: Int[Any, ""]


def _replicated(tree: Tree, like: Array) -> Tree:
    """Constrain arrays that a program returns to be the same on every device of the mesh of `like`, where each process
    reads them and the next program takes them.
    """
    mesh = jax.typeof(like).sharding.mesh
    if mesh.empty:
        return tree
    constrained: Tree = jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))
    return constrained


def empty_cache(graph: Any, params: Any, slots: int, start: int, end: int) -> list[LayerCache]:
    """Create each layer's blocks for the positions from `start`, the end of a block, to `end`; none for a layer that
    uses the keys and values of another.
    """
    model = nnx.merge(graph, params)
    layout, c, like = CacheLayout.of(model), model.config, model.embed.embedding[...]
    lengths = layout.block_lengths(end)[len(layout.block_lengths(start)) :]

    def layer_cache(layer: int) -> LayerCache:
        if (kind := find_kind(c.parts(layer)[0])).has_state:
            return [] if start else [SlotState(kind.load().state(c.kind_settings, slots))]
        needed = lengths if c.kv_source(layer) is None else []
        return [empty_block(layout, slots, length, c.heads(layer), like.dtype) for length in needed]

    return keep_sharding([layer_cache(layer) for layer in range(c.num_layers)], like)


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


def admit(
    stop_ids: tuple[int, ...],
    cache: list[LayerCache],
    slots: Slots,
    prefix: Prefix,
    inserted: Bool[Array, "S"],
    prompt: Int[Array, "S"],
    entering: Slots,
    numbers: TracedSamplingParams,
) -> tuple[list[LayerCache], Slots, Drawn]:
    """Insert the prompt of each sample that enters a slot, in all layers, and draw its first token.

    Args:
        cache: its `front`.
        slots: state of all slots.
        prefix: prefilled prompts.
        inserted: whether a sample enters the slot; what the next two have of other slots has no meaning.
        prompt: row of its prompt.
        entering: key of its completion, length of its prompt, and limit.
        numbers: settings of the distribution of each slot.
    """
    admitted = insert_prompts(cache, prefix.cache, prompt, inserted)
    keys = token_keys(entering.key, jnp.zeros_like(entering.length))
    draws = draw_sharded(prefix.logits[prompt], keys, numbers)
    token, ones = draws[0], jnp.ones_like(draws[0])
    active = ~_is_any(token, stop_ids) & (entering.limit > 1)
    started = put_rows(slots, inserted, entering._replace(token=token, num_tokens=ones, active=active))
    drawn = Drawn(tuple(x[None] for x in draws), inserted.astype(jnp.int32), started.active, jnp.int32(0))
    return keep_sharding(admitted, jax.tree.leaves(cache)[0]), started, _replicated(drawn, slots.token)


def append(
    graph: Any,
    params: Any,
    cache: list[LayerCache],
    slots: Int[Array, "S"],
    tokens: Int[Array, "S n"],
    start: Int[Array, "S"],
    count: Int[Array, "S"],
    rows: Int[Array, ""],
) -> list[LayerCache]:
    """Write the keys and values of the first `count` of the `tokens` of a row to the positions of its slot from `start`
    on, for each of the first `rows`.
    """
    model = nnx.merge(graph, params)
    in_place = is_divided(cache)

    def append_row(row: Int[Array, ""], cache: list[LayerCache]) -> list[LayerCache]:
        positions = start[row] + jnp.arange(tokens.shape[1])
        # XLA for TPUs writes tokens to a copy of an array in another order: of the slot, not of the whole cache.
        held, slot = (cache, slots[row]) if in_place else (take_slot(cache, slots[row]), jnp.int32(0))
        attend = append_attention(slot, positions, count[row])
        _, held = model(tokens[row][None], positions[None], attend, held)
        return keep_sharding(held if in_place else put_slot(cache, held, slots[row]), model.embed.embedding[...])

    appended: list[LayerCache] = jax.lax.fori_loop(0, rows, append_row, cache)
    return appended


def decode(
    graph: Any,
    stop_ids: tuple[int, ...],
    params: Any,
    cache: list[LayerCache],
    slots: Slots,
    numbers: TracedSamplingParams,
    *,
    steps: int,
    pause_id: int | None = None,
) -> tuple[list[LayerCache], Slots, Drawn]:
    """Run up to `steps` decode steps; return the cache, the slots and what they drew.

    A slot halts at a stop token, at its limit and at the token `pause_id`; it may be resumed.
    """
    halt_ids = stop_ids if pause_id is None else (*stop_ids, pause_id)
    model = join_adapters(nnx.merge(graph, params))
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
        hidden, cache = model(token, position, decode_attention(model, length, active), cache)
        keys = token_keys(slots.key, slots.num_tokens)
        drawn = draw_sharded(model.logits(hidden[:, 0]), keys, numbers)
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
