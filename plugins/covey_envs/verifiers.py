"""Environments of the library verifiers, in the shape of version 0.4 or 0.2, whichever is installed: `verifiers:NAME`.

The row's column `task` is the number of the task. verifiers runs whole episodes and asks the model; here each question
reaches the sampler as text, so tokens are drawn, kept and trained by Covey alone.

In 0.4 NAME is the module of a taskset, with an environment of its own or without. Questions are sent over a loopback
server. A harness in this process asks once per turn of the caller. It offers no tools, which are servers beside the
rollout in this shape, and there is one agent: another conversation in the same episode is refused.

In 0.2 NAME is a module with `load_environment`, and tasks are the rows of its training data set. Its tools are refused:
they are offered in the request, in a form of its own.

Both write an environment as a coroutine that asks the model and goes on with its reply. Here the question is the
prompt, or the response to a turn, and the coroutine waits for the model's next turn:

    play(ask) ─▶ await ask(messages)   ⇄   reset() ─▶ messages, step(reply) ─▶ Step(new messages)
    environment.rollout(row, client) ─▶ client.get_response(messages)   ⇄   env_response(messages, state)
    environment.rubric.score_rollout(state) ─▶ the reward
"""

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from covey.config.schema import EnvsConfig
from covey.errors import EpisodeError, RecipeError
from covey.registry import import_package, install_command
from covey.rewards.call import excerpt
from covey.types import Message
from covey_envs.protocol import Factory, Step
from covey_envs.registry import check_arguments

Ask = Callable[[Sequence[Message]], Awaitable[str]]
"""Coroutine function that gives the model a whole conversation and returns its turn."""
Play = Callable[[Ask], Coroutine[Any, Any, float]]
"""Coroutine function that plays an episode and returns its reward."""


class Dialogue:
    """An episode of an environment that asks the model: one conversation, which only grows.

    Args:
        play: plays the episode. It runs while `reset` or `step` is awaited and in between.
    """

    def __init__(self, play: Play):
        self._play = play
        self._questions: asyncio.Queue[Sequence[Message] | None] = asyncio.Queue()
        self._reply: asyncio.Future[str] | None = None
        self._task: asyncio.Task[float] | None = None
        self._conversation: list[Message] = []

    async def reset(self) -> Sequence[Message]:
        """Begin to play; return the first question.

        Raises:
            EpisodeError: the environment ends without a question.
        """
        self._task = asyncio.create_task(self._play(self._ask))
        self._task.add_done_callback(lambda _: self._questions.put_nowait(None))
        question = await self._questions.get()
        if question is None:
            self._task.result()
            raise EpisodeError("ended before it asked the model anything")
        self._conversation = list(question)
        return question

    async def step(self, reply: str) -> Step:
        """Give the model's turn to the environment; return what it adds before it asks again, or the end.

        Raises:
            EpisodeError: it asks about another conversation than the one so far.
        """
        assert self._reply is not None, "reset comes first"
        assert self._task is not None
        self._conversation.append({"role": "assistant", "content": reply})
        self._reply.set_result(reply)
        question = await self._questions.get()
        if question is None:
            return Step(reward=self._task.result(), done=True)
        asked, known = list(question), len(self._conversation)
        if asked[:known] != self._conversation:
            raise EpisodeError(
                "asks the model about another conversation than the one so far",
                want="the same messages, the model's turn, and new messages",
            )
        self._conversation = asked
        return Step(asked[known:])

    async def close(self) -> None:
        """End the environment, if it has not ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _ask(self, messages: Sequence[Message]) -> str:
        if self._reply is not None and not self._reply.done():
            raise EpisodeError("asks the model twice at the same time", want="one conversation")
        self._reply = asyncio.get_running_loop().create_future()
        self._questions.put_nowait(messages)
        return await self._reply


def plain_messages(prompt: Any) -> list[Message]:
    """Return the messages of a prompt of verifiers as chat messages.

    >>> plain_messages("Guess.")
    [{'role': 'user', 'content': 'Guess.'}]

    Raises:
        EpisodeError: a message has something else than text.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    dicts = [m if isinstance(m, Mapping) else {"role": m.role, "content": m.content} for m in prompt]
    for message in dicts:
        if not isinstance(message.get("content"), str):
            raise EpisodeError(f"has a message with {excerpt(message.get('content'))}", want="text")
    return [{"role": message["role"], "content": message["content"]} for message in dicts]


