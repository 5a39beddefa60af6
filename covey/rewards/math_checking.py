"""The part of `math_verify` that runs in a process of its own, which may be killed at any moment.

Nothing here is evaluated: math-verify hands sympy's `parse_expr`, which is Python's `eval` inside, text of digits and
operators alone, and reads LaTeX with a grammar.
"""

import functools
import logging
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import math_verify
import sympy

from covey.rewards.math_answers import as_latex
from covey.rewards.numbers import as_number

MEMORY = 2 << 30
"""Bytes that the process may have beside those it begins with."""


def equal(found: Sequence[str], truth: Sequence[str]) -> list[float]:
    """For each answer 1.0 when it equals its reference as mathematics, else 0.0."""
    _limit()
    return [float(_equal(answer, reference)) for answer, reference in zip(found, truth, strict=True)]


def _equal(answer: str, reference: str) -> bool:
    """Without the package's limits of time, which are signals: whoever started this process watches the clock."""
    read = functools.partial(math_verify.parse, parsing_timeout=None)
    number = as_number(reference)
    wanted = [*read(as_latex(reference)), *([] if number is None else [sympy.Rational(number)])]
    return bool(math_verify.verify(wanted, read(answer), timeout_seconds=None))


@functools.cache
def _limit() -> None:
    """Has a huge number fail with a MemoryError before the machine is out of memory, on Linux."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits of time are off
    with suppress(ValueError, OSError):
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
