"""Write `report.html` of a run while it trains, and at its end.

A report is made from the files of the run folder alone. It is written in the first process, after a step, at most every
`INTERVAL` seconds, and so rarely that all reports together take at most `MAX_SHARE` of the time since the start: the
files grow, so the next report is expected to take twice as long as the last one. The report at the end is always
written. A report that fails is logged and never ends the run.
"""

import logging
import time

from covey.report import REPORT, write_report
from covey.run.folder import RunFolder

log = logging.getLogger(__name__)

INTERVAL = 30.0
"""Minimum number of seconds between two reports."""
MAX_SHARE = 0.01
"""Maximum share of a run's time for the reports before its end."""


class ReportWriter:
    """Writer of the report of one run.

    Args:
        folder: the open run folder; only the process that writes in it writes reports.
    """

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._begun = time.monotonic()
        self._due, self._spent = self._begun + INTERVAL, 0.0
        self._failure = ""

    def write_if_due(self) -> None:
        """Write the report if the last one is old enough."""
        if time.monotonic() >= self._due:
            self.write()

    def write(self) -> bool:
        """Write the report now; return whether that was done. A failure is logged once."""
        if not self._folder.writes:
            return False
        begun = time.monotonic()
        try:
            write_report(self._folder.path / REPORT, [self._folder.path])
        except Exception as error:  # a report is a by-product, and the run goes on without it
            failure = f"{REPORT} could not be written: {type(error).__name__}: {error}"
            if failure != self._failure:
                log.warning(f"{failure}; the run goes on, and covey report {self._folder.given} tries again")
            self._failure = failure
            return False
        finally:
            ended = time.monotonic()
            self._spent += ended - begun
            expected = 2 * (ended - begun)
            self._due = max(ended + INTERVAL, self._begun + (self._spent + expected) / MAX_SHARE)
        return True
