"""Show the progress of a run on the terminal.

In: phases, one row of metrics and its samples per step, evaluations, a summary. Out: on a terminal a table of the steps
and two live lines below it (`terminal`); in a notebook the end of the same in one output; elsewhere one plain line per
step, so that a log file has the same information. The headline metric is the reward in reinforcement learning, since
the loss of a step with one update is 0 by construction, and the loss in supervised training. Text of the model is
untrusted: characters that are not printable are shown as escapes.
"""

import io
import math
import re
import shlex
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from covey.config.metrics import metric
from covey.display import make_console, printable
from covey.monitor.formats import ASCII_SPARKS, SPARKS, TEXT_WIDTH, clock, excerpt, in_unit, share, sparkline
from covey.monitor.notebook import NotebookOutput
from covey.monitor.run_files import SAMPLES
from covey.monitor.status import Status
from covey.monitor.terminal import StatusView, StepTable

HEARTBEAT = 15.0
"""Interval in seconds between the progress lines of a long phase in a log file."""
SLOW_COMPILE = 5.0
"""Number of seconds after which a log file says that a program is being compiled."""
SHOW_SAMPLES_EVERY = 5
"""Number of steps between two displays of samples."""
NOTEBOOK_LINES = 30
"""Number of lines that a notebook shows above the status."""
NARROW = 80
"""Width of a terminal, in cells, below which the line of a sample leaves out its prompt."""


@dataclass(frozen=True)
class SampleLine:
    """One completion as the terminal shows it."""

    prompt: str
    text: str
    reward: float


