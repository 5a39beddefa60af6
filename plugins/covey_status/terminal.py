"""Display of a run on a terminal: a table of steps above two live lines.

In: rows of metrics and a `Status`. Out: text, no line wider than the screen: what does not fit is left out, the least
important first. Names of metrics and phases and texts of the model are untrusted:
characters that are not printable are shown as escapes, and nothing is read as markup.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from covey.config.metrics import metric
from covey.display import printable
from covey.monitor.display import Display, cell, step_count
from covey.monitor.formats import SampleLine, duration, size, sparkline
from covey.monitor.status import Status
from covey_status.log import extremes

HEADER_EVERY = 20
"""Number of rows of the table after which its header is repeated."""
GAP = "  "
LONGEST_NAME = 14
"""Maximum width of a column's name, in cells."""
BAR_WIDTHS = (8, 48)
"""Smallest and largest width of the bar, in cells."""
SPARK_WIDTHS = (8, 40)
"""Smallest and largest width of the plot of the main metric, in cells."""
SPINNER = "|/-\\"


class TerminalDisplay(Display):
    """Display on a terminal: a table of the steps scrolls by above the status, which is drawn in place.

    Args:
        given: those of `Display`.
    """

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._table, self.live = StepTable(self.main_metric, self.show), self.make_live()

    def open(self) -> None:
        self.live.start()

    def make_live(self) -> Any:
        """Return the output that is drawn in place."""
        view = StatusView(self.status, self.main_metric, self.values)
        return Live(console=self.console, get_renderable=lambda: view, transient=True)

    def close(self) -> None:
        self.live.stop()

    def changed(self) -> None:
        self.live.refresh()

    def step(self, row: Mapping[str, float], total: int, left: float) -> None:
        for line in self._table.lines(row, total, self.console.width):
            self._fitted_line(line)

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
        main_metric: metric of the column after the step; `<main_metric>_error` is shown with it.
        show: metrics of the columns after that one.
    """

    def __init__(self, main_metric: str, show: Sequence[str] = ()):
        self._names = list(dict.fromkeys((main_metric, *show, *STANDARD)))
        self._main_metric = main_metric
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
        step = step_count(row, total)
        first = max(len(f"{total}/{total}"), len(step), len("step"))
        names = self._fitting(width - first)
        header = tuple(self._aligned(name, self._label(name)) for name in names)
        if header != self._header or self._rows % HEADER_EVERY == 0:
            yield Text(_cut(GAP.join((f"{'step':>{first}}", *header)), width), style="dim", no_wrap=True)
            self._header, self._rows = header, 0
        self._rows += 1
        cells = (self._aligned(name, cell(row, name, self._main_metric) if name in row else "-") for name in names)
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
        expected = MAIN_WIDTH if name == self._main_metric else WIDTHS.get(row.unit if row else "", NUMBER_WIDTH)
        return max(expected, cell_len(self._label(name)))

    def _label(self, name: str) -> str:
        return _cut(printable(LABELS.get(name) or name.removesuffix("/mean").rpartition("/")[2] or name), LONGEST_NAME)

    def _aligned(self, name: str, text: str) -> str:
        """Align `text` to the right of the column `name`."""
        return " " * (self._width(name) - cell_len(text)) + text


class StatusView:
    """Two lines on the current state of a run: a bar with times, speed and memory; the phase with the main metric.

    Args:
        status: returns the state at each drawing.
        main_metric: name of the metric that is plotted.
        values: values of this metric by step; they may grow.
        moving: whether a sign moves while the run goes on.
    """

    def __init__(self, status: Callable[[], Status], main_metric: str, values: Sequence[float], moving: bool = True):
        self.status, self._main_metric, self._values, self._moving = status, main_metric, values, moving

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, width = self.status(), options.max_width
        facts = fitting(_facts(status), width - BAR_WIDTHS[0] - len(GAP) if status.total else width)
        line = _bar(status, min(width - cell_len(facts) - len(GAP), BAR_WIDTHS[1]), options.ascii_only)
        yield line.append(facts, style="default")
        yield self._activity(status, width, options.ascii_only)

    def _activity(self, status: Status, width: int, ascii_only: bool) -> Text:
        """Return the line with the phase and the plot."""
        sign = f"{SPINNER[int(4 * time.monotonic()) % 4]} " if self._moving else ""
        since = f" {duration(status.phase_seconds)}" if status.phase and status.phase_seconds >= 3 else ""
        phase = _cut(f"{sign}{printable(status.activity)}{since}", width)
        line = Text(phase, style="yellow" if status.compiling else "", no_wrap=True)
        name = f"{GAP if phase else ''}{printable(self._main_metric)} "
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


def _bar(status: Status, width: int, ascii_only: bool) -> Text:
    """Return a bar of the steps made, `width` cells wide, and the gap behind it; nothing while the total is unknown."""
    line = Text(no_wrap=True)
    if not status.total or width < 1:
        return line
    done, ahead = "#-" if ascii_only else "━─"
    full = min(width * status.step // status.total, width)
    return line.append(done * full, style="green").append(ahead * (width - full), style="dim").append(GAP)


def _facts(status: Status) -> list[tuple[int, str]]:
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
NUMBER_WIDTH, MAIN_WIDTH = 8, 13
