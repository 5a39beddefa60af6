"""Checks within some minutes: those that time nothing run beside each other, while the timed ones compile. Then each
of these has the device for itself, one after the other.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from benchmarks.accelerator.checks import ALONE, BESIDE, PREPARED, Check
from benchmarks.accelerator.turn import VARIABLE, file_of

BARRIER = 0.45
"""Share of the minutes behind which the timed checks begin, whatever has not come to its end or is not ready."""
LEAST = 20.0
"""With fewer seconds left no check is begun."""
RESERVE = 6.0
"""Seconds at the end, for the results."""
NO_RESERVATION = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""No process takes three quarters of a GPU's memory for itself: others run beside it."""


@dataclass
class Running:
    """A check in its process.

    Attributes:
        log: file of its messages.
        turn: place of the files of its turn.
        began: when it was started, by the clock of `time.monotonic`.
        was_ended: whether it took too long.
    """

    check: Check
    process: "subprocess.Popen[bytes]"
    log: Path
    turn: Path
    began: float
    was_ended: bool = False

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    @property
    def waits(self) -> bool:
        """Whether it has compiled, and waits for its turn."""
        return file_of(self.turn, "ready").exists()

    def wait(self, until: float) -> None:
        """Wait for its end, and end it with all processes that it started if that is not `until` then."""
        try:
            while not self.is_done and time.monotonic() < until:
                time.sleep(0.05)
        finally:
            self.was_ended = not self.is_done
            for how in (signal.SIGTERM, signal.SIGKILL):
                if not self.is_done:
                    with suppress(ProcessLookupError):
                        os.killpg(self.process.pid, how)
                    with suppress(subprocess.TimeoutExpired):
                        self.process.wait(3)


class Timetable:
    """Makes checks within some minutes.

    Args:
        folder: of results.
        minutes: for all checks together, from `began` on.
        start: starts the process of a check, with further variables of its environment; returns it and the file of its
            messages.
        ended: called with each check that was begun as it ends.
        began: by the clock of `time.monotonic`.
    """

    def __init__(
        self,
        folder: Path,
        minutes: float,
        start: Callable[[Check, dict[str, str]], tuple["subprocess.Popen[bytes]", Path]],
        ended: Callable[[Running], None],
        began: float,
    ):
        self.folder, self._start_process, self._ended = folder, start, ended
        self.until, self.barrier = began + 60 * minutes - RESERVE, began + 60 * minutes * BARRIER

    def make(self, checks: Sequence[Check]) -> None:
        """Make as many of the checks as the minutes allow, the first ones first."""
        first = list(takewhile(lambda check: check.turn == ALONE, checks))  # what the others rest on
        self._alone(first, {})
        rest = checks[len(first) :]
        running = {check.name: self._start(check) for check in rest if check.turn != ALONE}
        try:
            while any(not (one.is_done or one.waits) for one in running.values()) and time.monotonic() < self.barrier:
                time.sleep(0.05)
            for check in rest:
                if check.turn == BESIDE:
                    self._finish(running.pop(check.name), self.barrier)
            self._alone([check for check in rest if check.turn != BESIDE], running)
        finally:
            for one in running.values():
                one.wait(0)

    def _alone(self, checks: Sequence[Check], prepared: dict[str, Running]) -> None:
        """Give each check the device for itself, whether it is prepared or not."""
        for check in checks:
            if self.until - time.monotonic() < LEAST:
                return
            one = prepared.pop(check.name, None) or self._start(check)
            file_of(one.turn, "go").touch()
            self._finish(one, min(self.until, time.monotonic() + check.seconds))

    def _start(self, check: Check) -> Running:
        turn, now = (self.folder / check.file_name).absolute(), time.monotonic()
        for ending in ("ready", "go"):
            file_of(turn, ending).unlink(missing_ok=True)
        of_turn = {VARIABLE: str(turn)} if check.turn == PREPARED else {}
        return Running(check, *self._start_process(check, NO_RESERVATION | of_turn), turn, now)

    def _finish(self, one: Running, until: float) -> None:
        one.wait(until)
        self._ended(one)
