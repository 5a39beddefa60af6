"""Runs of a folder, read as far as they have been written, for a page that follows them.

In: a folder with run folders, directly in it or one level below, or one run folder. Out: a row of a list for each run,
and `RunData` of those that are chosen. Only the answers of a finished run are read twice: a look at all runs reads the
rows that were added, for a limited time, and of a run that is unchanged it asks the system for the dates of three
files. The content of run folders is untrusted. A name of a run is looked up among those that are there, and never
becomes a path.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.config import recipe
from covey.errors import CoveyError
from covey.files import is_count, parse_line
from covey.monitor.run_files import AFTER, BEFORE, METRICS, SAMPLES, SUMMARY
from covey_report.completions import Location, locate
from covey_report.diagnosis import PROBLEM, Finding, RunHistory, diagnose
from covey_report.results import FIGURES
from covey_report.run_data import Curves, RunData, change_errors, read_lines
from covey_status.run_files import HEARTBEAT
from covey_status.watched_run import RUNNING, NewLines, WatchedRun

PATIENCE = 0.3
"""Seconds after which a look reads no further run."""
MISSING = 0, -1
"""Date and size of a file that is not there."""
DIAGNOSIS_SHARE = 0.05
"""Maximum share of the time that the diagnosis of a run takes while the run goes on."""
COLUMNS = {
    "rl": {"held-out": ("share", "accuracy before", "accuracy after"), "reward": ("", "final reward")},
    "sft": {
        "held-out": ("share", "accuracy before", "accuracy after"),
        "held-out loss": ("", "loss before", "loss after"),
        "loss": ("", "final loss"),
    },
}
"""Figures of the list: by training method and label, the unit and the names of the figures."""


def stamp_of(file: Path) -> tuple[int, int]:
    """Return the date of a file's last change in nanoseconds since 1970, and its size; 0 and −1 if it is missing."""
    try:
        stat = os.stat(file, follow_symlinks=False)
    except OSError:
        return MISSING
    return stat.st_mtime_ns, stat.st_size


class BoardRun:
    """One run of the folder.

    Args:
        name: its name on the page: the path from the folder that is shown.
        folder: the run folder.

    Attributes:
        findings: findings of the last diagnosis.
        error: what keeps the run from being read; empty if nothing does.
    """

    def __init__(self, name: str, folder: Path):
        self.name, self.folder, self.error = name, folder, ""
        self.findings: Sequence[Finding] = ()
        self._watched, self._lines = WatchedRun(folder), NewLines(folder / METRICS)
        self._curves, self._index = Curves(), list[Location]()
        self._settings: Mapping[str, Any] = {}
        self._stamps = [MISSING] * 3
        self._unread, self._undiagnosed, self._diagnose_from = True, True, 0.0
        self._figures: dict[str, list[Any]] = {}
        self._change_errors: Mapping[str, float] = {}

    @property
    def changed(self) -> float:
        """Time at which the run wrote last, in seconds since 1970."""
        return max(changed for changed, _ in self._stamps) / 1e9

    def look(self) -> bool:
        """Look for changes; return whether there are rows to read or to diagnose."""
        stamps = [stamp_of(self.folder / name) for name in (METRICS, SUMMARY, HEARTBEAT)]
        if stamps != self._stamps or self._watched.state == RUNNING:
            self._watched.read_state()
            self._unread |= stamps[0] != self._stamps[0]
            self._undiagnosed |= stamps[:2] != self._stamps[:2]
            self._stamps = stamps
        return self._unread or self._diagnosis_is_due()

    def read(self) -> None:
        """Read the rows that were added, and diagnose the run with them."""
        self._settings = self._settings or recipe.read_settings(self.folder)
        if self._unread:
            for line in self._lines.read():
                self._curves.add(parse_line(line) or {})
            self._unread = False
        if self._diagnosis_is_due():
            self._diagnose()

    def _diagnosis_is_due(self) -> bool:
        return self._undiagnosed and (self._watched.state != RUNNING or time.monotonic() >= self._diagnose_from)

    def _diagnose(self) -> None:
        start, answers = time.monotonic(), (read_lines(self.folder / name, {}) for name in (BEFORE, AFTER))
        self._change_errors = change_errors(self._watched.summary(), *answers)
        run = self.data()
        self.findings = diagnose(RunHistory.of(run)) if run.steps else ()
        for label, (unit, *names) in COLUMNS.get(run.method, COLUMNS["rl"]).items():
            self._figures[label] = [unit, *(figure.value for name in names if (figure := FIGURES[name](run)))]
        now = time.monotonic()
        self._undiagnosed, self._diagnose_from = False, now + (now - start) / DIAGNOSIS_SHARE

    def data(self) -> RunData:
        """Return the run as it was read so far, without answers to held-out prompts. Its curves grow later."""
        return RunData(
            name=self.name,
            path=self.folder,
            method=str(self._settings.get("method", "rl")),
            settings=self._settings,
            steps=self._curves.steps,
            seconds=self._curves.seconds,
            series=self._curves.series,
            summary=self._watched.summary(),
            change_errors=self._change_errors,
            status=self._watched.state,
        )

    def groups(self) -> Sequence[Location]:
        """Return the positions of all groups of completions that were written until now."""
        self._index = locate(self.folder / SAMPLES, {}, self._index)
        return self._index

    def row(self) -> dict[str, Any]:
        """Return the run's row in the list: what it is, how it goes, and what was found."""
        settings, beat, steps = self._settings, self._watched.heartbeat, self._curves.steps
        state = self._watched.state if self._stamps[0] != MISSING or beat else "not started"
        total = settings.get("training.max_steps")
        return {
            "name": self.name,
            "about": [str(settings.get(name, "")) for name in ("name", "grpo.algorithm", "model.source")],
            "state": state,
            "reason": beat.reason if beat else "",
            "activity": beat.activity if beat and state == RUNNING else "",
            "left": beat.left if beat and state == RUNNING else 0.0,
            "step": max(steps[-1] if steps else 0, beat.step if beat else 0),
            "total": total if is_count(total) else beat.total if beat else 0,
            "last": steps[-1] if steps else 0,
            "changed": self.changed,
            "figures": {label: values for label, values in self._figures.items() if len(values) > 1},
            "finding": self.findings[0].title if self.findings else "",
            "problems": sum(finding.level == PROBLEM for finding in self.findings),
            "read": not self._unread,
            "error": self.error,
        }


