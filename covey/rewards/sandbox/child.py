"""A worker process, which calls reward functions for the run that started it and ends with that run.

`workers` starts it as a script, which forks before importing anything. The parent is the *keeper*: it leads the process
group, runs no user code and so cannot hang. When the run has ended or the child dies, it kills all remaining processes,
including those that a function moved to another session. The child is the *worker*: it reads jobs from a socket and
writes results to it, one JSON object per line. Nothing is unpickled.
"""

import ctypes
import json
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
PASSES = 20
"""Maximum scans for descendants: one may be started while another is killed."""


def main(socket: int, path: list[str]) -> None:
    """Fork into keeper and worker, and run until the run closes its end of the socket.

    Args:
        socket: file descriptor of the end that belongs to this process.
        path: the run's `sys.path`.
    """
    sys.path[:] = path
    os.set_inheritable(socket, False)
    if sys.platform == "linux":  # orphans of a function's own processes become the keeper's children
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if worker := os.fork():
        keep(worker, socket)
    else:
        serve(socket)
        os._exit(0)  # do not wait for threads that a function left running


def keep(worker: int, socket: int) -> None:
    """Wait for `worker` or the run to end, then kill all descendants and exit with the worker's exit code."""
    import psutil  # noqa: F401  # once a process has to be killed, memory or files may be missing

    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    threading.Thread(target=end_with_run, args=(socket,), daemon=True).start()
    while (ended := os.wait())[0] != worker:  # an orphan
        pass
    kill_descendants()
    code = os.waitstatus_to_exitcode(ended[1])
    os._exit(code if code >= 0 else 128 - code)


def end_with_run(socket: int) -> None:
    """Kill the worker and all other descendants as soon as the other end of the socket is closed."""
    poll = select.poll()
    poll.register(socket, 0)  # only the hang-up of the other end, which poll always reports
    poll.poll()
    kill_descendants()


def kill_descendants() -> None:
    """Kill every descendant of this process, in any process group and session."""
    import psutil

    for _ in range(PASSES):
        found = 0
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    found += 1
        if not found:
            return


def serve(socket: int) -> None:
    """Run jobs until the run closes its end of the socket."""
    from covey.errors import CoveyError  # imported late: the keeper does not need it
    from covey.rewards.registry import resolve

    functions: dict[str, Any] = {}
    with open(socket, "rb", closefd=False) as jobs, open(socket, "wb", closefd=False) as results:
        for job in map(json.loads, jobs):
            name = job["function"]
            try:
                functions[name] = functions.get(name) or resolve(name)
                answer = run_job(functions[name], job) if "arguments" in job else {}
            except CoveyError as error:
                answer = {"refused": {"what": error.what, "want": error.want, "fix": error.fix, "where": error.where}}
            results.write(json.dumps({**answer, "number": job["number"]}).encode() + b"\n")
            results.flush()


def run_job(function: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Make the call that `job` describes and return its outcome as JSON."""
    import asyncio
    import inspect

    from covey.rewards.call import await_outcome, call, outcome_to_json

    outcome = call(function, job["arguments"], job["count"])
    if inspect.isawaitable(outcome):
        outcome = asyncio.run(await_outcome(outcome, job["count"]))
    return outcome_to_json(outcome)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
