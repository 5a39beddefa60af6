"""Steps and groups that findings are about, and marks of them and of the evaluations on the axis of the charts."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from covey_report.diagnosis import PROBLEM, Finding
from covey_report.run_data import Series

SPAN = re.compile(r"\bsteps? (\d{1,15})(?: to (\d{1,15}))?")
"""Pattern of a range of steps in the evidence of a finding."""
GROUP = re.compile(r"step (\d{1,15}), group (\d{1,9}),")
"""Pattern of the group of a completion to read."""
CONSEQUENCES = "It may explain: "
"""Beginning of the part of an evidence that is about other findings."""


def marks(series: Mapping[str, Series], findings: Mapping[int, Finding]) -> list[dict[str, Any]]:
    """Return the marks of a run in the form that the page reads.

    Each has its kind, the first and the last step; that of a finding its number and title too.

    Args:
        series: metrics of the run by name.
        findings: findings on the run by their number on the page.
    """
    evaluated = {step for name, points in series.items() if name.startswith("eval/") for step in points.steps}
    return [
        *({"kind": "evaluation", "first": step, "last": step} for step in sorted(evaluated)),
        *(
            {"kind": "finding", "first": first, "last": last, "number": number, "text": finding.title}
            for number, finding in findings.items()
            if finding.level == PROBLEM
            for first, last in spans(finding.evidence)
        ),
    ]


def spans(evidence: str) -> Iterator[tuple[int, int]]:
    """Yield the first and the last step of each range of steps that an evidence names.

    >>> list(spans("0.5 (steps 1 to 5) → 0.25 (step 9). It may explain: the entropy rose (steps 2 to 3)"))
    [(1, 5), (9, 9)]
    """
    for match in SPAN.finditer(evidence.partition(CONSEQUENCES)[0]):
        yield int(match[1]), int(match[2] or match[1])


def groups(findings: Iterable[Finding]) -> set[tuple[int, int]]:
    """Return step and number of the groups of the completions to read.

    >>> groups([Finding("", "", "", "", samples=("step 7, group 3, sample 0 (close 1): 1+1= → 2",))])
    {(7, 3)}
    """
    matches = (GROUP.match(line) for finding in findings for line in finding.samples)
    return {(int(match[1]), int(match[2])) for match in matches if match}
