"""Outputs of a run: its report, and the findings of the diagnosis in its log."""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from covey.config.recipe import flatten
from covey.monitor.record import StepRecord
from covey.monitor.run_files import METRICS
from covey.run.outputs import Output
from covey.run.saved_run import SavedRun
from covey_report.diagnosis import NOTE, Finding, LiveDiagnosis, RunHistory, diagnose
from covey_report.page import write_report
from covey_report.run_data import numbers, read_lines, read_run
from covey_report.run_files import REPORT

log = logging.getLogger(f"covey.{__name__}")  # as part of Covey, whose log a run shows

INTERVAL = 30.0
"""Minimum number of seconds between two reports."""
MAX_SHARE = 0.01
"""Maximum share of a run's time for the reports before its end."""


class ReportWriter(Output):
    """Write `report.html` of a run while it trains, and at its end, from the files of the run folder alone.

    It is written in the first process, after a step, at most every `INTERVAL` seconds, and so rarely that all reports
    together take at most `MAX_SHARE` of the time since the start: the files grow, so the next report is expected to
    take twice as long as the last one. The report at the end is always written. A report that fails is logged once.
    """

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._due, self._spent = self._begun + INTERVAL, 0.0
        self._failure = ""

    def begin(self, run: SavedRun, summary: Mapping[str, Any]) -> None:
        self._folder = run.folder

    def step(self, record: StepRecord) -> None:
        if time.monotonic() >= self._due:
            self.write()

    def end(self, status: str) -> Mapping[str, str]:
        return {"report": str(self._folder.path_as_given / REPORT)} if self.write(status) else {}

    def write(self, status: str = "") -> bool:
        """Write the report now, of a run in this state; return whether that was done."""
        if not self._folder.writes:
            return False
        begun = time.monotonic()
        try:
            write_report(self._folder.path / REPORT, [self._folder.path], status=status)
        except Exception as error:  # a report is a by-product, and the run goes on without it
            failure = f"{REPORT} could not be written: {type(error).__name__}: {error}"
            if failure != self._failure:
                log.warning(f"{failure}; the run goes on, and covey report {self._folder.path_as_given} tries again")
            self._failure = failure
            return False
        finally:
            ended = time.monotonic()
            self._spent += ended - begun
            expected = 2 * (ended - begun)
            self._due = max(ended + INTERVAL, self._begun + (self._spent + expected) / MAX_SHARE)
        return True


class FindingsLog(Output):
    """Log the findings of the diagnosis: a problem once it is certain while the run trains, its withdrawal if it is
    refuted, and all findings at the end.

    The first process logs, from the rows that it writes; in a resumed run the rows so far are read.
    """

    def begin(self, run: SavedRun, summary: Mapping[str, Any]) -> None:
        self._folder = run.folder
        before, data = (numbers(summary.get(name)) for name in ("before", "data"))
        rows = list(read_lines(run.folder.path / METRICS, {})) if run.folder.resuming and run.folder.writes else []
        self._live = LiveDiagnosis(run.recipe.method, flatten(asdict(run.recipe)), before, rows, data)

    def step(self, record: StepRecord) -> None:
        for finding in self._live.step(record.metrics) if self._folder.writes else ():
            log.warning(f"step {record.step}: {describe(finding)}")

    def end(self, status: str) -> Mapping[str, str]:
        for finding in self._last_findings() if self._folder.writes else ():
            level = logging.INFO if finding.level == NOTE else logging.WARNING
            log.log(level, f"diagnosis: {describe(finding)}")
            for line in finding.samples:
                log.info(f"  {line}")
        return {}

    def _last_findings(self) -> list[Finding]:
        """Return the findings on the finished run, as its report has them."""
        history = RunHistory.of(read_run(self._folder.path))
        return [*self._live.end(history), *diagnose(history)]


def describe(finding: Finding) -> str:
    """Return a finding as one line.

    >>> describe(Finding("The reward is constant", "", "0.5 in 5 steps", "rewards"))
    'The reward is constant. Seen: 0.5 in 5 steps. Change: rewards.'
    """
    seen = f". Seen: {finding.evidence}" if finding.evidence else ""
    change = f". Change: {finding.setting}" if finding.setting else ""
    return f"{finding.title}{seen}{change}."
