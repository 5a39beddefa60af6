"""A reward for mathematical answers: math-verify compares the final answer with the column `answer`.

The package reads LaTeX and plain expressions and compares them with sympy: 1/2, 0.5 and \\frac{1}{2} are equal. Model
text can keep sympy busy for hours, as 9^{9^{9^{9}}} does, and no signal interrupts a product of large numbers. So
answers are checked in a separate process, which is killed after `TIMEOUT` seconds; the answer then counts as wrong. The
package's own time limits are not used: they are signals, which work in the main thread only.

Model text is not evaluated as code: math-verify passes only digits and operators to sympy's `parse_expr`, which uses
Python's `eval`, and reads LaTeX with a grammar.
"""

import functools
import logging
import resource
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from covey.errors import RecipeError, RewardError
from covey.registry import install_command
from covey.rewards.call import LOST, Outcome
from covey.rewards.completions import Completions, texts
from covey.rewards.numbers import as_number
from covey_sandbox.reward_workers import START_SECONDS, Worker

if find_spec("math_verify") is None:
    raise RecipeError(
        "the reward function 'math_verify' needs the package math-verify", fix=install_command("math"), where="rewards"
    )

TIMEOUT = 5.0
"""Maximum seconds for one answer."""
MAX_CHARACTERS = 20_000
"""Number of characters read at the end of a completion, where the answer is."""
FUNCTION = "covey_sandbox.math_answers:equal"
"""Function that the separate process calls; it may be killed at any time."""


def math_verify(prompts: Sequence[Any], completions: Completions, answer: Sequence[Any], **columns: Any) -> list[float]:
    """Return 1.0 when the final answer is mathematically equal to the reference, else 0.0.

    The final answer is taken from the last `\\boxed{}`, from `<answer>` tags, from after `####`, or from what
    math-verify finds in the text, in this order. Without a reference, or when it takes too long, the score is 0.
    """
    return [_score(text, truth) for text, truth in zip(texts(completions), answer, strict=True)]


math_verify.in_process = True  # type: ignore[attr-defined]  # it starts its own process


def final_answer(text: str) -> str:
    """Return the part of a completion in which math-verify looks for the answer.

    >>> final_answer("<reasoning>1 + 1</reasoning><answer>2</answer>")
    '$2$'
    """
    text = text[-MAX_CHARACTERS:]
    if "\\boxed{" in text:
        return text[text.rindex("\\boxed{") :]
    if "<answer>" in text:
        return as_latex(text.rpartition("<answer>")[2].partition("</answer>")[0])
    if "####" in text:
        return as_latex(text.rpartition("####")[2].strip().partition("\n")[0])
    return text


def as_latex(answer: str) -> str:
    """Mark a bare answer as LaTeX mathematics, unless it is marked already."""
    answer = answer.strip()
    return answer if not answer or "$" in answer or "\\boxed{" in answer else f"${answer}$"


def _score(text: str, truth: Any) -> float:
    if truth is None or not str(truth).strip():
        return 0.0
    reward = _equal(final_answer(text), str(truth))
    if reward is None and _equal("1", "1") is None:
        raise RewardError("math-verify does not work: its process ends before it can say that 1 is 1")
    return reward or 0.0


def _equal(answer: str, truth: str) -> float | None:
    """Return 1.0 or 0.0, or None when the process died or was killed."""
    if _PROCESS.pid is None:
        _call(["1"], ["1"], START_SECONDS)  # what the process loads is no part of the time for an answer
    outcome = _call([answer], [truth], TIMEOUT)
    if outcome.values is not None:
        return float(outcome.values[0])
    if (failure := outcome.failure) is not None and failure.kind != LOST:
        raise RewardError(f"math-verify {failure.what}", where=failure.where, fix=failure.fix)
    return None


def _call(answers: list[str], truth: list[str], seconds: float) -> Outcome:
    return _PROCESS.call(FUNCTION, {"answers": answers, "truth": truth}, len(answers), seconds, threading.Event())


_PROCESS = Worker()
"""Process that checks answers; it starts with the first answer and again after it was killed."""


MEMORY = 2 << 30
"""Bytes of memory that the process may allocate beyond its initial size."""


def equal(answers: Sequence[str], truth: Sequence[str]) -> list[float]:
    """Return 1.0 for each answer that is mathematically equal to its reference, else 0.0."""
    import math_verify  # noqa: F401  # late, as the package may be missing; before the limit, which counts from here

    _limit()
    return [float(_is_equal(answer, reference)) for answer, reference in zip(answers, truth, strict=True)]


def _is_equal(answer: str, reference: str) -> bool:
    """Compare without the package's time limits, which are signals: the parent process enforces the limit."""
    from math_verify import parse, verify
    from sympy import Rational

    read = functools.partial(parse, parsing_timeout=None)
    number = as_number(reference)
    wanted = [*read(as_latex(reference)), *([] if number is None else [Rational(number)])]
    return bool(verify(wanted, read(answer), timeout_seconds=None))


@functools.cache
def _limit() -> None:
    """Limit memory, so that on Linux a huge number raises MemoryError before the machine runs out."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    with suppress(ValueError, OSError):
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
