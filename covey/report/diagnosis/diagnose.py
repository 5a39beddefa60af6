"""Apply the rules to the history of a run.

The first finding is the first cause: the rules are ordered by it, and a finding that an earlier one explains becomes a
line of its evidence. Where no problem is found, one note says how the run went, or that it is too short to judge.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from covey.display import printable
from covey.files import open_or_empty
from covey.report.diagnosis.finding import NOTE, PROBLEM, Finding
from covey.report.diagnosis.history import RunHistory
from covey.report.diagnosis.levels import change, improved
from covey.report.diagnosis.outcome_checks import opposed_parts
from covey.report.diagnosis.rules import RULES, Rule
from covey.report.diagnosis.signal_checks import LONG_ROWS, MIN_ROWS, TREND_ROWS
from covey.report.run_data import Row
from covey.train.json_lines import is_count, number, parse_line

Met = tuple[Rule, str]
"""A rule that is met, and its evidence."""
MOST_SAMPLES = 5
"""Maximum number of completions to read."""
EXCERPT_WIDTH = 160
"""Maximum number of characters of a prompt and of a completion."""
_STEP = re.compile(rb'\{"step": (\d{1,15}),')
CERTAIN = 5
"""Number of judgements in a row at which a rule must be met."""
FIRST_STEPS = 5
"""Number of first steps in which nothing is judged."""
GROWTH = 0.02
"""Share by which the history has grown between two judgements."""
LIVE = {rule.name for rule in RULES if rule.live}


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


def samples_to_read(history: RunHistory, high: str = "", low: str = "") -> list[str]:
    """Return lines with the completions of the last window in which the reward function `high` gave most and `low`
    least; without names, those with the highest reward. There is at most one of each group.
    """
    best: dict[tuple[object, object], tuple[float, str]] = {}
    for row in _recent_rows(history):
        group, score = (row["step"], str(row.get("group"))), _score(row, high, low)
        if score is not None and (group not in best or score > best[group][0]):
            best[group] = score, _line(row)
    return [line for _, line in sorted(best.values(), key=lambda one: -one[0])[:MOST_SAMPLES]]


def _recent_rows(history: RunHistory) -> Iterator[Row]:
    """Yield the rows of the last window; `samples.jsonl` may be large, and only these lines are parsed."""
    first = int(history.steps[-min(history.window, len(history))]) if len(history) else 0
    if history.samples is None:
        return
    with open_or_empty(history.samples.parent, history.samples.name) as lines:
        for line in lines:
            key = _STEP.match(line)
            row = parse_line(line) if (key is None or int(key[1]) >= first) and line.endswith(b"\n") else None
            if row is not None and is_count(row.get("step")) and row["step"] >= first:
                yield row


def _score(row: Row, high: str, low: str) -> float | None:
    """Return how well `row` shows that `high` is given and `low` is not; None if it is not scored."""
    if not high:
        return number(row.get("reward"))
    parts = row.get("rewards")
    parts = parts if isinstance(parts, dict) else {}
    up, down = number(parts.get(high)), number(parts.get(low))
    return None if up is None or down is None else up - down


def _line(row: Row) -> str:
    parts = row.get("rewards")
    rewards = parts.items() if isinstance(parts, dict) else ()
    scores = ", ".join(f"{name} {value:.3g}" for name, raw in rewards if (value := number(raw)) is not None)
    where = f"step {row.get('step')}, group {row.get('group')}, sample {row.get('sample')}"
    return printable(f"{where} ({scores}): {_excerpt(row.get('prompt'))} → {_excerpt(row.get('text'))}")


def _excerpt(text: object) -> str:
    shown = " ".join(str(text).split())
    return shown if len(shown) <= EXCERPT_WIDTH else f"{shown[: EXCERPT_WIDTH // 2]} … {shown[-EXCERPT_WIDTH // 2 :]}"


class LiveDiagnosis:
    """Judge a run while it trains, and tell each problem once, when it is certain.

    A problem is certain if its rule was met at `CERTAIN` judgements in a row, none of them in the first steps. There is
    a judgement after each step, and in a long run whenever its length has grown by 2 %, so that all judgements together
    take a time that is proportional to the length of the run.

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