class Progress:
    """Progress display of a run: a context manager with the same methods for a terminal and for a log file."""

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        *,
        headline: str = "reward",
        show: Sequence[str] = ("kl",),
        answers: str = SAMPLES,
        memory: Callable[[], int] = lambda: 0,
    ):
        """Create the display.

        Args:
            total_steps: optimizer steps of the whole run, those before a resume included.
            console: where to print; standard output when not given.
            headline: the metric that is shown first and plotted over the steps.
            show: further metrics on the line of a step, where the row has them.
            answers: the file in the run folder that the final message points to.
            memory: returns the memory in use, in bytes; 0 if that is not known.

        Attributes:
            seconds_before: seconds that the run took before this process resumed it.
            steps_before: number of steps that it had made then.
        """
        self.total, self.headline, self._show, self._answers = total_steps, headline, show, answers
        self.console = console or make_console(wrap=True, highlight=False)
        self._memory, self.seconds_before, self.steps_before = memory, 0.0, 0
        self._started = self._since = self._stepped = time.monotonic()
        self._rows: list[Mapping[str, Any]] = []
        self._values: list[float] = []
        self._phase, self._count, self._compiling = "", (0, 0), 0
        self._table, self._view = StepTable(headline, show), StatusView(self.status, headline, self._values)
        self._live = Live(console=self.console, get_renderable=lambda: self._view, transient=True)
        self._notebook = NotebookOutput() if self.console.is_jupyter else None
        self._latest: deque[str] = deque(maxlen=NOTEBOOK_LINES)
        self._slow_compile = Timer(0, self._stamp)
        self._announced: set[str] = set()
        self._spoken, self._updates = self._started, 1

    def __enter__(self) -> "Progress":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._slow_compile.cancel()
        if self._live.is_started:
            self._live.stop()
        self._redraw(now=True)

    def phase(self, text: str) -> None:
        """Show the phase that begins (loading, compiling, ...). A log file lists each once between two evaluations."""
        self._phase, self._count, self._compiling = printable(text), (0, 0), 0
        self._since = time.monotonic()
        if self._is_drawn:
            self._redraw()
        elif self._phase not in self._announced:
            self._announced.add(self._phase)
            self._stamp()

    def message(self, text: str) -> None:
        """Print a line that stays on the screen, about something that the user should know."""
        self._print(f"[{time.monotonic() - self._started:6.1f}s] {text}")

    def advance(self, done: int, total: int) -> None:
        """Show the progress of the phase; in a log file, every `HEARTBEAT` seconds."""
        self._count = (done, total)
        if self._is_drawn:
            self._redraw()
        elif time.monotonic() - self._spoken >= HEARTBEAT:
            self._stamp()

    def compiling(self, number: int) -> None:
        """Show that program `number` of the phase is being compiled, in a log file if that takes long; 0 ends it."""
        self._slow_compile.cancel()
        self._compiling = number
        if self._is_drawn:
            self._redraw()
        elif number:
            self._slow_compile = Timer(SLOW_COMPILE, self._stamp)
            self._slow_compile.daemon = True
            self._slow_compile.start()

    def step(self, row: Mapping[str, float], samples: Sequence[SampleLine] = ()) -> None:
        """Show a finished step.

        Args:
            row: its metrics by their usual names (`reward`, `frac_reward_zero_std`, ...); missing ones are left out.
            samples: its completions; the best and the worst are shown every `SHOW_SAMPLES_EVERY` steps.
        """
        self.add(row)
        if self.console.is_terminal or self._notebook:
            for line in self._table.lines(row, self.total, self.console.width):
                self._show_line(line)
        else:
            self._print("  ".join(f"{name} {value}" for name, value in self._columns(row).items()))
        if len(self._rows) == 1 or int(row["step"]) % SHOW_SAMPLES_EVERY == 0 or row["step"] == self.total:
            self._print_extremes(samples)

    def add(self, row: Mapping[str, float]) -> None:
        """Add the metrics of a step to what times and plots are made of, without showing it."""
        before = self._rows[-1]["step"] if self._rows else self.steps_before
        self._rows.append(row)
        self._values.extend([row[self.headline]] if self.headline in row else [])
        self._updates = max(int(row["step"]) - int(before), 1)
        self._phase, self._count, self._compiling = "", (0, 0), 0
        self._stepped = time.monotonic()

    def status(self) -> Status:
        """Return what the run does now."""
        now, row = time.monotonic(), self._rows[-1] if self._rows else {}
        (done, parts), expected = self._count, self._seconds_left() if self._rows else 0.0
        passed = min(now - self._stepped, self._row_time())  # the rest of a longer step is compilation
        return Status(
            step=int(row.get("step", self.steps_before)),
            total=self.total,
            phase=self._phase,
            phase_seconds=now - self._since,
            done=done,
            parts=parts,
            compiling=self._compiling,
            seconds=self.seconds_before + now - self._started,
            left=max(expected - passed, 0.0),
            tokens_per_second=row.get("tokens_per_second", 0.0),
            memory=self._memory(),
        )

    def show_status(self) -> None:
        """Print the current state once."""
        self.console.print(StatusView(self.status, self.headline, self._values, moving=False))

    def evaluation(self, name: str, result: Mapping[str, Any], samples: Sequence[SampleLine] = ()) -> None:
        """Show the results of the evaluation `name` (`before`, `after`), with its best and its worst answer."""
        self._announced.clear()
        self._print(f"{name}: {_figures(result)}")
        for under in dict.fromkeys(key.partition("/")[0] for key in result if "/" in key):
            figures = {key.removeprefix(f"{under}/"): result[key] for key in result if key.startswith(f"{under}/")}
            self._print(f"{name}, {under}: {_figures(figures)}")
        self._print_extremes(samples)

    def done(
        self, summary: Mapping[str, Any], folder: Path | str = "", report: Path | str = "", chat: bool = True
    ) -> None:
        """Show before → after, the run folder, its report, and what to do next; end the live view.

        Args:
            summary: content of `summary.json`.
            folder: the run folder; "" if there is none.
            report: its report; "" if there is none.
            chat: whether `covey chat` can load the model of the folder.
        """
        if self._live.is_started:
            self._live.stop()
        body = Text(printable("\n".join(self._closing(summary, str(folder), str(report), chat)), keep="\n"))
        if self._notebook:
            self._latest.extend(body.plain.splitlines())
            self._redraw(now=True)
        elif self.console.is_terminal:
            self.console.print(Panel(body, title="done", title_align="left"))
        else:
            self.console.print(body, soft_wrap=True)

    def _closing(self, summary: Mapping[str, Any], folder: str, report: str, chat: bool) -> list[str]:
        before, after = summary.get("before") or {}, summary.get("after") or {}
        both = [name for name in FIGURES if before.get(name) is not None and after.get(name) is not None]
        facts = {name: f"{_figure(name, before[name])} → {_figure(name, after[name])}" for name in both}
        facts |= {"by step": self._spark()} if self._rows else {}
        if "steps" in summary and "seconds" in summary:
            facts["steps"] = f"{summary['steps']} in {clock(summary['seconds'])}"
        facts |= {"run": folder} if folder else {}
        facts |= {"report": report} if report else {}
        width = max(12, *map(len, facts)) if facts else 0
        lines = [f"{name:<{width}} {fact}" for name, fact in facts.items()]
        if folder:
            quoted = shlex.quote(folder)
            chats = [f"  covey chat {quoted}"] if chat else []
            lines += ["", "next", *chats, f"  less {quoted}/{self._answers}"]
        return lines

    def _columns(self, row: Mapping[str, float]) -> dict[str, str]:
        """Return the row as a map from name to text, in the order shown."""
        columns = {"step": f"{int(row['step'])}/{self.total}"}
        if self.headline in row:
            error = f" ±{row[f'{self.headline}_error']:.3f}" if f"{self.headline}_error" in row else ""
            columns[self.headline] = f"{row[self.headline]:.3f}{error}"
        names = (*ALWAYS, *self._show, "tokens_per_second")
        columns |= {name: in_unit(name, row[name]) for name in names if name in row and name not in columns}
        if left := self._seconds_left():
            columns["left"] = clock(left)
        return columns

    def _seconds_left(self) -> float:
        """Estimate the seconds left: the time of a row times the number of those left."""
        return self._row_time() * math.ceil((self.total - int(self._rows[-1]["step"])) / self._updates)

    def _row_time(self) -> float:
        """Return the median time of the last rows, without compilation."""
        times = [(row["step_time"], row.get("time/compile", 0.0)) for row in self._rows[-5:] if "step_time" in row]
        warm = [seconds for seconds, compiling in times if not compiling]
        cold = [max(seconds - compiling, 0.0) for seconds, compiling in times]  # programs of two threads may overlap
        return float(statistics.median(warm or cold or [0.0]))

    def _spark(self) -> str:
        marks = SPARKS if (self.console.encoding or "").lower().startswith("utf") else ASCII_SPARKS
        return sparkline(self._values, marks)

    def _stamp(self) -> None:
        self._print(f"[{time.monotonic() - self._started:6.1f}s] {self.status().activity}")

    def _print_extremes(self, samples: Sequence[SampleLine]) -> None:
        """Print the best and the worst of `samples`; on a terminal each is one line."""
        width = self.console.width if self.console.is_terminal or self._notebook else 0
        for line in _extremes(samples, width):
            if width:
                self._show_line(Text(printable(line)))
            else:
                self._print(line)

    def _print(self, text: str) -> None:
        self._spoken = time.monotonic()
        if self._notebook:
            self._show_line(Text(printable(text)))
        else:
            self.console.print(Text(printable(text)), soft_wrap=True)

    def _show_line(self, line: Text) -> None:
        """Add a line to the output of the notebook, or print it as one line of the terminal."""
        if self._notebook:
            self._latest.append(line.plain)
            self._redraw()
        else:
            self.console.print(line, no_wrap=True, overflow="ellipsis")

    @property
    def _is_drawn(self) -> bool:
        """Whether the status is shown in place, by a terminal or a notebook."""
        return self._live.is_started or self._notebook is not None

    def _redraw(self, now: bool = False) -> None:
        """Draw the status again; in a notebook with the latest lines, and not too often unless `now` is set."""
        if self._live.is_started:
            self._live.refresh()
        elif self._notebook:
            drawn = Console(file=io.StringIO(), width=self.console.width, color_system=None, force_jupyter=False)
            with drawn.capture() as status:
                drawn.print(StatusView(self.status, self.headline, self._values, moving=False))
            self._notebook.show("\n".join([*self._latest, status.get()]), now)


