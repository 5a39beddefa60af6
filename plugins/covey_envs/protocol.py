"""Protocol of environments: one begins an episode with messages, and responds to each turn of the model.

    environment = factory(row)        one for each sample, from its data row
    environment.reset()    ─▶ the prompt: chat messages, or text
    environment.step(reply) ─▶ Step: messages, a reward, whether the episode is over
    environment.get_reward() ─▶ what it pays at the end, if there is one

The methods may be async. What they return is checked: it is not trusted. Async ones are called in the event loop,
others in a thread of their own, which goes on if it hangs.

Numbers in `Step.info` become the metrics `env/<name>`. `info` may hold anything, so what is no number is not looked at.
A number that cannot be a metric is left out, and the first of each kind is warned of.
"""

import asyncio
import inspect
import logging
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, TypeVar

import numpy as np

from covey.config.metrics import OWN_NUMBER, TABLE
from covey.display import safe_format
from covey.errors import CoveyError, EpisodeError
from covey.exits import block_exit
from covey.rewards.call import as_float, excerpt
from covey.text.chat_template import check_messages
from covey.types import Message, Prompt

log = logging.getLogger(f"covey.{__name__}")  # as part of Covey, whose log a run shows
F = TypeVar("F", bound=Callable[..., Any])

METRIC_NAME = re.compile(OWN_NUMBER)
MAX_NAME_LENGTH = 40
"""Maximum characters of a name."""
MAX_NAMES = 32
"""Largest number of names in a run: each is a metric of every step."""
MAX_NUMBER = 1e100
"""Limit of a number's magnitude, so that sums of many are finite."""
COUNTED = ("tool_calls", "tool_failures")
"""Numbers of `info` that are summed over the turns, as metrics of their own."""
OTHER_METRICS = {row.name.removeprefix("env/") for row in TABLE if row.name.startswith("env/")}
"""Names of other metrics."""


@dataclass(frozen=True)
class Step:
    """Response of an environment to a turn of the model.

    Attributes:
        messages: chat messages, or text: that is a message of the user in a chat, and appended as it is to plain text.
        reward: reward of the turn; the reward of the episode is the sum. None if nothing is paid yet: an episode that a
            limit ends before anything is paid is not scored, and one that the environment ends then has the reward 0.
        done: whether the episode is over; its messages are then not shown to the model.
        info: anything that the environment wants to keep. Its numbers are metrics `env/<name>`; `tool_calls` and
            `tool_failures` are summed over the turns.
    """

    messages: str | Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """An environment of one episode.

    Two methods are optional. `get_reward()` is asked at the end, where a limit ends the episode or the last step has no
    reward; it returns what to add, or None for an episode that is not scored. `close()` is called afterwards.
    """

    def reset(self) -> Prompt | Awaitable[Prompt]:
        """Begin the episode; return the prompt. It must be the same for all samples of a row."""
        ...

    def step(self, reply: str) -> Step | Awaitable[Step]:
        """Respond to a turn of the model, given as text without its stop token."""
        ...


Factory = Callable[[Mapping[str, Any]], Environment]
"""Function, or class, that makes the environment of one sample from its data row."""


def checked_prompt(prompt: Any, limit: int) -> Prompt:
    """Check that the result of `reset` is a prompt of at most `limit` characters, and return it.

    Raises:
        EpisodeError: it is none.
    """
    if not prompt:
        raise EpisodeError(f"returned {excerpt(prompt)} from reset", want="chat messages, or text")
    return _checked_messages(prompt, "reset", limit)


def checked_step(step: Any, as_chat: bool, limit: int) -> Step:
    """Check the result of `step`, and return it with messages in the form of the conversation.

    Args:
        as_chat: whether the conversation is a chat, and not plain text.
        limit: maximum number of characters of the messages.

    Raises:
        EpisodeError: a value is not of its type, the reward is not finite, or the messages are too long.
    """
    if not isinstance(step, Step):
        raise EpisodeError(f"returned {excerpt(step)} from step", want="a covey.Step")
    reward = checked_reward(step.reward)
    if not isinstance(step.done, bool):
        raise EpisodeError(f"said {excerpt(step.done)} for done", want="True or False")
    messages = _checked_messages(step.messages, "step", limit)
    if as_chat and isinstance(messages, str):
        messages = [{"role": "user", "content": messages}] if messages else []
    if not as_chat and not isinstance(messages, str):
        if messages:
            raise EpisodeError("responds to plain text with chat messages", want="text, or a chat from the beginning")
        messages = ""
    return Step(messages, reward, step.done, step.info)


