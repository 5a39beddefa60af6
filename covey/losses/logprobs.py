"""Log-probs without the [T, V] array: head, log-softmax, gather and entropy in one function over blocks of tokens ×
vocabulary.

The forward keeps a running maximum and running sums over the vocabulary's blocks (the online softmax of Milakov &
Gimelshein, 2018); the backward recomputes each block from the logsumexp. Memory holds a few blocks, whatever the
number of tokens and the size of the vocabulary. Temperature, soft-cap and dtype of the weights are handled inside.

A head that is not trained, as with LoRA adapters, needs only the gradient of the hidden states. That is a mean of the
head's rows under the softmax, so the forward accumulates it beside the other sums, and no block is recomputed: two
matrix products instead of three.

Scored tokens are at the front of each row; chunks after the last of them are never computed, forward or backward.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from covey.models.decoder import Decoder, head_logits
from covey.models.layers import project, softcapped
from covey.models.lora import has_lora
from covey.packing.rows import Rows, tree_attention

CHUNK = 1024
"""Number of tokens whose logits exist at one time, over all rows of the batch."""
BLOCK = 4096
"""Number of vocabulary entries whose logits exist at one time."""


class TokenScores(NamedTuple):
    """Log-prob of each scored token and entropy of the whole distribution there, in nats; 0 at padding."""

    logps: Float[Array, "R M"]
    entropy: Float[Array, "R M"]


class Head(NamedTuple):
    """Settings of `chunked_scores`, which turns hidden states into log-probs; hashable."""

    temperature: float
    softcap: float | None
    dtype: DTypeLike
    chunk: int = CHUNK
    block: int = BLOCK


def row_scores(
    graph: Any, params: Any, rows: Rows, temperature: float, *, entropy_gradient: bool = True
) -> TokenScores:
    """Compute log-probs and entropies of the scored tokens of `rows`, by the log-softmax of logits / temperature.

    Args:
        graph, params: the decoder as `nnx.split` returns it. With adapters the head is not trained and gets no
            gradient.
        temperature: the rollout's; 0 (greedy) counts as 1.
        entropy_gradient: whether entropies are differentiable. Without adapters they always are, at no cost.
    """
    model = nnx.merge(graph, params)
    picked = picked_hidden(model, rows)
    block = even_block(model.config.vocab_size)
    head = Head(float(temperature) or 1.0, model.config.final_softcap, model.dtype, block=block)
    scored = rows.scored.sum(axis=1).max()
    scores = partial(frozen_scores, head, entropy_gradient) if has_lora(model) else partial(chunked_scores, head)
    logps, entropy = scores(model.head_weight, picked, rows.target, scored)
    keep = rows.scored
    return TokenScores(jnp.where(keep, logps, 0.0), jnp.where(keep, entropy, 0.0))


def even_block(vocabulary: int) -> int:
    """Return the largest block, of at least a quarter of BLOCK, that divides the vocabulary; else BLOCK, and the last
    block is masked. A vocabulary smaller than BLOCK is one block.

    >>> [even_block(n) for n in (49152, 32000, 151936, 50257, 50021, 301)]
    [4096, 4000, 2374, 1733, 4096, 301]
    """
    if vocabulary <= BLOCK:
        return vocabulary
    return next((size for size in range(BLOCK, BLOCK // 4 - 1, -1) if vocabulary % size == 0), BLOCK)


def picked_hidden(model: Decoder, rows: Rows) -> Float[Array, "R M D"]:
    """Return the hidden state from which each scored token is predicted; arbitrary at padding."""
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
    """Compute log-prob of `target` and entropy of softmax(softcap(hidden · weightᵀ) / temperature) at each token.

    Only the first `scored` columns are computed; the chunks after them are 0 and pass no gradient.
    """
    return _forward(head, weight, hidden, target, scored)[0]


def _forward(
    head: Head, weight: Array, hidden: Array, target: Array, scored: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    blank = jnp.zeros(target.shape, jnp.float32)
    chunk = partial(_normalise, head, weight)
    logps, entropy, total = _by_chunks(head, hidden, target, scored, chunk, (blank, blank, blank))
    return (logps, entropy), (weight, hidden, target, scored, total, entropy)


def _by_chunks(head: Head, hidden: Array, target: Array, scored: Array, chunk: Any, blank: Any) -> Any:
    """Apply `chunk(hidden, target)` to each chunk of scored columns; columns after them are those of `blank`."""
    step = _step(head, hidden)

    def body(i: Array, out: Any) -> Any:
        part = chunk(_cut(hidden, i, step), _cut(target, i, step))
        return jax.tree.map(lambda whole, new: _paste(whole, new, i, step), out, part)

    return jax.lax.fori_loop(0, -(-scored // step), body, blank)


class _Sums(NamedTuple):
    """Running maximum and sums of each token's softmax over vocabulary blocks; sums are relative to exp(top)."""

    top: Array
    mass: Array
    weighted: Array

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> "_Sums":
        zero = jnp.zeros(shape, jnp.float32)
        return cls(jnp.full(shape, -jnp.inf), zero, zero)

    def plus(self, logits: Array, fresh: Array, weigh: bool) -> tuple["_Sums", Array, Array]:
        """Return the sums with one more block, the block's exp(logit − top), and the factor that rescaled the old sums.
        `weigh` also accumulates the weighted logits, at the cost of a sum over all columns.
        """
        top = jnp.maximum(self.top, jnp.max(logits, axis=-1, where=fresh, initial=-jnp.inf))
        share = jnp.where(fresh, jnp.exp(logits - top[..., None]), 0.0)
        shrink = jnp.exp(self.top - top)
        mass = self.mass * shrink + share.sum(-1)
        weighted = self.weighted * shrink + (share * logits).sum(-1) if weigh else self.weighted
        return _Sums(top, mass, weighted), share, shrink

    def scores(self, chosen: Array) -> tuple[Array, Array, Array]:
        """Return log-probs of the tokens with the logits `chosen`, entropies and logsumexps."""
        total = self.top + jnp.log(self.mass)
        return jnp.minimum(chosen - total, 0.0), total - self.weighted / self.mass, total


