"""Rewards for the arithmetic task: the completion is the number and nothing else."""

from collections.abc import Sequence
from typing import Any

from covey.rewards.numbers import as_number
from covey.rewards.text import Completions, texts


def arithmetic_answer(
    prompts: Sequence[Any], completions: Completions, answer: Sequence[Any], **columns: Any
) -> list[float]:
    """Return 1.0 when the whole completion is one number that equals the answer, else 0.0. `12` equals ` 12.0.`."""
    pairs = [(as_number(text), as_number(truth)) for text, truth in zip(texts(completions), answer, strict=True)]
    return [float(guess is not None and guess == truth) for guess, truth in pairs]


def number_only(prompts: Sequence[Any], completions: Completions, **columns: Any) -> list[float]:
    """Return 1.0 when the whole completion is one number, right or wrong, else 0.0. This rewards the format."""
    return [float(as_number(text) is not None) for text in texts(completions)]
