"""Log the findings of the diagnosis: a problem once it is certain while the run trains, and all findings at its end.

`report.diagnosis` has the rules. The first process logs, from the rows that it writes. A diagnosis that fails is logged
and never ends the run.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from covey.config.base import flatten
from covey.config.recipe import Recipe, SFTRecipe
from covey.monitor.run_files import METRICS
from covey.report.diagnosis import PROBLEM, Finding, LiveDiagnosis, RunHistory, diagnose
from covey.report.run_data import read_lines, read_run
from covey.run.folder import RunFolder
from covey.train.json_lines import number

log = logging.getLogger(__name__)


class FindingsLog:
    """Log of the findings of one run.

    Args:
        recipe: recipe of the run.
        folder: its open folder; if it is resumed, its rows so far are read.
        before: figures of the evaluation before training.
    """

    def __init__(self, recipe: Recipe | SFTRecipe, folder: RunFolder, before: Mapping[str, Any] | None):
        self._folder, self._failed = folder, False
        figures = {name: value for name, raw in (before or {}).items() if (value := number(raw)) is not None}
        rows = list(read_lines(folder.path / METRICS, {})) if folder.resuming and folder.writes else []
        self._live = LiveDiagnosis(recipe.method, flatten(asdict(recipe)), figures, rows)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Judge the run with the metrics of a new step, and log what became certain."""
        for finding in self._safely(lambda: self._live.step(metrics)):
            log.warning(f"step {metrics['step']}: {describe(finding)}")

    def end(self) -> None:
        """Log the findings on the finished run, as its report has them."""
        for finding in self._safely(lambda: diagnose(RunHistory.of(read_run(self._folder.path)))):
            level = logging.WARNING if finding.level == PROBLEM else logging.INFO
            log.log(level, f"diagnosis: {describe(finding)}")
            for line in finding.samples:
                log.info(f"  {line}")

    def _safely(self, judge: Callable[[], list[Finding]]) -> list[Finding]:
        if not self._folder.writes or self._failed:
            return []
        try:
            return judge()
        except Exception as error:  # a diagnosis is a by-product, and the run goes on without it
            self._failed = True
            log.warning(f"the diagnosis failed: {type(error).__name__}: {error}; the run goes on without it")
            return []


def describe(finding: Finding) -> str:
    """Return a finding as one line.

    >>> describe(Finding("The reward is constant", "", "0.5 in 5 steps", "rewards"))
    'The reward is constant. Seen: 0.5 in 5 steps. Change: rewards.'
    """
    seen = f". Seen: {finding.evidence}" if finding.evidence else ""
    change = f". Change: {finding.setting}" if finding.setting else ""
    return f"{finding.title}{seen}{change}."
