"""Rewards for the layout `<reasoning>…</reasoning><answer>…</answer>` of the recipe gsm8k-gemma2.

The check is stricter than the commonly used pattern: each tag occurs once, with only whitespace before the first and
after the last, so that a second answer or a preface fails. Text between the two blocks is allowed.
"""

from collections.abc import Sequence
from typing import Any

from covey.rewards.text import Completions, texts

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


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
