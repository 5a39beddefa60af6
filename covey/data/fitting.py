"""Handling of prompts longer than `rollout.max_prompt_length`: refuse them later, drop them, or truncate them.

A truncated prompt keeps its end, where the question usually is and where the completion continues. Text loses its
beginning. In a chat only the longest message loses its beginning: the other messages, all roles and the template
around them stay whole, so that no turn loses its header.
"""

from collections.abc import Callable, Sequence
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
    """Return `rows` with prompts of at most `most` tokens; unchanged under the policy `error` (the sampler refuses).

    Raises:
        DataError: every row would be dropped, or a truncated prompt would be empty.
    """
    if policy == "error":
        return FittedPrompts(rows)

    def short(prompt: Prompt) -> bool:
        return len(encode(prompt)) <= max_tokens

    if policy == "drop":
        kept = [row for row in rows if short(row["prompt"])]
        if rows and not kept:
            raise DataError(f"every prompt has more than {max_tokens} tokens", fix="a larger rollout.max_prompt_length")
        return FittedPrompts(kept, dropped=len(rows) - len(kept))
    fitted = [
        row if short(row["prompt"]) else row | {"prompt": truncate_prompt(row["prompt"], encode, max_tokens)}
        for row in rows
    ]
    return FittedPrompts(fitted, truncated=sum(a is not b for a, b in zip(rows, fitted, strict=True)))


def truncate_prompt(prompt: Prompt, encode: Encode, max_tokens: int) -> Prompt:
    """Truncate the beginning of `prompt` so that it has at most `most` tokens.

    Raises:
        DataError: the text, or the longest message, would be empty.
    """
    longest = 0 if isinstance(prompt, str) else max(range(len(prompt)), key=lambda i: len(prompt[i]["content"]))

    def keep_last(characters: int) -> Prompt:
        if isinstance(prompt, str):
            return prompt[len(prompt) - characters :]
        text = prompt[longest]["content"]
        message = {**prompt[longest], "content": text[len(text) - characters :]}
        return [*prompt[:longest], message, *prompt[longest + 1 :]]

    fits, too_long = 0, len(prompt if isinstance(prompt, str) else prompt[longest]["content"])
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        short = len(encode(keep_last(middle))) <= max_tokens
        fits, too_long = (middle, too_long) if short else (fits, middle)
    found = keep_last(fits)
    text = found if isinstance(found, str) else found[longest]["content"]
    if not text.strip():
        raise DataError(
            f"nothing would be left of a prompt cut to {max_tokens} tokens: {str(prompt)[:60]!r}",
            fix="a larger rollout.max_prompt_length, or training.too_long drop",
        )
    return found
