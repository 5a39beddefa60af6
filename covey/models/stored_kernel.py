"""Kernels that are not stored as an array of floats, such as a quantised base under adapters.

`model.quantize` names a format. A package offers it by an entry point of `covey.kernels`: a function from
`model.quantize_block` to a `KernelFormat`.
"""

from abc import abstractmethod
from collections.abc import Iterator
from types import EllipsisType
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from covey.registry import Registry


class FrozenParam(nnx.Variable[jax.Array]):
    """Array that is never trained."""


class StoredKernel(nnx.Module):
    """Kernel [n_in, n_out] of a `Linear` in another form; its arrays are `FrozenParam`s.

    Attributes:
        dtype: type of the kernel once it is an array, as when adapters are merged into it.
    """

    dtype: Any

    @abstractmethod
    def __getitem__(self, index: EllipsisType) -> Float[Array, "n_in n_out"]:
        """Return the kernel as an array, float32."""

    @abstractmethod
    def project(self, x: Float[Array, "... n_in"], dtype: DTypeLike, platform: str) -> Float[Array, "... n_out"]:
        """Compute `layers.project` with the kernel. `platform`: see `Linear`."""


class KernelFormat(Protocol):
    """Form of the kernels of a base."""

    def store(self, kernel: Array | np.ndarray, dtype: DTypeLike) -> StoredKernel:
        """Return `kernel` in this form. `dtype`: see `StoredKernel`.

        Raises:
            RecipeError: its shape does not fit the form.
        """

    def abstract(self, shape: tuple[int, ...], dtype: DTypeLike) -> StoredKernel:
        """Return the shapes of what `store` returns."""

    def tensors(self, tensors: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the tensors of a checkpoint, each kernel as its arrays in this form, one in memory at a time."""


FORMATS = Registry("kernel format", "covey.kernels", "function", "model.quantize", {})
"""Formats of installed packages, by the value of `model.quantize`."""


def find_format(quantize: str, block: int) -> KernelFormat | None:
    """Return the format that `config.schema.ModelOptions` names; None for `none`.

    Raises:
        RecipeError: there is no such format.
    """
    return None if quantize == "none" else FORMATS.resolve(quantize)(block)
