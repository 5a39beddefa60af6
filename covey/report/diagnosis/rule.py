"""The form of a rule: conditions on the features of a run, the words that say what was seen, and the advice."""

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
