"""A worker process, which calls reward functions for the run that started it and ends with that run.

`workers` starts it as a script, which forks before importing anything. The parent is the *keeper*: it leads the process
group, runs no user code and so cannot hang. When the run has ended or the child dies, it kills all remaining processes,
including those that a function moved to another session. The child is the *worker*: it reads jobs from one pipe and
writes results to another, as length-prefixed JSON. Nothing is unpickled.
"""

import ctypes
import json
import os
import select
import signal
import struct
import sys
from contextlib import suppress
from typing import Any

LENGTH = struct.Struct(">Q")
"""Prefix of each message: its length in bytes."""
PR_SET_CHILD_SUBREAPER = 36
PASSES = 20
"""Maximum scans for descendants: one may be started while another is killed."""


def main(jobs: int, results: int, path: list[str]) -> None:
    """Fork into keeper and worker, and run until the other end of the pipe `jobs` is closed.

    Args:
        jobs, results: file descriptors, to read from and to write to.
        path: the run's `sys.path`.
    """
    sys.path[:] = path
    for descriptor in (jobs, results):
        os.set_inheritable(descriptor, False)
    if sys.platform == "linux":  # orphans of a function's own processes become the keeper's children
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if worker := os.fork():
        os.close(results)
        keep(worker, jobs)
    else:
        work(jobs, results)
        os._exit(0)  # do not wait for threads that a function left running


def keep(worker: int, jobs: int) -> None:
    """Wait for `worker` or the run to end, then kill all descendants and exit with the worker's exit code."""

    def reap(*_: Any) -> None:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == worker:
                    leave(os.waitstatus_to_exitcode(found[1]))

    def leave(code: int) -> None:
        end_descendants(os.getpid())
        os._exit(code if code >= 0 else 128 - code)

    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, reap)
    reap()
    poll = select.poll()
    poll.register(jobs, 0)  # only the hang-up of the other end, which poll always reports
    poll.poll()
    leave(0)


def work(jobs: int, results: int) -> None:
    """Run jobs until the pipe is closed."""
    from covey.errors import CoveyError  # imported late: the keeper does not need it
    from covey.rewards.registry import resolve

    functions: dict[str, Any] = {}
    while (job := receive(jobs)) is not None:
        name = job["function"]
        try:
            functions[name] = functions.get(name) or resolve(name)
            answer = called(functions[name], job) if "arguments" in job else {}
        except CoveyError as error:
            answer = {"refused": {"what": error.what, "want": error.want, "fix": error.fix, "where": error.where}}
        send(results, json.dumps({**answer, "number": job["number"]}).encode())


def called(function: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Make the call that `job` describes and return its outcome as JSON."""
    import asyncio
    import inspect

    from covey.rewards.call import call, finished, to_wire

    outcome = call(function, job["arguments"], job["count"])
    return to_wire(asyncio.run(finished(outcome, job["count"])) if inspect.isawaitable(outcome) else outcome)


def receive(pipe: int) -> Any:
    """Read the next message, or None at the end of the pipe."""
    if len(head := _exactly(pipe, LENGTH.size)) < LENGTH.size:
        return None
    return json.loads(_exactly(pipe, LENGTH.unpack(head)[0]))


def send(pipe: int, message: bytes) -> None:
    """Write a whole message."""
    rest = memoryview(LENGTH.pack(len(message)) + message)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def end_descendants(root: int) -> None:
    """Kill every descendant of `root`, in any process group and session, but not `root` itself."""
    for _ in range(PASSES):
        if not (found := descendants(root)):
            return
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """Return all living descendants of `root`, or none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit() and (stat := _stat(entry)) and stat[0] != "Z":
            children.setdefault(int(stat[1]), []).append(int(entry))
    found, look = [], [root]
    while look:
        new = children.get(look.pop(), [])
        found += new
        look += new
    return found


def _stat(process: str) -> list[str]:
    """Return state, parent and further fields of a process's stat line, or [] when the process has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _exactly(pipe: int, size: int) -> bytes:
    """Read `size` bytes, or fewer when the pipe ends first."""
    parts: list[bytes] = []
    while size and (part := os.read(pipe, min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
