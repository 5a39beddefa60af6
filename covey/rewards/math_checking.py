"""The part of `math_verify` that runs in a separate process, which may be killed at any time.

Model text is not evaluated as code: math-verify passes only digits and operators to sympy's `parse_expr`, which uses
Python's `eval`, and reads LaTeX with a grammar.
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
"""Bytes of memory that the process may allocate beyond its initial size."""


def equal(answers: Sequence[str], truth: Sequence[str]) -> list[float]:
    """Return 1.0 for each answer that is mathematically equal to its reference, else 0.0."""
    _limit()
    return [float(_equal(answer, reference)) for answer, reference in zip(answers, truth, strict=True)]


def _equal(answer: str, reference: str) -> bool:
    """Compare without the package's time limits, which are signals: the parent process enforces the limit."""
    read = functools.partial(math_verify.parse, parsing_timeout=None)
    number = as_number(reference)
    wanted = [*read(as_latex(reference)), *([] if number is None else [sympy.Rational(number)])]
    return bool(math_verify.verify(wanted, read(answer), timeout_seconds=None))


@functools.cache
def _limit() -> None:
    """Limit memory, so that on Linux a huge number raises MemoryError before the machine runs out."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    with suppress(ValueError, OSError):
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
