"""The form of a rule: conditions on the features of a run, the words that say what was seen, and the advice.

Many features are levels: means of a metric over a few rows with their standard errors, and changes between them.
"""

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import eq, ge, gt, itemgetter, le, lt, ne
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from covey.display import printable
from covey.files import is_count, number

if TYPE_CHECKING:
    from covey_report.diagnosis.features import RunHistory

PROBLEM, NOTE, WITHDRAWN = "problem", "note", "withdrawn"
"""Levels of a finding: a problem has a cause that can be changed, a note informs, and a problem that was told while the
run trained may be withdrawn."""


@dataclass(frozen=True)
class Finding:
    """One finding, as the report and the terminal show it.

    Attributes:
        title: what was found, as a sentence.
        threshold: rule that it met, in words.
        evidence: steps and figures that show it.
        setting: setting to change, and how; empty where there is none.
        rule: name of the rule in the table of rules; empty for a note on the run as a whole.
        level: "problem", "note", or "withdrawn" for a problem that was told and holds no longer.
        samples: completions to read, one line each.
        refuted_by: what would refute it, in words; empty where nothing would.
    """

    title: str
    threshold: str
    evidence: str
    setting: str
    rule: str = ""
    level: str = PROBLEM
    samples: tuple[str, ...] = ()
    refuted_by: str = ""


class Condition(NamedTuple):
    """Comparison of a feature with a threshold. It does not hold where the feature is unknown.

    Attributes:
        compare: function of the feature and the threshold.
        feature: path of the feature.
        threshold: number that it is compared with.
        unit: path of the feature that the threshold is a multiple of; empty if it is the number itself.
        words: what holds then, as a clause, where the condition refutes a rule.
    """

    compare: Callable[[Any, Any], bool]
    feature: str
    threshold: float
    unit: str = ""
    words: str = ""

    def holds(self, run: "RunHistory") -> bool:
        """Return whether the features of `run` meet the condition."""
        value, unit = run.feature(self.feature), run.feature(self.unit) if self.unit else 1
        return value is not None and unit is not None and bool(self.compare(value, self.threshold * unit))


at_least, above, at_most, below, equal, differs = (partial(Condition, compare) for compare in (ge, gt, le, lt, eq, ne))


class Case(NamedTuple):
    """One way to meet a rule.

    Attributes:
        words: what was seen, with features in braces. A part, up to the next `|`, is left out if one of its features is
            unknown; if that is the first part, the case is not met. A format is one of Python's; `share`; or what
            joins a list.
        when: conditions that all hold.
        rows: number of steps from which it is judged; None for that of the rule. With one step it is certain at once.
    """

    words: str
    when: Sequence[Condition] = ()
    rows: int | None = None

    def evidence(self, run: "RunHistory") -> str:
        """Return the words with the features of `run`; "" if the case is not met."""
        if not all(condition.holds(run) for condition in self.when):
            return ""
        first, *others = (_fill(part, run) for part in self.words.split("|"))
        return first and "".join([first, *others])


class Match(NamedTuple):
    """A rule that is met: the evidence, what refutes it ("" if nothing does), and whether one step makes it certain."""

    rule: "Rule"
    evidence: str
    refutation: str
    certain: bool


