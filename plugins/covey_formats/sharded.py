"""Safetensors files written by several processes: each writes its own shards at their places in the file.

A safetensors file has a header with the place of each tensor, so process 0 writes the header and the length of the
file, and then every process writes the bytes that it has. Of several equal shards one is written. Nothing is gathered,
and no process holds a whole tensor on its host. The bytes are those of `safetensors.numpy.save_file`. All processes
need the folder at the same path.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from covey.errors import WeightsError
from covey.models import families
from covey.models.decoder import Decoder
from covey.parallel import processes
from covey_formats.files import export_arrays, parameter_arrays

TYPES = {"float32": "F32", "bfloat16": "BF16"}
"""Names of the types in a header."""


class Place(NamedTuple):
    """Place of a parameter in a file: first byte and shape of its tensor, and the parameter's first row in that."""

    start: int
    shape: tuple[int, ...]
    row: int


class Run(NamedTuple):
    """Bytes that lie next to each other in a file, from `start` on."""

    start: int
    data: bytes


def write_jointly(model: Decoder, dtype: str, files: Mapping[Path, Sequence[str]]) -> None:
    """Write the tensors named for each of `files`, each process its shards, and read them back.

    Raises:
        WeightsError: what was read differs from what was written.
    """
    shapes, names = _tensor_shapes(model), families.tensor_names(model.config)
    headers = {
        file: _header({name: shapes[name] for name in sorted(tensors)}, dtype) for file, tensors in files.items()
    }
    with processes.here().together("export/header"):
        if jax.process_index() == 0:
            for file, (text, places) in headers.items():
                with file.open("wb") as out:
                    out.write(text)
                    out.truncate(_end(places, dtype))
    where = {name: (file, place) for file, (_, places) in headers.items() for name, place in places.items()}
    with processes.here().together("export/shards"):
        for name, parameters in groupby(export_arrays(model, dtype), lambda item: names[item[0]]):
            file, place = where[name]
            for path, array in parameters:
                _write_shards(file, place, array, path.endswith(".kernel"))
                place = place._replace(row=place.row + array.shape[-1])


def _tensor_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the checkpoint; parameters that share one lie below each other in it."""
    state, names = parameter_arrays(model), families.tensor_names(model.config)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in families.parameter_paths(model.config):
        rows, *rest = state[path].shape[::-1] if path.endswith(".kernel") else state[path].shape
        shapes[names[path]] = (rows + shapes.get(names[path], (0,))[0], *rest)
    return shapes


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> tuple[bytes, dict[str, Place]]:
    """Return the first bytes of a file, and the places of its tensors."""
    sizes = [math.prod(shape) * jnp.dtype(dtype).itemsize for shape in shapes.values()]
    starts = dict(zip(shapes, accumulate(sizes, initial=0), strict=False))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for (name, shape), size in zip(shapes.items(), sizes, strict=True):
        entries[name] = {"dtype": TYPES[dtype], "shape": shape, "data_offsets": (starts[name], starts[name] + size)}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    places = {name: Place(8 + len(text) + start, shapes[name], 0) for name, start in starts.items()}
    return struct.pack("<Q", len(text)) + text, places


def _end(places: Mapping[str, Place], dtype: str) -> int:
    """Return the length of a file."""
    return max(place.start + math.prod(place.shape) * jnp.dtype(dtype).itemsize for place in places.values())


def _write_shards(file: Path, place: Place, array: jax.Array, transposed: bool) -> None:
    """Write the shards of a parameter that this process is to write, and read them back."""
    descriptor = os.open(file, os.O_RDWR)
    try:
        runs = [run for shard in array.addressable_shards for run in _runs(place, shard, array.shape, transposed)]
        for run in runs:
            os.pwrite(descriptor, run.data, run.start)
        os.fsync(descriptor)
        for run in runs:
            if os.pread(descriptor, len(run.data), run.start) != run.data:
                raise WeightsError(f"the bytes from {run.start} on were not written as in memory", where=file.name)
    finally:
        os.close(descriptor)


def _runs(place: Place, shard: jax.Shard, shape: tuple[int, ...], transposed: bool) -> Iterator[Run]:
    """Yield the bytes of a shard in the layout of the file, in runs; none where another process writes an equal one.

    Args:
        place: place of the parameter.
        shard: part of the parameter, in our layout.
        shape: shape of the whole parameter.
        transposed: whether the file has it transposed.
    """
    if shard.replica_id:
        return
    data, index = np.asarray(shard.data), [at.indices(size)[:2] for at, size in zip(shard.index, shape, strict=True)]
    if transposed:
        data, index = data.T, index[::-1]
    first, columns = place.row + index[0][0], index[1:]
    width = data.dtype.itemsize
    row = math.prod(place.shape[1:]) * width
    if all(span == (0, size) for span, size in zip(columns, place.shape[1:], strict=True)):
        yield Run(place.start + first * row, data.tobytes())
        return
    ((left, _),) = columns
    for number, values in enumerate(data):
        yield Run(place.start + (first + number) * row + left * width, values.tobytes())
