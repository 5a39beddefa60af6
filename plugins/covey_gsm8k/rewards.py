"""Rewards for GSM8K: layout and answer tag (recipe gsm8k-gemma2) and the `####` convention (recipe gsm8k-nanochat).

The layout is `<reasoning>…</reasoning><answer>…</answer>`. Its check is stricter than the commonly used pattern: each
tag occurs once, with only whitespace before the first and after the last, so that a second answer or a preface fails.
Text between the two blocks is allowed.

References are the `answer` column: the text after `####`, or a number, or a whole solution that ends in `#### n`.
A completion without a reference scores 0: two missing answers are never equal. Deviations: numbers are compared
exactly (`18.00` is 18, `$10` is 10), and of several `####` the last one with a number on its line counts, since models
also write headings with them.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from covey.rewards.completions import Completions, texts
from covey.rewards.numbers import as_number, first_number

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_NANOCHAT = re.compile(r"#### (-?[0-9.,]+)")


def sections(text: str) -> tuple[str, str] | None:
    """Return the texts inside the reasoning tags and the answer tags, or None when `text` does not have the layout.

    >>> sections("<reasoning>2 and 2</reasoning>\\n<answer> 4 </answer>")
    ('2 and 2', ' 4 ')
    """
    text = text.strip()
    if any(text.count(tag) != 1 for tag in TAGS):
        return None
    reasoning_start, reasoning_end, answer_start, answer_end = (text.index(tag) for tag in TAGS)
    if not (reasoning_start == 0 < reasoning_end < answer_start < answer_end == len(text) - len(TAGS[3])):
        return None
    reasoning, answer = text[len(TAGS[0]) : reasoning_end], text[answer_start + len(TAGS[2]) : answer_end]
    return (reasoning, answer) if reasoning.strip() and answer.strip() else None


def format_exact(prompts: Sequence[Any], completions: Completions, **columns: Any) -> list[float]:
    """Return 3.0 for a completion that has the whole layout, else 0.0."""
    return [3.0 if sections(text) else 0.0 for text in texts(completions)]


def format_approximate(prompts: Sequence[Any], completions: Completions, **columns: Any) -> list[float]:
    """Add 0.5 for each of the four tags that occurs exactly once, subtract 0.5 for each other: -2.0 to 2.0."""
    return [sum(0.5 if text.count(tag) == 1 else -0.5 for tag in TAGS) for text in texts(completions)]


def answer_ratio(
    prompts: Sequence[Any], completions: Completions, answer: Sequence[Any], **columns: Any
) -> list[float]:
    """Compare the answer with the reference, first as text and then by ratio.

    Layout not matched: 0. Same text: 3.0; same up to surrounding whitespace: 1.5. Otherwise by guess / reference:
    within 0.9 to 1.1: 0.5, within 0.8 to 1.2: 0.25, further off: -1.0. Not a number: -0.5. Bounds are in
    the better band.
    """
    return [_by_closeness(text, truth) for text, truth in zip(texts(completions), answer, strict=True)]


def answer_number(
    prompts: Sequence[Any], completions: Completions, answer: Sequence[Any], **columns: Any
) -> list[float]:
    """Return 1.5 when the first number inside the answer tag equals the reference, else 0.0.

    Neither the layout around the tag nor a closing tag is required.
    """
    pairs = zip(texts(completions), answer, strict=True)
    return [1.5 if _equal(first_number(_tagged(text)), truth) else 0.0 for text, truth in pairs]


def answer_close(
    prompts: Sequence[Any], completions: Completions, answer: Sequence[Any], **columns: Any
) -> list[float]:
    """Return 1.0 when the first number inside the answer tag is 0.9 to 1.1 times the reference, else 0.0.

    Bounds are included. This is the partial accuracy of gsm8k-gemma2's evaluation. For a reference of 0 only 0 counts.
    """
    pairs = zip(texts(completions), answer, strict=True)
    return [float(_close(first_number(_tagged(text)), reference(truth))) for text, truth in pairs]


def exact_answer(
    prompts: Sequence[Any], completions: Completions, answer: Sequence[Any], *, strict: bool = False, **columns: Any
) -> list[float]:
    """Return 1.0 when the number after `####` equals the reference as a number, else 0.0.

    Args:
        strict: use nanochat's rule: the first `#### ` followed by digits, points and commas, compared as text after
            commas are removed. `#### 10.`, `#### $10`, `####10` and `18.00` for 18 are then wrong.
    """
    pairs = zip(texts(completions), answer, strict=True)
    if strict:
        return [float(_same_text(_as_nanochat(text), truth)) for text, truth in pairs]
    return [float(_equal(first_number(after_marker(text)), truth)) for text, truth in pairs]


def exact_answer_strict(
    prompts: Sequence[Any], completions: Completions, answer: Sequence[Any], **columns: Any
) -> list[float]:
    """Return `exact_answer(strict=True)`; recipes refer to it by this name."""
    return exact_answer(prompts, completions, answer, strict=True)


def after_marker(text: str) -> str:
    """Return the rest of the line after the last `####` followed by a number, or "" when there is none.

    >>> after_marker("#### Sum\\n2 + 2 = 4\\n#### $4. ")
    '$4. '
    """
    for part in reversed(text.split("####")[1:]):
        line = part.lstrip().split("\n", 1)[0]
        if first_number(line) is not None:
            return line
    return ""


def reference(answer: object) -> Fraction | None:
    """Return the reference as a number: what follows `####` where the text has one, else its first number."""
    text = "" if answer is None else str(answer)
    return first_number(after_marker(text) if "####" in text else text)


def _by_closeness(text: str, truth: object) -> float:
    layout = sections(text)
    wanted = "" if truth is None else str(truth)
    if layout is None or not wanted.strip():
        return 0.0
    guess = layout[1]
    if guess == wanted:
        return 3.0
    if guess.strip() == wanted.strip():
        return 1.5
    number, target = as_number(guess), reference(truth)
    if number is None or target is None:
        return -0.5
    return 0.5 if _close(number, target) else 0.25 if abs(number - target) <= abs(target) / 5 else -1.0


def _close(number: Fraction | None, target: Fraction | None) -> bool:
    return number is not None and target is not None and abs(number - target) <= abs(target) / 10


def _tagged(text: str) -> str:
    """Return the text in the first answer tag, up to its end or the end of the text, or "" without the tag."""
    return text.partition("<answer>")[2].partition("</answer>")[0]


def _equal(number: Fraction | None, truth: object) -> bool:
    return number is not None and number == reference(truth)


def _as_nanochat(text: str) -> str:
    match = _NANOCHAT.search(text)
    return match[1].replace(",", "") if match else ""


def _same_text(guess: str, truth: object) -> bool:
    text = "" if truth is None else str(truth)
    return guess != "" and guess == (_as_nanochat(text) if "####" in text else text.strip().replace(",", ""))
