"""The trainer's side of a conformance run: loads one adapter file and answers calls of its functions.

It is executed by the Python of the trainer's environment, in which Covey need not be installed, so it imports the
standard library and NumPy alone. Messages are JSON; arrays travel in `.npz` files, without pickles.
"""

import importlib.util
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

HANDLE = "$handle"
ARRAY = "$array"
_adapter: Any = None
_handles: dict[int, Any] = {}


def answer(message: dict[str, Any]) -> dict[str, Any]:
    """Execute one call of the adapter, and return its value, the reason why it does not apply, or its error.

    Args:
        message: `open` is the path of an adapter to load; otherwise `function`, `arguments` and `arrays`, a file. With
            `log`, what this process prints goes to that file from now on.
    """
    try:
        if message.get("log"):
            _redirect(message["log"])
        if "open" in message:
            return {"value": open_adapter(message["open"])}
        with np.load(message["arrays"], allow_pickle=False) as arrays:
            arguments = decode(message["arguments"], dict(arrays))
        return {"value": write(_call(message["function"], arguments), message["arrays"])}
    except NotImplementedError as error:
        return {"not_applicable": str(error) or "the adapter gives no reason"}
    except Exception as error:
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"}


def open_adapter(path: str) -> dict[str, Any]:
    """Load the adapter at `path`, and return the names of its functions with its version and notes."""
    global _adapter
    spec = importlib.util.spec_from_file_location("adapter", path)
    assert spec is not None, "the path ends in .py"
    assert spec.loader is not None
    _adapter = importlib.util.module_from_spec(spec)
    sys.modules["adapter"] = _adapter
    spec.loader.exec_module(_adapter)
    _handles.clear()
    notes = {name: getattr(_adapter, name, {}) for name in ("SETTINGS", "REASONS")}
    functions = [name for name, value in vars(_adapter).items() if callable(value) and not name.startswith("_")]
    return {"functions": functions, "version": str(getattr(_adapter, "VERSION", "")), "notes": notes}


def _call(function: str, arguments: list[Any]) -> Any:
    value = getattr(_adapter, function)(*(_handles[x[HANDLE]] if _is(x, HANDLE) else x for x in arguments))
    if function not in ("load", "restore"):
        return value
    number = len(_handles)
    _handles[number] = value
    return {HANDLE: number}


def write(value: Any, path: str) -> Any:
    """Write the arrays of `value` to the file `path`, and return the rest for JSON."""
    arrays: dict[str, np.ndarray] = {}
    text = encode(value, arrays)
    np.savez(path, **arrays)  # type: ignore[arg-type]  # NumPy takes names for switches
    return text


def encode(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Return `value` with its arrays moved to `arrays`."""
    if isinstance(value, dict):
        return {str(name): encode(x, arrays) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [encode(x, arrays) for x in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    name = f"a{len(arrays)}"
    arrays[name] = np.asarray(value)
    if arrays[name].dtype.kind not in "biuf":
        raise TypeError(f"a {type(value).__name__} is no number, text, list, dict or array of numbers")
    return {ARRAY: name}


def decode(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Undo `encode`."""
    if _is(value, ARRAY):
        return arrays[value[ARRAY]]
    if isinstance(value, dict):
        return {name: decode(x, arrays) for name, x in value.items()}
    return [decode(x, arrays) for x in value] if isinstance(value, list) else value


def _is(value: Any, mark: str) -> bool:
    return isinstance(value, dict) and set(value) == {mark}


def _redirect(path: str) -> None:
    """Send all output of this process, also of C code, to the file `path`."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
