"""Peak rates of this machine, measured once per process: products of one type of number, and reading.

Everything goes through JAX with the precision that the models use, so a peak is what JAX reaches here, not what a data
sheet says. The best of some calls counts: other work on the machine can only take away.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

CALLS = 8
STREAMED = 256 * 2**20
"""Number of bytes that are read: more than any cache holds."""
MOST_KERNELS = 96


@dataclass(frozen=True)
class Peaks:
    """Rates of a large square product in flops/s, and of reading in bytes/s."""

    matmul: float
    bandwidth: float

    def json(self) -> dict[str, float]:
        """Return the rates in GF/s and GB/s."""
        return {name: float(f"{value / 1e9:.4g}") for name, value in asdict(self).items()}


@cache
def peaks(dtype: str = "float32") -> Peaks:
    """Measure the peaks of the default device, with operands of `dtype`."""
    side = 2048 if jax.default_backend() == "cpu" else 8192
    square = jnp.ones((side, side), dtype)
    streamed, matrix = jnp.ones(STREAMED // 4), jnp.ones((1024, STREAMED // 4096))
    reading = min(_best(jax.jit(jnp.sum), streamed), _best(_product, jnp.ones((1, 1024)), matrix))
    return Peaks(2 * side**3 / _best(_product, square, square), STREAMED / reading)


@cache
def product_rate(batch: int, width: int, inner: int, dtype: str = "float32") -> float:
    """Measure the flops/s of `batch` vectors of `width` numbers times weights that no cache holds: one kernel that
    wide, or many with `inner` columns, whichever is faster.
    """
    vectors, columns = jnp.ones((batch, width), dtype), STREAMED // jnp.dtype(dtype).itemsize // width
    count = max(1, min(columns // inner, MOST_KERNELS))
    wide = _best(_product, vectors, jnp.ones((width, columns), dtype)) / columns
    kernels = [jnp.full((width, inner), float(n), dtype) for n in range(count)]
    several = _best(_products, vectors, kernels) / (count * inner)
    return 2 * batch * width / min(wide, several)


_product = jax.jit(partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32))


@jax.jit
def _products(vectors: Any, matrices: list[Any]) -> list[Any]:
    return [_product(vectors, matrix) for matrix in matrices]


def _best(call: Callable[..., Any], *operands: Any) -> float:
    """Return the seconds of the fastest call, without the first, which compiles."""
    jax.block_until_ready(call(*operands))
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        jax.block_until_ready(call(*operands))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
