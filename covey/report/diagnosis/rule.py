"""The form of a rule: conditions on the features of a run, the words that say what was seen, and the advice.

Many features are levels: means of a metric over a few rows with their standard errors, and changes between them.
"""

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import eq, ge, gt, le, lt
from typing import Any, NamedTuple, Protocol

PROBLEM, NOTE = "problem", "note"
"""Levels of a finding: a problem has a cause that can be changed, a note informs."""


@dataclass(frozen=True)
class Finding:
    """One finding, as the report and the terminal show it.

    Attributes:
        title: what was found, as a sentence.
        threshold: rule that it met, in words.
        evidence: steps and figures that show it.
        setting: setting to change, and how; empty where there is none.
        rule: name of the rule in the table of rules; empty for a note on the run as a whole.
        level: "problem" or "note".
        samples: completions to read, one line each.
    """

    title: str
    threshold: str
    evidence: str
    setting: str
    rule: str = ""
    level: str = PROBLEM
    samples: tuple[str, ...] = ()


class Features(Protocol):
    """A run of some steps. Its features have paths, such as `kl.last.mean`; None stands for one that is unknown."""

    def __len__(self) -> int: ...
    def feature(self, path: str) -> Any: ...


class Condition(NamedTuple):
    """Comparison of a feature with a threshold. It does not hold where the feature is unknown.

    Attributes:
        compare: function of the feature and the threshold.
        feature: path of the feature.
        threshold: number that it is compared with.
        unit: path of the feature that the threshold is a multiple of; empty if it is the number itself.
    """

    compare: Callable[[Any, Any], bool]
    feature: str
    threshold: float
    unit: str = ""

    def holds(self, run: Features) -> bool:
        """Return whether the features of `run` meet the condition."""
        value, unit = run.feature(self.feature), run.feature(self.unit) if self.unit else 1
        return value is not None and unit is not None and bool(self.compare(value, self.threshold * unit))


at_least, above, at_most, below, equal = (partial(Condition, compare) for compare in (ge, gt, le, lt, eq))


class Case(NamedTuple):
    """One way to meet a rule.

    Attributes:
        words: what was seen, with features in braces. A part, up to the next `|`, is left out if one of its features is
            unknown; if that is the first part, the case is not met. A format is one of Python's; `share`; or what
            joins a list.
        when: conditions that all hold.
        unless: conditions of which none holds.
    """

    words: str
    when: Sequence[Condition] = ()
    unless: Sequence[Condition] = ()

    def evidence(self, run: Features) -> str:
        """Return the words with the features of `run`; "" if the case is not met."""
        if not all(one.holds(run) for one in self.when) or any(one.holds(run) for one in self.unless):
            return ""
        first, *others = map(_Words(run).text, self.words.split("|"))
        return first and "".join([first, *others])


class Rule(NamedTuple):
    """One rule.

    Attributes:
        name: short name, as in the heading of the documents.
        title: what was found, as a sentence.
        threshold: from when on it counts, in words.
        rows: number of steps from which it is judged.
        cases: the way to meet it, or ways, of which the first one that is met gives the evidence.
        fix: setting to change, and how.
        settings: names of the settings in `fix`.
        methods: training methods that it is for.
        explains: names of later rules whose findings are its consequences.
        level: "problem" or "note".
        live: whether it is told while the run trains.
    """

    name: str
    title: str
    threshold: str
    rows: int
    cases: Case | Sequence[Case]
    fix: str
    settings: tuple[str, ...]
    methods: tuple[str, ...] = ("rl",)
    explains: tuple[str, ...] = ()
    level: str = PROBLEM
    live: bool = True

    def evidence(self, run: Features) -> str:
        """Return the evidence that `run` meets the rule; "" if it does not, or is too short."""
        if len(run) < self.rows:
            return ""
        cases = [self.cases] if isinstance(self.cases, Case) else self.cases
        return next((text for case in cases if (text := case.evidence(run))), "")


class _Words(string.Formatter):
    """Formatter whose fields are features of `run`."""

    def __init__(self, run: Features):
        self._run = run

    def text(self, part: str) -> str:
        """Return `part` with its features filled in; "" if one of them is unknown."""
        try:
            return self.format(part)
        except LookupError:
            return ""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        if (value := self._run.feature(field_name)) is None:
            raise LookupError(field_name)
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, list):
            return format_spec.join(value)
        return percent(value) if format_spec == "share" else format(value, format_spec)


def percent(value: float) -> str:
    """Format a share.

    >>> percent(0.1234)
    '12.3 %'
    """
    return f"{100 * value:.3g} %"


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

    @property
    def factor(self) -> float:
        """Absolute value of the ratio."""
        return abs(self.ratio)

    @property
    def shares(self) -> str:
        """Both means as shares, with their steps."""
        return self._text(percent)

    def __str__(self) -> str:
        """Return both means with their steps.

        >>> str(Change(Level(0.5, 0.1, 1, 5), Level(0.25, 0.1, 16, 20)))
        '0.5 (steps 1 to 5) → 0.25 (steps 16 to 20)'
        """
        return self._text("{:.3g}".format)

    def _text(self, text_of: Callable[[float], str]) -> str:
        return " → ".join(f"{text_of(level.mean)} ({level.span})" for level in self)
