"""Apply the rules to the history of a run.

The first finding is the first cause: the rules are ordered by it, and a finding that an earlier one explains becomes a
line of its evidence. Where no problem is found, one note says how the run went, or that it is too short to judge.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from covey.display import printable
from covey.files import number, open_or_empty
from covey.monitor.formats import excerpt
from covey_report.completions import locate, read_group, rewards_of
from covey_report.diagnosis.features import MAX_WINDOW, RunHistory
from covey_report.diagnosis.rule import PROBLEM, WITHDRAWN, Finding, Match, OpposedParts
from covey_report.diagnosis.rules import OUTCOMES, RULES
from covey_report.run_data import Row

MOST_SAMPLES = 5
"""Maximum number of completions to read."""
CERTAIN, FIRST_STEPS, AGAIN = 5, 5, 10
"""Number of judgements in a row at which a rule must be met; number of first steps that do not count among them; and
length of a run, in units of that at a withdrawal (at least `MAX_WINDOW`), from which a problem may be told again."""
GROWTH = 0.02
"""Share by which the history has grown between two judgements."""
LIVE = {rule.name for rule in RULES if rule.live}


def diagnose(history: RunHistory) -> list[Finding]:
    """Return the findings on a run, the first cause first; one note if there is no problem."""
    return _findings(history, _matches(history))


@np.errstate(all="ignore")  # numbers of any size
def _matches(history: RunHistory) -> list[Match]:
    """Return the rules that a run meets, refuted ones among them."""
    matches = (rule.match(history) for rule in RULES if history.method in rule.methods)
    return [match for match in matches if match]


@np.errstate(all="ignore")
def _findings(history: RunHistory, matches: Sequence[Match]) -> list[Finding]:
    """Return the findings of the rules that are met and not refuted."""
    held = [match for match in matches if not match.refutation]
    findings = [_finding(history, match, held) for match in _causes(held)]
    if findings and findings[0].rule == "possible reward hacking":
        findings[0] = replace(findings[0], samples=tuple(samples_to_read(history)))
    if any(finding.level == PROBLEM for finding in findings):
        return findings
    outcomes = (rule.match(history) for rule in OUTCOMES.get(history.method, OUTCOMES["rl"]))
    return [next(_finding(history, match, []) for match in outcomes if match), *findings]


def _causes(matches: Sequence[Match]) -> list[Match]:
    """Return the rules that no earlier one explains, each once, problems first."""
    explained = {name for match in matches for name in match.rule.explains}
    causes: dict[str, Match] = {}
    for match in matches:
        if match.rule.name not in explained:
            causes.setdefault(match.rule.name, match)
    return sorted(causes.values(), key=lambda match: match.rule.level != PROBLEM)


def _finding(history: RunHistory, match: Match, matches: Sequence[Match]) -> Finding:
    """Return the finding of a rule; its consequences among `matches` are part of the evidence."""
    rule, evidence = match.rule, match.evidence
    consequences = [f"{other.rule.title} ({other.evidence})" for other in matches if other.rule.name in rule.explains]
    evidence += f". It may explain: {'; '.join(consequences)}" if consequences else ""
    refutations = "; ".join(condition.words for condition in rule.refuted_by)
    rates = {f"{history.optimizer}.learning_rate": peak.mean} if (peak := history.metric("learning_rate").peak) else {}
    return Finding(
        rule.title,
        rule.threshold,
        evidence,
        rule.advice_for(history.settings, rates),
        rule.name,
        rule.level,
        refuted_by=refutations,
    )


def samples_to_read(history: RunHistory) -> list[str]:
    """Return lines with the completions of the last window for which one of two opposed reward functions gave most and
    the other least; without such functions, those with the highest reward. There is at most one of each group.
    """
    best: dict[tuple[object, object], tuple[float, str]] = {}
    for row in _recent_rows(history):
        group, score = (row["step"], str(row.get("group"))), _score(row, history.opposed_parts)
        if score is not None and (group not in best or score > best[group][0]):
            best[group] = score, _line(row)
    return [line for _, line in sorted(best.values(), key=lambda scored: -scored[0])[:MOST_SAMPLES]]


def _recent_rows(history: RunHistory) -> Iterator[Row]:
    """Yield the rows of the last window; `samples.jsonl` may be large, and only these lines are parsed."""
    first = int(history.steps[-min(history.window, len(history))]) if len(history) else 0
    if history.samples is None:
        return
    with open_or_empty(history.samples.parent, history.samples.name) as lines:
        for group in locate(history.samples, {}):
            if group.step >= first:
                yield from read_group(lines, group)


def _score(row: Row, opposed: OpposedParts | None) -> float | None:
    """Return the score of `row` as an example of one reward without the opposed one; None if it has no such rewards."""
    if opposed is None:
        return number(row.get("reward"))
    up, down = (number(rewards_of(row).get(name)) for name in (opposed.up, opposed.down))
    return None if up is None or down is None else up - down


def _line(row: Row) -> str:
    rewards = {name: number(raw) for name, raw in rewards_of(row).items()}
    scores = ", ".join(f"{name} {reward:.3g}" for name, reward in rewards.items() if reward is not None)
    prompt, text = (excerpt(" ".join(str(row.get(name)).split())) for name in ("prompt", "text"))
    where = f"step {row.get('step')}, group {row.get('group')}, sample {row.get('sample')}"
    return printable(f"{where} ({scores}): {prompt} → {text}")


class LiveDiagnosis:
    """Judge a run while it trains; tell each problem once, when it is certain, and withdraw it when it is refuted.

    A problem is certain at once if what one step shows is enough for its rule; and otherwise if its rule was met at
    `CERTAIN` judgements in a row, none of them in the first steps. One that was refuted or not met at as many
    judgements in a row is withdrawn, and is told again only in a run that is `AGAIN` times as long. There is a
    judgement after each step, and in a long run whenever its length has grown by 2 %, so that all judgements together
    take a time that is proportional to the length of the run.

    Args:
        method: "rl" or "sft".
        settings: resolved recipe, by dotted name.
        before: figures of the evaluation before training.
        rows: rows of the steps before a resume.
        data: numbers of rows by what they are.
    """

    def __init__(
        self,
        method: str,
        settings: Mapping[str, Any],
        before: Mapping[str, float] | None = None,
        rows: Sequence[Mapping[str, Any]] = (),
        data: Mapping[str, float] | None = None,
    ):
        self.method, self.settings, self.before, self.data = method, settings, before or {}, data or {}
        self._rows: list[Mapping[str, Any]] = list(rows)
        self._next_length = 0.0
        self._streaks: Counter[str] = Counter()
        self._absences: Counter[str] = Counter()
        self._told: dict[str, Finding] = {}
        self._silent_until: dict[str, int] = {}

    def step(self, row: Mapping[str, Any]) -> Sequence[Finding]:
        """Add the row of a step; return the problems that it makes certain, and the problems that it withdraws."""
        self._rows.append(row)
        n = len(self._rows)
        if n < self._next_length:
            return []
        self._next_length = n * (1 + GROWTH)
        history = RunHistory.from_rows(self._rows, self.method, self.settings, self.before, self.data)
        matches = _matches(history)
        problems = [finding for finding in _findings(history, matches) if finding.level == PROBLEM]
        self._streaks = Counter({one.rule: (self._streaks[one.rule] + 1) * (n > FIRST_STEPS) for one in problems})
        certain = {match.rule.name for match in matches if match.certain and not match.refutation}
        certain |= {name for name, streak in self._streaks.items() if streak >= CERTAIN}
        told = [
            one
            for one in problems
            if one.rule in certain & LIVE - self._told.keys() and n >= self._silent_until.get(one.rule, 0)
        ]
        self._told |= {finding.rule: finding for finding in told}
        return [*told, *self._withdrawn(matches, CERTAIN)]

    def end(self, history: RunHistory) -> Sequence[Finding]:
        """Return the withdrawals of problems that were told and that the finished run does not have."""
        return list(self._withdrawn(_matches(history), 1))

    def _withdrawn(self, matches: Sequence[Match], times: int) -> Iterator[Finding]:
        """Yield the withdrawals of problems that were refuted or not met at as many judgements in a row as `times`."""
        held = {match.rule.name for match in matches if not match.refutation}
        refutations = {match.rule.name: match.refutation for match in matches if match.refutation}
        self._absences = Counter({name: self._absences[name] + 1 for name in self._told if name not in held})
        for name in [name for name, judgements in self._absences.items() if judgements >= times]:
            told, self._silent_until[name] = self._told.pop(name), AGAIN * max(len(self._rows), MAX_WINDOW)
            title, reason = f"Withdrawn: {told.title}", refutations.get(name, "the rule is no longer met")
            yield replace(told, title=title, evidence=reason, setting="", level=WITHDRAWN)
