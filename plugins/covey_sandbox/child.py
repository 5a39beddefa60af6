"""Child processes: how one starts, answers calls within limits, is killed, and how its end is described.

`Child` is the run's side of a process that answers calls. This file is also the script of that process, which imports
the function that answers. Messages both ways are JSON objects, one per line of a socket; nothing is unpickled.

A process that runs foreign code is *kept*: the script forks before importing the function. The parent is the *keeper*:
it leads the process group, runs no foreign code and so cannot hang. When the run has ended or the child dies, it kills
all remaining processes, including those that were moved to another session.

A process pool, the standard library's or pebble's, does not do: the run unpickles what comes back, processes that a
function has started outlive the time limit, and a worker in C code outlives a run that is killed.
"""

import ctypes
import itertools
import json
import math
import os
import pkgutil
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

MAX_REPLY = 1 << 26
"""Maximum bytes of a reply."""
POLL_SECONDS = 0.2
"""Interval at which a waiting thread checks whether its call was cancelled."""
EXIT_SECONDS = 5.0
"""Maximum time to wait for the exit code of a child that died, and for a keeper to kill all processes."""
PR_SET_CHILD_SUBREAPER = 36
PASSES = 20
"""Maximum scans for descendants: one may be started while another is killed."""


class Cancelled(Exception):  # noqa: N818
    """Raised when the reply to a call is no longer needed."""


class ReplyError(Exception):
    """Raised with what a child wrote instead of the reply to a call."""


