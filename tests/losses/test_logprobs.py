"""The chunked head: the numbers of the plain one, without its memory."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from covey.losses.logprobs import HeadConfig, chunked_logps, frozen_head_logps
from covey.models.decoder import head_logits

R, M, D, V = 2, 64, 16, 301
COUNT = 50


def arrays(vocabulary: int = V) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(vocabulary, D)), jnp.float32)
    hidden = jnp.asarray(rng.normal(size=(R, M, D)), jnp.float32)
    return weight, hidden, jnp.asarray(rng.integers(0, vocabulary, (R, M)), jnp.int32)


def plain_scores(
    head: HeadConfig, weight: jax.Array, hidden: jax.Array, target: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The same numbers from all logits at once."""
    logps = jax.nn.log_softmax(head_logits(weight, hidden, head.dtype, head.softcap) / head.temperature)
    chosen = jnp.take_along_axis(logps, target[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(logps) * logps, axis=-1)


class Exact(NamedTuple):
    """The head in float64, and how far the roundings of float32 can move each number.

    A logit is a sum of D products, each rounded to a number no larger than Σ |h|·|w|. Both a token's logit and its
    logsumexp are off by as much, so that probabilities are off by twice this share, and gradients by the share of the
    sum of all their terms without signs.
    """

    values: dict[str, np.ndarray]
    errors: dict[str, np.ndarray]

    def check(self, **computed: Any) -> None:
        """Compare results with the first columns of those of the same names."""
        for name, got in computed.items():
            columns = np.s_[:, : got.shape[1]]
            off = np.abs(np.asarray(got, np.float64) - self.values[name][columns])
            assert (off <= self.errors[name][columns]).all(), name


def exact(head: HeadConfig, arrays: Sequence[jax.Array], g: jax.Array, h: jax.Array) -> Exact:
    """Values of the scored tokens, and the gradients of Σ g · log-prob + h · entropy."""
    weight, hidden, target = (np.asarray(x, np.float64 if x.dtype == jnp.float32 else x.dtype) for x in arrays)
    g, h = (np.asarray(x, np.float64)[..., None] for x in (g, h))
    squashed = np.tanh(hidden @ weight.T / head.softcap) if head.softcap else None
    logits = hidden @ weight.T if squashed is None else head.softcap * squashed
    slope = (1.0 if squashed is None else 1 - squashed**2) / head.temperature
    logps = special.log_softmax(logits / head.temperature, axis=-1)
    probs, chosen = np.exp(logps), np.eye(len(weight))[target]
    entropy = -(probs * logps).sum(-1, keepdims=True)
    rounding = 2 * D * 2.0**-24 * (np.abs(hidden) @ np.abs(weight).T).max(-1, keepdims=True) / head.temperature
    passed = (g * (chosen - probs) - h * probs * (logps + entropy)) * slope
    terms = rounding * (np.abs(g) * (chosen + probs) + np.abs(h) * probs * (entropy - logps)) / head.temperature
    values = {"logps": (chosen * logps).sum(-1), "entropy": entropy[..., 0]}
    errors = {"logps": rounding[..., 0], "entropy": (rounding * (1 + 2 * entropy))[..., 0]}
    by_token, by_word = "rmv,vd->rmd", "rmv,rmd->vd"
    values |= {"hidden": np.einsum(by_token, passed, weight), "weight": np.einsum(by_word, passed, hidden)}
    sizes = np.einsum(by_token, terms, np.abs(weight)), np.einsum(by_word, terms, np.abs(hidden))
    errors |= dict(zip(("hidden", "weight"), sizes, strict=True))
    return Exact(values, errors)


def gradients_of() -> tuple[jax.Array, jax.Array]:
    """Gradients of log-probs and entropies; columns behind the count pass none."""
    rng = np.random.default_rng(1)
    g, h = (jnp.asarray(rng.normal(size=(R, M)), jnp.float32) * (jnp.arange(M) < COUNT) for _ in range(2))
    return g, h


@pytest.mark.parametrize(
    ("softcap", "temperature", "block"), [(None, 0.5, 64), (5.0, 1.0, 100), (None, 1.3, 301), (5.0, 1.0, 4096)]
)
def test_values_agree_with_float64(softcap: float | None, temperature: float, block: int) -> None:
    head = HeadConfig(temperature, softcap, jnp.float32, 32, block)
    logps, entropy = chunked_logps(head, *arrays(), jnp.int32(M))
    exact(head, arrays(), jnp.zeros((R, M)), jnp.zeros((R, M))).check(logps=logps, entropy=entropy)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "block"), [(16, 64), (64, 300), (1024, 4096)])
