"""Slots of the KV cache: insert prefilled prompts, attend while decoding, resize.

A slot is one row of every cache buffer. Keys are stored [S, K, W, T] and values [S, K, T, W], one buffer per layer: a
decode step then reads them in order (measured against [S, T, K, W] on CPU: 5 times the bandwidth). The time axis grows
between chunks of steps and the slot axis shrinks when few completions remain; inside a step both are fixed.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from covey.models.attention import Attend
from covey.models.blockwise import causal_spans, span_attention
from covey.models.layers import apply_softcap

NO_TOKEN = -1
"""Value that means "no forced token"."""

LayerCache = tuple[Float[Array, "S K W T"], Float[Array, "S K T W"]]


class Slots(NamedTuple):
    """State of the decode loop on the device.

    Attributes:
        cache: keys and values of each layer.
        length: number of tokens in the cache; also the position of the next one.
        token: the last token drawn, not yet in the cache.
        num_tokens: number of tokens of the completion so far.
        max_tokens: maximum number of tokens in the completion.
        key: the completion's random key; the token's index is folded in at each draw.
        active: whether the slot is still being decoded.
        forced_tokens: tokens that replace those the next steps draw, followed by NO_TOKEN; None without a tool.
    """

    cache: list[LayerCache]
    length: Int[Array, "S"]
    token: Int[Array, "S"]
    num_tokens: Int[Array, "S"]
    max_tokens: Int[Array, "S"]
    key: Array
    active: Bool[Array, "S"]
    forced_tokens: Int[Array, "S F"] | None = None


class Prefix(NamedTuple):
    """Prefilled prompts: their caches, the logits after their last token, and their lengths."""

    cache: list[LayerCache]
    logits: Float[Array, "P V"]
    length: Int[Array, "P"]


@partial(jax.jit, static_argnames=("slots", "time", "layers", "kv_heads", "head_dim", "dtype", "max_forced_tokens"))
def empty_slots(
    slots: int, time: int, layers: int, kv_heads: int, head_dim: int, dtype: Any, *, max_forced_tokens: int = 0
) -> Slots:
    """Create empty slots, each with room for `max_forced_tokens` tokens from a tool."""
    zeros = partial(jnp.zeros, (slots,))
    cache = [
        (jnp.zeros((slots, kv_heads, head_dim, time), dtype), jnp.zeros((slots, kv_heads, time, head_dim), dtype))
        for _ in range(layers)
    ]
    length, token, num_tokens, max_tokens = (zeros(jnp.int32) for _ in range(4))
    forced_tokens = jnp.full((slots, max_forced_tokens), NO_TOKEN) if max_forced_tokens else None
    return Slots(
        cache, length, token, num_tokens, max_tokens, jnp.zeros((slots, 2), jnp.uint32), zeros(bool), forced_tokens
    )


def prefill_attention(length: Int[Array, "P"]) -> Attend:
    """Return causal attention over right-padded prompts, which also outputs each layer's keys and values as cached."""

    def attend(q: Array, k: Array, v: Array, cache: Any, *, window: Any, softcap: float | None) -> tuple[Array, Any]:
        time = q.shape[1]
        positions = jnp.broadcast_to(jnp.arange(time), (length.shape[0], time))
        inner = span_attention(causal_spans(length, time), positions)
        out, _ = inner(q, k, v, None, window=window, softcap=softcap)
        return out, (k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))

    return attend


def decode_attention(length: Int[Array, "S"]) -> Attend:
    """Return attention of one new token per slot: it writes its key and value at `length` and attends up to it."""

    def attend(q: Array, k: Array, v: Array, cache: Any, *, window: Any, softcap: float | None) -> tuple[Array, Any]:
        keys, values = cache
        slots = jnp.arange(length.shape[0])
        keys = keys.at[slots, :, :, length].set(k[:, 0].astype(keys.dtype))
        values = values.at[slots, :, length].set(v[:, 0].astype(values.dtype))
        visible = jnp.arange(keys.shape[-1])[None, :] <= length[:, None]
        if window is not None:
            visible = visible & (length[:, None] - jnp.arange(keys.shape[-1])[None, :] < window)
        return _attend_cached(q[:, 0], keys, values, visible, softcap)[:, None], (keys, values)

    return attend


def _attend_cached(
    q: Float[Array, "S H W"],
    keys: Float[Array, "S K W T"],
    values: Float[Array, "S K T W"],
    visible: Bool[Array, "S T"],
    softcap: float | None,
) -> Float[Array, "S H W"]:
    slots, heads, width = q.shape
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    grouped = q.reshape(slots, keys.shape[1], -1, width).astype(keys.dtype)
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scores = apply_softcap(product("skgw,skwt->skgt", grouped, keys), softcap)
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return product("skgt,sktw->skgw", weights, values).reshape(slots, heads, width).astype(q.dtype)


def insert_prefix(
    slots: Slots, prefix: Prefix, prompt: Int[Array, "S"], inserted: Bool[Array, "S"]
) -> list[LayerCache]:
    """Copy the cache of prompt `prompt[s]` of `prefix` to the front of every slot that is `inserted`."""
    rows = inserted[:, None, None, None]

    def insert(old: LayerCache, new: LayerCache) -> LayerCache:
        (keys, values), (new_keys, new_values) = old, new
        time = min(new_keys.shape[-1], keys.shape[-1])
        front_keys = jnp.where(rows, new_keys[prompt, ..., :time].astype(keys.dtype), keys[..., :time])
        front_values = jnp.where(rows, new_values[prompt, :, :time].astype(values.dtype), values[:, :, :time])
        return keys.at[..., :time].set(front_keys), values.at[:, :, :time].set(front_values)

    return [insert(old, new) for old, new in zip(slots.cache, prefix.cache, strict=True)]


@partial(jax.jit, static_argnames=("time",))
def resize(slots: Slots, rows: Int[Array, "n"], time: int) -> Slots:
    """Keep only the slots in `rows`, in that order, and resize their caches to `time` tokens, cutting the rest."""

    def fit(x: Array, axis: int) -> Array:
        grow = [(0, 0)] * x.ndim
        grow[axis] = (0, max(0, time - x.shape[axis]))
        return jax.lax.slice_in_dim(jnp.pad(x, grow), 0, time, axis=axis)

    kept: Slots = jax.tree.map(lambda x: x[rows], slots)
    return kept._replace(cache=[(fit(keys, 3), fit(values, 2)) for keys, values in kept.cache])
