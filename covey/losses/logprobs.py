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
from covey.models.layers import apply_softcap, project
from covey.models.lora import has_lora
from covey.packing.rows import Rows, tree_attention

CHUNK_SIZE = 1024
"""Number of tokens whose logits exist at one time, over all rows of the batch."""
BLOCK_SIZE = 4096
"""Number of vocabulary entries whose logits exist at one time."""


class TokenLogps(NamedTuple):
    """Log-prob of each scored token and entropy of the whole distribution there, in nats; 0 at padding."""

    logps: Float[Array, "R M"]
    entropy: Float[Array, "R M"]


class HeadConfig(NamedTuple):
    """Settings of `chunked_logps`, which turns hidden states into log-probs; hashable."""

    temperature: float
    softcap: float | None
    dtype: DTypeLike
    chunk_size: int = CHUNK_SIZE
    block_size: int = BLOCK_SIZE

    @classmethod
    def of(cls, model: Decoder, temperature: float, block_size: int = BLOCK_SIZE) -> "HeadConfig":
        """Return the settings of the head of `model`, which computes what `Decoder.logits` does; temperature 0 (greedy)
        counts as 1.
        """
        return cls(float(temperature) or 1.0, model.config.final_softcap, model.dtype, block_size=block_size)


def token_logps(
    graph: Any, params: Any, rows: Rows, temperature: float, *, entropy_gradient: bool = True
) -> TokenLogps:
    """Compute log-probs and entropies of the scored tokens of `rows`, by the log-softmax of logits / temperature.

    Args:
        graph, params: the decoder as `nnx.split` returns it. With adapters the head is not trained and gets no
            gradient.
        temperature: the rollout's; 0 (greedy) counts as 1.
        entropy_gradient: whether entropies are differentiable. Without adapters they always are, at no cost.
    """
    model = nnx.merge(graph, params)
    hidden = gather_hidden(model, rows)
    head = HeadConfig.of(model, temperature, vocab_block_size(model.config.vocab_size))
    num_scored = rows.scored.sum(axis=1).max()
    logps_fn = partial(frozen_head_logps, head, entropy_gradient) if has_lora(model) else partial(chunked_logps, head)
    logps, entropy = logps_fn(model.head_weight, hidden, rows.target, num_scored)
    mask = rows.scored
    return TokenLogps(jnp.where(mask, logps, 0.0), jnp.where(mask, entropy, 0.0))


