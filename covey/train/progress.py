"""What a run shows on the terminal.

In: phases, one row of metrics and its samples a step, evaluations, a summary. Out: a live panel on a terminal; one
plain line a step anywhere else, so that a log file tells the same story. Reward leads, since the loss of a step with
one update is 0 by construction. Text of the model is untrusted: what is not printable is shown as its escape.
"""

import math
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from covey.train.metrics import SAMPLES

HEARTBEAT = 15.0
"""Seconds of silence in a log file before a long phase says how far it is."""
SHOW_SAMPLES_EVERY = 5
"""Steps."""
SAMPLE_WIDTH = 160
"""Characters of a prompt or completion that are shown."""
SPARKS, ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"


@dataclass(frozen=True)
class SampleLine:
    """One completion as the terminal shows it."""

    prompt: str
    text: str
    reward: float


class Progress:
    """The run's face: a context manager with the same calls for a terminal and for a log file."""

    def __init__(self, total_steps: int, console: Console | None = None):
        """
        Args:
            total_steps: optimizer steps of the whole run, those before a resume included.
            console: where to; standard output when not given.
        """
        self.total = total_steps
        self.console = console or Console(highlight=False)
        self._live = Live(console=self.console, auto_refresh=True, refresh_per_second=8, transient=True)
        self._started = time.monotonic()
        self._rows: list[Mapping[str, Any]] = []
        self._table: dict[str, str] = {}
        self._shown: tuple[SampleLine, SampleLine] | None = None
        self._phase = self._count = ""
        self._announced: set[str] = set()
        self._spoken = self._started

    def __enter__(self) -> "Progress":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live.is_started:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Say what begins now: loading, compiling, evaluating. A log hears of each once between two evaluations."""
        self._phase, self._count = printable(text), ""
        if self._live.is_started:
            self._refresh()
        elif self._phase not in self._announced:
            self._announced.add(self._phase)
            self._stamp()

    def advance(self, done: int, total: int) -> None:
        """How far the phase is; a log file hears of it every `HEARTBEAT` seconds."""
        self._count = f" {done}/{total}"
        if self._live.is_started:
            self._refresh()
        elif time.monotonic() - self._spoken >= HEARTBEAT:
            self._stamp()

    def step(self, row: Mapping[str, float], samples: Sequence[SampleLine] = ()) -> None:
        """A step is done.

        Args:
            row: its metrics by their usual names (`reward`, `frac_reward_zero_std`, ...); missing ones are left out.
            samples: its completions; the best and the worst are shown now and then.
        """
        self._rows.append(row)
        self._phase = ""
        self._table = self._columns(row)
        due = len(self._rows) == 1 or int(row["step"]) % SHOW_SAMPLES_EVERY == 0 or row["step"] == self.total
        if samples and due:
            self._shown = max(samples, key=_rank), min(samples, key=_rank)
        if self._live.is_started:
            self._refresh()
            return
        self._print("  ".join(f"{name} {value}" for name, value in self._table.items()))
        if samples and due:
            for line in self._sample_lines():
                self._print(line)

    def evaluation(self, name: str, result: Mapping[str, Any]) -> None:
        """Show what an evaluation found; `name` says which (`before`, `after`, `step 50`)."""
        self._announced.clear()
        self._print(f"{printable(name)}: {_figures(result)}")

    def done(self, summary: Mapping[str, Any], folder: Path | str = "") -> None:
        """Show before → after, where the run lies, and what to do next; the live view ends here."""
        if self._live.is_started:
            self._live.stop()
        body = Text("\n".join(self._closing(summary, str(folder))))
        if self.console.is_terminal:
            self.console.print(Panel(body, title="done", title_align="left"))
        else:
            self.console.print(body, soft_wrap=True)

    def _closing(self, summary: Mapping[str, Any], folder: str) -> list[str]:
        before, after = summary.get("before") or {}, summary.get("after") or {}
        both = [name for name in FIGURES if before.get(name) is not None and after.get(name) is not None]
        lines = [f"{name:<12} {FIGURES[name](before[name])} → {FIGURES[name](after[name])}" for name in both]
        if self._rows:
            lines.append(f"{'by step':<12} {self._spark()}")
        if "steps" in summary and "seconds" in summary:
            lines.append(f"{'steps':<12} {summary['steps']} in {_clock(summary['seconds'])}")
        if folder:
            quoted = shlex.quote(folder)
            lines += [f"{'run':<12} {folder}", "", "next", f"  covey chat {quoted}", f"  less {quoted}/{SAMPLES}"]
        return lines

    def _columns(self, row: Mapping[str, float]) -> dict[str, str]:
        """Name → text of everything the row tells, in the order shown."""
        columns = {"step": f"{int(row['step'])}/{self.total}"}
        if "reward" in row:
            error = f" ±{row['reward_error']:.3f}" if "reward_error" in row else ""
            columns["reward"] = f"{row['reward']:.3f}{error}"
        if "frac_reward_zero_std" in row:
            columns["informative"] = f"{100 * (1 - row['frac_reward_zero_std']):.0f}%"
        if "completions/mean_length" in row:
            columns["length"] = f"{row['completions/mean_length']:.0f}"
        if "kl" in row:
            columns["kl"] = f"{row['kl']:.4f}"
        if "tokens_per_second" in row:
            columns["tokens/s"] = f"{row['tokens_per_second']:.0f}"
        if left := self._seconds_left():
            columns["left"] = _clock(left)
        return columns

    def _seconds_left(self) -> float:
        """The median of the last steps times those to come: the first, which compiles, soon stops counting."""
        times = [row["step_time"] for row in self._rows[-5:] if "step_time" in row]
        return statistics.median(times) * (self.total - int(self._rows[-1]["step"])) if times else 0.0

    def _refresh(self) -> None:
        parts: list[Any] = []
        if self._table:
            table = Table(box=None, padding=(0, 3, 0, 0))
            for name in self._table:
                table.add_column(name, no_wrap=True)
            table.add_row(*self._table.values())
            parts += [table, Text(f"reward {self._spark()}"), *(Text(line) for line in self._sample_lines())]
        if self._phase:
            parts.append(Spinner("line", Text(self._phase + self._count)))
        self._live.update(Group(*parts), refresh=True)

    def _spark(self) -> str:
        marks = SPARKS if (self.console.encoding or "").lower().startswith("utf") else ASCII_SPARKS
        return sparkline([row["reward"] for row in self._rows if "reward" in row], marks)

    def _sample_lines(self) -> list[str]:
        best_and_worst = zip(("best ", "worst"), self._shown or (), strict=False)
        return [f"  {name} {s.reward:+.2f}  {excerpt(s.prompt)}  →  {excerpt(s.text)}" for name, s in best_and_worst]

    def _stamp(self) -> None:
        self._print(f"[{time.monotonic() - self._started:6.1f}s] {self._phase}{self._count}")

    def _print(self, text: str) -> None:
        self._spoken = time.monotonic()
        self.console.print(Text(text), soft_wrap=True)


def sparkline(values: Sequence[float], marks: str = SPARKS, width: int = 40) -> str:
    """`values` as a row of marks from their lowest to their highest, averaged into at most `width` of them.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    parts = min(width, len(finite))
    edges = [round(i * len(finite) / parts) for i in range(parts + 1)]
    means = [statistics.fmean(finite[a:b]) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(marks[round((m - low) / span * (len(marks) - 1)) if span else 0] for m in means)


def printable(text: str, keep: str = "") -> str:
    """`text` with control, direction and other invisible characters as escapes, but for those in `keep`.

    >>> printable("red \\x1b[31m")
    'red \\\\x1b[31m'
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def excerpt(text: str, width: int = SAMPLE_WIDTH) -> str:
    """The printable beginning of `text`; the end of a prompt matters too, so a long one loses its middle."""
    shown = printable(text.strip())
    return shown if len(shown) <= width else f"{shown[: width // 2]} … {shown[-width // 2 :]}"


def _rank(sample: SampleLine) -> float:
    return sample.reward if math.isfinite(sample.reward) else -math.inf


def _figures(result: Mapping[str, Any]) -> str:
    figures = [f"{name} {show(result[name])}" for name, show in FIGURES.items() if result.get(name) is not None]
    if "samples" in result:
        figures.append(f"({result['samples']} samples)")
    return "  ".join(figures)


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


def _number(value: float) -> str:
    return f"{value:.3f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


FIGURES = {"accuracy": _share, "format": _share, "reward": _number}
"""What an evaluation is shown by, in this order, and how each is written."""