class RunsFolder:
    """The runs of a folder, by name.

    Args:
        folder: the folder; it need not exist any more.

    Attributes:
        runs: the runs at the last look.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.runs: dict[str, BoardRun] = {}
        self._identities: dict[str, tuple[int, int]] = {}

    def look(self) -> bool:
        """Look at all runs, and read new rows, the last changed run first; return whether more is to be read.

        Where there are new runs nothing is read yet: their states are known and shown at once.
        """
        are_new = self._find()
        waiting = [run for run in self.runs.values() if _try(run, run.look)]
        waiting.sort(key=lambda run: -run.changed)
        end = time.monotonic() + (0 if are_new else PATIENCE)
        while waiting and time.monotonic() < end:
            run = waiting.pop(0)
            _try(run, run.read)
        return bool(waiting)

    def _find(self) -> bool:
        """Add new runs, and forget runs that are gone or were replaced; return whether some are new."""
        identities, known = {}, list(self.runs.values())
        for name, path in find_runs(self.folder):
            stat = os.stat(path)
            identities[name] = stat.st_dev, stat.st_ino
            if self._identities.get(name) != identities[name]:
                self.runs[name] = BoardRun(name, path)
        self.runs = {name: self.runs[name] for name in identities}
        self._identities = identities
        return not all(run in known for run in self.runs.values())


def find_runs(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield names and paths of the runs in `folder`: itself, or folders up to two levels below. A run may be a
    link, because the user may keep it on another disk; no other link is followed.
    """
    if _is_run(folder):
        yield folder.resolve().name, folder
        return
    for path in _folders(folder):
        if _is_run(path):
            yield path.name, path
        elif not path.is_symlink():
            yield from ((f"{path.name}/{inner.name}", inner) for inner in _folders(path) if _is_run(inner))


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.name[0] != "." and entry.is_dir())
    except OSError:  # it is gone, or may not be read: there is nothing to show of it
        return []


def _is_run(folder: Path) -> bool:
    try:
        return recipe.is_run(folder)
    except CoveyError:  # its recipe is a link, as that of no run is
        return False


def _try(run: BoardRun, method: Callable[[], bool | None]) -> bool:
    """Call a method of a run; return its result. An error is shown in the list, and the other runs are read all the
    same.
    """
    try:
        more, run.error = method(), ""
    except (CoveyError, OSError) as error:
        more, run.error = False, str(error)
    return bool(more)
