"""Trainers: each is a process that answers calls of its adapter's functions, within a time limit.

A reply is checked before a check uses it: names, shapes, and that all numbers are finite.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from covey.errors import CoveyError
from covey_conformance import worker
from covey_conformance.oracle import Row
from covey_conformance.tiny_model import Weights
from covey_sandbox.child import Child, ReplyError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHORTEST = 10.0
"""Seconds of a call after several others took too long; each halves the limit of those that follow."""
Handle = dict[str, int]
"""A trainer object in the other process."""


class Known(NamedTuple):
    """A trainer whose adapter comes with Covey.

    Attributes:
        version: version that `make conformance` installs, and that the adapter was written for.
        environment: folder of its environment in the checkout; "" for Covey's own.
    """

    version: str = ""
    environment: str = ""


KNOWN = {
    "covey": Known(),
    "trl": Known("1.16.0", ".venv-parity"),
    "tunix": Known("0.1.7", ".venv-tunix"),
}


class NotApplicableError(Exception):
    """Raised with the reason why a trainer has nothing that a check could measure."""


class FailedError(Exception):
    """Raised with what went wrong in a trainer or its adapter."""


@dataclass(eq=False)
class Trainer:
    """A trainer under test.

    Args:
        name: heading of its column.
        target: name or path by which the user names it.
        adapter: its file.
        exchange: answers a message within a number of seconds, as `Child.call` does.
        scratch: folder for the arrays of messages and for what the trainer prints.
        end: ends the process.
        seconds: time limit of a call.

    Attributes:
        functions, version, notes: what the adapter tells of itself.
    """

    name: str
    target: str
    adapter: Path
    exchange: Callable[[Mapping[str, Any], float], dict[str, Any]]
    scratch: Path
    end: Callable[[], None] = lambda: None
    seconds: float = 300.0
    functions: frozenset[str] = frozenset()
    version: str = ""
    notes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._is_open, self._loaded = False, dict[str, Handle]()

    def open(self) -> None:
        """Load the adapter.

        Raises:
            FailedError: it cannot be imported.
        """
        told = self._exchange({"open": str(self.adapter), "log": str(self.log)})
        self._is_open, self.functions, self.version = True, frozenset(told["functions"]), told["version"]
        self.notes = told["notes"]

    def load(self, folder: str, settings: Mapping[str, Any]) -> Handle:
        """Load a model, or return the one that was loaded with the same settings before."""
        key = json.dumps([folder, settings], sort_keys=True)
        if key not in self._loaded or not self._is_open:
            self._loaded[key] = self.call("load", folder, settings)
        return self._loaded[key]

    def close(self) -> None:
        """End the process."""
        self._is_open = False
        self.end()

    @property
    def log(self) -> Path:
        """File of what the trainer prints."""
        return self.scratch / f"{self.name}.log"

    def note(self, kind: str, check: str) -> str:
        """Return the adapter's note of a `kind` (`SETTINGS` or `REASONS`) on a check, on its group, or on all."""
        notes = self.notes.get(kind, {})
        return str(notes.get(check) or notes.get(check.partition("/")[0]) or notes.get("") or "")

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of the adapter.

        Raises:
            NotApplicableError: the adapter lacks it, or says that the trainer cannot do this.
            FailedError: it raised, took too long, or its process ended.
        """
        if not self._is_open:
            self.open()
        if function not in self.functions:
            raise NotApplicableError(f"the adapter has no function {function}")
        path = str(self.scratch / f"{self.name}.npz")
        value = self._exchange({"function": function, "arguments": worker.write(arguments, path), "arrays": path})
        with np.load(path, allow_pickle=False) as arrays:
            return worker.decode(value, dict(arrays))

    def gradient(self, handle: Handle, rows: Sequence[Row], weights: Weights) -> Weights:
        """Compute the gradient of a step, for the names and shapes of `weights`."""
        return self.checked(self.call("gradient", handle, rows), weights, "gradient")

    def step(self, handle: Handle, rows: Sequence[Row], weights: Weights) -> Weights:
        """Make a step, and return the weights after it."""
        return self.checked(self.call("step", handle, rows), weights, "step")

    def checked(self, value: Any, weights: Weights, function: str) -> Weights:
        """Check that `value`, which `function` returned, has a finite array for each of `weights`; return float64."""
        if not isinstance(value, dict) or set(value) != set(weights):
            names = sorted(set(weights).symmetric_difference(value if isinstance(value, dict) else ()))
            raise FailedError(f"{function} returned other names than the model has: {', '.join(names[:3])} ...")
        for name, w in weights.items():
            if np.shape(value[name]) != w.shape:
                raise FailedError(f"{function} returned {name} of shape {np.shape(value[name])}, wanted {w.shape}")
        return {name: _finite(np.asarray(x, np.float64), f"{function}: {name}") for name, x in value.items()}

    def sample(self, handle: Handle, prompts: Sequence[str], count: int, least: str = "") -> list[dict[str, Any]]:
        """Sample `count` completions of each prompt; `least` is an entry that a trainer need not have, and must here.

        Raises:
            NotApplicableError: the trainer does not have it.
        """
        rows: list[dict[str, Any]] = self.call("sample", handle, prompts, count)
        names = {"prompt", "sampled", "completion", "finished"}
        if len(rows) != count * len(prompts) or any(names - set(row) for row in rows):
            raise FailedError(
                f"sample returned {len(rows)} rows, wanted {count * len(prompts)} with {', '.join(names)}"
            )
        if least and any(row.get(least) is None for row in rows):
            raise NotApplicableError(f"its samples have no {least}")
        return rows

    def logps(self, handle: Handle, rows: Sequence[Row]) -> list[np.ndarray]:
        """Compute the trainer's log-probs of each completion's tokens."""
        value, wanted = self.call("logps", handle, rows), [len(row["completion"]) for row in rows]
        if [len(x) for x in value] != wanted:
            raise FailedError(f"logps returned arrays of lengths {[len(x) for x in value]}, wanted {wanted}")
        return [_finite(np.asarray(x, np.float64), "logps") for x in value]

    def _exchange(self, message: Mapping[str, Any]) -> Any:
        try:
            reply = self.exchange(message, self.seconds)
        except (TimeoutError, ChildProcessError, ReplyError, OSError) as error:
            self._is_open = False
            self._loaded.clear()
            raise FailedError(self._describe_end(error)) from None
        if "not_applicable" in reply:
            raise NotApplicableError(reply["not_applicable"])
        if "error" in reply:
            raise FailedError(reply["error"])
        return reply["value"]

    def _describe_end(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            self.seconds = max(self.seconds / 2, min(self.seconds, SHORTEST))  # that all checks end
            return f"the call took {error}, and its process was killed"
        return f"the process ended: {error}; it printed to {self.log}"


def make_trainer(name: str, scratch: Path, python: str = "") -> Trainer:
    """Make the trainer `name`: one of `KNOWN`, or the path of an adapter.

    Args:
        name: name or path.
        scratch: folder for messages and logs.
        python: interpreter that executes an adapter of the user's; this one when not given.

    Raises:
        CoveyError: there is no such adapter, or the environment of a known trainer is not installed.
    """
    if python and shutil.which(python) is None:
        raise CoveyError(f"--python is {python!r}", want="a Python interpreter", fix="its path, as in env/bin/python")
    interpreter = _interpreter(name) if name in KNOWN else python or sys.executable
    adapter = HERE / "adapters" / f"{name}.py" if name in KNOWN else Path(name).expanduser()
    if adapter.suffix != ".py" or not adapter.is_file():
        want = f"{', '.join(KNOWN)}, or the path of an adapter, a .py file"
        raise CoveyError(f"there is no trainer {name!r}", want=want, fix="docs/conformance-adapter.md shows how")
    cache = {"JAX_COMPILATION_CACHE_DIR": str(scratch / "programs"), **os.environ}["JAX_COMPILATION_CACHE_DIR"]
    env = {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip
    child = Child("worker:answer", env, python=interpreter, folder=str(HERE))
    label = name if name in KNOWN else adapter.stem
    return Trainer(label, name, adapter.resolve(), child.call, scratch, child.end)


def _interpreter(name: str) -> str:
    """Return the interpreter of a known trainer's environment."""
    if not (environment := KNOWN[name].environment):
        return sys.executable
    python = ROOT / environment / "bin" / "python"
    if not python.exists():
        raise CoveyError(f"{name} is not installed", want=str(python), fix="make conformance, in a checkout of Covey")
    return str(python)


def _finite(value: np.ndarray, where: str) -> np.ndarray:
    if not np.isfinite(value).all():
        raise FailedError(f"{where} has {int((~np.isfinite(value)).sum())} numbers that are NaN or infinite")
    return value
