"""Handle signals that end a run: after the first the step finishes and is saved, the second exits at once.

A preempted machine sends SIGTERM, a user's Ctrl-C SIGINT. During training a signal is only recorded, and the run checks
for it after each step and after the last save; several processes then agree, so that all stop at the same step.
Before and after training, when there is nothing to save, a signal ends the run immediately.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from covey.errors import Stopped
from covey.parallel import processes

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalHandler:
    """Handle `SIGNALS` as a context manager; outside the main thread, where Python allows no signal handlers, it does
    nothing.

    Args:
        second_ends_process: whether a second signal ends the process; if not, it ends the run alone, at once.
    """

    def __init__(self, second_ends_process: bool = True) -> None:
        self._received, self._deferring, self._ends_process = "", False, second_ends_process
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Record a signal inside this context for `requested`; it ends the run at the exit from the context at latest.

        Raises:
            Stopped: a signal came, and the body has not ended the run for it.
        """
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        if self._received:
            raise Stopped(self._received)

    def requested(self) -> str:
        """Return the name of the signal that any process has received, or "". All processes must call it."""
        received = self._received  # a second signal may come meanwhile, to this process alone
        return next(filter(None, processes.here().compare(received, "stop").values()), received)

    def raise_if_requested(self) -> None:
        """End the run if any process has received a signal. All processes must call it.

        Raises:
            Stopped: a process has received one.
        """
        if requested := self.requested():
            raise Stopped(requested)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received and not self._ends_process:
            raise Stopped(self._received)
        if self._received:
            os.write(2, b"\nstopped at once\n")
            os._exit(128 + number)
        self._received = signal.Signals(number).name
        if not self._deferring:
            raise Stopped(self._received)
        os.write(
            2, f"\n{self._received}: the run ends once this step is saved; a second signal ends it at once\n".encode()
        )
