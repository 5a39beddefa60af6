"""Log-probs without the [T, V] array: head, log-softmax, gather and entropy as one function over blocks of tokens ×
vocabulary.

The forward keeps a running maximum and running sums over the vocabulary's blocks (the online softmax of Milakov &
Gimelshein, 2018); the backward computes each block again from the log-normaliser. Memory holds a few blocks, whatever
the number of tokens and the size of the vocabulary. Temperature, soft-cap and the weights' type are inside, and nothing
outside needs to know. This is the only path.

Scored tokens stand at the front of each row; chunks behind the last of them are never computed, in either direction.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from covey.models.decoder import Decoder, head_logits
from covey.rl.rows import Rows, tree_attention

CHUNK = 1024
"""Tokens whose logits exist at one time, over all rows of the batch."""
BLOCK = 4096
"""Entries of the vocabulary whose logits exist at one time."""


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
    block: int = BLOCK


def row_scores(graph: Any, params: Any, rows: Rows, temperature: float) -> TokenScores:
    """Log-probs and entropies of the scored tokens of `rows`, the log-softmax taken of logits / temperature.

    Args:
        graph, params: the decoder as `nnx.split` gives it.
        temperature: the rollout's; 0 (greedy) counts as 1.
    """
    model = nnx.merge(graph, params)
    picked = picked_hidden(model, rows)
    head = Head(float(temperature) or 1.0, model.config.final_softcap, model.dtype)
    scored = rows.scored.sum(axis=1).max()
    logps, entropy = chunked_scores(head, model.head_weight, picked, rows.target, scored)
    keep = rows.scored
    return TokenScores(jnp.where(keep, logps, 0.0), jnp.where(keep, entropy, 0.0))


def picked_hidden(model: Decoder, rows: Rows) -> Float[Array, "R M D"]:
    """The hidden state from which each scored token is predicted; any at padding."""
    hidden, _ = model(rows.tokens, rows.positions, tree_attention(rows))
    return jnp.take_along_axis(hidden, rows.source[..., None], axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_scores(
    head: Head,
    weight: Float[Array, "V D"],
    hidden: Float[Array, "R M D"],
    target: Int[Array, "R M"],
    scored: Int[Array, ""],
) -> tuple[Float[Array, "R M"], Float[Array, "R M"]]:
    """Log-prob of `target` and entropy of softmax(softcap(hidden · weightᵀ) / temperature) at each token.

    Only the first `scored` columns are computed; the chunks behind them are 0 and pass no gradient.
    """
    return _forward(head, weight, hidden, target, scored)[0]


def _forward(head: Head, weight: Array, hidden: Array, target: Array, scored: Array) -> tuple[Any, Any]:
    step = _step(head, hidden)

    def body(i: Array, out: tuple[Array, ...]) -> tuple[Array, ...]:
        part = _normalise(head, weight, _cut(hidden, i, step), _cut(target, i, step))
        return tuple(_paste(whole, new, i, step) for whole, new in zip(out, part, strict=True))

    blank = jnp.zeros(target.shape, jnp.float32)
    logps, entropy, total = jax.lax.fori_loop(0, -(-scored // step), body, (blank, blank, blank))
    return (logps, entropy), (weight, hidden, target, scored, total, entropy)


def _normalise(head: Head, weight: Array, hidden: Array, target: Array) -> tuple[Array, Array, Array]:
    """Log-probs, entropies and log-normalisers of one chunk of tokens, block by block over the vocabulary."""

    def body(b: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        top, mass, weighted, chosen = carry
        (logits, _), (column, fresh) = _block_with_pull(head, weight, hidden, b)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1, where=fresh, initial=-jnp.inf))
        share = jnp.where(fresh, jnp.exp(logits - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        hit = fresh & (column == target[..., None])
        return (
            new_top,
            mass * shrink + share.sum(-1),
            weighted * shrink + (share * logits).sum(-1),
            chosen + jnp.where(hit, logits, 0.0).sum(-1),
        )

    none = jnp.zeros(target.shape, jnp.float32)
    start = (jnp.full(target.shape, -jnp.inf), none, none, none)
    top, mass, weighted, chosen = jax.lax.fori_loop(0, _blocks(head, weight), body, start)
    total = top + jnp.log(mass)
    return chosen - total, total - weighted / mass, total


def _backward(head: Head, saved: Any, grads: tuple[Array, Array]) -> tuple[Any, ...]:
    weight, hidden, target, scored, total, entropy = saved
    step = _step(head, hidden)

    def chunk(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        grad_weight, grad_hidden = carry
        local = _Chunk(*(_cut(x, i, step) for x in (hidden, target, total, entropy, *grads)))
        start = (grad_weight, jnp.zeros(local.hidden.shape, jnp.float32))
        body = partial(_block_backward, head, weight, local)
        grad_weight, new_hidden = jax.lax.fori_loop(0, _blocks(head, weight), body, start)
        return grad_weight, _paste(grad_hidden, new_hidden, i, step)

    start = (jnp.zeros(weight.shape, jnp.float32), jnp.zeros_like(hidden))
    grad_weight, grad_hidden = jax.lax.fori_loop(0, -(-scored // step), chunk, start)
    return grad_weight.astype(weight.dtype), grad_hidden, None, None


class _Chunk(NamedTuple):
    """What the backward pass knows of a chunk of tokens; `total` is the log-normaliser."""

    hidden: Array
    target: Array
    total: Array
    entropy: Array
    grad_logp: Array
    grad_entropy: Array


def _block_backward(head: Head, weight: Array, x: _Chunk, b: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    """Adds one block's part to the gradients of the weight and of the chunk's hidden states.

    With p the softmax and z the scaled logits: ∂logp/∂z = onehot − p and ∂H/∂z = −p · (z − log-normaliser + H).
    """
    grad_weight, grad_hidden = carry
    (logits, pull), (column, fresh) = _block_with_pull(head, weight, x.hidden, b)
    logp = logits - x.total[..., None]
    p = jnp.where(fresh, jnp.exp(logp), 0.0)
    grad = jnp.where(fresh & (column == x.target[..., None]), x.grad_logp[..., None], 0.0)
    grad = grad - p * (x.grad_logp[..., None] + x.grad_entropy[..., None] * (logp + x.entropy[..., None]))
    new_weight, new_hidden = pull(grad)
    start = _block_start(head, weight, b)
    held = jax.lax.dynamic_slice_in_dim(grad_weight, start, new_weight.shape[0], axis=0)
    grad_weight = jax.lax.dynamic_update_slice_in_dim(grad_weight, held + new_weight.astype(jnp.float32), start, axis=0)
    return grad_weight, grad_hidden + new_hidden.astype(jnp.float32)


chunked_scores.defvjp(_forward, _backward)


def _block_with_pull(head: Head, weight: Array, hidden: Array, b: Array) -> tuple[Any, tuple[Array, Array]]:
    """Scaled logits of vocabulary block `b` with their pull-back, each one's token, and whether no earlier block had
    it.

    The last block is moved back to end with the vocabulary, so that all are of one size.
    """
    start, size = _block_start(head, weight, b), min(head.block, weight.shape[0])
    part = jax.lax.dynamic_slice_in_dim(weight, start, size, axis=0)
    scaled = lambda w, h: head_logits(w, h, head.dtype, head.softcap) / head.temperature  # noqa: E731
    column = start + jnp.arange(size)
    return jax.vjp(scaled, part, hidden), (column, column >= b * head.block)


def _block_start(head: Head, weight: Array, b: Array) -> Array:
    return jnp.maximum(jnp.minimum(b * head.block, weight.shape[0] - head.block), 0)


def _blocks(head: Head, weight: Array) -> int:
    return -(-weight.shape[0] // head.block)


def _step(head: Head, hidden: Array) -> int:
    """Columns in a chunk: a power of two that divides M, so that no chunk is cut short."""
    rows, columns = hidden.shape[:2]
    step = min(columns & -columns, max(8, head.chunk // rows))
    return 1 << (step.bit_length() - 1)


def _cut(x: Array, i: Array, step: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * step, step, axis=1)


def _paste(whole: Array, part: Array, i: Array, step: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), i * step, axis=1)
