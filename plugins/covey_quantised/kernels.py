"""Frozen kernels in 8 or 4 bits, by qwix's numerics: the base under adapters (QLoRA; Dettmers et al., 2023).

int8 has one scale per column; nf4 has the 16 levels of the paper's appendix E and one scale per block of inputs in a
column. Only projections are quantised, one by one, while loading or after, and dequantised inside each product that
needs them (`project_quantised`): the whole model never exists in floating point.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from covey.errors import RecipeError
from covey.models.layers import dot, project, sum_dtype_of
from covey.models.stored_kernel import FrozenParam, StoredKernel


class QuantisedKernel(StoredKernel):
    """Quantised kernel that replaces a kernel [n_in, n_out]; `quantised[...]` is that kernel in float32.

    Attributes:
        values: int8 [n_in, n_out]; for nf4 two level indices per byte, uint8 [n_in / 2, n_out].
        scales: float32 [blocks, n_out].
        kind: the format's kind, int8 or nf4.
        dtype: type of the kernel once it is in floating point again, as when adapters are merged into it.
    """

    def __init__(self, values: Array, scales: Array, kind: str, dtype: DTypeLike):
        self.values, self.scales = FrozenParam(values), FrozenParam(scales)
        self.kind, self.dtype = kind, jnp.dtype(dtype)

    def __getitem__(self, index: EllipsisType) -> Float[Array, "n_in n_out"]:
        return dequantise(self.values[...], self.scales[...], self.kind)

    def project(self, x: Float[Array, "... n_in"], dtype: DTypeLike, platform: str) -> Float[Array, "... n_out"]:
        """Compute `layers.project` with the kernel; see `project_quantised`."""
        return project_quantised(x, self.values[...], self.scales[...], dtype, self.kind, platform)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the kernel."""
        rows, columns = self.values.shape
        return rows * ELEMENTS_PER_BYTE[self.kind], columns

    @property
    def ndim(self) -> int:
        """Number of dimensions of the kernel."""
        return 2

    @property
    def size(self) -> int:
        """Number of elements of the kernel."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class QuantisationFormat:
    """Storage format of quantised kernels.

    Attributes:
        kind: int8 or nf4.
        block: number of inputs that share a scale (nf4 only).
    """

    kind: str
    block: int

    def store(self, kernel: Array | np.ndarray, dtype: DTypeLike) -> QuantisedKernel:
        """Quantise `kernel`. `dtype`: see `QuantisedKernel`.

        Raises:
            RecipeError: the blocks do not divide its inputs.
        """
        return QuantisedKernel(*quantise(kernel, self), self.kind, dtype)

    def abstract(self, shape: tuple[int, ...], dtype: DTypeLike) -> QuantisedKernel:
        """Return the shapes of `store` for a kernel that is not loaded yet."""
        kernel = jax.ShapeDtypeStruct(shape, jnp.float32)
        values, scales = jax.eval_shape(partial(_quantise, kind=self.kind, block=_block_size(kernel, self)), kernel)
        return QuantisedKernel(values, scales, self.kind, dtype)

    def tensors(self, tensors: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the tensors of a checkpoint, each kernel as its values and scales, one in memory at a time."""
        for path, tensor in tensors:
            if path.endswith(".kernel"):
                values, scales = map(np.asarray, quantise(tensor, self))
                del tensor
                yield f"{path}.values", values
                yield f"{path}.scales", scales
                del values, scales  # free them before the next is read
            else:
                yield path, tensor
                del tensor


int8, nf4 = partial(QuantisationFormat, "int8"), partial(QuantisationFormat, "nf4")
"""Functions that `covey.kernels` offers, of the number of inputs that share a scale."""


def quantise(kernel: Any, fmt: QuantisationFormat) -> tuple[Array, Array]:
    """Compute values and scales of one kernel [n_in, n_out]; see `QuantisedKernel`.

    Raises:
        RecipeError: the blocks do not divide its inputs.
    """
    values, scales = _quantise(jnp.asarray(kernel, jnp.float32), kind=fmt.kind, block=_block_size(kernel, fmt))
    return values, scales


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def project_quantised(
    x: Float[Array, "... n_in"], values: Array, scales: Array, dtype: DTypeLike, kind: str, platform: str
) -> Array:
    """Compute `project` with a kernel stored as `kind` (see `QuantisedKernel`): it is dequantised for each product,
    forward and backward, and has no gradient. `platform`: see `Linear`.
    """
    values, scales, x = _barrier(platform, values, scales, x)
    return project(x, dequantise(values, scales, kind), dtype, 1, sum_dtype_of(x.dtype, platform))