@dataclass(eq=False)
class Child:
    """A process that answers calls, one at a time: the first call starts it, and so does the first after its end.

    It ends with this object or with the run, if not earlier, and after a call that fails. It is not thread-safe.

    Attributes:
        handler: `module:function`, which the process calls with each message to get the reply; both are JSON objects.
        env: environment variables that it gets besides those of the run.
        cpu_seconds: CPU seconds per call, after which the system kills it; 0 for no limit.
        memory: bytes of its memory, where the system has such a limit; 0 for no limit.
        kept: whether a keeper kills all processes that it has started, however it ends.
        python: interpreter of another environment, where the handler is imported from `folder`.
        folder: folder of the handler's module, in place of the run's `sys.path`.
    """

    handler: str
    env: Mapping[str, str] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    memory: int = 0
    kept: bool = False
    python: str = sys.executable
    folder: str = ""

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()

    def reap(self) -> None:
        """Let the next call start another process if this one was killed from outside."""
        if self._process is not None and self._process.poll() is not None:
            self.end()

    @property
    def pid(self) -> int | None:
        """Id of the process group, which is also the session; None while no process runs."""
        return None if self._process is None else self._process.pid

    def call(
        self,
        message: Mapping[str, Any],
        seconds: float | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Send `message` and return the reply. Any error ends the process.

        Raises:
            TimeoutError: the call took longer than `seconds` or the CPU seconds; the message reads on from "took".
            ChildProcessError: the process has ended, or the reply is longer than `MAX_REPLY`; the message says how.
            ReplyError: something else came than the reply.
            Cancelled: `is_cancelled` has become true.
        """
        number = next(self._numbers)
        line = json.dumps({**message, "number": number}).encode() + b"\n"
        if self._process is None:
            self._start()
        try:
            return _parse(self._exchange(line, seconds, is_cancelled), number)
        except BaseException:  # a pending reply would be taken for the reply to the next call
            self.end()
            raise

    def end(self) -> None:
        """End the process, if there is one; a keeper kills all others."""
        if self._process is not None:
            self._finish()
            self._process = None

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._received = bytearray()
        settings = {name: getattr(self, name) for name in ("handler", "cpu_seconds", "memory", "kept")}
        with theirs:
            path = {"folder": self.folder} if self.folder else {"path": sys.path}
            words = [str(theirs.fileno()), json.dumps({**settings, **path})]
            command = [self.python, "-P", __file__, *words]
            self._process = start(command, {**os.environ, **self.env}, [theirs.fileno()], stdin=subprocess.DEVNULL)
        self._finish = weakref.finalize(self, _end, self._process, self._socket, self.kept, os.getpid())

    def _exchange(self, line: bytes, seconds: float | None, is_cancelled: Callable[[], bool]) -> bytearray:
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        unsent = memoryview(line)
        while unsent or b"\n" not in self._received:
            remaining = min(POLL_SECONDS, deadline - time.monotonic())
            if is_cancelled():
                raise Cancelled
            if remaining <= 0:
                raise TimeoutError(f"longer than {seconds:g} s")
            self._socket.settimeout(remaining)
            try:
                if unsent:
                    unsent = unsent[self._socket.send(unsent) :]
                else:
                    self._received += self._receive()
            except TimeoutError:
                continue
            except (EOFError, OSError):
                raise self._explain_end() from None
        reply, _, self._received = self._received.partition(b"\n")
        return reply

    def _receive(self) -> bytes:
        if not (part := self._socket.recv(1 << 20)) or len(self._received) > MAX_REPLY:
            raise EOFError
        return part

    def _explain_end(self) -> OSError:
        """Make the error for a process that is gone."""
        assert self._process is not None
        try:
            code = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return ChildProcessError("it closed its pipe")
        if self.cpu_seconds and code == -signal.SIGPROF:
            return TimeoutError(f"more than {self.cpu_seconds:g} s of computing time")
        return ChildProcessError(describe_exit(code, self.kept))


def start(
    command: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int], **streams: Any
) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own: Ctrl-C is for the run, which may have to finish a step.

    Args:
        command: the program and its arguments.
        env: all of its environment variables.
        descriptors: file descriptors that it inherits besides the streams.
        streams: `stdin`, `stdout` and `stderr`, as for `subprocess.Popen`.
    """
    return subprocess.Popen(command, env=env, pass_fds=descriptors, start_new_session=True, **streams)


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process that `start` has started, with its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def describe_exit(code: int, kept: bool = False) -> str:
    """Describe an exit code. That of a keeper names the signal which ended its child."""
    return signal.Signals(code - 128).name if kept and code - 128 in set(signal.Signals) else f"exit code {code}"


def _parse(line: bytearray, number: int) -> dict[str, Any]:
    """Parse the reply to call `number`."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        reply: dict[str, Any] = json.loads(line)
        if reply["number"] == number:  # otherwise another writer used the socket
            return reply
    raise ReplyError(bytes(line[:80]))


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket, kept: bool, owner: int) -> None:
    """Have the keeper kill all processes, and kill the process group if there is none or it was killed or stopped."""
    if os.getpid() != owner:  # a forked process shares the connection, and has no children yet
        connection.close()
        return
    with suppress(OSError):  # it may have ended
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_SECONDS if kept else 0)
    if process.returncode is None or (kept and process.returncode < 0):
        kill_group(process)
        process.wait()


def main(connection: int, settings: Mapping[str, Any]) -> None:
    """Answer calls until the run closes its end of the socket.

    Args:
        connection: file descriptor of the end that belongs to this process.
        settings: attributes of the `Child`, and the run's `sys.path` or the folder of the handler.
    """
    sys.path[:] = settings.get("path") or [settings["folder"], *sys.path]
    os.set_inheritable(connection, False)
    if settings["kept"]:
        fork_from_keeper(connection)
    handle = pkgutil.resolve_name(settings["handler"])
    if memory := settings["memory"]:
        with suppress(ValueError, OSError):  # macOS has no such limit
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with suppress(ConnectionError):  # the run has ended during a call, and reads no reply
        serve(connection, handle, settings["cpu_seconds"])
    os._exit(0)  # do not wait for threads that a function left running


def serve(connection: int, handle: Callable[[dict[str, Any]], dict[str, Any]], cpu_seconds: float) -> None:
    """Answer calls with `handle`. The system kills this process when one takes more than `cpu_seconds`."""
    if cpu_seconds:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    with open(connection, "rb", closefd=False) as calls, open(connection, "wb", closefd=False) as replies:
        for line in calls:
            if cpu_seconds:
                signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            message = json.loads(line)
            reply = json.dumps({**handle(message), "number": message["number"]}).encode()
            if cpu_seconds:
                signal.setitimer(signal.ITIMER_PROF, 0)
            replies.write(reply + b"\n")
            replies.flush()


def fork_from_keeper(connection: int) -> None:
    """Return in a child of this process, which becomes the keeper: it waits for the child or the run to end, then kills
    all descendants and exits with the child's exit code.
    """
    if sys.platform == "linux":  # orphans of a function's own processes become the keeper's children
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not (child := os.fork()):
        return
    import psutil  # noqa: F401  # once a process has to be killed, memory or files may be missing

    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    threading.Thread(target=end_with_run, args=(connection,), daemon=True).start()
    while (ended := os.wait())[0] != child:  # an orphan
        pass
    kill_descendants()
    code = os.waitstatus_to_exitcode(ended[1])
    os._exit(code if code >= 0 else 128 - code)


def end_with_run(connection: int) -> None:
    """Kill all descendants as soon as the other end of the socket is closed."""
    poll = select.poll()
    poll.register(connection, 0)  # only the hang-up of the other end, which poll always reports
    poll.poll()
    kill_descendants()


def kill_descendants() -> None:
    """Kill every descendant of this process, in any process group and session."""
    import psutil

    for _ in range(PASSES):
        alive = 0
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    alive += 1
        if not alive:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