def vocab_block_size(vocabulary: int) -> int:
    """Return the largest block, of at least a quarter of BLOCK, that divides the vocabulary; else BLOCK, and the last
    block is masked. A vocabulary smaller than BLOCK is one block.

    >>> [vocab_block_size(n) for n in (49152, 32000, 151936, 50257, 50021, 301)]
    [4096, 4000, 2374, 1733, 4096, 301]
    """
    if vocabulary <= BLOCK_SIZE:
        return vocabulary
    return next((size for size in range(BLOCK_SIZE, BLOCK_SIZE // 4 - 1, -1) if vocabulary % size == 0), BLOCK_SIZE)


def gather_hidden(model: Decoder, rows: Rows) -> Float[Array, "R M D"]:
    """Return the hidden state from which each scored token is predicted; arbitrary at padding."""
    hidden, _ = model(rows.tokens, rows.positions, tree_attention(model, rows))
    return jnp.take_along_axis(hidden, rows.gather_index[..., None], axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_logps(
    head: HeadConfig,
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
    head: HeadConfig, weight: Array, hidden: Array, target: Array, scored: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    zeros = jnp.zeros(target.shape, jnp.float32)
    chunk = partial(_chunk_logps, head, weight)
    logps, entropy, logsumexp = _map_chunks(head, hidden, target, scored, chunk, (zeros, zeros, zeros))
    return (logps, entropy), (weight, hidden, target, scored, logsumexp, entropy)


def _map_chunks(head: HeadConfig, hidden: Array, target: Array, scored: Array, chunk: Any, init: Any) -> Any:
    """Apply `chunk(hidden, target)` to each chunk of scored columns; columns after them are those of `init`."""
    step = _chunk_columns(head, hidden)

    def body(i: Array, out: Any) -> Any:
        chunk_out = chunk(_slice_columns(hidden, i, step), _slice_columns(target, i, step))
        return jax.tree.map(lambda old, new: _update_columns(old, new, i, step), out, chunk_out)

    return jax.lax.fori_loop(0, -(-scored // step), body, init)


class _SoftmaxSums(NamedTuple):
    """Running maximum and sums of each token's softmax over vocabulary blocks; sums are relative to exp(max_logit)."""

    max_logit: Array
    sum_exp: Array
    sum_exp_logit: Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> "_SoftmaxSums":
        zero = jnp.zeros(shape, jnp.float32)
        return cls(jnp.full(shape, -jnp.inf), zero, zero)

    def add_block(self, logits: Array, new_columns: Array, with_entropy: bool) -> tuple["_SoftmaxSums", Array, Array]:
        """Return the sums with one more block, the block's exp(logit − max_logit), and the factor that rescaled the old
        sums. `with_entropy` also accumulates exp-weighted logits, at the cost of a sum over all columns.
        """
        max_logit = jnp.maximum(self.max_logit, jnp.max(logits, axis=-1, where=new_columns, initial=-jnp.inf))
        exp_logits = jnp.where(new_columns, jnp.exp(logits - max_logit[..., None]), 0.0)
        rescale = jnp.exp(self.max_logit - max_logit)
        sum_exp = self.sum_exp * rescale + exp_logits.sum(-1)
        sum_exp_logit = (
            self.sum_exp_logit * rescale + (exp_logits * logits).sum(-1) if with_entropy else self.sum_exp_logit
        )
        return _SoftmaxSums(max_logit, sum_exp, sum_exp_logit), exp_logits, rescale

    def finalize(self, target_logits: Array) -> tuple[Array, Array, Array]:
        """Return log-probs of the tokens with the logits `target_logits`, entropies and logsumexps."""
        logsumexp = self.max_logit + jnp.log(self.sum_exp)
        return jnp.minimum(target_logits - logsumexp, 0.0), logsumexp - self.sum_exp_logit / self.sum_exp, logsumexp


def _chunk_logps(head: HeadConfig, weight: Array, hidden: Array, target: Array) -> tuple[Array, Array, Array]:
    """Compute log-probs, entropies and logsumexps of one chunk of tokens, block by block over the vocabulary."""

    def body(b: Array, sums: _SoftmaxSums) -> _SoftmaxSums:
        (logits, _), (_, new_columns) = _block_logits_vjp(head, weight, hidden, b)
        return sums.add_block(logits, new_columns, True)[0]

    sums: _SoftmaxSums = jax.lax.fori_loop(0, _num_blocks(head, weight), body, _SoftmaxSums.zeros(target.shape))
    return sums.finalize(_target_logits(head, weight, hidden, target))


def _backward(head: HeadConfig, saved: Any, grads: tuple[Array, Array]) -> tuple[Any, ...]:
    weight, hidden, target, scored, logsumexp, entropy = saved
    step = _chunk_columns(head, hidden)

    def chunk(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        grad_weight, grad_hidden = carry
        local = _ChunkInputs(*(_slice_columns(x, i, step) for x in (hidden, target, logsumexp, entropy, *grads)))
        start = (grad_weight, jnp.zeros(local.hidden.shape, jnp.float32))
        body = partial(_block_backward, head, weight, local)
        grad_weight, new_hidden = jax.lax.fori_loop(0, _num_blocks(head, weight), body, start)
        return grad_weight, _update_columns(grad_hidden, new_hidden, i, step)

    start = (jnp.zeros(weight.shape, jnp.float32), jnp.zeros_like(hidden))
    grad_weight, grad_hidden = jax.lax.fori_loop(0, -(-scored // step), chunk, start)
    return grad_weight.astype(weight.dtype), grad_hidden, None, None


class _ChunkInputs(NamedTuple):
    """Inputs of the backward pass for a chunk of tokens."""

    hidden: Array
    target: Array
    logsumexp: Array
    entropy: Array
    grad_logp: Array
    grad_entropy: Array


def _block_backward(
    head: HeadConfig, weight: Array, x: _ChunkInputs, b: Array, carry: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Add one block's part to the gradients of the weight and of the chunk's hidden states.

    With p the softmax and z the scaled logits: ∂logp/∂z = onehot − p and ∂H/∂z = −p · (z − logsumexp + H).
    """
    grad_weight, grad_hidden = carry
    (logits, vjp), (column, new_columns) = _block_logits_vjp(head, weight, x.hidden, b)
    logp = logits - x.logsumexp[..., None]
    p = jnp.where(new_columns, jnp.exp(logp), 0.0)
    grad = jnp.where(new_columns & (column == x.target[..., None]), x.grad_logp[..., None], 0.0)
    grad = grad - p * (x.grad_logp[..., None] + x.grad_entropy[..., None] * (logp + x.entropy[..., None]))
    new_weight, new_hidden = vjp(grad)
    start = _block_start(head, weight, b)
    old = jax.lax.dynamic_slice_in_dim(grad_weight, start, new_weight.shape[0], axis=0)
    grad_weight = jax.lax.dynamic_update_slice_in_dim(grad_weight, old + new_weight.astype(jnp.float32), start, axis=0)
    return grad_weight, grad_hidden + new_hidden.astype(jnp.float32)


chunked_logps.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def frozen_head_logps(
    head: HeadConfig,
    entropy_gradient: bool,
    weight: Float[Array, "V D"],
    hidden: Float[Array, "R M D"],
    target: Int[Array, "R M"],
    scored: Int[Array, ""],
) -> tuple[Float[Array, "R M"], Float[Array, "R M"]]:
    """Compute `chunked_logps` for a head that is not trained: `weight` gets no gradient, hidden states get that of the
    log-probs, and that of the entropies only with `entropy_gradient`.
    """
    return _forward(head, weight, hidden, target, scored)[0]


def _frozen_forward(
    head: HeadConfig, entropy_gradient: bool, weight: Array, hidden: Array, target: Array, scored: Array
) -> tuple[Any, Any]:
    zeros = jnp.zeros(target.shape, jnp.float32)
    hidden_grads = (jnp.zeros(hidden.shape, jnp.float32),) * (1 + entropy_gradient)
    chunk = partial(_chunk_logps_and_grads, head, entropy_gradient, weight)
    logps_and_entropy, hidden_grads = _map_chunks(head, hidden, target, scored, chunk, ((zeros, zeros), hidden_grads))
    return logps_and_entropy, (hidden_grads, jnp.zeros((), hidden.dtype))


def _chunk_logps_and_grads(
    head: HeadConfig, entropy_gradient: bool, weight: Array, hidden: Array, target: Array
) -> Any:
    """Compute log-probs and entropies of one chunk of tokens, and the gradient of each in the hidden state.

    With z the scaled logits, s = ∂z/∂(w·h) and L the logsumexp, the gradients are s·w of the target − E[s·w], and
    (L − H)·E[s·w] − E[z·s·w]: the two means are accumulated like the other sums. Without a soft-cap
    E[z] = h·E[s·w], which is used in float32, where the operands are not rounded.
    """
    with_entropy = head.softcap is not None or jnp.dtype(head.dtype) != jnp.float32

    def body(b: Array, carry: tuple[_SoftmaxSums, tuple[Array, ...]]) -> tuple[_SoftmaxSums, tuple[Array, ...]]:
        sums, means = carry
        (logits, _), (_, new_columns) = _block_logits_vjp(head, weight, hidden, b)
        sums, exp_logits, rescale = sums.add_block(logits, new_columns, with_entropy)
        factors = exp_logits * _logit_grad(head, logits)
        block_weight = _slice_block(head, weight, b)
        products = [project(x, block_weight, head.dtype) for x in (factors, factors * logits)[: len(means)]]
        return sums, tuple(m * rescale[..., None] + p for m, p in zip(means, products, strict=True))

    start = (jnp.zeros(hidden.shape, jnp.float32),) * (1 + entropy_gradient)
    sums, means = jax.lax.fori_loop(0, _num_blocks(head, weight), body, (_SoftmaxSums.zeros(target.shape), start))
    if not with_entropy:
        sums = sums._replace(sum_exp_logit=(hidden.astype(jnp.float32) * means[0]).sum(-1))
    target_logits = _target_logits(head, weight, hidden, target)
    logps, entropy, logsumexp = sums.finalize(target_logits)
    means = [m / sums.sum_exp[..., None] for m in means]
    target_row = _logit_grad(head, target_logits)[..., None] * weight[target].astype(jnp.float32)
    hidden_grads = (target_row - means[0], *((logsumexp - entropy)[..., None] * means[0] - m for m in means[1:]))
    return (logps, entropy), hidden_grads


def _target_logits(head: HeadConfig, weight: Array, hidden: Array, target: Array) -> Array:
    """Compute the scaled logits of the targets from their own rows of the head alone."""
    rows, states = (_round_to(x, head.dtype) for x in (weight[target], hidden))
    return apply_softcap((rows * states).sum(-1), head.softcap) / head.temperature


def _round_to(x: Array, dtype: DTypeLike) -> Array:
    """Round `x` to the precision of `dtype`, as float32. (The compiler may remove a cast to `dtype` and back.)"""
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant)


def _logit_grad(head: HeadConfig, logits: Array) -> Array:
    """Compute ∂z/∂(w·h) where the scaled logit is z: 1 / temperature, and less where the soft-cap saturates."""
    softcap_grad = 1.0 if head.softcap is None else 1.0 - jnp.square(logits * head.temperature / head.softcap)
    return jnp.asarray(softcap_grad / head.temperature, jnp.float32)


def _frozen_backward(
    head: HeadConfig, entropy_gradient: bool, saved: Any, grads: tuple[Array, Array]
) -> tuple[Any, ...]:
    hidden_grads, like = saved
    grad = sum(g[..., None] * hidden_grad for g, hidden_grad in zip(grads, hidden_grads, strict=False))
    return None, jnp.asarray(grad, like.dtype), None, None


frozen_head_logps.defvjp(_frozen_forward, _frozen_backward)


def _block_logits_vjp(head: HeadConfig, weight: Array, hidden: Array, b: Array) -> tuple[Any, tuple[Array, Array]]:
    """Return the scaled logits of vocabulary block `b`, their VJP, their token ids, and whether no earlier block has
    them.

    The last block is moved back to end with the vocabulary, so that all blocks have one size.
    """
    start, block_weight = _block_start(head, weight, b), _slice_block(head, weight, b)
    scaled = lambda w, h: head_logits(w, h, head.dtype, head.softcap) / head.temperature  # noqa: E731
    column = start + jnp.arange(block_weight.shape[0])
    divides = weight.shape[0] % head.block_size == 0  # then no mask is needed, which would cost as much as the sums
    new_columns = jnp.ones_like(column, bool) if divides else column >= b * head.block_size
    return jax.vjp(scaled, block_weight, hidden), (column, new_columns)


def _slice_block(head: HeadConfig, weight: Array, b: Array) -> Array:
    size = min(head.block_size, weight.shape[0])
    return jax.lax.dynamic_slice_in_dim(weight, _block_start(head, weight, b), size, axis=0)


def _block_start(head: HeadConfig, weight: Array, b: Array) -> Array:
    return jnp.maximum(jnp.minimum(b * head.block_size, weight.shape[0] - head.block_size), 0)


def _num_blocks(head: HeadConfig, weight: Array) -> int:
    return -(-weight.shape[0] // head.block_size)


def _chunk_columns(head: HeadConfig, hidden: Array) -> int:
    """Return the columns of a chunk: a power of two that divides M, so that no chunk is cut short."""
    rows, columns = hidden.shape[:2]
    step = min(columns & -columns, max(8, head.chunk_size // rows))
    return 1 << (step.bit_length() - 1)


def _slice_columns(x: Array, i: Array, step: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * step, step, axis=1)


def _update_columns(out: Array, part: Array, i: Array, step: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(out, part.astype(out.dtype), i * step, axis=1)
