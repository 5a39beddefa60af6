"""Serialization of values between processes, without pickle: received data cannot run code.

Supported are plain values, tuples, lists, dicts, paths, arrays, and Covey's own dataclasses, named tuples and
enumerations. A class is sent by its name, and only a class of Covey that is already loaded is instantiated.

    8 bytes: length of the JSON | JSON, arrays as placeholders | the arrays one by one, as in .npy files
"""

import base64
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from covey.errors import CoveyError

OURS = "covey."


def serialize(value: Any) -> bytes:
    """Serialize `value`.

    Raises:
        CoveyError: `value` contains an object of an unsupported type.
    """
    arrays: list[np.ndarray] = []
    text = json.dumps(_described(value, arrays)).encode()
    out = io.BytesIO()
    out.write(len(text).to_bytes(8, "little") + text)
    for array in arrays:
        np.lib.format.write_array(out, array, allow_pickle=False)
    return out.getvalue()


def deserialize(data: bytes) -> Any:
    """Return the value that was given to `serialize`; JAX arrays become NumPy arrays.

    Raises:
        CoveyError: the data name a class that is not Covey's.
    """
    source = io.BytesIO(data)
    tree = json.loads(source.read(int.from_bytes(source.read(8), "little")))

    def next_array() -> np.ndarray:
        array: np.ndarray = np.lib.format.read_array(source, allow_pickle=False)
        return array

    return _made(tree, next_array)


def _described(value: Any, arrays: list[np.ndarray]) -> Any:
    """Convert `value` to JSON: plain values and lists as they are, anything else as {kind: content}."""
    inner = partial(_described, arrays=arrays)
    if isinstance(value, Enum):
        return {"enum": [_name(type(value)), inner(value.value)]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic | jax.Array) and not value.dtype.hasobject:
        arrays.append(np.asarray(value))
        return {"scalar" if isinstance(value, np.generic) else "array": None}
    if type(value) is list:
        return [inner(part) for part in value]
    if type(value) is tuple:
        return {"tuple": [inner(part) for part in value]}
    if isinstance(value, Mapping):
        return {"dict": [[inner(key), inner(part)] for key, part in value.items()]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"named": [_name(type(value)), [inner(part) for part in value]]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"class": [_name(type(value)), [[name, inner(part)] for name, part in fields.items()]]}
    raise CoveyError(
        f"{value!r:.80} of type {type(value).__name__} cannot go to another process",
        want="numbers, text, lists, dicts and arrays",
        fix="make columns of such values where all processes can, from text say",
    )


def _name(kind: type) -> str:
    if not kind.__module__.startswith(OURS):
        raise CoveyError(f"the class {kind.__qualname__} of {kind.__module__} cannot go to another process")
    return f"{kind.__module__}:{kind.__qualname__}"


def _made(tree: Any, next_array: Callable[[], np.ndarray]) -> Any:
    inner = partial(_made, next_array=next_array)
    if isinstance(tree, list):
        return [inner(part) for part in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    return KINDS[kind](content, inner, next_array)


def _class(name: str) -> Any:
    module, _, path = name.partition(":")
    found = getattr(sys.modules.get(module), path, None) if module.startswith(OURS) else None
    tuples = isinstance(found, type) and issubclass(found, tuple | Enum)
    if not (tuples or (isinstance(found, type) and dataclasses.is_dataclass(found))):
        raise CoveyError(f"another process sent a {name!r}", want="a dataclass of Covey's", fix="one version for all")
    return found


Inner = Callable[[Any], Any]

KINDS: dict[str, Callable[[Any, Inner, Callable[[], np.ndarray]], Any]] = {
    "tuple": lambda content, inner, array: tuple(inner(part) for part in content),
    "dict": lambda content, inner, array: {inner(key): inner(part) for key, part in content},
    "path": lambda content, inner, array: Path(content),
    "bytes": lambda content, inner, array: base64.b64decode(content),
    "array": lambda content, inner, array: array(),
    "scalar": lambda content, inner, array: array()[()],
    "enum": lambda content, inner, array: _class(content[0])(inner(content[1])),
    "named": lambda content, inner, array: _class(content[0])(*(inner(part) for part in content[1])),
    "class": lambda content, inner, array: _class(content[0])(**{name: inner(part) for name, part in content[1]}),
}
"""Function that restores a value from its content, for each kind."""
