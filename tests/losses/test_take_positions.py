"""The gradient of states from which several tokens are predicted: a sum in float32, whatever the order."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from covey.losses import logprobs

R, T, M, D = 2, 1100, 700, 8
"""More positions than are summed at one time."""


def indices() -> np.ndarray:
    """Positions in order, as in a row; the 64 completions of a group begin at position 7."""
    index = np.sort(np.random.default_rng(0).integers(8, T, (R, M)), axis=1)
    index[:, ::11] = 7
    return index.astype(np.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("add", [logprobs._add_in_turn, logprobs._add_all])
def test_the_gradient_is_rounded_once(dtype: str, add: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: partial(add, T)(*args))
    rng, index = np.random.default_rng(1), indices()
    hidden, grad = (jnp.asarray(rng.normal(size=(R, length, D)), dtype) for length in (T, M))
    taken, pull = jax.vjp(lambda x: logprobs.take_positions(T, x, jnp.asarray(index)), hidden)
    assert (taken == jnp.take_along_axis(hidden, index[..., None], axis=1)).all()
    exact = np.zeros((R, T, D))
    for row in range(R):
        np.add.at(exact[row], index[row], np.asarray(grad[row], np.float64))
    [got] = pull(grad)
    assert got.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(got, np.float64), exact, rtol=2.0**-8 if dtype == "bfloat16" else 1e-5, atol=1e-5
    )


def test_only_a_processor_that_adds_in_turn_scatters() -> None:
    """Scatters of equal indices have no order on a GPU."""
    index = jnp.asarray(indices())

    def grads(hidden: jax.Array, grad: jax.Array) -> Any:
        return jax.vjp(lambda x: logprobs.take_positions(T, x, index), hidden)[1](grad)

    shapes = [jax.ShapeDtypeStruct((R, length, D), jnp.bfloat16) for length in (T, M)]
    scatters = {
        platform: "stablehlo.scatter" in jax.jit(grads).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "tpu", "cuda")
    }
    assert scatters == {"cpu": True, "tpu": False, "cuda": False}
