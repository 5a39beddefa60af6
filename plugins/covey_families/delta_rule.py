"""The gated delta rule over pieces of trees of tokens, without a loop over tokens.

A head has a state S [keys, values]. A token t with key k, value v, query q, log-decay g and write gate β makes of the
state before it (Yang et al., 2024, "Gated Delta Networks", equation 10)

    S_t = e^g S + k δᵀ,   δ = β (v − e^g Sᵀ k),   output S_tᵀ q.

The state before a token is that of its predecessor, so a token of a tree may have several successors. A piece is a run
of at most C adjacent tokens, each of which descends from the same token outside of the piece or from a token inside.
Let E be the state that enters the piece, and G_t the sum of the log-decays from there to t. Inside of the piece

    δ_t = β_t (v_t − e^{G_t} Eᵀ k_t − Σ_s e^{G_t − G_s} (k_s · k_t) δ_s)   over the ancestors s of t in the piece,

a triangular system as in a sequence, with zeros where s is no ancestor of t. Its solution is δ = U − W E, so the state
that enters another piece after a token of this one is M E + B. Only these products, one a piece, follow each other.
Everything is computed in float32.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

EPSILON = 1e-6
"""Number added to the squared length of a key or a query before it is normalised."""
_multiply = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
_sum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Tokens(NamedTuple):
    """Inputs of the rule: normalised queries and keys, values, log-decays and write gates of the heads of values."""

    q: Float[Array, "B N H C K"]
    k: Float[Array, "B N H C K"]
    v: Float[Array, "B N H C V"]
    log_decay: Float[Array, "B N H C"]
    gate: Float[Array, "B N H C"]


class Pieces(NamedTuple):
    """Order of the pieces of a row, and of the tokens in each.

    Attributes:
        ancestors: whether token s is t, or an ancestor of t in the same piece, [t, s].
        entry: number of the piece with the token before each piece, which is an earlier one; -1 for none.
        entry_token: index in that piece of this token.
    """

    ancestors: Bool[Array, "B N C C"]
    entry: Int[Array, "B N"]
    entry_token: Int[Array, "B N"]


def normalise(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    """Return `x` in float32 with length 1."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON)


def step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    log_decay: Float[Array, "B H"],
    gate: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """Return the output of one token, and the state after it."""
    state = state * jnp.exp(log_decay)[..., None, None]
    delta = gate[..., None] * (v - _sum("bhkv,bhk->bhv", state, k))
    state = state + k[..., :, None] * delta[..., None, :]
    return _sum("bhkv,bhk->bhv", state, q), state


def over_pieces(
    x: Tokens, pieces: Pieces, state: Float[Array, "B H K V"]
) -> tuple[Float[Array, "B N H C V"], Float[Array, "B H K V"]]:
    """Return the outputs of all tokens, and the state after the last token of the last piece.

    Args:
        state: state before the tokens that have none before them.
    """
    decay, spread = _decays(x.log_decay, pieces.ancestors)
    read = spread * _multiply(x.k, x.k.swapaxes(-1, -2))
    strict = jnp.tril(jnp.ones(read.shape[-2:], jnp.float32), -1)
    solved = inverse(x.gate[..., None] * read * strict)
    written = _multiply(solved, x.gate[..., None] * x.v)
    erased = _multiply(solved, (x.gate * decay)[..., None] * x.k)
    states = _entering(x.k, decay, spread, written, erased, pieces, state)
    delta = written - _multiply(erased, states)
    seen = _multiply(spread * _multiply(x.q, x.k.swapaxes(-1, -2)), delta)
    last = spread[:, -1, :, -1, :, None] * x.k[:, -1]
    after = decay[:, -1, :, -1, None, None] * states[:, -1] + _multiply(last.swapaxes(-1, -2), delta[:, -1])
    return _multiply(decay[..., None] * x.q, states) + seen, after


def _decays(
    log_decay: Float[Array, "B N H C"], ancestors: Bool[Array, "B N C C"]
) -> tuple[Float[Array, "B N H C"], Float[Array, "B N H C C"]]:
    """Return the decay from the entry of a piece to each token, and from each ancestor to each token; 0 elsewhere.

    The logarithms are sums over the tokens between the two. Differences of sums from the entry would be rounded to the
    size of these sums.
    """
    on_path = ancestors[:, :, None].astype(jnp.float32)
    behind = jnp.tril(on_path, -1)
    between = _multiply(on_path, log_decay[..., None] * behind)
    total = _multiply(on_path, log_decay[..., None])[..., 0]
    return jnp.exp(total), jnp.exp(jnp.where(ancestors[:, :, None], between, -jnp.inf))


