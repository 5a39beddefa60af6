"""The plain display of a run: a line per step. Packages offer others by the entry points `covey.displays`: `log`,
`terminal` and `notebook` for `Progress`, and `notebook-lines` for a script without a folder.

Names of metrics and phases and texts of the model are untrusted: characters that are not printable are shown as
escapes, and nothing is read as markup.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from covey.display import printable
from covey.monitor.formats import SampleLine, duration, figures, in_unit
from covey.monitor.status import Status
from covey.registry import all_offered

if TYPE_CHECKING:
    from covey.monitor.record import StepRecord  # needs NumPy, which `covey watch` does not

ALWAYS = ("frac_reward_zero_std", "completions/mean_length")
"""Metrics after the main one on the line of a step."""


class Display:
    """Display without a package: a line per step and per evaluation, and messages with the time.

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
        self._started = time.monotonic()

    def open(self) -> None:
        """Begin to show the status, where it is shown in place."""

    def close(self) -> None:
        """Show the status no longer."""

    def changed(self) -> None:
        """Show the status, which has changed, where it is shown."""

    def stamp(self, text: str) -> None:
        """Print `text` with the time."""
        self.line(f"[{time.monotonic() - self._started:6.1f}s] {text}")

    def line(self, text: str) -> None:
        """Print a line that stays."""
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
        for line in lines:
            self.line(line)

    def latest(self, row: Mapping[str, float], samples: Sequence[SampleLine]) -> None:
        """Add the metrics of a step and its completions to the figures, where there are some."""

    def samples(self, samples: Sequence[SampleLine]) -> None:
        """Show the best and the worst of `samples`, where there is room."""

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


def step_count(row: Mapping[str, float], total: int) -> str:
    """Return the number of a step, with `total` where that is known."""
    return f"{int(row['step'])}/{total}" if total else f"{int(row['step'])}"


def cell(row: Mapping[str, float], name: str, main_metric: str) -> str:
    """Return the value of `name` as text; the main metric has its standard error with it."""
    if name != main_metric:
        return in_unit(name, row[name])
    error = row.get(f"{name}_error")
    return f"{row[name]:.3f}" + ("" if error is None else f" ±{error:.3f}")
