"""Worker processes, which isolate the run from what a reward function does.

A worker is started when it is first needed. When it takes too long, dies or returns an invalid message, it is killed
with every process it has started, and the next call starts another. Messages both ways are JSON: a function is named by
its module, never sent, and nothing is unpickled.

A process pool, the standard library's or pebble's, does not do: the run unpickles what comes back, processes that a
function has started outlive the time limit, and a worker in C code outlives a run that is killed.
"""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from covey.errors import RecipeError, RewardError
from covey.rewards.call import LOST, Failure, Outcome, RewardFn, excerpt, outcome_from_json

CHILD = Path(__file__).with_name("child.py")
"""Script that is the worker process. It is not imported: it imports the functions, and some of them start workers."""
START_SECONDS = 300.0
"""Maximum time for starting a worker and importing a function's module; `timeout` does not include it."""
MAX_REPLY = 1 << 26
"""Maximum bytes of a message from a worker."""
POLL_SECONDS = 0.2
"""Interval at which a waiting thread checks whether its call was cancelled."""
EXIT_SECONDS = 5.0
"""Maximum time to wait for the exit code of a worker that died."""


class Cancelled(Exception):  # noqa: N818
    """Raised when a call is no longer wanted or the workers are closed."""


class Worker:
    """A process that calls reward functions, one call at a time; it is restarted after a failure.

    It is thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._loaded: set[str] = set()
        self._closed, self._numbers = False, itertools.count()

    @property
    def pid(self) -> int | None:
        """Id of the process group, which is also the session; None while no process runs."""
        return None if self._process is None else self._process.pid

    def call(
        self,
        path: str,
        arguments: Mapping[str, list[Any]],
        count: int,
        timeout: float,
        cancelled: threading.Event,
    ) -> Outcome:
        """Call the function at `path` on `count` completions and return the outcome.

        Args:
            path: `module:function`.
            arguments: JSON-serializable values.
            timeout: seconds; 0 means no limit.
            cancelled: set when the outcome is no longer needed.

        Raises:
            RecipeError: the worker cannot import the function.
            Cancelled: `cancelled` was set and the worker killed, or the worker was closed.
        """
        with self._lock:
            if self._closed or cancelled.is_set():
                raise Cancelled("the workers are closed" if self._closed else "")
            try:
                self._load(path, cancelled)
                start = time.monotonic()
                job = {"function": path, "arguments": arguments, "count": count}
                outcome = _outcome(self._request(job, timeout or None, cancelled), count)
                return replace(outcome, seconds=time.monotonic() - start)
            except _WorkerLost as lost:
                self._terminate()
                return Outcome(None, failure=Failure(lost.what, LOST, fix=lost.fix))
            except RecipeError:
                raise
            except BaseException:  # a pending reply would be taken for the reply to the next job
                self._terminate()
                raise

    def close(self) -> None:
        """Kill the process and every process it has started; a call in another thread is aborted."""
        self._closed = True
        with self._lock:
            self._terminate()

    def _load(self, path: str, cancelled: threading.Event) -> None:
        if self._process is None:
            self._process, self._loaded = _Process(), set()
        if path not in self._loaded:
            reply = self._request({"function": path}, START_SECONDS, cancelled)
            if "refused" in reply:
                raise RecipeError(**reply["refused"])
            self._loaded.add(path)

    def _request(self, job: Mapping[str, Any], seconds: float | None, cancelled: threading.Event) -> dict[str, Any]:
        assert self._process is not None
        job = {**job, "number": next(self._numbers)}
        limit = None if seconds is None else time.monotonic() + seconds
        try:
            reply = self._process.exchange(
                json.dumps(job).encode() + b"\n", limit, lambda: self._closed or cancelled.is_set()
            )
        except TimeoutError:
            raise _WorkerLost(
                f"took longer than {seconds:g} s and was killed", fix="a longer reward_safety.timeout"
            ) from None
        except (EOFError, OSError):
            raise _WorkerLost(f"ended its worker process ({self._process.describe_exit()})") from None
        try:
            found: dict[str, Any] = json.loads(reply)
            if found["number"] == job["number"]:  # otherwise another writer used the socket
                return found
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise _WorkerLost(f"had its worker answer nonsense: {excerpt(reply[:80])}")

    def _terminate(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _WorkerLost(Exception):  # noqa: N818
    def __init__(self, what: str, fix: str = ""):
        self.what, self.fix = what, fix


def _outcome(reply: Mapping[str, Any], count: int) -> Outcome:
    try:
        return outcome_from_json(reply, count)
    except (ValueError, TypeError, AttributeError, KeyError):
        raise _WorkerLost(f"had its worker answer nonsense: {excerpt(reply)}") from None


class _Process:
    """One process group and the socket to it. It ends with this object or with the run, if not earlier."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", str(CHILD), str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},  # the run holds the devices
            )
        self._received = bytearray()
        self.pid = self._popen.pid
        self.end = weakref.finalize(self, _terminate, self._popen, self._socket)

    def exchange(self, line: bytes, limit: float | None, is_cancelled: Callable[[], bool]) -> bytes:
        """Send `line` and return the line that is the reply.

        Raises:
            TimeoutError: it has not arrived at `limit`.
            Cancelled: `is_cancelled` has become true.
            EOFError, OSError: the worker has ended, or the reply is longer than `MAX_REPLY`.
        """
        rest = memoryview(line)
        while rest or (end := self._received.find(b"\n")) < 0:
            left = POLL_SECONDS if limit is None else min(POLL_SECONDS, limit - time.monotonic())
            if is_cancelled():
                raise Cancelled
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            with suppress(TimeoutError):
                if rest:
                    rest = rest[self._socket.send(rest) :]
                    continue
                part = self._socket.recv(1 << 20)
                if not part or len(self._received) > MAX_REPLY:
                    raise EOFError
                self._received += part
        reply = bytes(self._received[:end])
        del self._received[: end + 1]
        return reply

    def describe_exit(self) -> str:
        """Describe how a process that is gone has ended."""
        try:
            code = self._popen.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        names = {128 + s.value: s.name for s in signal.Signals}
        return names.get(code, f"exit code {code}")


