"""Attention functions. The decoder passes its queries, keys and values to an `Attend` function and never sees a mask.

Training, prefill and decoding differ only in the `Attend` they pass: `masked_attention` from here, or a cached one from
`sampling.cache`.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from covey.models.layers import apply_softcap
from covey.models.recurrence import Context, recur_in_order


class SharedKeys(NamedTuple):
    """Keys and values that a layer gives to the layers that use them, which take it as their cache.

    Attributes:
        k, v: keys and values of the tokens of this call.
        cache: the layer's new cache.
    """

    k: Float[Array, "B T K W"]
    v: Float[Array, "B T K W"]
    cache: Any


class Attend(Protocol):
    """Compute attention for one layer.

    Takes queries [B T H W] (already scaled), keys and values [B T K W], the layer's cache (any pytree, or None), the
    sliding window in tokens (None: no window) and the soft-cap of the scores. Returns the attention output [B T H W]
    and the layer's new cache. `write` is False for keys and values of another layer, whose cache has them already.
    """

    def __call__(
        self, q: Array, k: Array, v: Array, cache: Any, *, window: Any, softcap: float | None, write: bool = True
    ) -> tuple[Array, Any]: ...


def dot_product_attention(
    q: Float[Array, "B T H W"],
    k: Float[Array, "B U K W"],
    v: Float[Array, "B U K W"],
    allowed: Bool[Array, "B T U"],
    softcap: float | None = None,
) -> Float[Array, "B T H W"]:
    """Compute grouped-query attention with the softmax in float32. A fully masked query returns a finite output.

    The heads of a group and the queries share one axis of the product, and the softmax's division comes after the
    product with V: the scores, by far the largest array, are never transposed or divided (twice the speed on CPU).
    """
    batch, time, heads, width = q.shape
    kv_heads, precision = k.shape[2], jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = partial(jnp.matmul, precision=precision, preferred_element_type=jnp.float32)
    grouped = q.reshape(batch, time, kv_heads, -1, width).transpose(0, 2, 3, 1, 4)
    stacked = grouped.reshape(batch, kv_heads, -1, width)
    scores = apply_softcap(product(stacked, k.transpose(0, 2, 3, 1)).reshape(*grouped.shape[:-1], -1), softcap)
    scores = jnp.where(allowed[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    mixed = product(weights.astype(v.dtype).reshape(batch, kv_heads, -1, k.shape[1]), v.transpose(0, 2, 1, 3))
    mixed = mixed.reshape(grouped.shape) / weights.sum(axis=-1)[..., None]
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, time, heads, width).astype(q.dtype)


def masked_attention(allowed: Bool[Array, "B T T"], positions: Int[Array, "B T"]) -> Attend:
    """Return the `Attend` for one block of tokens under a mask; a layer's window is measured in `positions`."""

    def attend(
        q: Array,
        k: Array,
        v: Array,
        cache: Any,
        *,
        window: Any = None,
        softcap: float | None = None,
        write: bool = True,
    ) -> tuple[Array, Any]:
        mask = allowed if window is None else allowed & (positions[:, :, None] - positions[:, None, :] < window)
        return dot_product_attention(q, k, v, mask, softcap), cache

    return attend


def causal_attention(valid: Bool[Array, "B T"], positions: Int[Array, "B T"]) -> Attend:
    """Return the `Attend` for plain causal attention over all tokens but padding, wherever the padding is."""
    time = valid.shape[1]
    attend = masked_attention(jnp.tril(jnp.ones((time, time), bool)) & valid[:, None, :], positions)
    return Context(attend, recur_in_order(valid))
