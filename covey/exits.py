"""Prevent code that is called in the run's own process from ending the run with a success status.

`os._exit(0)` ends a process at once and silently, with the exit code of success, and nothing can catch it. So from the
first such call on `os._exit` is replaced: with status 0 it raises SystemExit in a thread that calls the code. Other
statuses, other threads and forked processes are unaffected. Code that exits without Python (`_exit` of the C library)
can only be contained by a worker.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_exit_process = os._exit
_thread = threading.local()


@contextmanager
def block_exit() -> Iterator[None]:
    """Make `os._exit(0)` raise SystemExit in this thread while the context is open."""
    os._exit = _exit  # type: ignore[assignment]
    before, _thread.process = getattr(_thread, "process", None), os.getpid()
    try:
        yield
    finally:
        _thread.process = before


def _exit(status: int) -> None:
    if not status & 0xFF and getattr(_thread, "process", None) == os.getpid():
        raise SystemExit(f"os._exit({status})")
    _exit_process(status)