def _terminate(keeper: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    """Have the keeper kill all processes, and kill the process group if the keeper itself was killed or stopped."""
    with suppress(OSError):  # the worker may have ended
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    with suppress(subprocess.TimeoutExpired):
        keeper.wait(EXIT_SECONDS)
    if keeper.returncode is None or keeper.returncode < 0:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()


def import_path(name: str, function: RewardFn) -> str:
    """Return the `module:function` under which a worker finds `function`.

    Raises:
        RecipeError: it has none, because it was defined inside a function or in a script.
    """
    inner = function.func if isinstance(function, partial) else function
    home = getattr(inner, "__module__", None) or type(inner).__module__
    module = None if home == "__main__" else sys.modules.get(home)
    for attribute, value in list(vars(module).items()) if module else ():
        if value is function:
            return f"{home}:{attribute}"
    what = f"the reward function {name!r} cannot be called in a worker process, which would not find it"
    want = "a function at the top of a module that can be imported, not a lambda, a local one or one of a script"
    fix = f"put it into a file of its own; or workers 0; or {name}.in_process = True, to call just this one here"
    raise RecipeError(what, want=want, fix=fix, where="reward_safety.workers")


def to_json_values(name: str, arguments: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Convert arguments to JSON-serializable values: arrays and tuples become lists.

    Raises:
        RewardError: a column holds values of another type; the error names it.
    """
    found = {}
    for column, values in arguments.items():
        try:
            found[column] = _json_value(values)
        except (TypeError, RecursionError) as error:
            what = f"the reward function {name!r} cannot get {column!r} in a worker process: it holds {error}"
            want = "text, numbers, true, false, null, and lists and mappings (by text) of those; arrays become lists"
            fix = f"leave {column!r} out of the function's arguments, or reward_safety.workers 0"
            raise RewardError(what, want=want, fix=fix) from None
    return found


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value
    import numpy as np  # late: naming a reward function needs this module, and no arrays

    if isinstance(value, (np.ndarray, np.generic)):
        return _json_value(value.tolist())
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a mapping with the key {excerpt(odd[0])}")
        return {key: _json_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(inner) for inner in value]
    raise TypeError(f"{excerpt(value)} ({type(value).__name__})")