class Rule(NamedTuple):
    """One rule.

    Attributes:
        name: short name, as in the heading of the documents.
        title: what was found, as a sentence.
        threshold: from when on it counts, in words.
        rows: number of steps from which it is judged.
        cases: ways to meet it, of which the first one that is met gives the evidence.
        advice: settings to change, and how. `{name:try}` is a setting with the value to try, or with the factor by
            which to multiply (`×3`) or divide (`÷3`) that of the run. A part up to the next `|` is left out where a
            setting is at the value to try or beyond it (`>0.1` raises it to 0.1, `<0.1` lowers it).
        refuted_by: conditions of which each refutes it.
        methods: training methods that it is for.
        explains: names of later rules whose findings are its consequences.
        level: "problem" or "note".
        live: whether it is told while the run trains.
    """

    name: str
    title: str
    threshold: str
    rows: int
    cases: Sequence[Case]
    advice: str
    refuted_by: Sequence[Condition] = ()
    methods: tuple[str, ...] = ("rl",)
    explains: tuple[str, ...] = ()
    level: str = PROBLEM
    live: bool = True

    def match(self, run: "RunHistory") -> Match | None:
        """Return the first case that `run` meets; None if it meets none, or is too short."""
        for case in self.cases:
            rows = self.rows if case.rows is None else case.rows
            if len(run) >= rows and (evidence := case.evidence(run)):
                refutation = next((condition.words for condition in self.refuted_by if condition.holds(run)), "")
                return Match(self, evidence, refutation, rows == 1)
        return None

    def advice_for(self, settings: Mapping[str, Any], in_force: Mapping[str, float] | None = None) -> str:
        """Return the advice with today's value of each setting and the one to try.

        Args:
            settings: resolved recipe, by dotted name.
            in_force: largest values that settings have really had, where a schedule changes them.
        """
        advice = "".join(part for part in self.advice.split("|") if not _is_reached(part, settings))
        return FIELD.sub(lambda match: _setting(match[1], match[2] or "", settings, in_force or {}), advice)