def _extremes(samples: Sequence[SampleLine], width: int = 0) -> list[str]:
    """Return the best and the worst of `samples`, one line each; `width` cells wide if that is not 0."""
    if not samples:
        return []
    both = (("best ", max(samples, key=_rank)), ("worst", min(samples, key=_rank)))
    return [_sample_line(f"  {name} {sample.reward:+.2f}  ", sample, width) for name, sample in both]


def _sample_line(start: str, sample: SampleLine, width: int) -> str:
    arrow, dots = "  →  ", len(" … ")
    if 0 < width < NARROW:
        return f"{start}{excerpt(sample.text, max(width - len(start) - dots, 0))}"
    room = (width - len(start) - len(arrow)) // 2 - dots if width else TEXT_WIDTH
    room = min(room, TEXT_WIDTH)
    return f"{start}{excerpt(sample.prompt, room)}{arrow}{excerpt(sample.text, room)}"


def _rank(sample: SampleLine) -> float:
    return sample.reward if math.isfinite(sample.reward) else -math.inf


def _figures(result: Mapping[str, Any]) -> str:
    figures = [f"{name} {_figure(name, result[name])}" for name in FIGURES if result.get(name) is not None]
    figures += [f"{name} {share(result[name])}" for name in result if re.fullmatch(r"pass@\d+", name)]
    counts = [f"{result[name]} {name}" for name in ("examples", "samples") if name in result]
    figures += [f"({', '.join(counts)})"] if counts else []
    return "  ".join(figures)


def _figure(name: str, value: float) -> str:
    row = metric(f"eval/{name}")
    return share(value) if row and row.unit == "share" else f"{value:.3f}"


ALWAYS = ("frac_reward_zero_std", "completions/mean_length")
"""Metrics shown after the headline on the line of a step, where they are measured."""
FIGURES = ("loss", "perplexity", "accuracy", "partial_accuracy", "format_accuracy", "reward")
"""Metrics shown for an evaluation, in this order."""
