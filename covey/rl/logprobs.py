"""Log-probs without the [T, V] array: head, log-softmax, gather and entropy as one function over chunks of tokens.

The backward pass recomputes each chunk, so memory holds one [chunk, V] block at a time whatever the number of tokens. Temperature,
soft-cap and the weights' type are inside the chunk, and nothing outside needs to know. This is the only path.

Scored tokens stand at the front of each row; chunks behind the last of them are never computed, in either direction.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from covey.models.decoder import head_logits
from covey.rl.rows import Rows, tree_attention

CHUNK = 256
"""Tokens whose logits exist at one time, over all rows of the batch."""


class TokenScores(NamedTuple):
    """For each scored token its log-prob and the entropy of the distribution it came from, in nats; 0 at padding."""

    logps: Float[Array, "R M"]
    entropy: Float[Array, "R M"]


class Head(NamedTuple):
    """What turns hidden states into log-probs, hashable: the settings of `chunked_scores`."""

    temperature: float
    softcap: float | None
    dtype: DTypeLike
    chunk: int = CHUNK


def row_scores(graph: Any, params: Any, rows: Rows, temperature: float, chunk: int = CHUNK) -> TokenScores:
    """Log-probs and entropies of the scored tokens of `rows`, the log-softmax taken of logits / temperature.

    Args:
        graph, params: the decoder as `nnx.split` gives it.
        temperature: the rollout's; 0 (greedy) counts as 1.
    """
    model = nnx.merge(graph, params)
    hidden, _ = model(rows.tokens, rows.positions, tree_attention(rows))
    picked = jnp.take_along_axis(hidden, rows.source[..., None], axis=1)
    head = Head(float(temperature) or 1.0, model.config.final_softcap, model.dtype, chunk)
    scored = rows.scored.sum(axis=1).max()
    logps, entropy = chunked_scores(head, model.head_weight, picked, rows.target, scored)
    keep = rows.scored
    return TokenScores(jnp.where(keep, logps, 0.0), jnp.where(keep, entropy, 0.0))


def scores(
    head: Head, weight: Float[Array, "V D"], hidden: Float[Array, "R C D"], target: Int[Array, "R C"]
) -> tuple[Float[Array, "R C"], Float[Array, "R C"]]:
    """Log-probs of `target` and entropies, all at once: the arithmetic of one chunk, and the oracle of `chunked_scores`."""
    logits = head_logits(weight, hidden, head.dtype, head.softcap) / head.temperature
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    mean_logit = jnp.sum(jnp.exp(logits - total[..., None]) * logits, axis=-1)
    return chosen - total, total - mean_logit


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_scores(
    head: Head,
    weight: Float[Array, "V D"],
    hidden: Float[Array, "R M D"],
    target: Int[Array, "R M"],
    scored: Int[Array, ""],
) -> tuple[Float[Array, "R M"], Float[Array, "R M"]]:
    """`scores` in chunks over M. Only the first `scored` columns are computed; the rest are 0 and pass no gradient."""
    step = _step(head, hidden)

    def body(i: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
        part = scores(head, weight, _cut(hidden, i, step), _cut(target, i, step))
        return jax.tree.map(lambda whole, new: _paste(whole, new, i, step), out, part)

    blank = jnp.zeros(target.shape, jnp.float32)
    return jax.lax.fori_loop(0, -(-scored // step), body, (blank, blank))


def _forward(head: Head, weight: Array, hidden: Array, target: Array, scored: Array) -> tuple[Any, Any]:
    return chunked_scores(head, weight, hidden, target, scored), (weight, hidden, target, scored)


def _backward(head: Head, saved: Any, grads: tuple[Array, Array]) -> tuple[Any, ...]:
    weight, hidden, target, scored = saved
    step = _step(head, hidden)

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        grad_weight, grad_hidden = carry
        chunk = partial(scores, head, target=_cut(target, i, step))
        _, pull = jax.vjp(lambda w, h: chunk(w, h), weight, _cut(hidden, i, step))
        new_weight, new_hidden = pull(tuple(_cut(g, i, step) for g in grads))
        return grad_weight + new_weight.astype(jnp.float32), _paste(grad_hidden, new_hidden, i, step)

    start = (jnp.zeros(weight.shape, jnp.float32), jnp.zeros_like(hidden))
    grad_weight, grad_hidden = jax.lax.fori_loop(0, -(-scored // step), body, start)
    return grad_weight.astype(weight.dtype), grad_hidden, None, None


chunked_scores.defvjp(_forward, _backward)


def _step(head: Head, hidden: Array) -> int:
    """Columns in a chunk: a divisor of M (a power of two), so that no chunk is cut short."""
    rows, columns = hidden.shape[:2]
    step = min(columns & -columns, max(8, head.chunk // rows))
    return 1 << (step.bit_length() - 1)


def _cut(x: Array, i: Array, step: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * step, step, axis=1)


def _paste(whole: Array, part: Array, i: Array, step: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), i * step, axis=1)
