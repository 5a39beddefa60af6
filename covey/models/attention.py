"""Who may look at whom. The decoder hands its queries, keys and values to an `Attend` function and never sees a mask.

Training, prefill and decoding differ only in the `Attend` they pass: `masked` here, and the cached ones of `sampling.cache`.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Attend(Protocol):
    """Mixes values by attention for one layer.

    Takes queries [B T H W] (already scaled), keys and values [B T K W], the layer's cache (any pytree, or None), the sliding
    window in tokens (None: everything) and the soft-cap of the scores. Returns the mixture [B T H W] and the layer's new cache.
    """

    def __call__(
        self, q: Array, k: Array, v: Array, cache: Any, *, window: Any, softcap: float | None
    ) -> tuple[Array, Any]: ...


def attention(
    q: Float[Array, "B T H W"],
    k: Float[Array, "B U K W"],
    v: Float[Array, "B U K W"],
    allowed: Bool[Array, "B T U"],
    softcap: float | None = None,
) -> Float[Array, "B T H W"]:
    """Grouped-query attention with the softmax in float32. A query that may look at nothing returns a finite mixture."""
    batch, time, heads, width = q.shape
    kv_heads = k.shape[2]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    grouped = q.reshape(batch, time, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("btkgw,bukw->bkgtu", grouped, k, precision=precision, preferred_element_type=jnp.float32)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(allowed[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bkgtu,bukw->btkgw", weights, v, precision=precision, preferred_element_type=jnp.float32)
    return mixed.reshape(batch, time, heads, width).astype(q.dtype)


def masked(allowed: Bool[Array, "B T T"], positions: Int[Array, "B T"]) -> Attend:
    """Attention within one block of tokens under a mask; a layer's window is measured in `positions`."""

    def attend(
        q: Array, k: Array, v: Array, cache: Any, *, window: Any = None, softcap: float | None = None
    ) -> tuple[Array, Any]:
        mask = allowed if window is None else allowed & within_window(positions, positions, window)
        return attention(q, k, v, mask, softcap), cache

    return attend


def causal(valid: Bool[Array, "B T"], positions: Int[Array, "B T"]) -> Attend:
    """Plain causal attention over the tokens that are not padding, wherever the padding lies."""
    time = valid.shape[1]
    return masked(jnp.tril(jnp.ones((time, time), bool)) & valid[:, None, :], positions)


def within_window(q_positions: Int[Array, "B T"], k_positions: Int[Array, "B U"], window: Any) -> Bool[Array, "B T U"]:
    """True where the key lies fewer than `window` positions behind the query."""
    return q_positions[:, :, None] - k_positions[:, None, :] < window
