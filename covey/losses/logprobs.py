"""Log-probs without the [T, V] array: head, log-softmax, gather and entropy in one function over blocks of tokens ×
vocabulary.

The forward keeps a running maximum and running sums over the vocabulary's blocks (the online softmax of Milakov &
Gimelshein, 2018); the backward recomputes each block from the logsumexp. Memory holds a few blocks, whatever the
number of tokens and the size of the vocabulary. Temperature, soft-cap and dtype of the weights are handled inside.

A head that is not trained, as with LoRA adapters, needs only the gradient of the hidden states. This gradient is a mean
of the head's rows under the softmax, so the forward accumulates it like the other sums. No block is recomputed: there
are two matrix products instead of three.

Scored tokens are at the front of each row; chunks after the last of them are never computed, forward or backward.

On a mesh each device computes a part of the vocabulary (`vocab_parallel`).

With the random keys that drew the tokens, the same pass also tells which of them these logits would have drawn too
(`TokenLogps.agreed`). Where the draw was truncated that needs whole rows of logits, which a second pass computes for
few tokens at a time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from covey.losses.vocab_parallel import TargetRace, Targets, VocabLayout, VocabPart
from covey.models.decoder import Decoder, head_logits
from covey.models.layers import apply_softcap, project
from covey.models.lora import has_lora
from covey.packing.rows import Rows, tree_attention
from covey.sampling.logits import SamplingParams, draw

Arrays = tuple[Array, ...]
CHUNK_SIZE = 1024
"""Number of tokens whose logits exist on a device at one time."""
BLOCK_SIZE = 4096
"""Number of vocabulary entries whose logits exist on a device at one time."""
POSITIONS = 1024
"""Number of positions whose gradient is summed at one time."""


class TokenLogps(NamedTuple):
    """Log-prob of each scored token and entropy of the whole distribution there, in nats; 0 at padding. With keys also
    1 for each token that would have been drawn too, without gradient; 0 where there is no key.
    """

    logps: Float[Array, "R M"]
    entropy: Float[Array, "R M"]
    agreed: Float[Array, "R M"] | None = None


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
    graph: Any,
    params: Any,
    rows: Rows,
    temperature: float,
    *,
    entropy_gradient: bool = True,
    keys: UInt32[Array, "R M 2"] | None = None,
    sampling_params: SamplingParams | None = None,
    every: int = 1,
) -> TokenLogps:
    """Compute log-probs and entropies of the scored tokens of `rows`, by the log-softmax of logits / temperature.

    Args:
        graph, params: the decoder as `nnx.split` returns it. With adapters the head is not trained and gets no
            gradient.
        temperature: the rollout's; 0 (greedy) counts as 1.
        entropy_gradient: whether entropies are differentiable. Without adapters they always are, at no cost.
        keys: random key that drew each scored token; 0 where the model drew none. None to draw nothing again.
        sampling_params: settings of the distribution that they were drawn from.
        every: of truncated draws only the tokens in each `every`-th column are drawn again.
    """
    model = nnx.merge(graph, params)
    hidden = gather_hidden(model, rows)
    head = HeadConfig.of(model, temperature, vocab_block_size(model.config.vocab_size))
    num_scored = rows.scored.sum(axis=1).max()
    logps_fn = partial(frozen_head_logps, head, entropy_gradient) if has_lora(model) else partial(chunked_logps, head)
    weight, tokens = model.head_weight, (hidden, rows.target, num_scored)
    in_one_pass = sampling_params is None or sampling_params.is_plain
    logps, entropy, *agreed = logps_fn(weight, *tokens, keys if in_one_pass else None)
    mask = rows.scored
    scores = TokenLogps(jnp.where(mask, logps, 0.0), jnp.where(mask, entropy, 0.0))
    if keys is None:
        return scores
    if sampling_params is not None and not in_one_pass:
        columns = hidden[:, ::every], rows.target[:, ::every], -(-num_scored // every), keys[:, ::every]
        agreed = [jnp.zeros(mask.shape).at[:, ::every].set(redraw(head, sampling_params, weight, *columns))]
    return scores._replace(agreed=jax.lax.stop_gradient(jnp.where(keys.any(-1), agreed[0], 0.0)))


def redraw(
    head: HeadConfig,
    sampling_params: SamplingParams,
    weight: Float[Array, "V D"],
    hidden: Float[Array, "R M D"],
    target: Int[Array, "R M"],
    scored: Int[Array, ""],
    keys: UInt32[Array, "R M 2"],
) -> Float[Array, "R M"]:
    """Draw the first `scored` columns of tokens again, from whole rows of logits; 1 where the target is drawn."""
    weight, hidden = jax.lax.stop_gradient((weight, hidden))
    layout = VocabLayout.of(weight, hidden.shape[0])
    at_once = max(8, head.chunk_size * head.block_size // layout.vocabulary)
    head = head._replace(chunk_size=at_once * hidden.shape[0])  # chunks are computed row by row
    score = partial(_score_device, head, layout, partial(_redraw_chunk, head, sampling_params, layout), 1, 0)
    scores, _ = layout.run(score, weight, (hidden, Targets(target, keys)), scored)
    agreed: Array = scores[0]
    return agreed


def _redraw_chunk(
    head: HeadConfig,
    sampling_params: SamplingParams,
    layout: VocabLayout,
    part: VocabPart,
    hidden: Array,
    targets: Targets,
) -> tuple[Arrays, Arrays]:
    """Draw the tokens of one chunk again, row by row; 1 where the target is drawn."""

    def redraw_row(row: tuple[Array, Targets]) -> Array:
        states, (token, keys) = row
        logits = layout.whole_rows(head_logits(part.weight, states, head.dtype, head.softcap), part)
        assert keys is not None, "tokens are drawn again by their keys"
        return draw(logits, keys, sampling_params)[0] == token

    return (jax.lax.map(redraw_row, (hidden, targets)),), ()


def vocab_block_size(vocabulary: int, limit: int = BLOCK_SIZE) -> int:
    """Return the largest block, of a quarter of `limit` to `limit`, that divides the vocabulary; else `limit`, and the
    last block is masked. A vocabulary smaller than `limit` is one block.

    >>> [vocab_block_size(n) for n in (49152, 32000, 151936, 50257, 50021, 301)]
    [4096, 4000, 2374, 1733, 4096, 301]
    """
    if vocabulary <= limit:
        return vocabulary
    return next((size for size in range(limit, limit // 4 - 1, -1) if vocabulary % size == 0), limit)


def gather_hidden(model: Decoder, rows: Rows) -> Float[Array, "R M D"]:
    """Return the hidden state from which each scored token is predicted; arbitrary at padding."""
    hidden, _ = model(rows.tokens, rows.positions, tree_attention(model, rows))
    return take_positions(hidden.shape[1], hidden, rows.gather_index)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def take_positions(length: int, hidden: Float[Array, "R T D"], index: Int[Array, "R M"]) -> Float[Array, "R M D"]:
    """Return the states at `index` of each row of `length` positions.

    All completions of a group begin at the end of one prompt, so that indices repeat. The gradient that JAX derives
    adds equal indices in the type of the states, and on GPUs in any order. This one adds them in float32 and in a fixed
    order, and rounds once.
    """
    assert hidden.shape[1] == length, (hidden.shape, length)
    return jnp.take_along_axis(hidden, index[..., None], axis=1)


def _take_forward(length: int, hidden: Array, index: Array) -> tuple[Array, Array]:
    return take_positions(length, hidden, index), index


def _take_backward(length: int, index: Array, grad: Float[Array, "R M D"]) -> tuple[Array, None]:
    add = partial(jax.lax.platform_dependent, cpu=partial(_add_in_turn, length), default=partial(_add_all, length))
    return add(index, grad).astype(grad.dtype), None


take_positions.defvjp(_take_forward, _take_backward)


def _add_in_turn(length: int, index: Int[Array, "R M"], grad: Float[Array, "R M D"]) -> Float[Array, "R T D"]:
    """Add the rows of `grad` at their positions one after the other; quick on a CPU, in any order on a GPU."""
    zeros = jnp.zeros((length, grad.shape[-1]), jnp.float32)
    return jax.vmap(lambda at, rows: zeros.at[at].add(rows))(index, grad)


def _add_all(length: int, index: Int[Array, "R M"], grad: Float[Array, "R M D"]) -> Float[Array, "R T D"]:
    """Multiply the rows of `grad` by the indicators of each position, which costs less than 1 % of an update."""

    def at_position(position: Array) -> Float[Array, "R D"]:
        indicators, precise = (index == position).astype(grad.dtype), jax.lax.Precision.HIGHEST
        return jnp.einsum("rm,rmd->rd", indicators, grad, precision=precise, preferred_element_type=jnp.float32)

    sums: Array = jax.lax.map(at_position, jnp.arange(length), batch_size=POSITIONS)
    return jnp.swapaxes(sums, 0, 1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_logps(
    head: HeadConfig,
    weight: Float[Array, "V D"],
    hidden: Float[Array, "R M D"],
    target: Int[Array, "R M"],
    scored: Int[Array, ""],
    keys: UInt32[Array, "R M 2"] | None = None,
) -> Arrays:
    """Compute log-prob of `target` and entropy of softmax(softcap(hidden · weightᵀ) / temperature) at each token. With
    `keys` also 1, without gradient, where that distribution would have drawn `target`, and 0 elsewhere.

    Only the first `scored` columns are computed; the chunks after them are 0 and pass no gradient.
    """
    return _forward(head, weight, hidden, target, scored, keys)[0]


def _forward(
    head: HeadConfig, weight: Array, hidden: Array, target: Array, scored: Array, keys: Array | None
) -> tuple[Arrays, Arrays]:
    (logps, entropy, logsumexp, *agreed), _ = _scores(head, 0, weight, hidden, target, scored, keys)
    return (logps, entropy, *agreed), (weight, hidden, target, scored, logsumexp, entropy)


def _scores(
    head: HeadConfig,
    num_grads: int,
    weight: Array,
    hidden: Array,
    target: Array,
    scored: Array,
    keys: Array | None,
) -> tuple[Arrays, Arrays]:
    """Compute the scores and gradients of `_score_chunk` for all tokens, on all devices."""
    layout, head = _layout(head, weight, hidden)
    num_scores = (2 if num_grads else 3) + (keys is not None)
    score_chunk = partial(_score_chunk, head, num_grads, layout)
    score = partial(_score_device, head, layout, score_chunk, num_scores, num_grads)
    scores: tuple[Arrays, Arrays] = layout.run(score, weight, (hidden, Targets(target, keys)), scored)
    return scores


def _layout(head: HeadConfig, weight: Array, hidden: Array) -> tuple[VocabLayout, HeadConfig]:
    """Return the division of the head over its mesh, and settings whose blocks suit a device's part of it."""
    layout = VocabLayout.of(weight, hidden.shape[0])
    if layout.mesh is not None:
        head = head._replace(block_size=vocab_block_size(layout.part_size, head.block_size))
    return layout, head