HARNESS = "covey_harness"
"""Name under which verifiers finds the harness: it looks for a module."""
MAX_TASKS = 1_000_000
"""Largest number of tasks that are read, of data that may not end."""
WHERE = "envs.environment"


def factory(name: str, config: EnvsConfig) -> Factory:
    """Return the factory of the environment `name`, with its tasks read, in the shape of the installed version.

    Raises:
        RecipeError: verifiers is missing or has another shape, or there is no such environment.
    """
    shape = Library02 if _installed_version().startswith("0.2.") else Library
    library = shape(name, config.max_turns, config.arguments)
    return lambda row: _begin(row, library)


def _begin(row: Mapping[str, Any], library: "Library | Library02") -> Dialogue:
    """Return the episode of a row, by its column `task`.

    Raises:
        EpisodeError: the row names no task.
    """
    number = row.get("task")
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(library.tasks):
        raise EpisodeError(
            f"has no task {excerpt(number)}", want=f"a number below {len(library.tasks)} in the column task"
        )
    return Dialogue(lambda ask: library.play(library.tasks[number], ask))


class Library:
    """An environment of verifiers 0.4, which all episodes share.

    Args:
        name: module of the taskset.
        max_turns: largest number of turns of the model.
        arguments: settings of the taskset.
    """

    def __init__(self, name: str, max_turns: int, arguments: Mapping[str, Any]):
        what = "verifiers cannot be imported"
        self._vf, self.name = import_package("verifiers.v1", RecipeError, what, "verifiers", WHERE), name
        _register_harness(self._vf)
        self._env = self._load(max_turns, arguments)
        self.tasks = list(itertools.islice(self._env.taskset, MAX_TASKS))
        self._dialogues: dict[str, Ask] = {}
        self._served: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._numbers = itertools.count()

    async def play(self, task: Any, ask: Ask) -> float:
        """Play an episode of a task; return its reward.

        Raises:
            EpisodeError: it failed, or has several agents.
        """
        await self._serve()
        model = f"{self.name}-{next(self._numbers)}"
        self._dialogues[model] = ask
        endpoint = self._vf.EvalClientConfig(base_url=f"http://{HARNESS}", api_key_var="NONE")  # never called
        try:
            episode = await self._env.run_episode(task, self._vf.ModelContext(model=model, client=endpoint))
        finally:
            del self._dialogues[model]
        if not episode.ok or len(episode.traces) != 1:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise EpisodeError(
                f"ended with {excerpt(errors)}" if errors else f"has {len(episode.traces)} agents",
                want="an episode of one agent without an error",
            )
        return float(episode.traces[0].reward)

    def _load(self, max_turns: int, arguments: Mapping[str, Any]) -> Any:
        """Return the environment of the taskset's module, or else the environment of a single agent."""
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        agent = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}, "max_turns": max_turns}
        settings = {"taskset": {**arguments, "id": self.name}}
        try:
            agents = dict.fromkeys(agent_config_fields(resolve_env_config(settings)), agent)
            return load_environment(resolve_env_config({**settings, **agents}))
        except Exception as error:
            raise RecipeError(
                f"verifiers cannot load {self.name!r}: {type(error).__name__}: {error}",
                want="verifiers:MODULE of a taskset in the shape of 0.4",
                where=WHERE,
            ) from error

    async def _serve(self) -> None:
        """Start the loopback server, for as long as the event loop runs."""
        if self._served is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._served = asyncio.create_task(self._hold())
        assert self._ready is not None
        await asyncio.shield(self._ready)

    async def _hold(self) -> None:
        assert self._ready is not None
        try:
            async with self._env.serving(), self._answering():
                self._ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(error)

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Let the loopback server hand questions to this object: it makes its clients from settings only."""
        from verifiers.v1.interception import server

        usual, answers = server.resolve_client, _sampler_client(self._vf, self._dialogues)
        server.resolve_client = lambda config: answers if HARNESS in str(config.base_url) else usual(config)
        try:
            yield
        finally:
            server.resolve_client = usual


def _installed_version() -> str:
    """Return the version of verifiers that is installed.

    Raises:
        RecipeError: it is missing, or its environments have another shape than those of 0.2 and 0.4.
    """
    try:
        installed = version("verifiers")
    except PackageNotFoundError as error:
        what = "environments of verifiers need that library"
        raise RecipeError(what, fix=install_command("verifiers"), where=WHERE) from error
    if not installed.startswith(("0.2.", "0.4.")):
        what = f"verifiers {installed} is installed"
        raise RecipeError(
            what,
            want="version 0.4, or 0.2 for environments with load_environment",
            fix=install_command("verifiers"),
            where=WHERE,
        )
    return installed


def _register_harness(vf: Any) -> None:
    """Make the module in which verifiers finds the harness that asks once per turn, in this process."""

    class CoveyHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
        pass

    class CoveyHarness(vf.Harness[CoveyHarnessConfig]):  # type: ignore[misc]
        APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
        ) -> Any:
            if mcp_urls:
                raise EpisodeError(
                    f"offers the tools {', '.join(mcp_urls)}", want="an environment without tool servers"
                )
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            await _post(endpoint, secret, {"model": ctx.model, "messages": [*messages, *plain_messages(prompt)]})
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    module: Any = ModuleType(HARNESS)
    module.CoveyHarness, module.__all__ = CoveyHarness, ["CoveyHarness"]
    sys.modules[HARNESS] = module


async def _post(endpoint: str, secret: str, body: Mapping[str, Any]) -> None:
    """Ask the loopback server, without a limit of time: the sampler takes its turn."""
    import httpx

    # Certificates are left out because the server is this process, and reading them takes 20 ms.
    async with httpx.AsyncClient(trust_env=False, timeout=None, verify=False) as client:
        response = await client.post(
            f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
        )
        response.raise_for_status()


def _sampler_client(vf: Any, dialogues: Mapping[str, Ask]) -> Any:
    """Return the client whose answers are the turns of the model."""

    class SamplerClient(vf.Client):  # type: ignore[misc]
        async def get_response(self, dialect: Any, body: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            text = await dialogues[body["model"]](plain_messages(body["messages"]))
            response = vf.Response(
                id="0", created=0, model=body["model"], message=vf.AssistantMessage(content=text), finish_reason="stop"
            )
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            response.raw = {
                "id": "0", "object": "chat.completion", "created": 0, "model": body["model"], "usage": None,
                "choices": [choice],
            }  # fmt: skip
            return response

    return SamplerClient()


class Library02:
    """An environment of verifiers 0.2, which all episodes share.

    Args:
        name: module with `load_environment`.
        max_turns: largest number of turns of the model; the environment's own, if that is smaller.
        arguments: arguments of `load_environment`.

    Raises:
        RecipeError: it cannot be loaded, does not take the arguments, has tools, or scores whole groups.
    """

    def __init__(self, name: str, max_turns: int, arguments: Mapping[str, Any]):
        self.name, self._env = name, _load_02(name, arguments)
        if self._env.tool_defs or self._env.requires_group_rollouts:
            has = "tools" if self._env.tool_defs else "rewards of whole groups"
            raise RecipeError(
                f"the environment {name!r} of verifiers has {has}",
                want="one without, which scores each episode",
                where=WHERE,
            )
        own = getattr(self._env, "max_turns", -1)
        self._env.max_turns = min(own, max_turns) if own > 0 else max_turns
        self.tasks = list(itertools.islice(self._env.get_dataset(), MAX_TASKS))

    async def play(self, task: Any, ask: Ask) -> float:
        """Play an episode of a row of the data; return its reward.

        Raises:
            EpisodeError: it failed.
        """
        state = await self._env.rollout(task, _sampler_client_02(ask), self.name, {})
        if (error := state["error"]) is not None:
            raise EpisodeError(f"ended with {excerpt(error.__cause__ or error)}", want="an episode without an error")
        await self._env.rubric.score_rollout(state)
        await self._env.rubric.cleanup(state)
        return float(state["reward"])


def _load_02(name: str, arguments: Mapping[str, Any]) -> Any:
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
        raise RecipeError(
            f"verifiers cannot load {name!r}: {type(error).__name__}: {error}",
            want="verifiers:MODULE with load_environment, in the shape of 0.2",
            where=WHERE,
        ) from error


def _sampler_client_02(ask: Ask) -> Any:
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
            return Response(
                id="0",
                created=int(time.time()),
                model="",
                message=ResponseMessage(content=response, finish_reason="stop", is_truncated=False),
            )

    return SamplerClient(None)
