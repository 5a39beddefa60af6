"""Display of a run in a log file: a line per step, one per phase between two evaluations, some for a long phase or
compilation, and now and then the best and the worst completion.
"""

import time
from collections.abc import Iterable, Sequence
from operator import attrgetter
from threading import Timer
from typing import Any

from covey.display import BESIDE
from covey.monitor.display import Display
from covey.monitor.formats import TEXT_WIDTH, SampleLine, excerpt

HEARTBEAT = 15.0
"""Interval in seconds between the progress lines of a long phase."""
SLOW_COMPILE = 5.0
"""Number of seconds after which a log says that a program is being compiled."""
NARROW = 80
"""Width of a terminal, in cells, below which the line of a sample leaves out its prompt."""


class LogDisplay(Display):
    """Display in a log file.

    Args:
        given: those of `Display`.
    """

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._spoken = time.monotonic()
        self._announced: set[str] = set()
        self._slow_compile = Timer(0, self._tell_activity)

    def close(self) -> None:
        self._slow_compile.cancel()

    def changed(self) -> None:
        """Print a new phase, the progress of a long one, and a compilation that takes long."""
        status = self.status()
        self._slow_compile.cancel()
        if new := {status.phase, *status.ahead.split(BESIDE)} - self._announced - {""}:
            self._announced |= new
            self._tell_activity()
        elif status.compiling:
            self._slow_compile = Timer(SLOW_COMPILE, self._tell_activity)
            self._slow_compile.daemon = True
            self._slow_compile.start()
        elif status.activity and time.monotonic() - self._spoken >= HEARTBEAT:
            self._tell_activity()

    def _tell_activity(self) -> None:
        self.stamp(self.status().activity)

    def line(self, text: str) -> None:
        self._spoken = time.monotonic()
        super().line(text)

    def evaluation(self, lines: Iterable[str]) -> None:
        self._announced.clear()
        super().evaluation(lines)

    def samples(self, samples: Sequence[SampleLine]) -> None:
        for line in extremes(samples):
            self.line(line)


def extremes(samples: Sequence[SampleLine], width: int = 0) -> list[str]:
    """Return the best and the worst of `samples`, one line each; `width` cells wide if that is not 0."""
    if not samples:
        return []
    rank = attrgetter("rank")
    both = (("best ", max(samples, key=rank)), ("worst", min(samples, key=rank)))
    return [_sample_line(f"  {name} {sample.reward:+.2f}  ", sample, width) for name, sample in both]


def _sample_line(start: str, sample: SampleLine, width: int) -> str:
    arrow, dots = "  →  ", len(" … ")
    if 0 < width < NARROW:
        return f"{start}{excerpt(sample.text, max(width - len(start) - dots, 0))}"
    room = min((width - len(start) - len(arrow)) // 2 - dots if width else TEXT_WIDTH, TEXT_WIDTH)
    return f"{start}{excerpt(sample.prompt, room)}{arrow}{excerpt(sample.text, room)}"
