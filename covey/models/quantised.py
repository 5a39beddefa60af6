"""Frozen kernels in 8 or 4 bits, by qwix's numerics: the base under adapters (QLoRA; Dettmers et al., 2023).

int8 has one scale a column, nf4 the 16 levels of the paper's appendix E and one scale for each block of inputs in a
column. Only projections are held so. They are quantised one by one, while loading or after, and dequantised inside each
product that needs them (`layers.project_frozen`): neither the float model nor a float copy of it is ever whole.
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
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from covey.errors import RecipeError, nearest


@dataclass(frozen=True)
class Format:
    """How kernels are held.

    Attributes:
        kind: int8 or nf4.
        block: nf4: inputs that share a scale.
    """

    kind: str
    block: int


class Frozen(nnx.Variable[jax.Array]):
    """A part of a quantised kernel: nothing trains it."""


class Quantised(nnx.Module):
    """In place of a kernel [n_in, n_out]; `quantised[...]` is that kernel in float32.

    Attributes:
        values: int8 [n_in, n_out]; nf4's numbers of levels two in a byte, uint8 [n_in / 2, n_out].
        scales: float32 [blocks, n_out].
        kind: of the format.
        dtype: of the kernel where it is a float one again, as when adapters are merged into it.
    """

    def __init__(self, values: Array, scales: Array, kind: str, dtype: DTypeLike):
        self.values, self.scales = Frozen(values), Frozen(scales)
        self.kind, self.dtype = kind, jnp.dtype(dtype)

    def __getitem__(self, index: EllipsisType) -> Float[Array, "n_in n_out"]:
        return dequantised(self.values[...], self.scales[...], self.kind)

    @property
    def shape(self) -> tuple[int, int]:
        """That of the kernel."""
        rows, columns = self.values.shape
        return rows * IN_A_BYTE[self.kind], columns

    @property
    def ndim(self) -> int:
        """That of the kernel."""
        return 2

    @property
    def size(self) -> int:
        """Numbers in the kernel."""
        return math.prod(self.shape)


def format_of(quantize: str, block: int) -> Format | None:
    """The format that `configs.ModelOptions` names; None for `none`.

    Raises:
        RecipeError: there is no such format.
    """
    if quantize not in ("none", *IN_A_BYTE):
        fix = nearest(quantize, ("none", *IN_A_BYTE))
        raise RecipeError(f"there is no format {quantize!r} for a base", fix=fix, where="model.quantize")
    return None if quantize == "none" else Format(quantize, block)


def held(kernel: Array | np.ndarray, how: Format, dtype: DTypeLike) -> Quantised:
    """`kernel` in the format `how`. `dtype`: see `Quantised`.

    Raises:
        RecipeError: the blocks do not divide its inputs.
    """
    return Quantised(*quantise(kernel, how), how.kind, dtype)


def room_for(shape: tuple[int, ...], how: Format, dtype: DTypeLike) -> Quantised:
    """As `held`, for a kernel that is still to come: shapes alone."""
    kernel = jax.ShapeDtypeStruct(shape, jnp.float32)
    values, scales = jax.eval_shape(partial(_quantise, kind=how.kind, block=_block(kernel, how)), kernel)
    return Quantised(values, scales, how.kind, dtype)


def quantise(kernel: Any, how: Format) -> tuple[Array, Array]:
    """Values and scales of one kernel [n_in, n_out]; see `Quantised`.

    Raises:
        RecipeError: the blocks do not divide its inputs.
    """
    values, scales = _quantise(jnp.asarray(kernel, jnp.float32), kind=how.kind, block=_block(kernel, how))
    return values, scales


def quantising(tensors: Iterator[tuple[str, np.ndarray]], how: Format) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a checkpoint with each kernel as its values and scales, one in memory at a time."""
    for path, tensor in tensors:
        if path.endswith(".kernel"):
            values, scales = map(np.asarray, quantise(tensor, how))
            del tensor
            yield f"{path}.values", values
            yield f"{path}.scales", scales
            del values, scales  # before the next is read
        else:
            yield path, tensor
            del tensor


def dequantised(values: Int[Array, "rows n_out"], scales: Float[Array, "blocks n_out"], kind: str) -> Array:
    """The kernel that they stand for, float32 [n_in, n_out]."""
    import qwix

    def row(values: Array, scales: Array) -> Array:
        kernel: Array = qwix.dequantize(qwix.QArray(values, scales, qtype=kind))
        return kernel

    # Row by row, since qwix looks levels up in one long line: of a kernel in pieces it would gather the whole.
    values = values if kind == "int8" else jnp.stack([values & 15, values >> 4], axis=1)
    blocks = values.reshape(scales.shape[0], -1, scales.shape[1])
    return jax.vmap(jax.vmap(row, (0, None)))(blocks, scales).reshape(-1, scales.shape[1])


@partial(jax.jit, static_argnames=("kind", "block"))
def _quantise(kernel: Float[Array, "n_in n_out"], *, kind: str, block: int) -> tuple[Array, Array]:
    import qwix

    found = qwix.quantize(kernel, kind, channelwise_axes=[1], tiled_axes={0: block})
    if kind == "int8":
        return found.qvalue, found.scale
    values = found.qvalue.astype(jnp.uint8)  # JAX's uint4 takes a whole byte on CPU: two are put into one here
    return values[::2] | values[1::2] << 4, found.scale


def _block(kernel: Any, how: Format) -> int:
    inputs: int = kernel.shape[0]
    if how.kind == "int8":
        return inputs
    if inputs % how.block or how.block % 2:
        raise RecipeError(
            f"blocks of {how.block} do not divide the {inputs} inputs of a projection into even parts",
            want=f"an even divisor of {inputs}, such as {math.gcd(inputs, 2 * how.block)}",
            where="model.quantize_block",
        )
    return how.block


IN_A_BYTE = {"int8": 1, "nf4": 2}
"""Format → numbers of a kernel in a byte."""
