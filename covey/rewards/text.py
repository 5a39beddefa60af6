"""Convert completions to text, from any form in which a trainer passes them."""

from collections.abc import Mapping, Sequence

ChatCompletion = Sequence[Mapping[str, str]]
"""A completion as chat messages, as TRL passes it: `[{"role": "assistant", "content": "..."}]`."""

Completions = Sequence[str | ChatCompletion]


def text_of(completion: str | ChatCompletion) -> str:
    """Return the text of one completion: the string itself, or the content of its last assistant message.

    >>> text_of([{"role": "assistant", "content": "#### 4"}])
    '#### 4'
    """
    if isinstance(completion, str):
        return completion
    said = [message["content"] for message in completion if message.get("role", "assistant") == "assistant"]
    return said[-1] if said else ""


def texts(completions: Completions) -> list[str]:
    """Return `text_of` for each completion."""
    return [text_of(completion) for completion in completions]
