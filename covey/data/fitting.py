"""Prompts that are longer than the model is to be given: refused later, left out, or cut.

A cut prompt keeps its end: what is asked stands there more often than not, and the token after it is the first that
the model writes. Text loses its beginning. Of a chat only the longest message loses its beginning: the others, every
role and the template around them stay whole, so that no turn is left without its head.
"""

from collections.abc import Sequence
from typing import NamedTuple

from covey.data.rows import Row
from covey.errors import DataError
from covey.text.tokenizer import Tokenizer
from covey.types import Prompt


class FittedPrompts(NamedTuple):
    """The rows that are used, and how many were left out or cut to fit."""

    rows: Sequence[Row]
    dropped: int = 0
    truncated: int = 0


def fit_prompts(rows: Sequence[Row], tokenizer: Tokenizer, most: int, policy: str) -> FittedPrompts:
    """`rows` with prompts of at most `most` tokens; under the policy `error` as they are, to be refused by the sampler.

    Raises:
        DataError: nothing is left of the rows, or of a prompt.
    """
    if policy == "error":
        return FittedPrompts(rows)

    def short(prompt: Prompt) -> bool:
        return len(tokenizer.encode_prompt(prompt)) <= most

    if policy == "drop":
        kept = [row for row in rows if short(row["prompt"])]
        if rows and not kept:
            raise DataError(f"every prompt has more than {most} tokens", fix="a larger rollout.max_prompt_length")
        return FittedPrompts(kept, dropped=len(rows) - len(kept))
    fitted = [row if short(row["prompt"]) else row | {"prompt": cut(row["prompt"], tokenizer, most)} for row in rows]
    return FittedPrompts(fitted, truncated=sum(a is not b for a, b in zip(rows, fitted, strict=True)))


def cut(prompt: Prompt, tokenizer: Tokenizer, most: int) -> Prompt:
    """`prompt` without as much of its beginning as has to go, so that it has at most `most` tokens.

    Raises:
        DataError: nothing would be left of the text, or of the longest message.
    """
    longest = 0 if isinstance(prompt, str) else max(range(len(prompt)), key=lambda i: len(prompt[i]["content"]))

    def keeping(characters: int) -> Prompt:
        if isinstance(prompt, str):
            return prompt[len(prompt) - characters :]
        text = prompt[longest]["content"]
        message = {**prompt[longest], "content": text[len(text) - characters :]}
        return [*prompt[:longest], message, *prompt[longest + 1 :]]

    fits, too_many = 0, len(prompt if isinstance(prompt, str) else prompt[longest]["content"])
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        short = len(tokenizer.encode_prompt(keeping(middle))) <= most
        fits, too_many = (middle, too_many) if short else (fits, middle)
    found = keeping(fits)
    text = found if isinstance(found, str) else found[longest]["content"]
    if not text.strip():
        raise DataError(
            f"nothing would be left of a prompt cut to {most} tokens: {str(prompt)[:60]!r}",
            fix="a larger rollout.max_prompt_length, or training.too_long drop",
        )
    return found
