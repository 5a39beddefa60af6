"""Follow the progress of a run and show it.

In: phases, one row of metrics and its samples per step, evaluations, a summary. Out: the `Status` of the run, and lines
on the display that fits the console (`display`). The main metric is the reward in
reinforcement learning, since the loss of a step with one update is 0 by construction, and the loss in supervised
training.
"""

import math
import shlex
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from covey.display import BESIDE, make_console, printable
from covey.monitor.display import Display
from covey.monitor.formats import FIGURES, SampleLine, duration, figure, figures, sparkline
from covey.monitor.run_files import SAMPLES
from covey.monitor.status import Status
from covey.registry import all_offered

SHOW_SAMPLES_EVERY = 5
"""Number of steps between two displays of samples."""


class Progress:
    """Progress of a run on a display: a context manager."""

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        *,
        main_metric: str = "reward",
        show: Sequence[str] = ("kl",),
        samples_file: str = SAMPLES,
        memory: Callable[[], int] = lambda: 0,
    ):
        """Create the display.

        Args:
            total_steps: optimizer steps of the whole run, also before a resume.
            console: where to print; standard output when not given.
            main_metric: the metric that is shown first and plotted over the steps.
            show: further metrics on the line of a step, where the row has them.
            samples_file: the file in the run folder that the final message points to.
            memory: returns the memory in use, in bytes; 0 if that is not known.

        Attributes:
            seconds_before: seconds that the run took before this process resumed it.
            steps_before: number of steps that it had made then.
        """
        self.total, self.main_metric, self._samples_file, self._memory = total_steps, main_metric, samples_file, memory
        self.console = console or make_console(wrap=True, highlight=False)
        self.seconds_before, self.steps_before = 0.0, 0
        self._started = self._since = self._stepped = time.monotonic()
        self._rows: list[Mapping[str, Any]] = []
        self._values: list[float] = []
        self._phase, self._count, self._compiling, self._program, self._updates = "", (0, 0), 0, "", 1
        self._thread = threading.current_thread()
        self._ahead: dict[str, tuple[threading.Thread, str]] = {}
        kind = "notebook" if self.console.is_jupyter else "terminal" if self.console.is_terminal else "log"
        display = all_offered("covey.displays").get(kind, lambda: Display)()
        self.display: Display = display(self.console, self.status, main_metric, show, self._values)

    def __enter__(self) -> "Progress":
        self.display.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.display.close()

    def phase(self, text: str) -> None:
        """Show the phase that begins (loading, compiling, ...), and the phases of other threads with it."""
        thread = threading.current_thread()
        if thread is not self._thread:
            self._ahead[thread.name] = thread, printable(text)
        else:
            self._phase, self._count, self._compiling = printable(text), (0, 0), 0
            self._since = time.monotonic()
        self.display.changed()

    def message(self, text: str) -> None:
        """Print a line that stays on the screen, about something that the user should know."""
        self.display.stamp(text)

    def advance(self, done: int, total: int) -> None:
        """Show the progress of the phase."""
        self._count = (done, total)
        self.display.changed()

    def compiling(self, number: int, program: str = "") -> None:
        """Show that program `number` of the phase, which has this name, is being compiled; 0 ends it."""
        self._compiling, self._program = number, program
        self.display.changed()

    def step(self, row: Mapping[str, float], samples: Sequence[SampleLine] = ()) -> None:
        """Show a finished step.

        Args:
            row: its metrics by their usual names (`reward`, `frac_reward_zero_std`, ...); missing ones are left out.
            samples: its completions; the best and the worst are shown every `SHOW_SAMPLES_EVERY` steps.
        """
        self.add(row)
        self.display.latest(row, samples)
        self.display.step(row, self.total, self._seconds_left())
        if len(self._rows) == 1 or int(row["step"]) % SHOW_SAMPLES_EVERY == 0 or row["step"] == self.total:
            self.display.samples(samples)

    def add(self, row: Mapping[str, float]) -> None:
        """Add the metrics of a step to the times and plots, without showing it."""
        before = self._rows[-1]["step"] if self._rows else self.steps_before
        self._rows.append(row)
        self._values.extend([row[self.main_metric]] if self.main_metric in row else [])
        self._updates = max(int(row["step"]) - int(before), 1)
        self._phase, self._count, self._compiling = "", (0, 0), 0
        self._stepped = time.monotonic()

    def status(self) -> Status:
        """Return the present status."""
        now, row = time.monotonic(), self._rows[-1] if self._rows else {}
        (done, parts), expected = self._count, self._seconds_left() if self._rows else 0.0
        passed = min(now - self._stepped, self._row_time())  # the rest of a longer step is compilation
        return Status(
            step=int(row.get("step", self.steps_before)),
            total=self.total,
            phase=self._phase,
            ahead=BESIDE.join(text for _, (thread, text) in sorted(self._ahead.items()) if thread.is_alive()),
            phase_seconds=now - self._since,
            done=done,
            parts=parts,
            compiling=self._compiling,
            program=self._program if self._compiling else "",
            seconds=self.seconds_before + now - self._started,
            left=max(expected - passed, 0.0),
            tokens_per_second=row.get("tokens_per_second", 0.0),
            memory=self._memory(),
        )

    def evaluation(self, name: str, result: Mapping[str, Any], samples: Sequence[SampleLine] = ()) -> None:
        """Show the results of the evaluation `name` (`before`, `after`), with its best and its worst answer. Its phase
        ends with it.
        """
        lines = [f"{name}: {figures(result)}"]
        for preset in dict.fromkeys(key.partition("/")[0] for key in result if "/" in key):
            start = f"{preset}/"
            of_preset = {key.removeprefix(start): value for key, value in result.items() if key.startswith(start)}
            lines.append(f"{name}, {preset}: {figures(of_preset)}")
        self.display.evaluation(lines)
        self.display.samples(samples)
        self.phase("")

    def done(
        self,
        summary: Mapping[str, Any],
        folder: Path | str = "",
        facts: Mapping[str, str] = MappingProxyType({}),
        chat: bool = True,
    ) -> None:
        """Show before → after, the run folder, further facts such as its report, and what is next; end the live view.

        Args:
            summary: content of `summary.json`.
            folder: the run folder; "" if there is none.
            facts: further lines by name.
            chat: whether a command can load the model of the folder.
        """
        facts = self._facts(summary) | ({"run": str(folder)} if folder else {}) | dict(facts)
        width = max(12, *map(len, facts)) if facts else 0
        lines = [f"{name:<{width}} {fact}" for name, fact in facts.items()]
        if folder:
            quoted = shlex.quote(str(folder))
            use = f"chat {quoted}" if summary.get("has_chat_template", True) else f'generate {quoted} "PROMPT"'
            lines += ["", "next", *([f"  covey {use}"] if chat else []), f"  less {quoted}/{self._samples_file}"]
        self.display.done(printable("\n".join(lines), keep="\n"))

    def _facts(self, summary: Mapping[str, Any]) -> dict[str, str]:
        """Return the results of the run by name."""
        before, after = summary.get("before") or {}, summary.get("after") or {}
        both = [name for name in FIGURES if before.get(name) is not None and after.get(name) is not None]
        facts = {name: f"{figure(name, before[name])} → {figure(name, after[name])}" for name in both}
        if self._rows:
            facts["by step"] = sparkline(self._values, ascii_only=self.console.options.ascii_only)
        if "steps" in summary and "seconds" in summary:
            facts["steps"] = f"{summary['steps']} in {duration(summary['seconds'])}"
        return facts

    def _seconds_left(self) -> float:
        """Estimate the seconds left: the time of a row times the number of rows to come."""
        return self._row_time() * math.ceil((self.total - int(self._rows[-1]["step"])) / self._updates)

    def _row_time(self) -> float:
        """Return the median time of the last rows, without compilation."""
        times = [(row["step_time"], row.get("time/compile", 0.0)) for row in self._rows[-5:] if "step_time" in row]
        warm = [seconds for seconds, compiling in times if not compiling]
        cold = [max(seconds - compiling, 0.0) for seconds, compiling in times]  # programs of two threads may overlap
        return float(statistics.median(warm or cold or [0.0]))