def _entering(
    k: Array, decay: Array, spread: Array, written: Array, erased: Array, pieces: Pieces, state: Array
) -> Float[Array, "B N H K V"]:
    """Return the state that enters each piece."""
    at = jnp.maximum(pieces.entry, 0)

    def of_entry(x: Array) -> Array:
        return jnp.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - 2)), axis=1)

    def of_token(x: Array) -> Array:
        index = jnp.maximum(pieces.entry_token, 0)
        return jnp.take_along_axis(of_entry(x), index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=3)

    keys = of_token(spread)[..., 0, :, None] * of_entry(k)
    kept = of_token(decay)[..., None] * jnp.eye(k.shape[-1])
    matrix = kept - _multiply(keys.swapaxes(-1, -2), of_entry(erased))
    added = _multiply(keys.swapaxes(-1, -2), of_entry(written))
    is_first = (pieces.entry < 0)[:, :, None, None, None]
    matrix, added = jnp.where(is_first, jnp.eye(k.shape[-1]), matrix), jnp.where(is_first, 0.0, added)
    return tree_products(matrix, added, pieces.entry + 1, state)[:, 1:]


@jax.custom_vjp
def tree_products(
    matrix: Float[Array, "B N H K K"],
    added: Float[Array, "B N H K V"],
    before: Int[Array, "B N"],
    state: Float[Array, "B H K V"],
) -> Float[Array, "B N+1 H K V"]:
    """Return X with X_0 = `state` and X_{j+1} = matrix_j X_{before_j} + added_j, where before_j is at most j.

    The gradient saves X alone: that of a loop would save X in each turn.
    """
    states = jnp.zeros((added.shape[0], added.shape[1] + 1, *added.shape[2:]), added.dtype).at[:, 0].set(state)

    def turn(states: Array, inputs: Any) -> tuple[Array, None]:
        number, matrix, added, before = inputs
        x = jax.vmap(lambda x, i: x[i])(states, before)
        return states.at[:, number + 1].set(_multiply(matrix, x) + added), None

    numbered = jnp.arange(added.shape[1]), *(jnp.moveaxis(x, 1, 0) for x in (matrix, added, before))
    return jax.lax.scan(turn, states, numbered)[0]


def _products_forward(matrix: Array, added: Array, before: Array, state: Array) -> tuple[Array, Any]:
    states = tree_products(matrix, added, before, state)
    return states, (matrix, before, states)


def _products_backward(saved: Any, grad: Array) -> tuple[Array, Array, None, Array]:
    matrix, before, states = saved

    def turn(grads: Array, inputs: Any) -> tuple[Array, None]:
        number, matrix, before = inputs
        passed = _multiply(matrix.swapaxes(-1, -2), grads[:, number + 1])
        return jax.vmap(lambda x, i, new: x.at[i].add(new))(grads, before, passed), None

    numbered = jnp.arange(before.shape[1]), *(jnp.moveaxis(x, 1, 0) for x in (matrix, before))
    grads = jax.lax.scan(turn, grad, numbered, reverse=True)[0]
    x = jnp.take_along_axis(states, before[:, :, None, None, None], axis=1)
    return _multiply(grads[:, 1:], x.swapaxes(-1, -2)), grads[:, 1:], None, grads[:, 0]


tree_products.defvjp(_products_forward, _products_backward)


@jax.custom_vjp
def inverse(a: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """Return (I + a)⁻¹ for matrices that are 0 on the diagonal and above; C is a power of two.

    Halves are inverted and joined, as substitution by blocks does: products of two matrices alone, and as accurate.
    """
    size = a.shape[-1]
    if size == 1:
        return jnp.ones_like(a)
    half = size // 2
    top, bottom = inverse(jnp.stack([a[..., :half, :half], a[..., half:, half:]]))
    corner = -_multiply(_multiply(bottom, a[..., half:, :half]), top)
    upper = jnp.concatenate([top, jnp.zeros_like(top)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, bottom], axis=-1)], axis=-2)


def _inverse_forward(a: Array) -> tuple[Array, Array]:
    result = inverse(a)
    return result, result


def _inverse_backward(result: Array, grad: Array) -> tuple[Array]:
    transposed = result.swapaxes(-1, -2)
    return (-_multiply(_multiply(transposed, grad), transposed),)


inverse.defvjp(_inverse_forward, _inverse_backward)
