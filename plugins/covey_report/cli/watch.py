"""Execute `covey watch`: show a run from another terminal or machine.

Everything comes from the files of the run folder, which are only read. The view equals the run's own terminal.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from covey.cli.checks import resume_command
from covey.cli.parse import Line
from covey.config import recipe
from covey.config.schema.data import FROM_PYTHON
from covey.display import echo, make_console, mask_secrets
from covey.errors import STOPPED, CoveyError
from covey.files import is_count, number
from covey.monitor.formats import SampleLine, duration
from covey.monitor.progress import Progress
from covey.monitor.run_files import AFTER, SAMPLES
from covey.monitor.status import Status
from covey_report.run_files import REPORT
from covey_status.terminal import StatusView
from covey_status.watched_run import DEAD, FINISHED, RUNNING, WatchedRun

INTERVAL = 1.0
"""Seconds between two looks at the files."""
HISTORY = 15
"""Number of steps before the command began that are listed."""


class WatchedProgress(Progress):
    """Progress display of a run of another process.

    Args:
        run: the run.
        console: where to print.
        settings: settings of the run by dotted name, which are not checked.
    """

    def __init__(self, run: WatchedRun, console: Console, settings: Mapping[str, Any]):
        supervised = settings.get("method") == "sft"
        main_metric, samples_file = ("loss", AFTER) if supervised else ("reward", SAMPLES)
        show = settings.get("training.show")
        names = [name for name in show if isinstance(name, str)] if isinstance(show, list) else []
        super().__init__(0, console, main_metric=main_metric, show=names, samples_file=samples_file)
        self.run, self.task, self._printed = run, settings.get("data.task"), ""

    def status(self) -> Status:
        """Return the run's status: times and plots from the rows, the rest from the heartbeat."""
        own, beat = super().status(), self.run.heartbeat
        if beat is None:
            return own
        running = self.run.state == RUNNING
        now = replace(beat, step=max(own.step, beat.step), left=own.left if running else 0.0)
        now = replace(now, total=max(now.total, now.step) if now.total else 0)
        now = replace(now, tokens_per_second=own.tokens_per_second or now.tokens_per_second)
        if running:
            return now
        return replace(now, phase=self.run.state, ahead="", done=0, parts=0, compiling=0, phase_seconds=0.0)

    def begin(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Show the evaluation before training, if there is one, and the last of the steps that are there."""
        if before := _figures(self.run.summary().get("before")):
            self.evaluation("before", before)
        for row in rows[:-HISTORY]:
            self.add(row)
        self.show_steps(rows[-HISTORY:])

    def show_steps(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Show new steps as lines."""
        self.total = self.run.heartbeat.total if self.run.heartbeat else 0
        samples = self._samples_by_step()
        for row in rows:
            self.step(row, samples.get(int(row["step"]), ()))

    def show_status(self) -> None:
        """Print the current state once."""
        self.console.print(StatusView(self.status, self.main_metric, self._values, moving=False))

    def print_state(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Print the state as a line of JSON if it is new."""
        for row in rows:
            self.add(row)
        status, beat = self.status(), self.run.heartbeat
        if (new := f"{self.run.state} {status.step} {status.activity}") == self._printed:
            return
        self._printed = new
        figures = {field.name: getattr(status, field.name) for field in fields(Status)}
        state: dict[str, Any] = {"run": str(self.run.folder), "state": self.run.state, **figures}
        state |= {"reason": beat.reason if beat else "", "heartbeat": beat.now if beat else None}
        state |= {"metrics": dict(self._rows[-1]) if self._rows else {}}
        print(json.dumps(mask_secrets(state), allow_nan=False), flush=True)

    def _samples_by_step(self) -> dict[int, list[SampleLine]]:
        """Return the completions that the run has written since the last call, by step."""
        samples: dict[int, list[SampleLine]] = {}
        for row in self.run.new_samples():
            if is_count(step := row.get("step")):
                prompt, text = (row[key] if isinstance(row.get(key), str) else "" for key in ("prompt", "text"))
                reward = number(row.get("reward"))
                line = SampleLine(prompt, text, math.nan if reward is None else reward)
                samples.setdefault(step, []).append(line)
        return samples


def watch_command(line: Line) -> int:
    """Execute `covey watch RUN [--once] [--json] [--web]`."""
    folder = Path(line.arguments[0]).expanduser()
    if "--web" not in line.options:
        return watch(folder, "--once" in line.options, "--json" in line.options)
    if len(line.options) > 1:
        raise CoveyError("--web stands beside --once or --json", want="one of them")
    recipe.require_run(folder)
    from covey_report.cli.board import show_board  # late: the terminal needs it not

    show_board(folder)
    return 0


def watch(folder: Path, once: bool = False, as_json: bool = False, console: Console | None = None) -> int:
    """Show the run in `folder` until it ends, or once; return the exit code.

    Args:
        folder: the run folder.
        once: show the present state and end.
        as_json: print each new state as one line of JSON instead.
        console: where to print; standard output when not given.

    Raises:
        CoveyError: it is no run folder.
    """
    recipe.require_run(folder)
    settings = recipe.read_settings(folder)
    run = WatchedRun(folder)
    progress = WatchedProgress(run, console or make_console(wrap=True, highlight=False), settings)
    try:
        with nullcontext() if once or as_json else progress:
            (progress.print_state if as_json else progress.begin)(run.look())
            while run.state == RUNNING and not once:
                if not as_json and run.heartbeat and run.heartbeat.phase:
                    progress.phase(run.heartbeat.phase)
                time.sleep(INTERVAL)
                (progress.print_state if as_json else progress.show_steps)(run.look())
        if not as_json:
            _show_end(run, progress, once)
    except KeyboardInterrupt:
        echo("\nthe watch has ended, and the run goes on" if run.state == RUNNING else "", keep="\n")
        return 130
    return 0 if run.state in (RUNNING, FINISHED) else STOPPED


def _show_end(run: WatchedRun, progress: WatchedProgress, once: bool) -> None:
    """Show the state at the end of the watch, and how to go on with a run that has ended too early."""
    if once and run.state == RUNNING:
        progress.show_status()
        return
    if run.state == FINISHED:
        summary = run.summary()
        ends = {name: _figures(summary.get(name)) for name in ("before", "after")}
        report = run.folder / REPORT
        chat = progress.task != FROM_PYTHON
        progress.done(ends | _figures(summary), run.folder, {"report": str(report)} if report.is_file() else {}, chat)
        return
    progress.show_status()
    beat = run.heartbeat
    if run.state == DEAD:
        ago = f"; its last heartbeat was {duration(max(time.time() - beat.now, 0))} ago" if beat else ""
        echo(f"this run seems to be dead: no process holds its lock, and it has not said that it ended{ago}")
    else:
        echo(f"this run has {run.state}: {beat.reason if beat else ''}")
    echo(f"go on with: {resume_command(run.folder)}")


def _figures(summary: Any) -> dict[str, Any]:
    """Return the numbers in a mapping that is not trusted."""
    entries = summary.items() if isinstance(summary, dict) else ()
    return {name: value if is_count(value) else number(value) for name, value in entries if number(value) is not None}
