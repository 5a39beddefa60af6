"""Signals that end a run in order: the first lets the step end and saves, the second leaves at once.

A machine that is taken away says so with SIGTERM, a user with Ctrl-C (SIGINT). While steps are trained, a signal is
only noted, and the run looks at it behind each step and behind the last save; several processes then agree, so that all
stop at the same step. Before and after, when there is nothing to save, it ends the run where it stands.
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


class Stopper:
    """Listens to `SIGNALS` as a context manager; in another thread than the main one, where Python has no signals, it
    hears none.
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
        """Inside, a signal is noted for `asked`; it ends the run at the latest behind what is inside.

        Raises:
            Stopped: a signal came, and nothing inside has ended the run for it.
        """
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        if self._asked:
            raise Stopped(self._asked)

    def asked(self) -> str:
        """The name of the signal that this process or another has heard, or nothing. All processes have to call it."""
        return next(filter(None, distributed.gathered(self._asked, "stop")), "")

    def leave_if_asked(self) -> None:
        """Ends the run when any process has heard a signal. All processes have to call it.

        Raises:
            Stopped: one has.
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
