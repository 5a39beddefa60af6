"""Handling of prompts longer than `rollout.max_prompt_length`: refuse them later, drop them, or truncate them.

A truncated prompt keeps its end, where the question usually is and where the completion continues. Text loses its
beginning. In a chat only the longest message loses its beginning: the other messages, all roles and the template
around them stay whole, so that no turn loses its header.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from covey.data.rows import Row
from covey.errors import DataError
from covey.types import Prompt

Encode = Callable[[Prompt], np.ndarray]
"""Function that encodes a row's prompt to the tokens that are sampled after: int32 [n]."""


class FittedPrompts(NamedTuple):
    """Rows that are used, and how many were dropped or truncated."""

    rows: Sequence[Row]
    dropped: int = 0
    truncated: int = 0


def fit_prompts(rows: Sequence[Row], encode: Encode, max_tokens: int, policy: str) -> FittedPrompts:
    """Return `rows` with prompts of at most `max_tokens`; unchanged under the policy `error` (the sampler refuses).

    Raises:
        DataError: every row would be dropped, or a truncated prompt would be empty.
    """
    if policy == "error":
        return FittedPrompts(rows)
    fits = [len(encode(row["prompt"])) <= max_tokens for row in rows]
    if policy == "drop":
        if rows and not any(fits):
            raise DataError(f"every prompt has more than {max_tokens} tokens", fix="a larger rollout.max_prompt_length")
        return FittedPrompts([*compress(rows, fits)], dropped=fits.count(False))
    fitted = [
        row if fit else row | {"prompt": truncate_prompt(row["prompt"], encode, max_tokens)}
        for row, fit in zip(rows, fits, strict=True)
    ]
    return FittedPrompts(fitted, truncated=fits.count(False))


def truncate_prompt(prompt: Prompt, encode: Encode, max_tokens: int) -> Prompt:
    """Truncate the beginning of `prompt` so that it has at most `max_tokens`.

    Raises:
        DataError: the text, or the longest message, would be empty.
    """
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    longest, text = max(enumerate(texts), key=lambda entry: len(entry[1]))

    def keep_last(characters: int) -> Prompt:
        end = text[len(text) - characters :]
        if isinstance(prompt, str):
            return end
        return [*prompt[:longest], {**prompt[longest], "content": end}, *prompt[longest + 1 :]]

    fits, too_long = 0, len(text)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        short = len(encode(keep_last(middle))) <= max_tokens
        fits, too_long = (middle, too_long) if short else (fits, middle)
    if not text[len(text) - fits :].strip():
        raise DataError(
            f"nothing would be left of a prompt cut to {max_tokens} tokens: {str(prompt)[:60]!r}",
            fix="a larger rollout.max_prompt_length, or training.too_long drop",
        )
    return keep_last(fits)
