"""Run environments while the sampler works: calls under way at once, with limits, and a policy for failures.

An event loop in a thread of its own awaits async environments; each call of another environment has a thread, so that a
call that hangs can be left behind. The results do not depend on the order in which calls return, as long as each
environment depends on its row and its replies alone.

An environment may hold a remote sandbox, which would go on without it. So each is closed behind its episode, and those
that are left where the run ends, also by an error.
"""

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from covey.config.schema import EnvsConfig
from covey.config.schema.envs import PythonEngine
from covey.errors import EpisodeError, RecipeError
from covey.rewards.call import deep_copy, describe
from covey.rl.step_data import GroupTable
from covey.text.tokenizer import Tokenizer
from covey.types import Prompt
from covey_envs import rehearsal
from covey_envs.episodes import Episodes
from covey_envs.metrics import episode_metrics
from covey_envs.protocol import Environment, Factory, LateError, OwnNumbers, checked_reward, invoke
from covey_envs.registry import REMOTE_ADAPTERS, environment_name, resolve, resolve_tool
from covey_envs.tools import Tool, ToolEnvironment, Toolset, make_toolset
from covey_envs.trl import TrlFactory

log = logging.getLogger(f"covey.{__name__}")  # as part of Covey, whose log a run shows
T = TypeVar("T")

CLOSE_SECONDS = 5.0
"""Maximum time to close the environments that are left when a run ends."""
CANCEL_SECONDS = 1.0
"""Maximum time to wait for calls of `close` that were cancelled."""
LAG_AHEAD = 1
"""Lag of answers in a run that samples ahead of training, where the settings have none: a chunk of decode steps."""
END_SECONDS = 5.0 + CLOSE_SECONDS
"""Maximum time to wait for the end of the event loop."""


