"""Keeps code that is called in the run's own process from ending the run as if it were done.

`os._exit(0)` ends a process at once, with the exit code of success and without a word, and nothing can catch it. So
while such code is called, `os._exit` is replaced: status 0 raises SystemExit in the thread that calls the code.
Everything else goes its way: other statuses, other threads, and processes that were forked. Code that exits without
Python (`_exit` of the C library) is only held by a worker.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_calls = 0
_exit_process = os._exit
_thread = threading.local()


@contextmanager
def refused() -> Iterator[None]:
    """Inside, and in this thread, `os._exit(0)` raises SystemExit."""
    global _calls, _exit_process
    with _lock:
        if not _calls:
            _exit_process, os._exit = os._exit, _exit  # type: ignore[assignment]
        _calls += 1
    before, _thread.process = getattr(_thread, "process", None), os.getpid()
    try:
        yield
    finally:
        _thread.process = before
        with _lock:
            _calls -= 1
            if not _calls:
                os._exit = _exit_process


def _exit(status: int) -> None:
    """Stands for `os._exit`. A module that was imported meanwhile may keep it for good."""
    if not status & 0xFF and getattr(_thread, "process", None) == os.getpid():
        raise SystemExit(f"os._exit({status})")
    _exit_process(status)
