"""Rewards for the layout `<reasoning>…</reasoning><answer>…</answer>` of the recipe gsm8k-gemma2.

Stricter than the pattern commonly used for it: each tag occurs once, and only blanks stand before the first and after
the last, so that a second answer or a preface cannot pass. Text between the two blocks is allowed.
"""

from collections.abc import Sequence
from typing import Any

from covey.rewards.text import Completions, texts

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def sections(text: str) -> tuple[str, str] | None:
    """What stands inside the reasoning tags and inside the answer tags; None when `text` is not the whole layout.

    >>> sections("<reasoning>2 and 2</reasoning>\\n<answer> 4 </answer>")
    ('2 and 2', ' 4 ')
    """
    text = text.strip()
    if any(text.count(tag) != 1 for tag in TAGS):
        return None
    opened, closed, asked, ended = (text.index(tag) for tag in TAGS)
    if not (opened == 0 < closed < asked < ended == len(text) - len(TAGS[3])):
        return None
    reasoning, answer = text[len(TAGS[0]) : closed], text[asked + len(TAGS[2]) : ended]
    return (reasoning, answer) if reasoning.strip() and answer.strip() else None


def format_exact(prompts: Sequence[Any], completions: Completions, **columns: Any) -> list[float]:
    """3.0 for a completion that is the whole layout, else 0.0."""
    return [3.0 if sections(text) else 0.0 for text in texts(completions)]


def format_approximate(prompts: Sequence[Any], completions: Completions, **columns: Any) -> list[float]:
    """Adds +0.5 for each of the four tags that occurs exactly once and -0.5 for each other: -2.0 to 2.0."""
    return [sum(0.5 if text.count(tag) == 1 else -0.5 for tag in TAGS) for text in texts(completions)]