class EnvironmentCalls:
    """Calls of environments within their limits, and the environments that were not closed yet.

    It is used in the event loop alone, whose thread holds it and not the runner, which ends when nothing else holds it.

    Args:
        name: name of the environment in warnings.
        seconds: time limit of a call; None for none.
        concurrency: largest number of calls at the same time.
    """

    def __init__(self, name: str, seconds: float | None, concurrency: int):
        self._name, self._seconds, self._places = name, seconds, asyncio.Semaphore(concurrency)
        self._closes: dict[int, Callable[..., Any]] = {}
        self._failures = 0

    async def call(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function; see `EnvironmentRunner.call`."""
        async with self._places:
            try:
                async with asyncio.timeout(self._seconds) as limit:
                    return await invoke(function, *args)
            except TimeoutError as error:
                if not limit.expired():
                    raise _raised(what, error) from error
                raise LateError(
                    f"took longer than {self._seconds:g} s in {what}", fix="a longer envs.timeout"
                ) from None
            except (KeyboardInterrupt, asyncio.CancelledError):
                raise
            except BaseException as error:
                raise _raised(what, error) from error

    def add(self, environment: Any) -> None:
        """Keep an environment that was made, if it can be closed."""
        if callable(close := getattr(environment, "close", None)):
            self._closes[id(environment)] = close

    async def close(self, environment: Any) -> None:
        """Close an environment whose episode is over, if it can be closed."""
        if (close := self._closes.pop(id(environment), None)) is not None:
            await self._close(close)

    async def close_rest(self, seconds: float) -> None:
        """Close all environments that are left, within a limit of time."""
        tasks = [asyncio.create_task(self._close(close)) for close in self._closes.values()]
        self._closes = {}
        late = (await asyncio.wait(tasks, timeout=seconds))[1] if tasks else ()
        for task in late:
            task.cancel()
            self._report(f"took longer than {seconds:g} s in close, at the end of the run")
        if late:
            await asyncio.wait(late, timeout=CANCEL_SECONDS)
        if self._failures > 1:
            log.warning(f"{self._failures} environments {self._name!r} could not be closed")

    async def _close(self, close: Callable[..., Any]) -> None:
        """Close an environment. An error is logged: the episode is what it is."""
        try:
            await self.call("close", close)
        except EpisodeError as error:
            self._report(error.what)

    def _report(self, what: str) -> None:
        """Log the first error, and count all: there may be as many as there are episodes."""
        self._failures += 1
        if self._failures == 1:
            log.warning(f"the environment {self._name!r} {what}; what it holds may be left behind")


class EnvironmentRunner(AbstractContextManager["EnvironmentRunner"]):
    """Make environments and call them. It is thread-safe; the first failure is logged as a warning.

    Args:
        environment: a factory, or its name; by default from the settings.
        config: limits, and the policy for failures.
        tools: functions that the model may call in place of an environment, or names of such; by default those of the
            settings.

    Attributes:
        name: name of the environment in metrics.
        config: the settings, with the names of environment or tools that were given as objects.
        failed: number of failures so far, which is compared with the budget.
        scores: whether the environment gives rewards; tools give none.
        keeps_prompts: whether an episode begins with the row's prompt, as one with tools does.
        answer_lag: number of chunks of decode steps after a turn at which its answer is taken; None for as soon as it
            is there.
        warned_of_waiting: whether a warning has said that the sampler waits for the environments.
        warned_of_unscored: whether a warning has said that episodes that a limit ends are not scored.
        is_remote: whether episodes are played on a server or by another library, which may be slow or cost something.
        own_numbers: the numbers in `Step.info` that become metrics.
        tools: the tools, once `prepare` has read the model's chat template; None if there are none.

    Raises:
        RecipeError: there is no environment or tool of this name, a tool has no JSON Schema, or the environment does
            not take `envs.arguments`.
    """

    def __init__(
        self,
        environment: str | Factory | None = None,
        config: EnvsConfig | None = None,
        *,
        tools: Sequence[str | Callable[..., Any]] = (),
    ):
        chosen = environment or (config.environment if config and not tools else None)
        functions = tools or (config.tools if config and not chosen else ())
        assert chosen or functions, "an environment or tools, or settings that name them"
        if environment and tools:
            raise RecipeError("both an environment and tools are given", want="one of them", where="EnvironmentRunner")
        self.config = replace(
            config or EnvsConfig(), environment=chosen and _setting(chosen), tools=tuple(map(_setting, functions))
        )
        self._tools = _tools_by_name(functions, self.config.python_engine)
        self.scores, self.keeps_prompts = not functions, not chosen
        self.is_remote = isinstance(chosen, str) and chosen.partition(":")[0] in REMOTE_ADAPTERS
        self.tools: Toolset | None = None
        self._factory: Callable[..., Environment] = ToolEnvironment
        self.name = "tools"
        if chosen:
            self.name = environment_name(chosen)
            self._factory = chosen if isinstance(chosen, TrlFactory) else resolve(chosen, self.config)
        if isinstance(self._factory, TrlFactory):
            self._tools, self.scores = _tools_by_name(self._factory.tools), self._factory.scores
        self.failed, self.answer_lag = 0, self.config.answer_lag
        self.warned_of_waiting = self.warned_of_unscored = False
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        seconds = (self.config.timeout or None) if chosen else None  # each call of a tool has its own limit
        self._calls = EnvironmentCalls(self.name, seconds, self.config.concurrency)
        self.own_numbers = OwnNumbers(self.name)

    def prepare(self, template: str | None) -> None:
        """Choose the form in which a model with this chat template calls the tools, if there are any.

        Raises:
            RecipeError: the form is not known, or the model has no chat template.
        """
        if self._tools:
            for tool in self._tools.values() if self.tools is None else ():
                if callable(begin := getattr(tool.function, "at_start", None)):
                    begin()
            self.tools = make_toolset(self._tools, template, self.config)

    def keep_order(self) -> None:
        """Take answers in an order that does not follow the clock, also where `envs.answer_lag` is not set."""
        if self.answer_lag is None:
            self.answer_lag = LAG_AHEAD

    def episodes(self, rows: Sequence[Mapping[str, Any]], samples: int, tokenizer: Tokenizer) -> Episodes:
        """Return episodes of `rows`, `samples` for each, which have not begun."""
        return Episodes(self, rows, samples, tokenizer)

    def prompt_encoder(self, tokenizer: Tokenizer) -> Callable[[Prompt], np.ndarray] | None:
        """Return the function that encodes a row's prompt as its samples begin; None if it is known only then."""
        if not self.keeps_prompts:
            return None
        tools = self.tools or make_toolset(self._tools, tokenizer.chat_template, self.config)
        return partial(tools.encode_prompt, tokenizer=tokenizer)

    rehearses = property(rehearsal.is_due)
    rehearse = rehearsal.rehearse

    @property
    def groups_prompts(self) -> bool:
        """Whether samples of a row may begin with different prompts; only equal prompts are compared then."""
        return self.config.different_prompts == "group"

    def metrics(self, table: GroupTable) -> dict[str, float]:
        """Compute the metrics of the episodes of a step (`metrics.py`)."""
        return episode_metrics(table)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine in the event loop, which is started when it is first needed."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_run, args=(self._loop, self._calls), name="environments", daemon=True)
                thread.start()
                self._end = weakref.finalize(self, _stop, self._loop, thread)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def make(self, row: Mapping[str, Any], tools: Toolset | None = None) -> Environment:
        """Make the environment of a sample; it gets a copy of the row.

        Args:
            row: the data row.
            tools: tools for an environment that has some; the runner's if None.

        Raises:
            EpisodeError: as for `call`.
        """
        arguments = (tools or self.tools,) if self._tools else ()
        environment: Environment = await self.call("__init__", self._factory, deep_copy(row), *arguments)
        self._calls.add(environment)
        return environment

    async def call(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of an environment within the limits, and return its result.

        Args:
            what: name of the function in errors.

        Raises:
            EpisodeError: it raised or exited; `LateError` if it took too long.
        """
        return await self._calls.call(what, function, *args)

    async def ask_reward(self, environment: Any) -> float | None:
        """Ask an environment for what it pays at the end of an episode; None if it cannot say.

        Raises:
            EpisodeError: as for `call`, or the answer is neither a finite number nor None.
        """
        return checked_reward(await self.call("get_reward", environment.get_reward))

    async def close_environment(self, environment: Environment | None) -> None:
        """Close the environment of an episode that is over, if it can be closed."""
        await self._calls.close(environment)

    def accept(self, error: EpisodeError) -> float | None:
        """Count a failure and return the reward of its episode, by the policy.

        Raises:
            EpisodeError: the policy is to raise, or there are more failures than the budget allows.
        """
        named = EpisodeError(f"the environment {self.name!r} {error.what}", want=error.want, fix=error.fix)
        policy = self.config.on_error
        if policy == "raise":
            raise named from error
        failed = self._count(1)
        self._check_budget(failed, f"the last: {error.what}")
        if failed == 1:
            instead = "not scored" if policy == "none" else f"given {self.config.value:g}"
            log.warning(f"{named.what}; such episodes are {instead}, and env/failed counts them")
        return None if policy == "none" else self.config.value

    def count_elsewhere(self, failures: int, total: int) -> None:
        """Count failures of other processes.

        Args:
            failures: their number.
            total: failures of all processes up to the step that is checked; this process may be playing later ones.

        Raises:
            EpisodeError: there are more in all processes than the budget allows.
        """
        self._count(failures)
        self._check_budget(total, "in all processes together")

    def _count(self, failures: int) -> int:
        """Count failures; return the number of all so far."""
        with self._lock:
            self.failed += failures
            return self.failed

    def _check_budget(self, failed: int, which: str) -> None:
        if failed > self.config.budget:
            raise EpisodeError(
                f"{failed} failures of the environment {self.name!r}, {which}",
                want=f"at most {self.config.budget} in a run",
                fix="mend the environment; or a larger envs.budget",
            )

    def close(self) -> None:
        """Close the environments that are left, and end the event loop; calls under way are left behind. Both happen
        with the end of this object and of the process too.
        """
        if self._loop is not None:
            self._end()

    def __exit__(self, *_: Any) -> None:
        self.close()


def _setting(member: Any) -> str:
    """Return an environment or a tool as a setting names it: `module:Class` for an object."""
    adapter, kind = "trl:" * isinstance(member, TrlFactory), type(member)
    path = f"{getattr(member, '__module__', kind.__module__)}:{getattr(member, '__name__', kind.__name__)}"
    return member if isinstance(member, str) else adapter + path


def _tools_by_name(functions: Sequence[str | Callable[..., Any]], engine: PythonEngine = "auto") -> dict[str, Tool]:
    tools = [Tool.of(resolve_tool(tool, engine) if isinstance(tool, str) else tool) for tool in functions]
    by_name = {tool.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise RecipeError("two tools have the same name", want="functions of different names", where="envs.tools")
    return by_name


def _run(loop: asyncio.AbstractEventLoop, calls: EnvironmentCalls) -> None:
    """Run a loop until it is stopped, then cancel what is under way and close the environments that are left."""
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
    loop.run_until_complete(calls.close_rest(CLOSE_SECONDS))
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    with suppress(RuntimeError):  # it is closed already
        loop.call_soon_threadsafe(loop.stop)
    thread.join(END_SECONDS)


def _raised(what: str, error: BaseException) -> EpisodeError:
    return error if isinstance(error, EpisodeError) else EpisodeError(describe(error, f" in {what}"))
