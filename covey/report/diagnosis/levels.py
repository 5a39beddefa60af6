"""Means of a metric over a few rows with their standard errors, and changes between them.

The error of a mean comes from the differences of successive rows, which a slow trend does not enlarge; that of the
reward is at least what the spread of the completions says. So a threshold in standard errors means the same for a run
of 8 completions per step and for one of 800.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from covey.report.diagnosis.history import RunHistory, noise

GAIN_ERRORS, FALL_ERRORS = 3.0, 4.0
"""Number of standard errors from which a rise, and from which a fall counts. A fall needs more: the level that it is
measured from is chosen among many.
"""
MIN_GAIN, MIN_FALL = 0.05, 0.3
"""Smallest rise and fall of the reward that count, in units of the spread of single completions."""


ROUNDING = 1e-9
"""Relative difference below which values are equal."""
MOST_LEVELS = 200
"""Number of earlier levels among which the best is chosen in a long run."""


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


class Change(NamedTuple):
    """Change from one level to another."""

    early: Level
    late: Level

    @property
    def difference(self) -> float:
        """Late mean minus early mean; 0 if they are equal to rounding."""
        found = self.late.mean - self.early.mean
        return found if abs(found) > ROUNDING * max(abs(self.early.mean), abs(self.late.mean)) else 0.0

    @property
    def errors(self) -> float:
        """Difference in standard errors; infinite if both levels have none and differ."""
        error = math.hypot(self.early.error, self.late.error)
        return (
            self.difference / error if error else math.copysign(math.inf, self.difference) if self.difference else 0.0
        )

    @property
    def ratio(self) -> float:
        """Late mean divided by the early one; 1 if both are 0."""
        if not self.early.mean:
            return 1.0 if not self.late.mean else math.copysign(math.inf, self.late.mean)
        return self.late.mean / self.early.mean

    def text(self, share: bool = False) -> str:
        """Return both means with their steps.

        >>> Change(Level(0.5, 0.1, 1, 5), Level(0.25, 0.1, 16, 20)).text()
        '0.5 (steps 1 to 5) → 0.25 (steps 16 to 20)'
        """
        parts = [f"{percent(one.mean) if share else f'{one.mean:.3g}'} ({one.span})" for one in self]
        return " → ".join(parts)


def percent(value: float) -> str:
    """Format a share.

    >>> percent(0.1234)
    '12.3 %'
    """
    return f"{100 * value:.3g} %"


def level(history: RunHistory, name: str, start: int, stop: int) -> Level | None:
    """Return the level of the metric `name` in the rows from `start` to before `stop`; None if none of them has it."""
    column = history.column(name)
    inside = column[start:stop]
    known = inside[np.isfinite(inside)]
    if not known.size:
        return None
    error = max(noise(known), history.noise(name)) / math.sqrt(known.size)
    if name == "reward":
        error = max(error, _sampling_error(history, start, stop))
    steps = history.steps[start:stop][np.isfinite(inside)]
    return Level(float(known.mean()), float(error), int(steps[0]), int(steps[-1]))


def change(history: RunHistory, name: str) -> Change | None:
    """Return the change of `name` from the first window of the run to the last; None if a window lacks the metric."""
    early = level(history, name, 0, history.window)
    late = recent(history, name)
    return None if early is None or late is None else Change(early, late)


def recent(history: RunHistory, name: str) -> Level | None:
    """Return the level of `name` in the last window."""
    return level(history, name, max(0, len(history) - history.window), len(history))


def spread(history: RunHistory, name: str = "reward") -> float:
    """Return the standard deviation of the reward over single completions, the largest of any window of the run.

    This is the unit in which rises and falls are measured, so that no rule depends on the scale of a reward.

    Args:
        name: "reward", or a reward function's `rewards/<function>/mean`.
    """
    if name == "reward":
        between = np.nan_to_num(history.column("reward_error")) ** 2 * max(1, history.groups_per_step)
        each = np.sqrt(np.nan_to_num(history.column("reward_std")) ** 2 + between)
    else:
        each = np.nan_to_num(history.column(name.removesuffix("/mean") + "/std"))
    size = min(history.window, len(each))
    if not size:
        return 0.0
    found = float(np.convolve(each, np.ones(size) / size, "valid").max())
    known = history.column(name)[np.isfinite(history.column(name))]
    return found or (float(known.std()) if known.size else 0.0)


def gain(history: RunHistory) -> Change | None:
    """Return the change of the reward from the first window to the last."""
    return change(history, "reward")


def improved(history: RunHistory) -> bool:
    """Return whether the reward has risen: by at least 3 standard errors, and by 5 % of the spread of completions."""
    found = gain(history)
    return found is not None and found.errors >= GAIN_ERRORS and found.difference >= MIN_GAIN * spread(history)


def fall(history: RunHistory, name: str = "reward") -> Change | None:
    """Return the largest fall of `name` from an earlier level to the last window; None if it has not fallen.

    A fall is at least 4 standard errors and 30 % of the spread of completions, from the level that shows it best.
    """
    late = recent(history, name)
    found = [] if late is None else [Change(early, late) for early in earlier_levels(history, name)]
    least = MIN_FALL * spread(history, name)
    falls = [one for one in found if one.errors <= -FALL_ERRORS and -one.difference >= least]
    if not falls or min(found, key=lambda one: one.errors) not in falls:
        return None
    return min(falls, key=lambda one: one.difference)


def earlier_levels(history: RunHistory, name: str) -> Iterator[Level]:
    """Yield levels of `name` before the last window, each over at most a window."""
    for stop in _stops(len(history) - history.window):
        found = level(history, name, max(0, stop - history.window), stop)
        if found is not None:
            yield found


def _stops(last: int) -> list[int]:
    """Return ends of earlier levels: every row at the start, and evenly spaced ones in a long run.

    >>> _stops(4), len(_stops(100_000))
    ([1, 2, 3, 4], 207)
    """
    spaced = np.linspace(1, max(last, 1), MOST_LEVELS).astype(int).tolist()
    return [stop for stop in sorted({*range(1, 9), *spaced}) if stop <= last]


def constant(values: Float[np.ndarray, "n"]) -> bool:
    """Return whether all finite values are equal, to rounding; False if there are none."""
    known = values[np.isfinite(values)]
    return bool(known.size and np.ptp(known) <= ROUNDING * np.abs(known).max())


def _sampling_error(history: RunHistory, start: int, stop: int) -> float:
    """Return the standard error of the mean reward of some rows, from the spread of their completions. It is at least
    that of all completions as one group: two groups may have equal means by chance.
    """
    samples = max(1, history.samples_per_step)
    errors = np.nan_to_num(history.column("reward_error")[start:stop])
    within = np.nan_to_num(history.column("reward_std")[start:stop]) / math.sqrt(samples)
    each = np.maximum(errors, within)[np.isfinite(history.column("reward")[start:stop])]
    return float(np.linalg.norm(each) / max(each.size, 1))


def all_zero(values: Float[np.ndarray, "n"]) -> bool:
    """Return whether all values are 0 or not measured."""
    return bool((~np.isfinite(values) | (values == 0)).all())
