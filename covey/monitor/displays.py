"""Displays of a run: lines of a log file, a table of steps above two live lines of a terminal, an output of a notebook.

In: rows of metrics and a `Status`. Out: text, on terminals and in notebooks no line wider than the screen: what does
not fit is left out, the least important first. Names of metrics and phases and texts of the model are untrusted:
characters that are not printable are shown as escapes, and nothing is read as markup.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from threading import Timer
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from covey.config.metrics import metric
from covey.display import BESIDE, printable
from covey.monitor.formats import (
    TEXT_WIDTH,
    SampleLine,
    duration,
    excerpt,
    in_unit,
    size,
    sparkline,
)
from covey.monitor.notebook import NOTEBOOK_LINES, NotebookOutput, plain_console

if TYPE_CHECKING:
    from covey.monitor.status import Status  # whose module reads run folders

HEARTBEAT = 15.0
"""Interval in seconds between the progress lines of a long phase in a log file."""
SLOW_COMPILE = 5.0
"""Number of seconds after which a log file says that a program is being compiled."""
NARROW = 80
"""Width of a terminal, in cells, below which the line of a sample leaves out its prompt."""
HEADER_EVERY = 20
"""Number of rows of the table after which its header is repeated."""
GAP = "  "
LONGEST_NAME = 14
"""Maximum width of a column's name, in cells."""
BAR_WIDTHS = (8, 48)
"""Smallest and largest width of the bar, in cells."""
SPARK_WIDTHS = (8, 40)
"""Smallest and largest width of the plot of the headline metric, in cells."""
SPINNER = "|/-\\"


class LogDisplay:
    """Display in a log file: a line per step, one per phase between two evaluations, and some for a long phase.

    Args:
        console: where to print.
        view: view of the present state.
        headline: the metric that is shown first.
        show: further metrics on the line of a step, where the row has them.
    """

    def __init__(self, console: Console, view: "StatusView", headline: str, show: Sequence[str]):
        self.console, self.view, self.headline, self._show = console, view, headline, show
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
        status = self.view.status()
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
        self.line(f"[{time.monotonic() - self._started:6.1f}s] {text or self.view.status().activity}")

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self._spoken = time.monotonic()
        self.console.print(Text(printable(text)), soft_wrap=True)

    def step(self, row: Mapping[str, float], total: int, left: float) -> None:
        """Show a step of `total`, of which `left` seconds are left."""
        columns = {"step": _count(row, total)}
        for name in (self.headline, *ALWAYS, *self._show, "tokens_per_second"):
            if name in row:
                columns.setdefault(name, _cell(row, name, self.headline))
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


class LiveDisplay(LogDisplay):
    """Display on a terminal, or in a notebook: a table of the steps scrolls by above the status, drawn in place."""

    def __init__(self, console: Console, view: "StatusView", headline: str, show: Sequence[str]):
        self.live: Live | NotebookOutput = Live(console=console, get_renderable=lambda: view, transient=True)
        if console.is_jupyter:
            self.live = NotebookOutput(NOTEBOOK_LINES, view.still(), console.width)
            console = plain_console(self.live, console.width)
        super().__init__(console, view, headline, show)
        self._table = StepTable(headline, show)

    def open(self) -> None:
        self.live.start()

    def close(self) -> None:
        self.live.stop()

    def changed(self) -> None:
        self.live.refresh()

    def step(self, row: Mapping[str, float], total: int, left: float) -> None:
        for line in self._table.lines(row, total, self.console.width):
            self._fitted_line(line)

    def latest(self, row: Mapping[str, float], samples: Sequence[SampleLine]) -> None:
        if isinstance(self.live, NotebookOutput):
            self.live.figures.step(row, samples)

    def samples(self, samples: Sequence[SampleLine]) -> None:
        for line in extremes(samples, self.console.width):
            self._fitted_line(Text(printable(line)))

    def _fitted_line(self, line: Text) -> None:
        """Print a line that is no wider than the screen."""
        self.console.print(line, no_wrap=True, overflow="ellipsis")

    def done(self, text: str) -> None:
        self.close()
        self.console.print(Panel(Text(text), title="done", title_align="left"))


class StepTable:
    """Table of steps, one line each. Its columns are those that fit the width, the most important first.

    Args:
        headline: metric of the column after the step; `<headline>_error` is shown with it.
        show: metrics of the columns after that one.
    """

    def __init__(self, headline: str, show: Sequence[str] = ()):
        self._names = list(dict.fromkeys((headline, *show, *STANDARD)))
        self._headline = headline
        self._measured: set[str] = set()
        self._header: tuple[str, ...] = ()
        self._rows = 0

    def lines(self, row: Mapping[str, float], total: int, width: int) -> Iterator[Text]:
        """Yield the line of a step, after a header where one is due.

        Args:
            row: metrics of the step; the table has the columns that any step so far had.
            total: number of updates of the whole run; 0 if it is not known.
            width: width of the terminal, in cells.
        """
        self._measured |= row.keys() & set(self._names)
        step = _count(row, total)
        first = max(len(f"{total}/{total}"), len(step), len("step"))
        names = self._fitting(width - first)
        header = tuple(self._aligned(name, self._label(name)) for name in names)
        if header != self._header or self._rows % HEADER_EVERY == 0:
            yield Text(_cut(GAP.join((f"{'step':>{first}}", *header)), width), style="dim", no_wrap=True)
            self._header, self._rows = header, 0
        self._rows += 1
        cells = (self._aligned(name, _cell(row, name, self._headline) if name in row else "-") for name in names)
        yield Text(_cut(GAP.join((f"{step:>{first}}", *cells)), width), no_wrap=True)

    def _fitting(self, width: int) -> list[str]:
        """Return the names of the columns that fit into `width` cells."""
        fitting: list[str] = []
        for name in (name for name in self._names if name in self._measured):
            width -= len(GAP) + self._width(name)
            if width < 0:
                break
            fitting.append(name)
        return fitting

    def _width(self, name: str) -> int:
        row = metric(name)
        expected = HEADLINE_WIDTH if name == self._headline else WIDTHS.get(row.unit if row else "", NUMBER_WIDTH)
        return max(expected, cell_len(self._label(name)))

    def _label(self, name: str) -> str:
        return _cut(printable(LABELS.get(name) or name.removesuffix("/mean").rpartition("/")[2] or name), LONGEST_NAME)

    def _aligned(self, name: str, text: str) -> str:
        """Align `text` to the right of the column `name`."""
        return " " * (self._width(name) - cell_len(text)) + text


