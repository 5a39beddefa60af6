"""Apply the rules to the history of a run.

The first finding is the first cause: the rules are ordered by it, and a finding that an earlier one explains becomes a
line of its evidence. Where no problem is found, one note says how the run went, or that it is too short to judge.
"""

from collections.abc import Sequence

import numpy as np

from covey.report.diagnosis.finding import NOTE, PROBLEM, Finding
from covey.report.diagnosis.history import RunHistory
from covey.report.diagnosis.levels import change, improved
from covey.report.diagnosis.outcome_checks import opposed_parts
from covey.report.diagnosis.rules import RULES, Rule
from covey.report.diagnosis.samples import samples_to_read
from covey.report.diagnosis.signal_checks import LONG_ROWS, MIN_ROWS, TREND_ROWS

Met = tuple[Rule, str]
"""A rule that is met, and its evidence."""


def diagnose(history: RunHistory) -> list[Finding]:
    """Return the findings on a run, the first cause first; one note if there is no problem."""
    with np.errstate(all="ignore"):  # numbers of any size
        return _diagnose(history)


def _diagnose(history: RunHistory) -> list[Finding]:
    found = met(history)
    findings = [_finding(rule, _with_consequences(rule, seen, found)) for rule, seen in _causes(found)]
    if findings and findings[0].rule == "possible reward hacking":
        findings[0] = _with_samples(findings[0], history)
    if any(finding.level == PROBLEM for finding in findings):
        return findings
    return [_without_problem(history), *findings]


def met(history: RunHistory) -> list[Met]:
    """Return the rules that the run meets, in the order of the table."""
    return [(rule, seen) for rule in RULES if history.method in rule.methods and (seen := rule.check(history))]


def _causes(found: Sequence[Met]) -> list[Met]:
    """Return the rules that no earlier one explains, problems first."""
    explained = {name for rule, _ in found for name in rule.explains}
    kept = list({rule.name: (rule, seen) for rule, seen in reversed(found) if rule.name not in explained}.values())[
        ::-1
    ]
    return sorted(kept, key=lambda one: one[0].level != PROBLEM)


def _with_consequences(rule: Rule, seen: str, found: Sequence[Met]) -> str:
    follow = [f"{other.title} ({evidence})" for other, evidence in found if other.name in rule.explains]
    return f"{seen}. It may explain: {'; '.join(follow)}" if follow else seen


def _finding(rule: Rule, evidence: str) -> Finding:
    return Finding(rule.title, rule.threshold, evidence, rule.fix, rule.name, rule.level)


def _with_samples(finding: Finding, history: RunHistory) -> Finding:
    pair = opposed_parts(history)
    lines = samples_to_read(history, *pair) if pair else samples_to_read(history)
    return Finding(**(vars(finding) | {"samples": tuple(lines)}))


def _without_problem(history: RunHistory) -> Finding:
    """Return the note on a run without a problem."""
    n = len(history)
    if n < TREND_ROWS:
        what = "no rule is judged" if n < MIN_ROWS else "rules about changes are not judged"
        seen = f"{n} step{'s' if n != 1 else ''}; {what} before step {MIN_ROWS if n < MIN_ROWS else TREND_ROWS}"
        return Finding("The run is too short to judge", "", seen, "", level=NOTE)
    name = "loss" if history.method == "sft" else "reward"
    moved = change(history, name)
    seen = f"the mean {name} went {moved.text()}" if moved else f"{name} was not measured"
    better = improved(history) if name == "reward" else moved is not None and moved.difference < 0
    rules = [rule for rule in RULES if history.method in rule.methods]
    if better or n < LONG_ROWS:
        return Finding(
            "Nothing wrong was found",
            f"none of the {len(rules)} rules for this method of training is met",
            seen,
            "",
            level=NOTE,
        )
    advice = "train longer, or compare runs with another learning rate"
    return Finding(f"The {name} did not improve, and no rule says why", "", seen, advice, level=NOTE)
