"""Show a run on a terminal: a table of its steps that scrolls by, and below it two lines that say what it does now.

In: rows of metrics and a `Status`. Out: lines for rich, none wider than the terminal. What does not fit is left out,
the least important first. Names of metrics and phases are untrusted: characters that are not printable are shown as
escapes, and nothing is read as markup.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from covey.config.metrics import metric
from covey.display import printable
from covey.monitor.formats import ASCII_SPARKS, SPARKS, duration, in_unit, size, sparkline
from covey.monitor.status import Status

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
        step = f"{int(row['step'])}/{total}" if total else f"{int(row['step'])}"
        first = max(len(f"{total}/{total}"), len(step), len("step"))
        names = self._fitting(width - first)
        header = tuple(_aligned(self._label(name), self._width(name)) for name in names)
        if header != self._header or self._rows % HEADER_EVERY == 0:
            yield Text(_cut(GAP.join((f"{'step':>{first}}", *header)), width), style="dim", no_wrap=True)
            self._header, self._rows = header, 0
        self._rows += 1
        cells = (_aligned(self._cell(name, row), self._width(name)) for name in names)
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
        shown = printable(LABELS.get(name) or name.removesuffix("/mean").rpartition("/")[2] or name)
        return shown if cell_len(shown) <= LONGEST_NAME else set_cell_size(shown, LONGEST_NAME - 1) + "…"

    def _cell(self, name: str, row: Mapping[str, float]) -> str:
        if name not in row:
            return "-"
        if name != self._headline:
            return in_unit(name, row[name])
        error = row.get(f"{name}_error")
        return f"{row[name]:.3f}" + ("" if error is None else f" ±{error:.3f}")


class StatusView:
    """Two lines on the current state of a run: a bar with times, speed and memory; the phase with the headline metric.

    Args:
        status: returns the state at each drawing.
        headline: name of the metric that is plotted.
        values: values of this metric by step; they may grow.
        moving: whether a sign moves while the run goes on; False for a single drawing.
    """

    def __init__(self, status: Callable[[], Status], headline: str, values: Sequence[float], moving: bool = True):
        self._status, self._headline, self._values, self._moving = status, headline, values, moving

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, width = self._status(), options.max_width
        facts = fitting(_facts(status), width - BAR_WIDTHS[0] - len(GAP) if status.total else width)
        line = _bar(status, min(width - cell_len(facts) - len(GAP), BAR_WIDTHS[1]), options.ascii_only)
        yield line.append(facts, style="default")
        yield self._activity(status, width, ASCII_SPARKS if options.ascii_only else SPARKS)

    def _activity(self, status: Status, width: int, marks: str) -> Text:
        """Return the line with the phase and the plot."""
        sign = f"{SPINNER[int(4 * time.monotonic()) % 4]} " if self._moving else ""
        since = f" {duration(status.phase_seconds)}" if status.phase and status.phase_seconds >= 3 else ""
        phase = _cut(f"{sign}{printable(status.activity)}{since}", width)
        line = Text(phase, style="yellow" if status.compiling else "", no_wrap=True)
        name = f"{GAP if phase else ''}{printable(self._headline)} "
        room = min(width - cell_len(phase) - cell_len(name), SPARK_WIDTHS[1])
        if self._values and room >= SPARK_WIDTHS[0]:
            line.append(f"{name}{sparkline(self._values, marks, room)}", style="default")
        return line


def fitting(parts: Iterable[tuple[int, str]], width: int) -> str:
    """Join the texts of `parts` that fit into `width` cells.

    Args:
        parts: priority and text of each part, in the order shown; the highest numbers are left out first.

    >>> fitting([(0, "3/9"), (2, "10s"), (1, "left 20s")], 14)
    '3/9  left 20s'
    """
    shown = [part for part in parts if part[1]]
    while len(shown) > 1 and cell_len(GAP.join(text for _, text in shown)) > width:
        shown.remove(max(shown))
    return _cut(GAP.join(text for _, text in shown), width)


def _bar(status: Status, width: int, ascii_only: bool) -> Text:
    """Return a bar of the steps made, `width` cells wide, and the gap behind it; nothing while the total is unknown."""
    line = Text(no_wrap=True)
    if not status.total or width < 1:
        return line
    made, ahead = "#-" if ascii_only else "━─"
    full = min(width * status.step // status.total, width)
    return line.append(made * full, style="green").append(ahead * (width - full), style="dim").append(GAP)


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


def _aligned(text: str, width: int) -> str:
    """Align `text` to the right of `width` cells."""
    return " " * (width - cell_len(text)) + text


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
"""Metrics of the columns after those that the run names, the most important first."""
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