def test_gradients_agree_with_float64(chunk: int, block: int) -> None:
    """Of log-probs and of the entropy, for hidden states and weights."""
    weight, hidden, target = arrays()
    head, (g, h) = HeadConfig(0.8, 5.0, jnp.float32, chunk, block), gradients_of()
    _, pull = jax.vjp(lambda w, x: chunked_logps(head, w, x, target, jnp.int32(COUNT)), weight, hidden)
    by_weight, by_hidden = pull((g, h))
    exact(head, arrays(), g, h).check(weight=by_weight, hidden=by_hidden)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("softcap", "temperature", "block", "entropy_gradient"),
    [(None, 1.0, 64, True), (None, 1.0, 64, False), (5.0, 0.8, 300, False), (30.0, 1.3, 4096, True)],
)
def test_a_frozen_head_gives_the_same_and_passes_the_same_gradient_on(
    softcap: float | None, temperature: float, block: int, entropy_gradient: bool
) -> None:
    """To hidden states; the entropy's only when asked for, and its own weights none."""
    weight, hidden, target = arrays()
    head, (g, h) = HeadConfig(temperature, softcap, jnp.float32, 16, block), gradients_of()
    frozen = partial(frozen_head_logps, head, entropy_gradient)
    for one, other in zip(
        frozen(weight, hidden, target, jnp.int32(COUNT)),
        chunked_logps(head, weight, hidden, target, jnp.int32(COUNT)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    (logps, entropy), pull = jax.vjp(lambda w, x: frozen(w, x, target, jnp.int32(COUNT)), weight, hidden)
    none, by_hidden = pull((g, h))
    oracle = exact(head, arrays(), g, h if entropy_gradient else jnp.zeros_like(h))
    oracle.check(logps=logps[:, :COUNT], entropy=entropy[:, :COUNT], hidden=by_hidden)  # values that training reports
    assert not none.any()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_entropy_under_adapters_is_right_in_16_bits(softcap: float | None) -> None:
    """The trap: a mean of logits under rounded shares is off by the logits' offset times the rounding."""
    weight, hidden, target = arrays()
    weight = (weight.at[:, 0].set(6.0) / 4).astype(jnp.bfloat16)  # all logits lie high
    hidden = hidden.at[..., 0].set(16.0).astype(jnp.bfloat16).astype(jnp.float32)
    head = HeadConfig(1.0, softcap, jnp.bfloat16, 16, 64)
    (_, entropy), _ = jax.vjp(lambda x: frozen_head_logps(head, False, weight, x, target, jnp.int32(M)), hidden)
    np.testing.assert_allclose(entropy, plain_scores(head, weight, hidden, target)[1], atol=1e-4)


def test_chunks_behind_the_last_scored_token_are_not_computed() -> None:
    weight, hidden, target = arrays()
    hidden = hidden.at[:, 32:].set(jnp.nan)
    logps, entropy = chunked_logps(HeadConfig(1.0, None, jnp.float32, 32), weight, hidden, target, jnp.int32(30))
    assert jnp.isfinite(logps).all()
    assert jnp.isfinite(entropy).all()
    assert not logps[:, 32:].any()


def temporary_bytes(vocabulary: int, tokens: int) -> int:
    """Scratch memory of forward and backward, beyond the head's own weights and gradient, as the compiler states it."""
    head = HeadConfig(1.0, None, jnp.float32)
    width = 64

    def loss(weight, hidden, target):  # type: ignore[no-untyped-def]
        return chunked_logps(head, weight, hidden, target, jnp.int32(tokens))[0].sum()

    shapes = ((vocabulary, width), (1, tokens, width))
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes] + [jax.ShapeDtypeStruct((1, tokens), jnp.int32)]
    memory = jax.jit(jax.grad(loss, (0, 1))).lower(*arguments).compile().memory_analysis()
    return memory.temp_size_in_bytes


@pytest.mark.slow
def test_memory_is_flat_in_the_vocabulary_and_in_the_tokens() -> None:
    small, large = temporary_bytes(8192, 1024), temporary_bytes(131_072, 1024)
    assert large < 1.1 * small
    assert (
        temporary_bytes(131_072, 8192) < 1.1 * large + 8 * 8192 * 64 * 4
    )  # hidden states and their gradient are the tokens' own