class StatusView:
    """Two lines on the current state of a run: a bar with times, speed and memory; the phase with the headline metric.

    Args:
        status: returns the state at each drawing.
        headline: name of the metric that is plotted.
        values: values of this metric by step; they may grow.
        moving: whether a sign moves while the run goes on.
    """

    def __init__(self, status: "Callable[[], Status]", headline: str, values: Sequence[float], moving: bool = True):
        self.status, self._headline, self._values, self._moving = status, headline, values, moving

    def still(self) -> "StatusView":
        """Return the view for a single drawing."""
        return StatusView(self.status, self._headline, self._values, moving=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, width = self.status(), options.max_width
        facts = fitting(_facts(status), width - BAR_WIDTHS[0] - len(GAP) if status.total else width)
        line = _bar(status, min(width - cell_len(facts) - len(GAP), BAR_WIDTHS[1]), options.ascii_only)
        yield line.append(facts, style="default")
        yield self._activity(status, width, options.ascii_only)

    def _activity(self, status: "Status", width: int, ascii_only: bool) -> Text:
        """Return the line with the phase and the plot."""
        sign = f"{SPINNER[int(4 * time.monotonic()) % 4]} " if self._moving else ""
        since = f" {duration(status.phase_seconds)}" if status.phase and status.phase_seconds >= 3 else ""
        phase = _cut(f"{sign}{printable(status.activity)}{since}", width)
        line = Text(phase, style="yellow" if status.compiling else "", no_wrap=True)
        name = f"{GAP if phase else ''}{printable(self._headline)} "
        room = min(width - cell_len(phase) - cell_len(name), SPARK_WIDTHS[1])
        if self._values and room >= SPARK_WIDTHS[0]:
            line.append(f"{name}{sparkline(self._values, room, ascii_only)}", style="default")
        return line


def fitting(parts: Iterable[tuple[int, str]], width: int) -> str:
    """Join the texts of `parts` that fit into `width` cells.

    Args:
        parts: priority and text of each part, in the order shown; the highest numbers are left out first.

    >>> fitting([(0, "3/9"), (2, "10s"), (1, "left 20s")], 14)
    '3/9  left 20s'
    """
    visible = [part for part in parts if part[1]]
    while len(visible) > 1 and cell_len(GAP.join(text for _, text in visible)) > width:
        visible.remove(max(visible))
    return _cut(GAP.join(text for _, text in visible), width)


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


def _count(row: Mapping[str, float], total: int) -> str:
    return f"{int(row['step'])}/{total}" if total else f"{int(row['step'])}"


def _cell(row: Mapping[str, float], name: str, headline: str) -> str:
    """Return the value of `name` as text; that of the headline has its standard error with it."""
    if name != headline:
        return in_unit(name, row[name])
    error = row.get(f"{name}_error")
    return f"{row[name]:.3f}" + ("" if error is None else f" ±{error:.3f}")


def _bar(status: "Status", width: int, ascii_only: bool) -> Text:
    """Return a bar of the steps made, `width` cells wide, and the gap behind it; nothing while the total is unknown."""
    line = Text(no_wrap=True)
    if not status.total or width < 1:
        return line
    done, ahead = "#-" if ascii_only else "━─"
    full = min(width * status.step // status.total, width)
    return line.append(done * full, style="green").append(ahead * (width - full), style="dim").append(GAP)


def _facts(status: "Status") -> list[tuple[int, str]]:
    """Return the figures of the first line with their priority."""
    count = f"{status.step}/{status.total}" if status.total else f"step {status.step}" if status.step else ""
    return [
        (0, count),
        (2, duration(status.seconds)),
        (1, f"left {duration(status.left)}" if status.left else ""),
        (3, f"{status.tokens_per_second:.0f} tok/s" if status.tokens_per_second else ""),
        (4, size(status.memory) if status.memory else ""),
    ]


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, max(width - 1, 0)) + "…"


ALWAYS = ("frac_reward_zero_std", "completions/mean_length")
"""Metrics after the headline on the line of a step in a log file."""
STANDARD = (
    "completions/mean_length",
    "frac_reward_zero_std",
    "tokens_per_second",
    "step_time",
    "completions/clipped_ratio",
    "entropy",
    "grad_norm",
    "learning_rate",
)
"""Metrics of the columns of a terminal after those that the run names, the most important first."""
LABELS = {
    "completions/mean_length": "length",
    "completions/clipped_ratio": "clipped",
    "frac_reward_zero_std": "zero std",
    "tokens_per_second": "tok/s",
    "step_time": "time",
    "learning_rate": "lr",
}
"""Names of columns that are not the last part of the metric's name."""
WIDTHS = {"share": 5, "tokens": 6, "tokens/s": 6, "s": 6}
"""Widths of the columns of a unit, in cells; other units have `NUMBER_WIDTH`."""
NUMBER_WIDTH, HEADLINE_WIDTH = 8, 13
