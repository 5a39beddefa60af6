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
from covey.parallel import distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalHandler:
    """Handle `SIGNALS` as a context manager; outside the main thread, where Python allows no signal handlers, it does
    nothing.
    """

    def __init__(self) -> None:
        self._asked, self._deferring = "", False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Record a signal inside this context for `asked`; it ends the run at the exit of the context at the latest.

        Raises:
            Stopped: a signal came, and the body has not ended the run for it.
        """
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        if self._asked:
            raise Stopped(self._asked)

    def asked(self) -> str:
        """Return the name of the signal that any process has received, or "". All processes must call it."""
        return next(filter(None, distributed.gathered(self._asked, "stop")), "")

    def leave_if_asked(self) -> None:
        """End the run if any process has received a signal. All processes must call it.

        Raises:
            Stopped: a process has received one.
        """
        if asked := self.asked():
            raise Stopped(asked)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            os.write(2, b"\nstopped at once\n")
            os._exit(128 + number)
        self._asked = signal.Signals(number).name
        if not self._deferring:
            raise Stopped(self._asked)
        os.write(2, f"\n{self._asked}: this step is ended and saved first; once more leaves at once\n".encode())
