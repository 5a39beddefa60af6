"""Read JSON that is not trusted: the rows of a run folder, and the entries of a checkpoint.

A line or a value of another form is no error; the functions return None for it, or False. An entry that a run needs is
one. This module imports neither JAX nor NumPy.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeGuard, TypeVar

from covey.errors import ResumeError

T = TypeVar("T")

MAX_LINE = 16_000_000
"""Maximum length in bytes of a line that is read; a longer one is left out."""
MAX_COUNT = 2**53
"""Upper end of the steps that are read: a page has no exact number beyond it."""
LARGEST = 1e300
"""Largest number of a page: rounded to a few digits, one beside the end of the range of floats would be infinite."""


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse one line of JSON; None if it is no object, too long or too deeply nested."""
    try:
        row = json.loads(line) if len(line) <= MAX_LINE else None
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def number(value: Any) -> float | None:
    """Return `value` as a float; None if it is no number, or none of a magnitude up to `LARGEST`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether `value` is a whole number that a page can show exactly: the number of a step or of a group."""
    return type(value) is int and 0 <= value < MAX_COUNT


def require_entry(extra: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return the entry `name` of the `extra` of a checkpoint, or of a mapping in it.

    Raises:
        ResumeError: it is missing, or of another kind than `kind`: a file made by others may hold anything.
    """
    value = extra.get(name)
    is_right = {int: is_count(value), float: number(value) is not None}.get(kind, isinstance(value, kind))
    if not is_right:
        raise ResumeError(
            "meta.json of the checkpoint has " + (f"{name} = {value!r:.80}" if name in extra else f"no {name}"),
            want=f"{name} as the run has saved it",
            fix="remove this checkpoint, to resume from the one before",
        )
    return value if isinstance(value, kind) else kind(value)  # type: ignore[call-arg]  # of a number
