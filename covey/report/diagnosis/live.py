"""Judge a run while it trains, and tell each problem once, when it is certain.

A problem is certain if its rule was met at `CERTAIN` judgements in a row, none of them in the first steps. There is a
judgement after each step, and in a long run whenever its length has grown by 2 %, so that all judgements together take
a time that is proportional to the length of the run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from covey.report.diagnosis.diagnose import diagnose
from covey.report.diagnosis.finding import PROBLEM, Finding
from covey.report.diagnosis.history import RunHistory
from covey.report.diagnosis.rules import RULES

CERTAIN = 5
"""Number of judgements in a row at which a rule must be met."""
FIRST_STEPS = 5
"""Number of first steps in which nothing is judged."""
GROWTH = 0.02
"""Share by which the history has grown between two judgements."""
LIVE = {rule.name for rule in RULES if rule.live}


class LiveDiagnosis:
    """Judge of one run.

    Args:
        method: "rl" or "sft".
        settings: resolved recipe, by dotted name.
        before: figures of the evaluation before training.
        rows: rows of the steps before a resume.
    """

    def __init__(
        self,
        method: str,
        settings: Mapping[str, Any],
        before: Mapping[str, float] | None = None,
        rows: Sequence[Mapping[str, Any]] = (),
    ):
        self.method, self.settings, self.before = method, settings, before or {}
        self._rows: list[Mapping[str, Any]] = list(rows)
        self._next = 0.0
        self._held: dict[str, int] = {}
        self._announced: set[str] = set()

    def step(self, row: Mapping[str, Any]) -> list[Finding]:
        """Add the row of a step; return the problems that became certain with it."""
        self._rows.append(row)
        n = len(self._rows)
        if n <= FIRST_STEPS or n < self._next:
            return []
        self._next = n * (1 + GROWTH)
        history = RunHistory.from_rows(self._rows, self.method, self.settings, self.before)
        found = {one.rule: one for one in diagnose(history) if one.level == PROBLEM and one.rule in LIVE}
        self._held = {rule: self._held.get(rule, 0) + 1 for rule in found}
        certain = [one for rule, one in found.items() if self._held[rule] >= CERTAIN and rule not in self._announced]
        self._announced.update(one.rule for one in certain)
        return certain