def _is_reached(part: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a setting in a part of an advice is at the value to which it should be raised or lowered."""
    return any(
        (value >= float(match[2][1:]) if match[2][0] == ">" else value <= float(match[2][1:]))
        for match in FIELD.finditer(part)
        if (match[2] or "").startswith((">", "<")) and (value := number(settings.get(match[1]))) is not None
    )


def _setting(name: str, attempt: str, settings: Mapping[str, Any], in_force: Mapping[str, float]) -> str:
    """Return a setting with its value in `settings` and the one to try; its name where the value is unknown. A factor
    is one of the largest value that was in force.

    >>> _setting("rollout.temperature", "÷2", {"rollout.temperature": 1.5}, {})
    'rollout.temperature (1.5 today; try 0.75)'
    >>> _setting("rate", "÷5", {"rate": 1e-3}, {"rate": 2e-4})
    'rate (0.001 today, at most 0.0002 in force; try 4e-05)'
    """
    today, value, attempt = settings.get(name), number(settings.get(name)), attempt.lstrip("<>")
    if name not in settings or not attempt:
        return name
    reached = in_force.get(name, value)
    if attempt[0] in "×÷":
        factor = float(attempt[1:]) if attempt[0] == "×" else 1 / float(attempt[1:])
        attempt = f"{round(reached * factor) if is_count(today) else reached * factor:.3g}" if reached else ""
    shown = "unset" if today is None else printable(f"{today:.6g}" if isinstance(today, float) else str(today))
    lower = f", at most {reached:.3g} in force" if reached and value and f"{reached:.3g}" != f"{value:.3g}" else ""
    return f"{name} ({shown} today{lower}{f'; try {attempt}' if attempt and attempt != shown else ''})"


FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
"""A feature in the words of a case, with its format; a setting in an advice, with the value to try."""


def _fill(part: str, run: "RunHistory") -> str:
    """Return `part` with the features of `run` filled in; "" if one of them is unknown."""
    values = {match[1]: run.feature(match[1]) for match in FIELD.finditer(part)}
    if any(value is None for value in values.values()):
        return ""
    return FIELD.sub(lambda match: _format(values[match[1]], match[2] or ""), part)


def _format(value: Any, form: str) -> str:
    """Return a feature as text: a list by what joins it, a change by the form of its means.

    >>> _format(Change(Level(0.5, 0.1, 1, 5), Level(0.25, 0.1, 16, 20)), "")
    '0.5 (steps 1 to 5) → 0.25 (steps 16 to 20)'
    """
    if isinstance(value, Change):
        return " → ".join(f"{_format(level.mean, form or '.3g')} ({level.span})" for level in value)
    if isinstance(value, list):
        return form.join(value)
    return percent(value) if form == "share" else format(value, form)


def percent(value: float) -> str:
    """Format a share.

    >>> percent(0.1234)
    '12.3 %'
    """
    return f"{100 * value:.3g} %"


MOST_LEVELS = 200
"""Number of earlier levels among which the best is chosen in a long run."""
ROUNDING = 1e-9
"""Relative difference below which values are equal."""


class Level(NamedTuple):
    """Mean of a metric over some rows.

    Attributes:
        mean: mean over the rows that have the metric.
        error: its standard error.
        first, last: steps of the first and the last row.
    """

    mean: float
    error: float
    first: int
    last: int

    @property
    def span(self) -> str:
        """Steps of the level, in words."""
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"

    @property
    def size(self) -> float:
        """Absolute value of the mean."""
        return abs(self.mean)

    @property
    def lower_end(self) -> float:
        """Mean less two standard errors."""
        return self.mean - 2 * self.error


class Change(NamedTuple):
    """Change from one level to another."""

    early: Level
    late: Level

    @property
    def difference(self) -> float:
        """Late mean minus early mean; 0 if they are equal to rounding."""
        difference = self.late.mean - self.early.mean
        return difference if abs(difference) > ROUNDING * max(self.early.size, self.late.size) else 0.0

    @property
    def size(self) -> float:
        """Absolute value of the difference."""
        return abs(self.difference)

    @property
    def error(self) -> float:
        """Standard error of the difference."""
        return math.hypot(self.early.error, self.late.error)

    @property
    def errors(self) -> float:
        """Difference in standard errors; infinite if both levels have none and differ."""
        infinite = math.copysign(math.inf, self.difference) if self.difference else 0.0
        return self.difference / self.error if self.error else infinite

    @property
    def ratio(self) -> float:
        """Late mean divided by the early one; 1 if both are 0."""
        if not self.early.mean:
            return 1.0 if not self.late.mean else math.copysign(math.inf, self.late.mean)
        return self.late.mean / self.early.mean


class OpposedParts(NamedTuple):
    """Two reward functions that moved against each other: names and changes of the one that rose and of the other."""

    up: str
    down: str
    rise: Change
    fall: Change


def change_between(
    early: Callable[..., Level], levels: Sequence[Level], late: Callable[[Sequence[Level]], Level] = itemgetter(-1)
) -> Change | None:
    """Return the change from the level that `early` chooses by its mean to the level of `late`; None of one level."""
    return Change(early(levels, key=lambda level: level.mean), late(levels)) if len(levels) > 1 else None


def clearest_fall(levels: Sequence[Level]) -> Change | None:
    """Return the clearest fall from a level to a later one; None if there is no level."""
    peaks: Iterator[Level] = accumulate(levels, lambda best, level: best if best.mean > level.mean else level)
    return min(map(Change, peaks, levels), key=lambda change: change.errors, default=None)


def noise(values: Float[np.ndarray, "n"]) -> float:
    """Return the standard deviation of one value around a slow trend, from the median of the successive differences.

    >>> noise(np.arange(5.0)) < noise(np.array([0.0, 3, 0, 3, 0]))
    True
    """
    if values.size < 2:
        return 0.0
    differences: list[float] = np.abs(values[1:] - values[:-1]).tolist()  # NumPy's median is slow for a few values
    return statistics.median(differences) / (0.6745 * math.sqrt(2))


def stops_before(last: int) -> list[int]:
    """Return ends of earlier levels: every row at the start, and evenly spaced ones in a long run.

    >>> stops_before(4), len(stops_before(100_000))
    ([1, 2, 3, 4], 207)
    """
    spaced = np.linspace(1, max(last, 1), MOST_LEVELS).astype(int).tolist()
    return [stop for stop in sorted({*range(1, 9), *spaced}) if stop <= last]
