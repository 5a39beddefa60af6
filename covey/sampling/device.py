"""Device programs of the sampler, as pure functions: prefill prompts, start completions in slots, decode some steps.

The noise of a token depends only on its completion's key and its index in the completion; the key depends only on
(seed, step, prompt index, sample index). A forced token uses up an index, and the noise of that index is not used.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from covey.sampling.cache import NOTHING, Prefix, Slots, admit, decoding, prefilling
from covey.sampling.logits import SamplingParams, draw


def prefill(graph: Any, params: Any, tokens: Int[Array, "P T"], length: Int[Array, "P"]) -> Prefix:
    """Run right-padded prompts through the model; return their caches and the logits after their last tokens."""
    model = nnx.merge(graph, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, cache = model(tokens, positions, prefilling(length), [None] * model.config.num_layers)
    last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]
    return Prefix(cache, model.logits(last), length)


def start(
    stop_ids: tuple[int, ...],
    slots: Slots,
    prefix: Prefix,
    source: Int[Array, "S"],
    taken: Any,
    keys: Array,
    limit: Array,
    *,
    sampling_params: SamplingParams,
) -> tuple[Slots, tuple[Array, ...]]:
    """Put prompts into the slots that are `taken` and draw the first token of each."""
    keys = jnp.where(taken[:, None], keys, slots.key)
    zero = jnp.zeros_like(slots.drawn)
    token, logp, sampler_logp = draw(prefix.logits[source], _noise(keys, zero), sampling_params)
    going = ~_stops(token, stop_ids) & (limit > 1)

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(taken, new, old)

    new = Slots(
        cache=admit(slots, prefix, source, taken),
        length=pick(prefix.length[source], slots.length),
        token=pick(token, slots.token),
        drawn=pick(zero + 1, slots.drawn),
        limit=pick(zero + limit, slots.limit),
        key=keys,
        active=pick(going, slots.active),
        forced=None if slots.forced is None else jnp.where(taken[:, None], NOTHING, slots.forced),
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
    pause: int | None = None,
) -> tuple[Slots, tuple[Array, ...], Array, Array]:
    """Run up to `steps` decode steps; return the slots, the draws [steps, S], their validity mask and the steps made.

    A slot halts at a stop token, at its limit and at the token `pause`, after which the host may `resume` it.
    """
    halts = stop_ids if pause is None else (*stop_ids, pause)
    model = nnx.merge(graph, params)
    size = slots.token.shape[0]
    blank = jnp.zeros((steps, size))
    out = (jnp.zeros((steps, size), jnp.int32), blank, blank)

    def going(carry: Any) -> Array:
        step, slots, _, _ = carry
        more: Array = (step < steps) & slots.active.any()
        return more

    def body(carry: Any) -> Any:
        step, slots, out, valid = carry
        hidden, cache = model(slots.token[:, None], slots.length[:, None], decoding(slots.length), slots.cache)
        forced = None if slots.forced is None else slots.forced[:, 0]
        drawn = draw(model.logits(hidden[:, 0]), _noise(slots.key, slots.drawn), sampling_params, forced)
        was = slots.active
        count = slots.drawn + was
        after = Slots(
            cache=cache,
            length=slots.length + was,
            token=jnp.where(was, drawn[0], slots.token),
            drawn=count,
            limit=slots.limit,
            key=slots.key,
            active=was & ~_stops(drawn[0], halts) & (count < slots.limit),
            forced=_behind_first(slots.forced),
        )
        out = tuple(buffer.at[step].set(new) for buffer, new in zip(out, drawn, strict=True))
        return step + 1, after, out, valid.at[step].set(was)

    start = (jnp.int32(0), slots, out, jnp.zeros((steps, size), bool))
    used, slots, out, valid = jax.lax.while_loop(going, body, start)
    return slots, out, valid, used


@jax.jit
def resume(
    active: Bool[Array, "S"], held: Int[Array, "S F"], resumed: Bool[Array, "S"], forced: Int[Array, "S F"]
) -> tuple[Bool[Array, "S"], Int[Array, "S F"]]:
    """Return `active` and `forced` of the slots after the `resumed` ones receive their new forced tokens."""
    return active | resumed, jnp.where(resumed[:, None], forced, held)


def _behind_first(forced: Int[Array, "S F"] | None) -> Int[Array, "S F"] | None:
    """Drop the first forced token of each slot after a step. Those of inactive slots no longer matter."""
    return None if forced is None else jnp.pad(forced[:, 1:], ((0, 0), (0, 1)), constant_values=NOTHING)


def _noise(keys: Array, index: Int[Array, "S"]) -> Float[Array, "S"]:
    """Draw one number in [0, 1) per slot, from the completion's key and the token's index."""
    return jax.vmap(lambda key, i: jax.random.uniform(jax.random.fold_in(key, i)))(keys, index)


@jax.jit
def sample_keys(seed: int, rows: Int[Array, "n 3"]) -> Array:
    """Return the random key of each (step, prompt index, sample index) under the run's seed."""
    base = jax.random.PRNGKey(seed)
    fold = jax.random.fold_in
    return jax.vmap(lambda row: fold(fold(fold(base, row[0]), row[1]), row[2]))(rows)


def _stops(token: Int[Array, "S"], stop_ids: tuple[int, ...]) -> Array:
    return jnp.isin(token, jnp.array(stop_ids, jnp.int32)) if stop_ids else jnp.zeros_like(token, dtype=bool)
