"""The chunked head: the numbers of the plain one, without its memory."""

from functools import partial

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


@pytest.mark.parametrize("block", [64, 100, 301, 4096])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_values_agree_with_float64(softcap: float | None, temperature: float, block: int) -> None:
    weight, hidden, target = arrays()
    logits = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
    logits = softcap * np.tanh(logits / softcap) if softcap else logits
    logps = special.log_softmax(logits / temperature, axis=-1)
    entropy = -(np.exp(logps) * logps).sum(-1)
    want = np.take_along_axis(logps, np.asarray(target)[..., None], -1)[..., 0]
    head = HeadConfig(temperature, softcap, jnp.float32, 32, block)
    got, got_entropy = chunked_logps(head, weight, hidden, target, jnp.int32(M))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=5e-5)
    np.testing.assert_allclose(got_entropy, entropy, rtol=1e-5, atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "block"), [(16, 64), (64, 300), (1024, 4096)])
def test_gradients_agree_with_the_plain_head(chunk: int, block: int) -> None:
    """Of log-probs and of the entropy, for hidden states and weights; columns behind the count pass none."""
    weight, hidden, target = arrays()
    rng = np.random.default_rng(1)
    g, h = (jnp.asarray(rng.normal(size=(R, M)), jnp.float32) * (jnp.arange(M) < COUNT) for _ in range(2))
    head = HeadConfig(0.8, 5.0, jnp.float32, chunk, block)

    def loss(score, weight, hidden):  # type: ignore[no-untyped-def]
        logps, entropy = score(weight, hidden)
        return jnp.sum(g * logps + h * entropy)

    chunked = jax.grad(
        lambda w, x: loss(lambda w, x: chunked_logps(head, w, x, target, jnp.int32(COUNT)), w, x), (0, 1)
    )
    plain = jax.grad(lambda w, x: loss(lambda w, x: plain_scores(head, w, x, target), w, x), (0, 1))
    for one, other in zip(chunked(weight, hidden), plain(weight, hidden), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize(("softcap", "temperature", "block"), [(None, 1.0, 64), (5.0, 0.8, 300), (30.0, 1.3, 4096)])
def test_a_frozen_head_gives_the_same_and_passes_the_same_gradient_on(
    softcap: float | None, temperature: float, block: int, entropy_gradient: bool
) -> None:
    """To hidden states; the entropy's only when asked for, and its own weights none."""
    weight, hidden, target = arrays()
    rng = np.random.default_rng(1)
    g, h = (jnp.asarray(rng.normal(size=(R, M)), jnp.float32) * (jnp.arange(M) < COUNT) for _ in range(2))
    head = HeadConfig(temperature, softcap, jnp.float32, 16, block)
    frozen = partial(frozen_head_logps, head, entropy_gradient)
    for one, other in zip(
        frozen(weight, hidden, target, jnp.int32(COUNT)),
        chunked_logps(head, weight, hidden, target, jnp.int32(COUNT)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    values, _ = jax.vjp(lambda x: frozen(weight, x, target, jnp.int32(COUNT)), hidden)  # those that training reports
    for one, other in zip(values, plain_scores(head, weight, hidden, target), strict=True):
        np.testing.assert_allclose(one[:, :COUNT], other[:, :COUNT], rtol=1e-5, atol=1e-5)

    def loss(score, hidden, h):  # type: ignore[no-untyped-def]
        logps, entropy = score(hidden)
        return jnp.sum(g * logps + h * entropy)

    got = jax.grad(lambda x: loss(lambda x: frozen(weight, x, target, jnp.int32(COUNT)), x, h))(hidden)
    kept = h if entropy_gradient else jnp.zeros_like(h)
    want = jax.grad(lambda x: loss(lambda x: plain_scores(head, weight, x, target), x, kept))(hidden)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    none = jax.grad(lambda w: loss(lambda x: frozen(w, x, target, jnp.int32(COUNT)), hidden, h))(weight)
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