def _normalise(head: Head, weight: Array, hidden: Array, target: Array) -> tuple[Array, Array, Array]:
    """Compute log-probs, entropies and logsumexps of one chunk of tokens, block by block over the vocabulary."""

    def body(b: Array, sums: _Sums) -> _Sums:
        (logits, _), (_, fresh) = _block_with_pull(head, weight, hidden, b)
        return sums.plus(logits, fresh, True)[0]

    sums: _Sums = jax.lax.fori_loop(0, _blocks(head, weight), body, _Sums.none(target.shape))
    return sums.scores(_chosen(head, weight, hidden, target))


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
    """Inputs of the backward pass for a chunk of tokens; `total` is the logsumexp."""

    hidden: Array
    target: Array
    total: Array
    entropy: Array
    grad_logp: Array
    grad_entropy: Array


def _block_backward(head: Head, weight: Array, x: _Chunk, b: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    """Add one block's part to the gradients of the weight and of the chunk's hidden states.

    With p the softmax and z the scaled logits: ∂logp/∂z = onehot − p and ∂H/∂z = −p · (z − logsumexp + H).
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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def frozen_scores(
    head: Head,
    entropy_gradient: bool,
    weight: Float[Array, "V D"],
    hidden: Float[Array, "R M D"],
    target: Int[Array, "R M"],
    scored: Int[Array, ""],
) -> tuple[Float[Array, "R M"], Float[Array, "R M"]]:
    """Compute `chunked_scores` for a head that is not trained: `weight` gets no gradient, hidden states get that of the
    log-probs, and that of the entropies only with `entropy_gradient`.
    """
    return _forward(head, weight, hidden, target, scored)[0]


def _frozen_forward(
    head: Head, entropy_gradient: bool, weight: Array, hidden: Array, target: Array, scored: Array
) -> tuple[Any, Any]:
    blank = jnp.zeros(target.shape, jnp.float32)
    slopes = (jnp.zeros(hidden.shape, jnp.float32),) * (1 + entropy_gradient)
    chunk = partial(_with_slopes, head, entropy_gradient, weight)
    scores, slopes = _by_chunks(head, hidden, target, scored, chunk, ((blank, blank), slopes))
    return scores, (slopes, jnp.zeros((), hidden.dtype))


def _with_slopes(head: Head, entropy_gradient: bool, weight: Array, hidden: Array, target: Array) -> Any:
    """Compute log-probs and entropies of one chunk of tokens, and the gradient of each in the hidden state.

    With z the scaled logits, s = ∂z/∂(w·h) and L the logsumexp, the gradients are s·w of the target − E[s·w], and
    (L − H)·E[s·w] − E[z·s·w]: the two means are accumulated like the other sums. Without a soft-cap
    E[z] = h·E[s·w], which is used in float32, where the operands are not rounded.
    """
    weigh = head.softcap is not None or jnp.dtype(head.dtype) != jnp.float32

    def body(b: Array, carry: tuple[_Sums, tuple[Array, ...]]) -> tuple[_Sums, tuple[Array, ...]]:
        sums, means = carry
        (logits, _), (_, fresh) = _block_with_pull(head, weight, hidden, b)
        sums, share, shrink = sums.plus(logits, fresh, weigh)
        share = share * _slope(head, logits)
        part = _block_of(head, weight, b)
        products = [project(of, part, head.dtype) for of in (share, share * logits)[: len(means)]]
        return sums, tuple(m * shrink[..., None] + p for m, p in zip(means, products, strict=True))

    start = (jnp.zeros(hidden.shape, jnp.float32),) * (1 + entropy_gradient)
    sums, means = jax.lax.fori_loop(0, _blocks(head, weight), body, (_Sums.none(target.shape), start))
    if not weigh:
        sums = sums._replace(weighted=(hidden.astype(jnp.float32) * means[0]).sum(-1))
    chosen = _chosen(head, weight, hidden, target)
    logps, entropy, total = sums.scores(chosen)
    means = [m / sums.mass[..., None] for m in means]
    own = _slope(head, chosen)[..., None] * weight[target].astype(jnp.float32)
    slopes = (own - means[0], *((total - entropy)[..., None] * means[0] - m for m in means[1:]))
    return (logps, entropy), slopes


def _chosen(head: Head, weight: Array, hidden: Array, target: Array) -> Array:
    """Compute the scaled logits of the targets from their own rows of the head alone."""
    rows, states = (_rounded(x, head.dtype) for x in (weight[target], hidden))
    return softcapped((rows * states).sum(-1), head.softcap) / head.temperature


def _rounded(x: Array, dtype: DTypeLike) -> Array:
    """Round `x` to the precision of `dtype`, as float32. (The compiler may remove a cast to `dtype` and back.)"""
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant)


def _slope(head: Head, logits: Array) -> Array:
    """Compute ∂z/∂(w·h) where the scaled logit is z: 1 / temperature, and less where the soft-cap saturates."""
    bent = 1.0 if head.softcap is None else 1.0 - jnp.square(logits * head.temperature / head.softcap)
    return jnp.asarray(bent / head.temperature, jnp.float32)


def _frozen_backward(head: Head, entropy_gradient: bool, saved: Any, grads: tuple[Array, Array]) -> tuple[Any, ...]:
    slopes, like = saved
    grad = sum(g[..., None] * slope for g, slope in zip(grads, slopes, strict=False))
    return None, jnp.asarray(grad, like.dtype), None, None


frozen_scores.defvjp(_frozen_forward, _frozen_backward)


def _block_with_pull(head: Head, weight: Array, hidden: Array, b: Array) -> tuple[Any, tuple[Array, Array]]:
    """Return the scaled logits of vocabulary block `b`, their VJP, their token ids, and whether no earlier block has
    them.

    The last block is moved back to end with the vocabulary, so that all blocks have one size.
    """
    start, part = _block_start(head, weight, b), _block_of(head, weight, b)
    scaled = lambda w, h: head_logits(w, h, head.dtype, head.softcap) / head.temperature  # noqa: E731
    column = start + jnp.arange(part.shape[0])
    whole = weight.shape[0] % head.block == 0  # then no mask is needed, which would cost as much as the sums
    return jax.vjp(scaled, part, hidden), (column, jnp.ones_like(column, bool) if whole else column >= b * head.block)


def _block_of(head: Head, weight: Array, b: Array) -> Array:
    size = min(head.block, weight.shape[0])
    return jax.lax.dynamic_slice_in_dim(weight, _block_start(head, weight, b), size, axis=0)


def _block_start(head: Head, weight: Array, b: Array) -> Array:
    return jnp.maximum(jnp.minimum(b * head.block, weight.shape[0] - head.block), 0)


def _blocks(head: Head, weight: Array) -> int:
    return -(-weight.shape[0] // head.block)


def _step(head: Head, hidden: Array) -> int:
    """Return the columns of a chunk: a power of two that divides M, so that no chunk is cut short."""
    rows, columns = hidden.shape[:2]
    step = min(columns & -columns, max(8, head.chunk // rows))
    return 1 << (step.bit_length() - 1)


def _cut(x: Array, i: Array, step: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * step, step, axis=1)


def _paste(whole: Array, part: Array, i: Array, step: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), i * step, axis=1)
