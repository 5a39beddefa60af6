"""Protocol of environments: one begins an episode with messages, and responds to each turn of the model.

    environment = factory(row)        one for each sample, from its data row
    environment.reset()    ─▶ the prompt: chat messages, or text
    environment.step(reply) ─▶ Step: messages, a reward, whether the episode is over

Both methods may be async. What they return is checked: it is not trusted.
"""

import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from covey.errors import CoveyError, EpisodeError
from covey.rewards.call import excerpt
from covey.text.messages import check_messages
from covey.types import Message, Prompt


@dataclass(frozen=True)
class Step:
    """Response of an environment to a turn of the model.

    Attributes:
        messages: chat messages, or text: that is a message of the user in a chat, and appended as it is to plain text.
        reward: reward of the turn; the reward of the episode is the sum.
        done: whether the episode is over; its messages are then not shown to the model.
        info: anything that the environment wants to keep. Its numbers are metrics `env/<name>`; `tool_calls` and
            `tool_failures` are summed over the turns.
    """

    messages: str | Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """An environment of one episode. A method `close()`, if there is one, is called when the episode is over."""

    def reset(self) -> Prompt | Awaitable[Prompt]:
        """Begin the episode; return the prompt. It must be the same for all samples of a row."""
        ...

    def step(self, reply: str) -> Step | Awaitable[Step]:
        """Respond to a turn of the model, given as text without its stop token."""
        ...


Factory = Callable[[Mapping[str, Any]], Environment]
"""Function, or class, that makes the environment of one sample from its data row."""


def checked_prompt(prompt: Any, limit: int) -> Prompt:
    """Return what `reset` returned, after checking that it is a prompt of at most `limit` characters.

    Raises:
        EpisodeError: it is none.
    """
    if not prompt:
        raise EpisodeError(f"returned {excerpt(prompt)} from reset", want="chat messages, or text")
    checked = _checked_messages(prompt, "reset", limit)
    return checked


def checked_step(step: Any, as_chat: bool, limit: int) -> Step:
    """Return what `step` returned, after checking it; its messages have the form of the conversation.

    Args:
        as_chat: whether the conversation is a chat, and not plain text.
        limit: maximum number of characters of the messages.

    Raises:
        EpisodeError: a value is not of its type, the reward is not finite, or the messages are too long.
    """
    if not isinstance(step, Step):
        raise EpisodeError(f"returned {excerpt(step)} from step", want="a covey.envs.Step")
    if isinstance(step.reward, bool) or not isinstance(step.reward, numbers.Real) or not math.isfinite(step.reward):
        raise EpisodeError(f"gave the reward {excerpt(step.reward)}", want="a finite number")
    if not isinstance(step.done, bool):
        raise EpisodeError(f"said {excerpt(step.done)} for done", want="True or False")
    messages = _checked_messages(step.messages, "step", limit)
    if as_chat and isinstance(messages, str):
        messages = [{"role": "user", "content": messages}] if messages else []
    if not as_chat and not isinstance(messages, str):
        if messages:
            raise EpisodeError("responds to plain text with chat messages", want="text, or a chat from the beginning")
        messages = ""
    return Step(messages, float(step.reward), step.done, step.info)


def _checked_messages(messages: Any, method: str, limit: int) -> Prompt:
    """Return messages as plain dicts, or text as it is."""
    if not isinstance(messages, str) and (isinstance(messages, Mapping) or not isinstance(messages, Sequence)):
        raise EpisodeError(f"returned {excerpt(messages)} from {method}", want="chat messages, or text")
    try:
        checked: Prompt = messages if isinstance(messages, str) else check_messages(messages)
    except CoveyError as error:
        raise EpisodeError(f"returned from {method} what is no chat: {error.what}", want=error.want) from error
    texts = [checked] if isinstance(checked, str) else [value for message in checked for value in message.values()]
    if (size := sum(map(len, texts))) > limit:
        what, fix = f"returned {size:,} characters from {method}", "a larger envs.max_characters, or shorter messages"
        raise EpisodeError(what, want=f"at most {limit:,}", fix=fix)
    return checked
