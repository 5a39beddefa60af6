"""Environments of the library verifiers, in the shape of version 0.2: a module with `load_environment`.

    environment.rollout(row, client) ─▶ client.get_response(messages)   ⇄   env_response(messages, state)
    environment.rubric.score_rollout(state) ─▶ the reward

The rows are those of its training data set; the column `task` of Covey's row is the number of one. Its tools are
refused: they are offered in the request, in a form of its own.
"""

import itertools
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from covey.envs.dialogue import Ask, plain_messages
from covey.envs.registry import check_arguments
from covey.errors import EpisodeError, RecipeError
from covey.rewards.call import excerpt

MAX_TASKS = 1_000_000
"""Largest number of tasks that are read, of data that may not end."""


class Library:
    """An environment of verifiers 0.2, which all episodes share.

    Args:
        name: module with `load_environment`.
        max_turns: largest number of turns of the model; the environment's own, if that is smaller.
        arguments: arguments of `load_environment`.

    Raises:
        RecipeError: it cannot be loaded, does not take the arguments, has tools, or scores whole groups.
    """

    def __init__(self, name: str, max_turns: int, arguments: Mapping[str, Any]):
        self.name, self._env = name, _load(name, arguments)
        if self._env.tool_defs or self._env.requires_group_rollouts:
            has = "tools" if self._env.tool_defs else "rewards of whole groups"
            what = f"the environment {name!r} of verifiers has {has}"
            raise RecipeError(what, want="one without, which scores each episode", where="envs.environment")
        own = getattr(self._env, "max_turns", -1)
        self._env.max_turns = min(own, max_turns) if own > 0 else max_turns
        self.tasks = list(itertools.islice(self._env.get_dataset(), MAX_TASKS))

    async def play(self, task: Any, ask: Ask) -> float:
        """Play an episode of a row of the data; return its reward.

        Raises:
            EpisodeError: it failed.
        """
        state = await self._env.rollout(task, _client(ask), self.name, {})
        if (error := state["error"]) is not None:
            raise EpisodeError(f"ended with {excerpt(error.__cause__ or error)}", want="an episode without an error")
        await self._env.rubric.score_rollout(state)
        await self._env.rubric.cleanup(state)
        return float(state["reward"])


def _load(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return the environment of a module, whose other arguments are the module's defaults."""
    try:
        import verifiers

        # The library looks for the module in the same way, and says less about wrong arguments.
        module = import_module(name.replace("-", "_").rpartition("/")[2])
        check_arguments(module.load_environment, arguments, f"{name}.load_environment")
        return verifiers.load_environment(name, **arguments)
    except RecipeError:
        raise
    except Exception as error:
        what = f"verifiers cannot load {name!r}: {type(error).__name__}: {error}"
        want = "verifiers:MODULE with load_environment, in the shape of 0.2"
        raise RecipeError(what, want=want, where="envs.environment") from error


def _client(ask: Ask) -> Any:
    """Return the client of an episode, whose answers are the turns of the model."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class SamplerClient(Client):  # type: ignore[misc]
        def setup_client(self, config: Any) -> None: ...

        async def close(self) -> None: ...

        async def to_native_tool(self, tool: Any) -> Any:
            raise EpisodeError(f"offers the tool {excerpt(tool)}", want="an environment without tools")

        async def to_native_prompt(self, messages: Any) -> Any:
            return plain_messages(messages), {}

        async def get_native_response(self, prompt: Any, *args: Any, **kwargs: Any) -> str:
            return await ask(prompt)

        async def raise_from_native_response(self, response: Any) -> None: ...

        async def from_native_response(self, response: str) -> Any:
            message = ResponseMessage(content=response, finish_reason="stop", is_truncated=False)
            return Response(id="0", created=int(time.time()), model="", message=message)

    return SamplerClient(None)
