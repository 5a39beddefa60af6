"""Values as bytes, without pickle, so that reading them runs no code. For checkpoints and other processes of a run.

Supported values are plain ones, tuples, lists, dicts, paths, arrays, and Covey's own dataclasses, named tuples and
enumerations. A class is sent by its name, and only a class of Covey that is already loaded is instantiated.

    8 bytes: length of the JSON | JSON, of arrays the type and shape | the numbers of the arrays, one after the other
"""

import base64
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from covey.errors import CoveyError

OURS = ("covey.", "covey_")
"""How the modules of Covey and of its plugins begin."""
Convert = Callable[[Any], Any]


def serialize(value: Any) -> bytes:
    """Serialize `value`.

    Raises:
        CoveyError: `value` contains an object of an unsupported type.
    """
    arrays: list[np.ndarray] = []
    text = json.dumps(_describe(value, arrays)).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in arrays)])


def deserialize(data: bytes, rename: Callable[[str, Any], tuple[str, Any]] | None = None) -> Any:
    """Return the value that was given to `serialize`; JAX arrays become NumPy arrays.

    Args:
        rename: function from the name and the fields of a dataclass, as an earlier version wrote them, to those of now.

    Raises:
        CoveyError: the data name a class that is not Covey's.
        ValueError: they name a dtype that does not exist, or is of objects.
    """
    start = 8 + int.from_bytes(data[:8], "little")
    tree, rest = json.loads(data[8:start]), memoryview(data)[start:]

    def next_array(dtype: str, shape: Sequence[int]) -> np.ndarray:
        nonlocal rest
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        numbers, rest = rest[:size], rest[size:]
        return np.frombuffer(numbers, kind).reshape(shape).copy()

    return _restore(tree, next_array, rename)


def _describe(value: Any, arrays: list[np.ndarray]) -> Any:
    """Convert `value` to JSON: plain values and lists as they are, anything else as {kind: content}."""
    inner = partial(_describe, arrays=arrays)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [inner(item) for item in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array) and not value.dtype.hasobject:
        arrays.append(np.asarray(value))
        return {"scalar" if isinstance(value, np.generic) else "array": [arrays[-1].dtype.str, value.shape]}
    for kind, (fits, describe, _) in KINDS.items():
        if fits(value):
            return {kind: describe(value, inner)}
    raise CoveyError(
        f"{value!r:.80} of type {type(value).__name__} cannot go to another process",
        want="numbers, text, lists, dicts and arrays",
        fix="make columns of such values where all processes can, from text say",
    )


def _restore(tree: Any, next_array: Callable[[str, Sequence[int]], np.ndarray], rename: Any) -> Any:
    inner = partial(_restore, next_array=next_array, rename=rename)
    if isinstance(tree, list):
        return [inner(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind in ("array", "scalar"):
        array = next_array(*content)
        return array if kind == "array" else array[()]
    return KINDS[kind].restore(rename(*content) if rename and kind == "class" else content, inner)


def _name(kind: type) -> str:
    if not kind.__module__.startswith(OURS):
        raise CoveyError(f"the class {kind.__qualname__} of {kind.__module__} cannot go to another process")
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> Any:
    module, _, path = name.partition(":")
    kind = getattr(sys.modules.get(module), path, None) if module.startswith(OURS) else None
    if not isinstance(kind, type) or not (issubclass(kind, tuple | Enum) or dataclasses.is_dataclass(kind)):
        raise CoveyError(f"another process sent a {name!r}", want="a dataclass of Covey's", fix="one version for all")
    return kind


def _fields(value: Any, inner: Convert) -> list[Any]:
    return [[field.name, inner(getattr(value, field.name))] for field in dataclasses.fields(value)]


class Kind(NamedTuple):
    """A kind of values: a test for it, and how its values become JSON and are restored from it. The second argument of
    `describe` and `restore` converts the items of a value.
    """

    fits: Callable[[Any], bool]
    describe: Callable[[Any, Convert], Any]
    restore: Callable[[Any, Convert], Any]


KINDS = {
    "enum": Kind(
        lambda value: isinstance(value, Enum),
        lambda value, inner: [_name(type(value)), inner(value.value)],
        lambda content, inner: _class(content[0])(inner(content[1])),
    ),
    "dict": Kind(
        lambda value: isinstance(value, Mapping),
        lambda value, inner: [[inner(key), inner(item)] for key, item in value.items()],
        lambda content, inner: {inner(key): inner(item) for key, item in content},
    ),
    "path": Kind(
        lambda value: isinstance(value, Path),
        lambda value, inner: str(value),
        lambda content, inner: Path(content),
    ),
    "bytes": Kind(
        lambda value: isinstance(value, bytes),
        lambda value, inner: base64.b64encode(value).decode(),
        lambda content, inner: base64.b64decode(content),
    ),
    "tuple": Kind(
        lambda value: type(value) is tuple,
        lambda value, inner: [inner(item) for item in value],
        lambda content, inner: tuple(inner(item) for item in content),
    ),
    "named": Kind(
        lambda value: isinstance(value, tuple),
        lambda value, inner: [_name(type(value)), [inner(item) for item in value]],
        lambda content, inner: _class(content[0])(*(inner(item) for item in content[1])),
    ),
    "class": Kind(
        lambda value: dataclasses.is_dataclass(value) and not isinstance(value, type),
        lambda value, inner: [_name(type(value)), _fields(value, inner)],
        lambda content, inner: _class(content[0])(**{name: inner(item) for name, item in content[1]}),
    ),
}
"""Kinds of values that JSON does not have, by name; the first one that fits describes a value."""
