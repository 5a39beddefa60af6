"""The plain display of a run: lines of a log file, or of a script. Packages offer others by the entry points
`covey.displays`: `terminal`, `notebook` for `Progress`, and `notebook-lines` for a script without a folder.

Names of metrics and phases and texts of the model are untrusted: characters that are not printable are shown as
escapes, and nothing is read as markup.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from threading import Timer
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from covey.display import BESIDE, printable
from covey.monitor.formats import TEXT_WIDTH, SampleLine, duration, excerpt, figures, in_unit
from covey.monitor.status import Status
from covey.registry import all_offered

if TYPE_CHECKING:
    from covey.monitor.record import StepRecord  # needs NumPy, which `covey watch` does not

HEARTBEAT = 15.0
"""Interval in seconds between the progress lines of a long phase."""
SLOW_COMPILE = 5.0
"""Number of seconds after which a log file says that a program is being compiled."""
NARROW = 80
"""Width of a terminal, in cells, below which the line of a sample leaves out its prompt."""
ALWAYS = ("frac_reward_zero_std", "completions/mean_length")
"""Metrics after the main one on the line of a step."""


class LogDisplay:
    """Display in a log file: a line per step, one per phase between two evaluations, and some for a long phase.

    Args:
        console: where to print.
        status: returns the present state.
        main_metric: the metric that is shown first.
        show: further metrics on the line of a step, where the row has them.
        values: values of the main metric by step; they grow.
    """

    def __init__(
        self,
        console: Console,
        status: Callable[[], Status],
        main_metric: str,
        show: Sequence[str],
        values: Sequence[float],
    ):
        self.console, self.status, self.main_metric, self.show, self.values = console, status, main_metric, show, values
        self._started = self._spoken = time.monotonic()
        self._announced: set[str] = set()
        self._slow_compile = Timer(0, self.stamp)

    def open(self) -> None:
        """Begin to show the status, where it is shown in place."""

    def close(self) -> None:
        """Show the status no longer."""
        self._slow_compile.cancel()

    def changed(self) -> None:
        """Print a new phase, the progress of a long one, and a compilation that takes long."""
        status = self.status()
        self._slow_compile.cancel()
        if new := {status.phase, *status.ahead.split(BESIDE)} - self._announced - {""}:
            self._announced |= new
            self.stamp()
        elif status.compiling:
            self._slow_compile = Timer(SLOW_COMPILE, self.stamp)
            self._slow_compile.daemon = True
            self._slow_compile.start()
        elif status.activity and time.monotonic() - self._spoken >= HEARTBEAT:
            self.stamp()

    def stamp(self, text: str = "") -> None:
        """Print `text`, or the present activity, with the time."""
        self.line(f"[{time.monotonic() - self._started:6.1f}s] {text or self.status().activity}")

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self._spoken = time.monotonic()
        self.console.print(Text(printable(text)), soft_wrap=True)

    def step(self, row: Mapping[str, float], total: int, left: float) -> None:
        """Show a step of `total`, of which `left` seconds are left."""
        columns = {"step": step_count(row, total)}
        for name in (self.main_metric, *ALWAYS, *self.show, "tokens_per_second"):
            if name in row:
                columns.setdefault(name, cell(row, name, self.main_metric))
        columns |= {"left": duration(left)} if left else {}
        self.line("  ".join(f"{name} {value}" for name, value in columns.items()))

    def evaluation(self, lines: Iterable[str]) -> None:
        """Show the results of an evaluation."""
        self._announced.clear()
        for line in lines:
            self.line(line)

    def latest(self, row: Mapping[str, float], samples: Sequence[SampleLine]) -> None:
        """Add the metrics of a step and its completions to the figures, where there are some."""

    def samples(self, samples: Sequence[SampleLine]) -> None:
        """Show the best and the worst of `samples`."""
        for line in extremes(samples):
            self.line(line)

    def done(self, text: str) -> None:
        """Show the end of the run."""
        self.console.print(Text(text), soft_wrap=True)


class StepLines:
    """Observer that prints one line per step.

    Args:
        names: metrics on the line, where the step has them.
    """

    def __init__(self, names: Iterable[str]):
        self._names = tuple(names)

    def __call__(self, record: "StepRecord") -> None:
        """Show the step."""
        numbers = "  ".join(f"{name} {record.metrics[name]:.4g}" for name in self._names if name in record.metrics)
        self.line(f"step {record.step}/{record.total}  {numbers}")

    def evaluation(self, name: str, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of the evaluation `name` (`before`, `after`)."""
        self.line(f"{name}: {figures(metrics)}")

    def line(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)


def make_step_lines(names: Iterable[str]) -> StepLines:
    """Return the observer that prints steps; in a notebook an observer that a package offers."""
    offers = all_offered("covey.displays") if Console().is_jupyter else {}
    lines: StepLines = offers.get("notebook-lines", lambda: StepLines)()(names)
    return lines


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


def step_count(row: Mapping[str, float], total: int) -> str:
    """Return the number of a step, with `total` where that is known."""
    return f"{int(row['step'])}/{total}" if total else f"{int(row['step'])}"


def cell(row: Mapping[str, float], name: str, main_metric: str) -> str:
    """Return the value of `name` as text; the main metric has its standard error with it."""
    if name != main_metric:
        return in_unit(name, row[name])
    error = row.get(f"{name}_error")
    return f"{row[name]:.3f}" + ("" if error is None else f" ±{error:.3f}")
