"""A worker process: calls reward functions for the run that started it, and ends with it.

Started by `workers` as a script, and split in two before anything is imported. One half *keeps*: it leads the process
group, runs nobody's code and so cannot hang. When the run is gone or the other half dies, it kills whatever is left,
also what a function put into a session of its own. The other half *works*: it takes jobs from one pipe and answers on
another, in JSON with its length before it. Nothing is ever unpickled.
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
"""Stands before each message: its bytes."""
PR_SET_CHILD_SUBREAPER = 36
PASSES = 20
"""Looks for descendants, at most: one may be born while another is killed."""


def main(jobs: int, results: int, path: list[str]) -> None:
    """Keeps and works, until the other end of the pipe `jobs` is closed.

    Args:
        jobs, results: file descriptors, to read from and to write to.
        path: where the run looks for modules.
    """
    sys.path[:] = path
    for descriptor in (jobs, results):
        os.set_inheritable(descriptor, False)
    if sys.platform == "linux":  # whom a function's own process leaves behind becomes the keeper's child
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if worker := os.fork():
        os.close(results)
        keep(worker, jobs)
    else:
        work(jobs, results)
        os._exit(0)  # threads that a function left behind are not waited for


def keep(worker: int, jobs: int) -> None:
    """Waits for the end of `worker` or of the run; leaves nothing behind. The exit code is the worker's."""

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
    poll.register(jobs, 0)  # no event but the end of the other side, which is always told
    poll.poll()
    leave(0)


def work(jobs: int, results: int) -> None:
    """Answers jobs until there are no more."""
    from covey.errors import CoveyError  # late: the keeper needs none of it
    from covey.rewards.score import resolve

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
    """What the call that `job` asks for comes to."""
    import asyncio
    import inspect

    from covey.rewards.call import call, finished, to_wire

    outcome = call(function, job["arguments"], job["count"])
    return to_wire(asyncio.run(finished(outcome, job["count"])) if inspect.isawaitable(outcome) else outcome)


def receive(pipe: int) -> Any:
    """The next message; None at the end."""
    if len(head := _exactly(pipe, LENGTH.size)) < LENGTH.size:
        return None
    return json.loads(_exactly(pipe, LENGTH.unpack(head)[0]))


def send(pipe: int, message: bytes) -> None:
    """Writes a message whole."""
    rest = memoryview(LENGTH.pack(len(message)) + message)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def end_descendants(root: int) -> None:
    """Kills every process that descends from `root`, whichever group and session it is in, but not `root`."""
    for _ in range(PASSES):
        if not (found := descendants(root)):
            return
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """The living children of `root`, theirs, and so on; none where there is no /proc."""
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
    """State, parent and the rest of a process's line; nothing when it is gone."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _exactly(pipe: int, size: int) -> bytes:
    """`size` bytes, or what there was before the end."""
    parts: list[bytes] = []
    while size and (part := os.read(pipe, min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