def _score_device(
    head: HeadConfig,
    layout: VocabLayout,
    score_chunk: Callable[[VocabPart, Array, Targets], tuple[Arrays, Arrays]],
    num_scores: int,
    num_grads: int,
    weight: Array,
    rows: tuple[Array, Targets],
    scored: Array,
) -> tuple[Arrays, Arrays]:
    """Apply `score_chunk` to a device's own rows, in chunks.

    `score_chunk` takes the device's part of the head, hidden states and targets. It returns `num_scores` numbers of
    each token, and `num_grads` gradients in the hidden states, of the part of the vocabulary alone.
    """
    hidden, targets = rows[0], jax.tree.map(layout.gather_rows, rows[1])
    part, zeros = layout.take_part(weight), jnp.zeros(targets.token.shape, jnp.float32)
    num_rows, num_columns = zeros.shape
    step = chunk_columns(num_rows, num_columns, head.chunk_size)

    def chunk(i: Array, out: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        columns = partial(_slice_columns, i=i, step=step)
        scores, grads = score_chunk(part, layout.gather_rows(columns(hidden)), jax.tree.map(columns, targets))
        new = scores, tuple(map(layout.sum_rows, grads))
        updated: tuple[Arrays, Arrays] = jax.tree.map(partial(_update_columns, i=i, step=step), out, new)
        return updated

    init = (zeros,) * num_scores, (jnp.zeros(hidden.shape, jnp.float32),) * num_grads
    scores, grads = jax.lax.fori_loop(0, -(-scored // step), chunk, init)
    return tuple(map(layout.own_rows, scores)), grads


class _SoftmaxSums(NamedTuple):
    """Running maximum and sums of each token's softmax over vocabulary blocks; sums are relative to exp(max_logit)."""

    max_logit: Array
    sum_exp: Array
    sum_exp_logit: Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> "_SoftmaxSums":
        zero = jnp.zeros(shape, jnp.float32)
        return cls(jnp.full(shape, jnp.finfo(jnp.float32).min), zero, zero)  # finite: a part may be all padding

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

    def combine(self, layout: VocabLayout) -> tuple["_SoftmaxSums", Array]:
        """Return the sums over all parts of the vocabulary, and the factor that turns a sum of this part into one
        relative to the maximum of all.
        """
        max_logit = layout.max(self.max_logit)
        rescale = jnp.exp(self.max_logit - max_logit)
        sums = layout.sum((self.sum_exp * rescale, self.sum_exp_logit * rescale))
        return _SoftmaxSums(max_logit, *sums), rescale

    def finalize(self, target_logits: Array) -> tuple[Array, Array, Array]:
        """Return log-probs of the tokens with the logits `target_logits`, entropies and logsumexps."""
        logsumexp = self.max_logit + jnp.log(self.sum_exp)
        return jnp.minimum(target_logits - logsumexp, 0.0), logsumexp - self.sum_exp_logit / self.sum_exp, logsumexp


def _backward(head: HeadConfig, saved: Any, grads: Arrays) -> tuple[Any, ...]:
    weight, hidden, target, scored, logsumexp, entropy = saved
    layout, head = _layout(head, weight, hidden)
    rows = hidden, _PerToken(target, logsumexp, entropy, *grads[:2])
    compute = partial(_backward_device, head, layout)
    grad_weight, grad_hidden = layout.run(compute, weight, rows, scored, with_weight=True)
    return grad_weight, grad_hidden, None, None, None


def _backward_device(
    head: HeadConfig, layout: VocabLayout, weight: Array, rows: tuple[Array, "_PerToken"], scored: Array
) -> tuple[Array, Array]:
    """Compute a device's pieces of the gradients of the weight and of the hidden states."""
    part, hidden = layout.take_part(weight), rows[0]
    per_token = jax.tree.map(layout.gather_rows, rows[1])
    rows_at_once, columns = per_token.target.shape
    step = chunk_columns(rows_at_once, columns, head.chunk_size)

    def chunk(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        grad_weight, grad_hidden = carry
        x = jax.tree.map(lambda x: _slice_columns(x, i, step), per_token)
        gathered = layout.gather_rows(_slice_columns(hidden, i, step))
        start = (grad_weight, jnp.zeros(gathered.shape, jnp.float32))
        body = partial(_block_backward, head, part, gathered, x)
        grad_weight, new_hidden = jax.lax.fori_loop(0, _num_blocks(head, part), body, start)
        return grad_weight, _update_columns(grad_hidden, layout.sum_rows(new_hidden), i, step)

    start = (jnp.zeros(part.weight.shape, jnp.float32), jnp.zeros_like(hidden))
    grad_weight, grad_hidden = jax.lax.fori_loop(0, -(-scored // step), chunk, start)
    return layout.return_part(grad_weight, weight.dtype), grad_hidden


class _PerToken(NamedTuple):
    """Numbers of each token that the backward pass needs, each [R, M]."""

    target: Array
    logsumexp: Array
    entropy: Array
    grad_logp: Array
    grad_entropy: Array


def _block_backward(
    head: HeadConfig, part: VocabPart, hidden: Array, x: _PerToken, b: Array, carry: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Add one block's part to the gradients of the weight and of the chunk's hidden states.

    With p the softmax and z the scaled logits: ∂logp/∂z = onehot − p and ∂H/∂z = −p · (z − logsumexp + H).
    """
    grad_weight, grad_hidden = carry
    (logits, vjp), (column, new_columns) = _block_logits_vjp(head, part, hidden, b)
    logp = logits - x.logsumexp[..., None]
    p = jnp.where(new_columns, jnp.exp(logp), 0.0)
    grad = jnp.where(new_columns & (column == x.target[..., None]), x.grad_logp[..., None], 0.0)
    grad = grad - p * (x.grad_logp[..., None] + x.grad_entropy[..., None] * (logp + x.entropy[..., None]))
    new_weight, new_hidden = vjp(grad)
    start = _block_start(head, part, b)
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
    keys: UInt32[Array, "R M 2"] | None = None,
) -> Arrays:
    """Compute `chunked_logps` for a head that is not trained. `weight` gets no gradient. Hidden states get the gradient
    of the log-probs, and with `entropy_gradient` also the gradient of the entropies.
    """
    return _forward(head, weight, hidden, target, scored, keys)[0]


def _frozen_forward(
    head: HeadConfig,
    entropy_gradient: bool,
    weight: Array,
    hidden: Array,
    target: Array,
    scored: Array,
    keys: Array | None,
) -> tuple[Any, Any]:
    scores, hidden_grads = _scores(head, 1 + entropy_gradient, weight, hidden, target, scored, keys)
    return scores, (hidden_grads, jnp.zeros((), hidden.dtype))


def _score_chunk(
    head: HeadConfig, num_grads: int, layout: VocabLayout, part: VocabPart, hidden: Array, targets: Targets
) -> tuple[Arrays, Arrays]:
    """Compute log-probs and entropies of one chunk of tokens, block by block over the vocabulary. With keys, compute
    also which tokens would have been drawn. Return these scores, and the gradients of the first `num_grads` of
    (log-prob, entropy) in the hidden state. Without gradients the third score is the logsumexp.

    With z the scaled logits, s = ∂z/∂(w·h) and L the logsumexp, the gradients are s·w of the target − E[s·w], and
    (L − H)·E[s·w] − E[z·s·w]: the two means are accumulated like the other sums. Without a soft-cap
    E[z] = h·E[s·w], which is used in float32, where the operands are not rounded. On a mesh a device computes the
    gradients of its part of the vocabulary, which are summed over all parts later.
    """
    with_entropy = not num_grads or head.softcap is not None or jnp.dtype(head.dtype) != jnp.float32

    def body(b: Array, carry: tuple[_SoftmaxSums, Arrays, TargetRace | None]) -> Any:
        sums, means, race = carry
        (logits, _), (column, new_columns) = _block_logits_vjp(head, part, hidden, b)
        sums, exp_logits, rescale = sums.add_block(logits, new_columns, with_entropy)
        if means:
            factors, block_weight = exp_logits * _logit_grad(head, logits), _slice_block(head, part, b)
            products = [project(x, block_weight, head.dtype) for x in (factors, factors * logits)[: len(means)]]
            means = tuple(m * rescale[..., None] + p for m, p in zip(means, products, strict=True))
        return sums, means, race and race.add(exp_logits, column[0], rescale, targets)

    zeros = (jnp.zeros(hidden.shape, jnp.float32),) * num_grads if num_grads else ()
    start = _SoftmaxSums.zeros(targets.token.shape), zeros, TargetRace.start(targets)
    sums, means, race = jax.lax.fori_loop(0, _num_blocks(head, part), body, start)
    if not with_entropy:
        sums = sums._replace(sum_exp_logit=(hidden.astype(jnp.float32) * means[0]).sum(-1))
    sums, rescale = sums.combine(layout)
    target_logits = layout.sum(_target_logits(head, part, hidden, targets.token))
    logps, entropy, logsumexp = sums.finalize(target_logits)
    agreed = () if race is None else (race.won(layout, rescale, targets).astype(jnp.float32),)
    if not means:
        return (logps, entropy, logsumexp, *agreed), ()
    of_h, *others = (m * rescale[..., None] / sums.sum_exp[..., None] for m in means)
    target_row = _logit_grad(head, target_logits)[..., None] * part.rows(targets.token).astype(jnp.float32)
    hidden_grads = (target_row - of_h, *((logsumexp - entropy)[..., None] * of_h - m for m in others))
    return (logps, entropy, *agreed), hidden_grads


def _target_logits(head: HeadConfig, part: VocabPart, hidden: Array, target: Array) -> Array:
    """Compute the scaled logits of the targets from their rows of the head; 0 for targets of other parts."""
    rows, states = (_round_to(x, head.dtype) for x in (part.rows(target), hidden))
    return apply_softcap((rows * states).sum(-1), head.softcap) / head.temperature


def _round_to(x: Array, dtype: DTypeLike) -> Array:
    """Round `x` to the precision of `dtype`, as float32. (The compiler may remove a cast to `dtype` and back.)"""
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant)


def _logit_grad(head: HeadConfig, logits: Array) -> Array:
    """Compute ∂z/∂(w·h) where the scaled logit is z: 1 / temperature, and less where the soft-cap saturates."""
    softcap_grad = 1.0 if head.softcap is None else 1.0 - jnp.square(logits * head.temperature / head.softcap)
    return jnp.asarray(softcap_grad / head.temperature, jnp.float32)


def _frozen_backward(head: HeadConfig, entropy_gradient: bool, saved: Any, grads: Arrays) -> tuple[Any, ...]:
    hidden_grads, like = saved
    grad = sum(g[..., None] * hidden_grad for g, hidden_grad in zip(grads, hidden_grads, strict=False))
    return None, jnp.asarray(grad, like.dtype), None, None, None


frozen_head_logps.defvjp(_frozen_forward, _frozen_backward)


def _block_logits_vjp(head: HeadConfig, part: VocabPart, hidden: Array, b: Array) -> tuple[Any, tuple[Array, Array]]:
    """Return the scaled logits of vocabulary block `b`, their VJP, their token ids, and whether they are tokens of this
    part that no earlier block has.

    The last block is moved back to end with the part, so that all blocks have one size.
    """
    start, block_weight = _block_start(head, part, b), _slice_block(head, part, b)
    scaled = lambda w, h: head_logits(w, h, head.dtype, head.softcap) / head.temperature  # noqa: E731
    row = start + jnp.arange(block_weight.shape[0])
    # Where the blocks divide the part, no mask is needed, which would cost as much as the sums.
    divides = part.weight.shape[0] % head.block_size == 0
    new_columns = jnp.ones_like(row, bool) if divides else row >= b * head.block_size
    column = part.first + row
    if part.is_padded:
        new_columns &= column < part.end
    return jax.vjp(scaled, block_weight, hidden), (column, new_columns)


def _slice_block(head: HeadConfig, part: VocabPart, b: Array) -> Array:
    size = min(head.block_size, part.weight.shape[0])
    return jax.lax.dynamic_slice_in_dim(part.weight, _block_start(head, part, b), size, axis=0)


def _block_start(head: HeadConfig, part: VocabPart, b: Array) -> Array:
    return jnp.maximum(jnp.minimum(b * head.block_size, part.weight.shape[0] - head.block_size), 0)


def _num_blocks(head: HeadConfig, part: VocabPart) -> int:
    return -(-part.weight.shape[0] // head.block_size)


def chunk_columns(rows: int, columns: int, chunk_size: int = CHUNK_SIZE) -> int:
    """Return the columns of a chunk of tokens [rows, columns]: a power of two that divides `columns`, so that no chunk
    is cut short.
    """
    step = min(columns & -columns, max(8, chunk_size // rows))
    return 1 << (step.bit_length() - 1)


def _slice_columns(x: Array, i: Array, step: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * step, step, axis=1)


def _update_columns(out: Array, part: Array, i: Array, step: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(out, part.astype(out.dtype), i * step, axis=1)