def pays_at_end(environment: Any, last: Step) -> bool:
    """Tell whether an environment is asked for a reward at the end of its episode, by the last step."""
    return callable(getattr(environment, "get_reward", None)) and not (last.done and last.reward is not None)


def checked_reward(reward: Any) -> float | None:
    """Check that a reward is a finite number or None, and return it.

    Raises:
        EpisodeError: it is something else.
    """
    value = as_float(reward) if isinstance(reward, Real) and not isinstance(reward, bool) else None
    if value is None and reward is not None:
        raise EpisodeError(f"gave the reward {excerpt(reward)}", want="a finite number, or None")
    return value


def _checked_messages(messages: Any, method: str, limit: int) -> Prompt:
    """Check messages and return them as plain dicts, or text as it is."""
    if not isinstance(messages, str) and (isinstance(messages, Mapping) or not isinstance(messages, Sequence)):
        raise EpisodeError(f"returned {excerpt(messages)} from {method}", want="chat messages, or text")
    try:
        checked: Prompt = messages if isinstance(messages, str) else check_messages(messages)
    except CoveyError as error:
        raise EpisodeError(f"returned from {method} what is no chat: {error.what}", want=error.want) from error
    texts = [checked] if isinstance(checked, str) else [value for message in checked for value in message.values()]
    if (size := sum(map(len, texts))) > limit:
        raise EpisodeError(
            f"returned {size:,} characters from {method}",
            want=f"at most {limit:,}",
            fix="a larger envs.max_characters, or shorter messages",
        )
    return checked


class FaultError(EpisodeError):
    """A fault of this machine, and not of the call that the model wrote, which ends the episode by `envs.on_error`."""


class LateError(EpisodeError):
    """An environment took longer than `envs.timeout`."""


def independent(function: F) -> F:
    """Declare that a call of this tool neither depends on the other calls of a turn nor changes what they return, so
    that neighbouring calls of such tools run at once.
    """
    function.independent = True  # type: ignore[attr-defined]
    return function


async def invoke(function: Callable[..., Any], *args: Any) -> Any:
    """Call an async function in the loop, another in a thread; await the result if it is awaitable."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    future: Future[tuple[Any, Exception | None]] = Future()
    future.set_running_or_notify_cancel()  # it is not cancelled where nobody waits any more
    threading.Thread(target=lambda: future.set_result(_outcome(function, args)), daemon=True).start()
    value, error = await asyncio.wrap_future(future)
    if error is not None:
        raise error
    return await value if isinstance(value, Awaitable) else value


def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    """Call a function; return its value, or the error that it raised: a future cannot hold every exception."""
    try:
        with block_exit():
            return function(*args), None
    except Exception as error:
        return None, error
    except BaseException as error:  # an exit in an environment must not end the loop
        return None, EpisodeError(f"raised {type(error).__name__}: {excerpt(safe_format(error, str))}")


class OwnNumbers:
    """Numbers of the episodes of one environment.

    Args:
        environment: its name in warnings.
    """

    def __init__(self, environment: str):
        self._environment = environment
        self._names: set[str] = set()
        self._warned: set[str] = set()

    def select(self, info: Any) -> dict[str, float]:
        """Select the numbers of a step that can be metrics, by name; True and False are 1 and 0."""
        if not isinstance(info, Mapping):
            return {}
        return {
            name: float(value)
            for name, value in info.items()
            if isinstance(value, Real | np.bool_) and name not in COUNTED and self._is_metric(name, value)
        }

    def _is_metric(self, name: Any, value: Any) -> bool:
        """Tell whether a number can be a metric, and warn of the first that cannot for each reason."""
        reason = _objection(name, value)
        if not reason and name not in self._names and len(self._names) == MAX_NAMES:
            reason = f"there are {MAX_NAMES} others, and each is a metric of every step"
        if not reason:
            self._names.add(name)
        elif reason not in self._warned:
            self._warned.add(reason)
            what = f"the number {name!r:.80} in the info of the environment {self._environment!r}"
            log.warning(f"{what} is no metric: {reason}; such numbers are left out")
        return not reason


def _objection(name: Any, value: Any) -> str:
    """Return the reason why a number cannot be a metric, or ""."""
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or not METRIC_NAME.fullmatch(name):
        form = "small letters, digits and _, begins with a letter"
        return f"a name has {form}, and has at most {MAX_NAME_LENGTH} characters"
    if name in OTHER_METRICS:
        return "a metric of every environment has its name"
    return "" if abs(value) < MAX_NUMBER else f"it is not finite, or beyond {MAX_NUMBER:g}"
