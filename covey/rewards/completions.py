"""The form in which a reward function of Covey reads completions: trainers pass texts or chats."""

from collections.abc import Mapping, Sequence

ChatCompletion = Sequence[Mapping[str, str]]
"""A completion as chat messages, as TRL passes it: `[{"role": "assistant", "content": "..."}]`."""
Completions = Sequence[str | ChatCompletion]


def text_of(completion: str | ChatCompletion) -> str:
    """Return the text of a completion, in any form in which a trainer passes it: its last assistant message.

    >>> text_of([{"role": "assistant", "content": "#### 4"}])
    '#### 4'
    """
    if isinstance(completion, str):
        return completion
    turns = [message["content"] for message in completion if message.get("role", "assistant") == "assistant"]
    return turns[-1] if turns else ""


def texts(completions: Completions) -> list[str]:
    """Return the text of each completion."""
    return [text_of(completion) for completion in completions]