def _project_quantised_backward(
    dtype: DTypeLike, kind: str, platform: str, saved: tuple[Array, Array], grad: Array
) -> tuple[Array, None, None]:
    values, scales, grad = _barrier(platform, *saved, grad)
    kernel = dequantise(values, scales, kind)
    sum_dtype = sum_dtype_of(grad.dtype, platform)
    return dot(grad, kernel, ((grad.ndim - 1,), (1,)), dtype, sum_dtype).astype(grad.dtype), None, None


def _barrier(platform: str, values: Array, scales: Array, other: Array) -> tuple[Array, Array, Array]:
    """Return all three, none usable before the others are computed. Otherwise the compiler keeps a float kernel from
    the forward for the backward pass, or makes all of them before a decoding loop begins.
    """
    if platform == "cpu":  # CPU drops barriers early, but cannot fold this zero
        zero = jnp.square(other.reshape(-1)[0].astype(jnp.float32)) < -1
        return values + zero.astype(values.dtype), scales, other
    barrier: tuple[Array, Array, Array] = jax.lax.optimization_barrier((values, scales, other))
    return barrier


project_quantised.defvjp(lambda x, *kernel: (project_quantised(x, *kernel), kernel[:2]), _project_quantised_backward)


def dequantise(values: Int[Array, "rows n_out"], scales: Float[Array, "blocks n_out"], kind: str) -> Array:
    """Return the kernel that `values` and `scales` represent, float32 [n_in, n_out]."""
    exact = values.astype(jnp.float32) if kind == "int8" else _nf4_levels(values)
    blocks = exact.reshape(scales.shape[0], -1, scales.shape[1])
    return (blocks * scales[:, None]).reshape(-1, scales.shape[1])


def _nf4_levels(values: Int[Array, "rows n_out"]) -> Float[Array, "2*rows n_out"]:
    """Return the levels that the two indices of each byte stand for.

    Bit by bit, half of the levels that an index may still mean are chosen. Compared with a look-up in a table, which is
    a gather of as many numbers as the kernel has, this is arithmetic that the compiler fuses into its neighbours.
    """
    indices = jnp.stack([values & 15, values >> 4], axis=1).reshape(-1, values.shape[1])
    levels: list[Any] = list(jnp.asarray(NF4_LEVELS, jnp.float32))
    for bit in (1, 2, 4, 8):
        is_set = (indices & bit) != 0
        levels = [jnp.where(is_set, high, low) for low, high in zip(levels[::2], levels[1::2], strict=True)]
    chosen: Array = levels[0]
    return chosen


@partial(jax.jit, static_argnames=("kind", "block"))
def _quantise(kernel: Float[Array, "n_in n_out"], *, kind: str, block: int) -> tuple[Array, Array]:
    import qwix

    result = qwix.quantize(kernel, kind, channelwise_axes=[1], tiled_axes={0: block})
    if kind == "int8":
        return result.qvalue, result.scale
    values = result.qvalue.astype(jnp.uint8)  # JAX's uint4 takes a whole byte on CPU: pack two per byte here
    return values[::2] | values[1::2] << 4, result.scale


def _block_size(kernel: Any, fmt: QuantisationFormat) -> int:
    inputs: int = kernel.shape[0]
    if fmt.kind == "int8":
        return inputs
    if inputs % fmt.block or fmt.block % 2:
        raise RecipeError(
            f"blocks of {fmt.block} do not divide the {inputs} inputs of a projection into even parts",
            want=f"an even divisor of {inputs}, such as {math.gcd(inputs, 2 * fmt.block)}",
            where="model.quantize_block",
        )
    return fmt.block


NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022833334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Numbers that the indices of nf4 stand for (Dettmers et al., 2023, appendix E), as float32."""

ELEMENTS_PER_BYTE = {"int8": 1, "nf4": 2}
"""Format → number of kernel elements per byte."""
