"""Apply the rules to the history of a run.

The first finding is the first cause: the rules are ordered by it, and a finding that an earlier one explains becomes a
line of its evidence. Where no problem is found, one note says how the run went, or that it is too short to judge.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from covey.display import printable
from covey.files import number, open_or_empty
from covey.monitor.formats import excerpt
from covey.report.completions import locate, read_group, rewards_of
from covey.report.diagnosis.features import OpposedParts, RunHistory
from covey.report.diagnosis.rule import NOTE, PROBLEM, Case, Condition, Finding, Rule, below
from covey.report.diagnosis.rules import LONG_ROWS, MIN_ROWS, ROSE, RULES, TREND_ROWS
from covey.report.run_data import Row

Match = tuple[Rule, str]
"""A rule that is met, and its evidence."""
MOST_SAMPLES = 5
"""Maximum number of completions to read."""
CERTAIN = 5
"""Number of judgements in a row at which a rule must be met."""
FIRST_STEPS = 5
"""Number of first steps in which nothing is judged."""
GROWTH = 0.02
"""Share by which the history has grown between two judgements."""
REWARD_ROSE, LOSS_FELL = ("reward", ROSE), ("loss", below("loss.change.difference", 0))
"""Metrics by which a run is judged, with the condition of one that learns."""
LIVE = {rule.name for rule in RULES if rule.live}


def diagnose(history: RunHistory) -> list[Finding]:
    """Return the findings on a run, the first cause first; one note if there is no problem."""
    with np.errstate(all="ignore"):  # numbers of any size
        rules = [rule for rule in RULES if history.method in rule.methods]
        matches = [(rule, evidence) for rule in rules if (evidence := rule.evidence(history))]
        findings = [_finding(rule, evidence, matches) for rule, evidence in _causes(matches)]
        if findings and findings[0].rule == "possible reward hacking":
            findings[0] = replace(findings[0], samples=tuple(samples_to_read(history)))
        if any(finding.level == PROBLEM for finding in findings):
            return findings
        metric, improved = LOSS_FELL if history.method == "sft" else REWARD_ROSE
        outcomes = _outcomes(metric, improved, len(rules))
        return [next(_finding(rule, text, []) for rule in outcomes if (text := rule.evidence(history))), *findings]


def _causes(matches: Sequence[Match]) -> list[Match]:
    """Return the rules that no earlier one explains, each once, problems first."""
    explained = {name for rule, _ in matches for name in rule.explains}
    causes: dict[str, Match] = {}
    for rule, evidence in matches:
        if rule.name not in explained:
            causes.setdefault(rule.name, (rule, evidence))
    return sorted(causes.values(), key=lambda cause: cause[0].level != PROBLEM)


def _finding(rule: Rule, evidence: str, matches: Sequence[Match]) -> Finding:
    """Return the finding of a rule; its consequences among `matches` are part of the evidence."""
    consequences = [f"{other.title} ({seen})" for other, seen in matches if other.name in rule.explains]
    evidence += f". It may explain: {'; '.join(consequences)}" if consequences else ""
    return Finding(rule.title, rule.threshold, evidence, rule.fix, rule.name, rule.level)


def _outcomes(metric: str, improved: Condition, num_rules: int) -> list[Rule]:
    """Return the notes on a run in which none of `num_rules` rules found a problem; the first that is met is told."""
    words = f"the mean {metric} went {{{metric}.change}}", f"{metric} was not measured"
    sound = improved, below("run.steps.size", LONG_ROWS)
    too_short = [
        Case(f"{{num_steps}}; no rule is judged before step {MIN_ROWS}", [below("run.steps.size", MIN_ROWS)]),
        Case(
            f"{{num_steps}}; rules about changes are not judged before step {TREND_ROWS}",
            [below("run.steps.size", TREND_ROWS)],
        ),
    ]
    threshold = f"none of the {num_rules} rules for this method of training is met"
    advice = "train longer, or compare runs with another learning rate"
    note = partial(Rule, "", settings=(), level=NOTE)
    return [
        note("The run is too short to judge", "", 0, too_short, ""),
        note("Nothing wrong was found", threshold, 0, [Case(text, [one]) for text in words for one in sound], ""),
        note(f"The {metric} did not improve, and no rule says why", "", 0, [Case(text) for text in words], advice),
    ]


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
        self._next_length = 0.0
        self._streaks: dict[str, int] = {}
        self._announced: set[str] = set()

    def step(self, row: Mapping[str, Any]) -> list[Finding]:
        """Add the row of a step; return the problems that became certain with it."""
        self._rows.append(row)
        n = len(self._rows)
        if n <= FIRST_STEPS or n < self._next_length:
            return []
        self._next_length = n * (1 + GROWTH)
        history = RunHistory.from_rows(self._rows, self.method, self.settings, self.before)
        problems = [finding for finding in diagnose(history) if finding.level == PROBLEM and finding.rule in LIVE]
        self._streaks = {finding.rule: self._streaks.get(finding.rule, 0) + 1 for finding in problems}
        certain = [rule for rule, count in self._streaks.items() if count >= CERTAIN and rule not in self._announced]
        self._announced.update(certain)
        return [finding for finding in problems if finding.rule in certain]
