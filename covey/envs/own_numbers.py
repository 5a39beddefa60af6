"""Numbers that an environment gives in `Step.info`, which become the metrics `env/<name>`.

`info` may hold anything, so what is no number is not looked at. A number that cannot be a metric is left out, and the
first of each kind is warned of.
"""

import logging
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from covey.config.metrics import OWN_NUMBER, TABLE

log = logging.getLogger(__name__)

NAME = re.compile(OWN_NUMBER)
MAX_LENGTH = 40
"""Maximum characters of a name."""
MAX_NAMES = 32
"""Largest number of names in a run: each is a metric of every step."""
LARGEST = 1e100
"""Limit of a number's magnitude, so that sums of many are finite."""
COUNTED = ("tool_calls", "tool_failures")
"""Numbers of `info` that are summed over the turns, as metrics of their own."""
TAKEN = {row.name.removeprefix("env/") for row in TABLE if row.name.startswith("env/")}
"""Names of other metrics."""


class OwnNumbers:
    """Numbers of the episodes of one environment.

    Args:
        environment: its name in warnings.
    """

    def __init__(self, environment: str):
        self._environment = environment
        self._names: set[str] = set()
        self._warned: set[str] = set()

    def of(self, info: Any) -> dict[str, float]:
        """Return the numbers of a step that can be metrics, by name; True and False are 1 and 0."""
        if not isinstance(info, Mapping):
            return {}
        numbers = {name: value for name, value in info.items() if isinstance(value, Real | np.bool_)}
        return {
            name: float(value) for name, value in numbers.items() if name not in COUNTED and self._takes(name, value)
        }

    def _takes(self, name: Any, value: Any) -> bool:
        """Return whether a number can be a metric, and warn of the first that cannot for the same reason."""
        reason = _objection(name, value)
        if not reason and name not in self._names and len(self._names) == MAX_NAMES:
            reason = f"there are {MAX_NAMES} others, and each is a metric of every step"
        if not reason:
            self._names.add(name)
        elif reason not in self._warned:
            self._warned.add(reason)
            shown = f"the number {name!r:.80} in the info of the environment {self._environment!r}"
            log.warning(f"{shown} is no metric: {reason}; such numbers are left out")
        return not reason


def _objection(name: Any, value: Any) -> str:
    """Return the reason why a number cannot be a metric; empty if there is none."""
    if not isinstance(name, str) or len(name) > MAX_LENGTH or not NAME.fullmatch(name):
        return f"a name has small letters, digits and _, begins with a letter, and has at most {MAX_LENGTH} characters"
    if name in TAKEN:
        return "a metric of every environment has its name"
    return "" if abs(value) < LARGEST else f"it is not finite, or beyond {LARGEST:g}"
