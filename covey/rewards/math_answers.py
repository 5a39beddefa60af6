"""A reward for answers that are mathematics: the final answer against the column `answer`, by the package math-verify.

It reads LaTeX and plain expressions and compares them as sympy does: 1/2, 0.5 and \\frac{1}{2} are equal. What a model
writes can keep sympy busy for hours, as 9^{9^{9^{9}}} does, and no signal stops a product of large numbers. So each
answer is read in a process of its own, which is killed after `SECONDS`; the answer is then wrong. The package's own
limits are signals, which work in the main thread alone, and are not used.
"""

import threading
from collections.abc import Sequence
from typing import Any

from covey.errors import RewardError
from covey.rewards.call import LOST
from covey.rewards.sandbox.workers import Worker
from covey.rewards.text import Completions, texts

SECONDS = 5.0
"""Longest time for one answer."""
LONGEST = 20_000
"""Characters at the end of a completion that are read: the answer stands there."""
CHECK = "covey.rewards.math_checking:equal"
"""What the process calls."""


def math_verify(prompts: Sequence[Any], completions: Completions, answer: Sequence[Any], **columns: Any) -> list[float]:
    """1.0 when the final answer equals the reference as mathematics, else 0.0.

    The final answer is that in the last `\\boxed{}`, in `<answer>` tags, behind `####`, or what math-verify finds in
    the text, in this order. A sample without a reference, and an answer that takes too long, score 0.
    """
    return [_score(text, truth) for text, truth in zip(texts(completions), answer, strict=True)]


math_verify.in_process = True  # type: ignore[attr-defined]  # it has a process of its own


def final_answer(text: str) -> str:
    """The part of a completion in which math-verify looks for the answer.

    >>> final_answer("<reasoning>1 + 1</reasoning><answer>2</answer>")
    '$2$'
    """
    text = text[-LONGEST:]
    if "\\boxed{" in text:
        return text[text.rindex("\\boxed{") :]
    if "<answer>" in text:
        return as_latex(text.rpartition("<answer>")[2].partition("</answer>")[0])
    if "####" in text:
        return as_latex(text.rpartition("####")[2].strip().partition("\n")[0])
    return text


def as_latex(answer: str) -> str:
    """An answer that stands alone, marked as mathematics where it does not mark itself."""
    answer = answer.strip()
    return answer if not answer or "$" in answer or "\\boxed{" in answer else f"${answer}$"


def _score(text: str, truth: Any) -> float:
    if truth is None or not str(truth).strip():
        return 0.0
    found = _equal(final_answer(text), str(truth))
    if found is None and _equal("1", "1") is None:
        raise RewardError("math-verify does not work: its process ends before it can say that 1 is 1")
    return found or 0.0


def _equal(found: str, truth: str) -> float | None:
    """1.0 or 0.0; None when the process was lost over it."""
    outcome = _PROCESS.call(CHECK, {"found": [found], "truth": [truth]}, 1, SECONDS, threading.Event())
    if outcome.values is not None:
        return float(outcome.values[0])
    failure = outcome.failure
    if failure is not None and failure.sort != LOST:
        raise RewardError(f"math-verify {failure.what}", where=failure.where, fix=failure.fix)
    return None


_PROCESS = Worker()
"""Started by the first answer, and again after one that was killed."""
