"""Environments of the library verifiers, in the shape of version 0.4: `verifiers:NAME`. With version 0.2 installed,
`verifiers_02` plays the environments of that.

NAME is the module of a taskset, with an environment of its own or without. The row's column `task` is the number of the
task. verifiers runs whole episodes and sends each question to the model over a loopback server; here that reaches the
sampler as text, so tokens are drawn, kept and trained by Covey alone.

A harness in this process asks once per turn of the caller. It offers no tools, which are servers beside the rollout in
this shape, and there is one agent: another conversation in the same episode is refused.
"""

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from covey.config.schema import EnvsConfig
from covey.envs import verifiers_02
from covey.envs.dialogue import Ask, Dialogue, plain_messages
from covey.envs.protocol import Factory
from covey.errors import EpisodeError, RecipeError
from covey.registry import install_command
from covey.rewards.call import excerpt

HARNESS = "covey_harness"
"""Name under which verifiers finds the harness: it looks for a module."""
WHERE = "envs.environment"


def factory(name: str, config: EnvsConfig) -> Factory:
    """Return the factory of the environment `name`, with its tasks read, in the shape of the installed version.

    Raises:
        RecipeError: verifiers is missing or has another shape, or there is no such environment.
    """
    shape = verifiers_02 if _installed_version().startswith("0.2.") else sys.modules[__name__]
    library: Library | verifiers_02.Library = shape.Library(name, config.max_turns, config.arguments)
    return lambda row: _begin(row, library)


def _begin(row: Mapping[str, Any], library: "Library | verifiers_02.Library") -> Dialogue:
    """Return the episode of a row, by its column `task`.

    Raises:
        EpisodeError: the row names no task.
    """
    number = row.get("task")
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(library.tasks):
        want = f"a number below {len(library.tasks)} in the column task"
        raise EpisodeError(f"has no task {excerpt(number)}", want=want)
    return Dialogue(lambda ask: library.play(library.tasks[number], ask))


class Library:
    """An environment of verifiers, which all episodes share.

    Args:
        name: module of the taskset.
        max_turns: largest number of turns of the model.
        arguments: settings of the taskset.
    """

    def __init__(self, name: str, max_turns: int, arguments: Mapping[str, Any]):
        self._vf, self.name = _import_verifiers(), name
        _register_harness(self._vf)
        self._env = self._load(max_turns, arguments)
        self.tasks = list(itertools.islice(self._env.taskset, verifiers_02.MAX_TASKS))
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
            what = f"ended with {excerpt(errors)}" if errors else f"has {len(episode.traces)} agents"
            raise EpisodeError(what, want="an episode of one agent without an error")
        return float(episode.traces[0].reward)

    def _load(self, max_turns: int, arguments: Mapping[str, Any]) -> Any:
        """Return the environment: that of the taskset's module, or the one of a single agent."""
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        agent = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}, "max_turns": max_turns}
        settings = {"taskset": {**arguments, "id": self.name}}
        try:
            agents = dict.fromkeys(agent_config_fields(resolve_env_config(settings)), agent)
            return load_environment(resolve_env_config({**settings, **agents}))
        except Exception as error:
            what = f"verifiers cannot load {self.name!r}: {type(error).__name__}: {error}"
            raise RecipeError(what, want="verifiers:MODULE of a taskset in the shape of 0.4", where=WHERE) from error

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
        found = version("verifiers")
    except PackageNotFoundError as error:
        what = "environments of verifiers need that library"
        raise RecipeError(what, fix=install_command("verifiers"), where=WHERE) from error
    if not found.startswith(("0.2.", "0.4.")):
        what = f"verifiers {found} is installed"
        want = "version 0.4, or 0.2 for environments with load_environment"
        raise RecipeError(what, want=want, fix=install_command("verifiers"), where=WHERE)
    return found


def _import_verifiers() -> Any:
    """Import verifiers, which takes some seconds.

    Raises:
        RecipeError: a package that it needs is missing.
    """
    try:
        import verifiers.v1
    except ImportError as error:
        what = f"verifiers cannot be imported: {error}"
        raise RecipeError(what, fix=install_command("verifiers"), where=WHERE) from error
    return verifiers.v1


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
            message = vf.AssistantMessage(content=text)
            response = vf.Response(id="0", created=0, model=body["model"], message=message, finish_reason="stop")
            shown = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            response.raw = {
                "id": "0", "object": "chat.completion", "created": 0, "model": body["model"], "usage": None,
                "choices": [shown],
            }  # fmt: skip
            return response

    return SamplerClient()
