"""Device programs of the sampler, as pure functions: prefill prompts, insert them into slots, decode some steps.

The noise of a token depends only on its completion's key and its index in the completion; the key depends only on
(seed, step, prompt index, sample index). A forced token uses up an index, and the noise of that index is not used.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from covey.sampling.cache import NO_TOKEN, Prefix, Slots, decode_attention, insert_prefix, prefill_attention
from covey.sampling.logits import SamplingParams, draw


def prefill(graph: Any, params: Any, tokens: Int[Array, "P T"], length: Int[Array, "P"]) -> Prefix:
    """Run right-padded prompts through the model; return their caches and the logits after their last tokens."""
    model = nnx.merge(graph, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, cache = model(tokens, positions, prefill_attention(length), [None] * model.config.num_layers)
    last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]
    return Prefix(cache, model.logits(last), length)


def insert(
    stop_ids: tuple[int, ...],
    slots: Slots,
    prefix: Prefix,
    prompt: Int[Array, "S"],
    inserted: Any,
    keys: Array,
    limit: Array,
    *,
    sampling_params: SamplingParams,
) -> tuple[Slots, tuple[Array, ...]]:
    """Insert prompt `prompt[s]` of `prefix` into every slot that is `inserted`, and draw the first token of each."""
    keys = jnp.where(inserted[:, None], keys, slots.key)
    zero = jnp.zeros_like(slots.drawn)
    token, logp, sampler_logp = draw(prefix.logits[prompt], uniform_noise(keys, zero), sampling_params)
    unfinished = ~_is_any(token, stop_ids) & (limit > 1)

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(inserted, new, old)

    new = Slots(
        cache=insert_prefix(slots, prefix, prompt, inserted),
        length=pick(prefix.length[prompt], slots.length),
        token=pick(token, slots.token),
        drawn=pick(zero + 1, slots.drawn),
        limit=pick(zero + limit, slots.limit),
        key=keys,
        active=pick(unfinished, slots.active),
        forced_tokens=None
        if slots.forced_tokens is None
        else jnp.where(inserted[:, None], NO_TOKEN, slots.forced_tokens),
    )
    return new, (token[None], logp[None], sampler_logp[None])


def decode(
    graph: Any,
    stop_ids: tuple[int, ...],
    params: Any,
    slots: Slots,
    *,
    sampling_params: SamplingParams,
    steps: int,
    pause_id: int | None = None,
) -> tuple[Slots, tuple[Array, ...], Array, Array]:
    """Run up to `steps` decode steps; return the slots, the draws [steps, S], their validity mask and the steps made.

    A slot halts at a stop token, at its limit and at the token `pause_id`, after which the host may `resume` it.
    """
    halt_ids = stop_ids if pause_id is None else (*stop_ids, pause_id)
    model = nnx.merge(graph, params)
    size = slots.token.shape[0]
    zeros = jnp.zeros((steps, size))
    draws = (jnp.zeros((steps, size), jnp.int32), zeros, zeros)

    def unfinished(carry: Any) -> Array:
        step, slots, _, _ = carry
        more: Array = (step < steps) & slots.active.any()
        return more

    def body(carry: Any) -> Any:
        step, slots, draws, valid = carry
        hidden, cache = model(slots.token[:, None], slots.length[:, None], decode_attention(slots.length), slots.cache)
        forced = None if slots.forced_tokens is None else slots.forced_tokens[:, 0]
        drawn = draw(model.logits(hidden[:, 0]), uniform_noise(slots.key, slots.drawn), sampling_params, forced)
        active = slots.active
        count = slots.drawn + active
        after = Slots(
            cache=cache,
            length=slots.length + active,
            token=jnp.where(active, drawn[0], slots.token),
            drawn=count,
            limit=slots.limit,
            key=slots.key,
            active=active & ~_is_any(drawn[0], halt_ids) & (count < slots.limit),
            forced_tokens=_without_first(slots.forced_tokens),
        )
        draws = tuple(buffer.at[step].set(new) for buffer, new in zip(draws, drawn, strict=True))
        return step + 1, after, draws, valid.at[step].set(active)

    start = (jnp.int32(0), slots, draws, jnp.zeros((steps, size), bool))
    steps_made, slots, draws, valid = jax.lax.while_loop(unfinished, body, start)
    return slots, draws, valid, steps_made


@jax.jit
def resume(
    active: Bool[Array, "S"], forced_tokens: Int[Array, "S F"], resumed: Bool[Array, "S"], new: Int[Array, "S F"]
) -> tuple[Bool[Array, "S"], Int[Array, "S F"]]:
    """Return `active` and `forced_tokens` of the slots after the `resumed` ones receive their `new` forced tokens."""
    return active | resumed, jnp.where(resumed[:, None], new, forced_tokens)


def _without_first(forced_tokens: Int[Array, "S F"] | None) -> Int[Array, "S F"] | None:
    """Drop the first forced token of each slot after a step. Those of inactive slots no longer matter."""
    if forced_tokens is None:
        return None
    return jnp.pad(forced_tokens[:, 1:], ((0, 0), (0, 1)), constant_values=NO_TOKEN)


def uniform_noise(keys: Array, index: Int[Array, "S"]) -> Float[Array, "S"]:
    """Draw one number in [0, 1) per slot, from the completion's key and the token's index."""
    return jax.vmap(lambda key, i: jax.random.uniform(jax.random.fold_in(key, i)))(keys, index)


@jax.jit
def sample_keys(seed: int, rows: Int[Array, "n 3"]) -> Array:
    """Return the random key of each (step, prompt index, sample index) under the run's seed."""
    base = jax.random.PRNGKey(seed)
    fold = jax.random.fold_in
    return jax.vmap(lambda row: fold(fold(fold(base, row[0]), row[1]), row[2]))(rows)


def _is_any(token: Int[Array, "S"], ids: tuple[int, ...]) -> Bool[Array, "S"]:
    return jnp.isin(token, jnp.array(ids, jnp.int32)) if ids else jnp.zeros_like(token, dtype=bool)
