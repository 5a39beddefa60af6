"""Environments in the shape of TRL's `environment_factory`: `trl:module:Class`.

    environment = Class()              without arguments, or with envs.arguments
    environment.reset(**row)           text after the prompt's last message, or None
    environment.add(amount=3)          every public method is a tool that the model calls
    environment.get_reward()           reward of the episode, at its end, if there is one

TRL itself is not needed. Its trainer makes an object once and resets it often; here each sample has its own.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from covey.config.schema import EnvsConfig
from covey.errors import EpisodeError, RecipeError
from covey.rewards.call import excerpt
from covey.types import Prompt
from covey_envs.protocol import Step, invoke
from covey_envs.registry import ENVIRONMENT_REGISTRY, with_arguments
from covey_envs.tools import ToolEnvironment, Toolset

RESERVED = ("reset", "get_reward")
"""Public methods that are not tools."""
WHERE = "envs.environment"


def factory(name: str, config: EnvsConfig) -> "TrlFactory":
    """Make the factory of a class, or of a function, by `module:Class`. It gets `envs.arguments`, and nothing else.

    Raises:
        RecipeError: it does not exist, cannot be made with these arguments, or has no tool.
    """
    return TrlFactory(with_arguments(ENVIRONMENT_REGISTRY.resolve(name), config.arguments, name.rpartition(":")[2]))


class TrlFactory:
    """Makes environments of TRL's shape.

    Args:
        make: class, or function, without arguments.

    Attributes:
        tools: the methods that are tools, in alphabetical order, of an object that plays no episode.
        scores: whether there is a `get_reward`.

    Raises:
        RecipeError: there is no tool, or no `reset`.
    """

    def __init__(self, make: Callable[[], Any]):
        function = make.func if isinstance(make, partial) else make
        name = getattr(function, "__name__", type(function).__name__)
        try:
            sample = make()
        except Exception as error:
            raise RecipeError(
                f"{name} cannot be made: {type(error).__name__}: {error}",
                want="a class whose reset takes the row",
                where=WHERE,
            ) from error
        self._make, self.__name__, self.__module__ = make, name, function.__module__
        self.tools = tools_of(sample)
        self.scores = callable(getattr(sample, "get_reward", None))
        if not callable(getattr(sample, "reset", None)):
            raise RecipeError(f"{name} has no method reset", where=WHERE)
        if not self.tools:
            raise RecipeError(f"{name} has no tool", want="public methods that the model calls", where=WHERE)

    def __call__(self, row: Mapping[str, Any], tools: Toolset) -> "TrlEnvironment":
        return TrlEnvironment(self._make(), row, tools)


class TrlEnvironment:
    """One episode. It pays at its end: when the model makes no call, or at a limit."""

    def __init__(self, environment: Any, row: Mapping[str, Any], tools: Toolset):
        self._environment, self._row = environment, row
        bound = {name: replace(tool, function=getattr(environment, name)) for name, tool in tools.tools.items()}
        self._tools = replace(tools, tools=bound)
        self._calls = ToolEnvironment(row, self._tools)

    async def reset(self) -> Prompt:
        """Begin the episode with all columns of the row; return its prompt, and what `reset` adds to it."""
        text = await invoke(partial(self._environment.reset, **self._row))
        if not isinstance(text, str | None):
            raise EpisodeError(f"returned {excerpt(text)} from reset", want="text, or None")
        return self._tools.prompt(with_suffix(self._row["prompt"], text or ""))

    async def step(self, reply: str) -> Step:
        """Answer the calls of a turn."""
        return await self._calls.step(reply)

    async def get_reward(self) -> Any:
        """Return the reward of the episode as it stands; None if the class has none to give."""
        get_reward = getattr(self._environment, "get_reward", None)
        return None if get_reward is None else await invoke(get_reward)


def tools_of(environment: Any) -> list[Callable[..., Any]]:
    """List the public methods of an object but the reserved ones, in alphabetical order, as TRL does.

    >>> [method.__name__ for method in tools_of("text")][:2]
    ['capitalize', 'casefold']
    """
    members = inspect.getmembers(environment, predicate=inspect.isroutine)
    return [method for name, method in members if not name.startswith("_") and name not in RESERVED]


def with_suffix(prompt: Prompt, text: str) -> Prompt:
    """Append a text to the last message of a prompt.

    >>> with_suffix([{"role": "user", "content": "Count"}], " (start)")
    [{'role': 'user', 'content': 'Count (start)'}]
    """
    if isinstance(prompt, str):
        return prompt + text
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + text}]
