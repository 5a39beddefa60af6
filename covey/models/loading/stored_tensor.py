"""Tensor of a safetensors file that is read slice by slice, so that a process reads only what its devices hold."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in our layout, in an open safetensors file.

    Attributes:
        file: the open file.
        name: name of the tensor in it.
        rows: rows of the tensor, from a first one to an end; None for all of them.
        transposed: whether our layout is the transpose of the file's.
        dtype: type of what is read; by default the file's.
    """

    file: Any
    name: str
    rows: slice | None = None
    transposed: bool = False
    dtype: DTypeLike | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in our layout."""
        stored = self._stored_shape()
        return stored[::-1] if self.transposed else stored

    @property
    def kind(self) -> str:
        """Name of the file's type."""
        return str(self.file.get_slice(self.name).get_dtype())

    def astype(self, dtype: DTypeLike) -> "StoredTensor":
        """Return the tensor with its slices in `dtype`."""
        return replace(self, dtype=dtype)

    def whole(self) -> np.ndarray:
        """Read the whole tensor."""
        name, rows = self.name, self.rows
        return self._in_our_layout(self.file.get_tensor(name) if rows is None else self.file.get_slice(name)[rows])

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Read a slice: one `slice` without a step for each dimension of `shape`."""
        order = index[::-1] if self.transposed else index
        ranges = [part.indices(size)[:2] for part, size in zip(order, self._stored_shape(), strict=True)]
        first = 0 if self.rows is None else self.rows.start
        start, *others = (slice(*bounds) for bounds in ranges)
        start = slice(start.start + first, start.stop + first)
        return self._in_our_layout(self.file.get_slice(self.name)[(start, *others)])

    def _stored_shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = tuple(self.file.get_slice(self.name).get_shape())
        return shape if self.rows is None else (self.rows.stop - self.rows.start, *shape[1:])

    def _in_our_layout(self, tensor: np.ndarray) -> np.ndarray:
        tensor = tensor.T if self.transposed else tensor
        return tensor if self.dtype is None else tensor.astype(self.dtype)
