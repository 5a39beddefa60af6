"""The gradient of an embedding: a sum in float32, rounded once, whichever way it is added."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from covey.models.layers import look_up

V, B, T, D = 300, 2, 700, 8
"""More tokens than one block has, of which the most frequent fills more than a block."""


def draw(dtype: str) -> tuple[jax.Array, np.ndarray, jax.Array]:
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.zipf(1.2, (B, T)), V) - 1
    tokens[0, 50:650] = 7
    table, grad = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((V, D), (B, T, D)))
    return table, tokens.astype(np.int32), grad


def gradient(platform: str, table: jax.Array, tokens: np.ndarray, grad: jax.Array) -> Any:
    rows, pull = jax.vjp(lambda table: look_up(platform, table, tokens), table)
    assert (rows == table[tokens]).all()
    return pull(grad)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_gradient_is_rounded_once(platform: str, dtype: str) -> None:
    table, tokens, grad = draw(dtype)
    assert np.bincount(tokens.ravel()).max() > 600
    exact = np.zeros((V, D))
    np.add.at(exact, tokens, np.asarray(grad, np.float64))
    got = gradient(platform, table, tokens, grad)
    assert got.dtype == dtype
    rounded = 2.0**-8 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=rounded, atol=3e-5)


def test_on_a_processor_float32_has_the_bits_of_the_derived_gradient() -> None:
    table, tokens, grad = draw("float32")
    derived = jax.vjp(lambda table: jnp.take(table, tokens, axis=0), table)[1](grad)[0]
    np.testing.assert_array_equal(gradient("cpu", table, tokens, grad), derived)


@pytest.mark.parametrize(("platform", "unique"), [("cpu", False), ("cuda", True), ("tpu", True)])
def test_only_a_processor_that_adds_in_turn_scatters_equal_tokens(platform: str, unique: bool) -> None:
    """Scatters of equal indices have no order on a GPU."""
    table, tokens, grad = draw("bfloat16")
    lowered = jax.jit(partial(gradient_of, platform)).trace(table, tokens, grad).lower(lowering_platforms=(platform,))
    assert ("unique_indices = true" in lowered.as_text()) is unique
    assert lowered.as_text().count('"stablehlo.scatter"') == 1


def gradient_of(platform: str, table: Any, tokens: Any, grad: Any) -> Any:
    return jax.vjp(lambda table: look_up(platform, table, tokens), table)[1](grad)[0]
