"""Show a run from another terminal or machine: the command `covey watch`.

Everything comes from the files of the run folder, which are only read; the view is that of the run's own terminal.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from covey.cli.checks import resume_command
from covey.cli.parse import Line
from covey.config import recipe, strict_yaml
from covey.config.schema.data import FROM_PYTHON
from covey.display import echo, make_console, mask_secrets
from covey.errors import STOPPED, CoveyError
from covey.monitor.formats import duration
from covey.monitor.progress import Progress, SampleLine
from covey.monitor.run_files import AFTER, RECIPE, REPORT, SAMPLES
from covey.monitor.status import DEAD, FINISHED, RUNNING, Status, WatchedRun
from covey.train.json_lines import is_count, number

INTERVAL = 1.0
"""Seconds between two looks at the files."""
HISTORY = 15
"""Number of steps, of those before the command began, that are listed."""


class WatchedProgress(Progress):
    """Progress display of a run of another process.

    Args:
        run: the run.
        console: where to print.
        settings: the settings of the run that the display needs.
    """

    def __init__(self, run: WatchedRun, console: Console, settings: Mapping[str, Any]):
        supervised = settings.get("method") == "sft"
        headline, answers = ("loss", AFTER) if supervised else ("reward", SAMPLES)
        show = settings.get("show")
        names = [name for name in show if isinstance(name, str)] if isinstance(show, list) else []
        super().__init__(0, console, headline=headline, show=names, answers=answers)
        self.run, self.task = run, settings.get("task")

    def status(self) -> Status:
        """Return what the run does: its times and plots from the rows, the rest from its heartbeat."""
        own, beat = super().status(), self.run.heartbeat
        if beat is None:
            return own
        running = self.run.state == RUNNING
        now = replace(beat.status, step=max(own.step, beat.status.step), left=own.left if running else 0.0)
        now = replace(now, total=max(now.total, now.step) if now.total else 0)
        now = replace(now, tokens_per_second=own.tokens_per_second or now.tokens_per_second)
        return now if running else replace(now, phase=self.run.state, done=0, parts=0, compiling=0, phase_seconds=0.0)


def watch_command(line: Line) -> int:
    """Execute `covey watch RUN [--once] [--json]`."""
    return watch(Path(line.arguments[0]).expanduser(), "--once" in line.options, "--json" in line.options)


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
    settings = _settings(folder)
    run = WatchedRun(folder)
    progress = WatchedProgress(run, console or make_console(wrap=True, highlight=False), settings)
    show = _JsonLines(progress, folder) if as_json else _Steps(progress, folder)
    try:
        with nullcontext() if once or as_json else progress:
            while show(run.look(), once) and not once:
                time.sleep(INTERVAL)
        if not as_json:
            _show_end(run, progress, once)
    except KeyboardInterrupt:
        echo("\nthe watch has ended, and the run goes on" if run.state == RUNNING else "", keep="\n")
        return 130
    return 0 if run.state in (RUNNING, FINISHED) else STOPPED


class _Steps:
    """Show new steps as lines. Called with the rows of each look; returns whether the run goes on."""

    def __init__(self, progress: WatchedProgress, folder: Path):
        self._progress, self._last, self._phase, self._begun = progress, 0, "", False

    def __call__(self, rows: Sequence[Mapping[str, float]], once: bool) -> bool:
        progress, run = self._progress, self._progress.run
        if not self._begun:
            _show_before(run, progress)
        samples = _samples_by_step(run)
        beat = run.heartbeat
        progress.total = beat.status.total if beat else 0
        listed = rows if self._begun else rows[-HISTORY:]
        for row in rows[: len(rows) - len(listed)]:
            self._last = _add(progress.add, row, self._last)
        for row in listed:
            self._last = _add(partial(progress.step, samples=samples.get(int(row["step"]), ())), row, self._last)
        self._begun = True
        if beat and not progress.console.is_terminal and not once and beat.status.phase != self._phase:
            self._phase = beat.status.phase
            progress.phase(self._phase)
        return run.state == RUNNING


class _JsonLines:
    """Print each new state as a line of JSON. Called like `_Steps`."""

    def __init__(self, progress: WatchedProgress, folder: Path):
        self._progress, self._folder, self._last, self._printed = progress, folder, 0, ""
        self._row: Mapping[str, float] = {}

    def __call__(self, rows: Sequence[Mapping[str, float]], once: bool) -> bool:
        progress, run = self._progress, self._progress.run
        for row in rows:
            self._last, self._row = _add(progress.add, row, self._last), row
        status, beat = progress.status(), run.heartbeat
        new = f"{run.state} {status.step} {status.activity}"
        if new != self._printed:
            self._printed = new
            state: dict[str, Any] = {"run": str(self._folder), "state": run.state, **asdict(status)}
            state |= {"reason": beat.reason if beat else "", "heartbeat": beat.now if beat else None}
            state |= {"metrics": dict(self._row)}
            print(json.dumps(mask_secrets(state), allow_nan=False), flush=True)
        return run.state == RUNNING


def _add(add: Callable[..., None], row: Mapping[str, float], last: int) -> int:
    """Add the row behind that of step `last`; return its step."""
    step = int(row["step"])
    add(row, updates=max(step - last, 1))
    return step


def _samples_by_step(run: WatchedRun) -> dict[int, list[SampleLine]]:
    """Return the completions that the run has written since the last call, by step."""
    found: dict[int, list[SampleLine]] = {}
    for row in run.new_samples():
        if is_count(step := row.get("step")):
            reward = number(row.get("reward"))
            line = SampleLine(_text(row.get("prompt")), _text(row.get("text")), math.nan if reward is None else reward)
            found.setdefault(step, []).append(line)
    return found


def _show_before(run: WatchedRun, progress: Progress) -> None:
    """Show the evaluation before training, if there is one."""
    if before := _figures(run.summary().get("before")):
        progress.evaluation("before", before)


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
        progress.done(ends | _figures(summary), run.folder, report if report.is_file() else "", chat)
        return
    progress.show_status()
    beat = run.heartbeat
    if run.state == DEAD:
        ago = f"; its last heartbeat was {duration(max(time.time() - beat.now, 0))} ago" if beat else ""
        echo(f"this run seems to be dead: no process holds its lock, and it has not said that it ended{ago}")
    else:
        echo(f"this run has {run.state}: {beat.reason if beat else ''}")
    echo(f"go on with: {resume_command(run.folder)}")


def _figures(found: Any) -> dict[str, Any]:
    """Return the numbers in a mapping that is not trusted."""
    entries = found.items() if isinstance(found, dict) else ()
    return {name: value if is_count(value) else number(value) for name, value in entries if number(value) is not None}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _settings(folder: Path) -> Mapping[str, Any]:
    """Return the method, the task and `training.show` of the recipe, unchecked: another version of Covey may have
    written it.
    """
    if not recipe.is_run(folder):
        want = "the folder of a run, as covey train and covey sft write it"
        raise CoveyError(f"this is no run folder: it has no {RECIPE}", want=want, where=str(folder))
    path = folder / RECIPE
    tree = strict_yaml.read(strict_yaml.text_of(path, str(path)), str(path)).tree
    tree = tree if isinstance(tree, dict) else {}
    sections = {name: tree[name] if isinstance(tree.get(name), dict) else {} for name in ("training", "data")}
    return {
        "method": tree.get("method"),
        "task": sections["data"].get("task"),
        "show": sections["training"].get("show"),
    }
