"""Means of a metric over a few rows with their standard errors, and changes between them."""

import math
from collections.abc import Callable
from typing import NamedTuple

from covey.report.diagnosis.rule import percent

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
