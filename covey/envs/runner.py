"""Run environments beside the sampler: calls under way at once, with limits, and a policy for failures.

An event loop in a thread of its own awaits async environments; each call of another environment has a thread, so that a
call that hangs can be left behind. The results do not depend on the order in which calls return, as long as each
environment depends on its row and its replies alone.
"""

import asyncio
import inspect
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

from covey.config.schema import EnvsConfig
from covey.envs.protocol import Environment, Factory
from covey.envs.registry import environment_name, resolve
from covey.errors import EpisodeError
from covey.rewards.call import deep_copy, excerpt, safe_format
from covey.rewards.exits import block_exit

log = logging.getLogger(__name__)
T = TypeVar("T")

END_SECONDS = 5.0
"""Maximum time to wait for the end of the event loop."""
MAX_MESSAGE = 500
"""Maximum characters kept of an exception's message."""


class EnvironmentRunner(AbstractContextManager["EnvironmentRunner"]):
    """Make environments and call them. It is thread-safe; the first failure is logged as a warning.

    Args:
        environment: a factory, or the name of one; by default that of the settings.
        config: limits, and the policy for failures.

    Attributes:
        name: name of the environment in metrics.
        failed: number of failures so far, which is compared with the budget.

    Raises:
        RecipeError: there is no environment of this name.
    """

    def __init__(self, environment: str | Factory | None = None, config: EnvsConfig | None = None):
        chosen = environment or (config.environment if config else None)
        assert chosen, "an environment, or settings that name one"
        self.config = config or EnvsConfig(environment=chosen if isinstance(chosen, str) else None)
        self.name = environment_name(chosen)
        self._factory = resolve(chosen, self.config) if isinstance(chosen, str) else chosen
        self.failed = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(self.config.concurrency)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine in the event loop, which is started when it is first needed."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_run, args=(self._loop,), name="environments", daemon=True)
                thread.start()
                self._end = weakref.finalize(self, _stop, self._loop, thread)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def make(self, row: Mapping[str, Any]) -> Environment:
        """Make the environment of a sample; it gets a copy of the row.

        Raises:
            EpisodeError: as for `call`.
        """
        environment: Environment = await self.call("__init__", self._factory, deep_copy(row))
        return environment

    async def call(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of an environment within the limits, and return its result.

        Args:
            what: name of the function in errors.

        Raises:
            EpisodeError: it raised, exited or took too long.
        """
        async with self._places:
            try:
                async with asyncio.timeout(self.config.timeout or None) as limit:
                    return await _call(function, args)
            except TimeoutError as error:
                if not limit.expired():
                    raise _raised(what, error) from error
                took = f"took longer than {self.config.timeout:g} s in {what}"
                raise EpisodeError(took, fix="a longer envs.timeout") from None
            except (KeyboardInterrupt, asyncio.CancelledError):
                raise
            except BaseException as error:
                raise _raised(what, error) from error

    def accept(self, error: EpisodeError) -> float | None:
        """Count a failure and return the reward of its episode, by the policy.

        Raises:
            EpisodeError: the policy is to raise, or there are more failures than the budget allows.
        """
        shown = EpisodeError(f"the environment {self.name!r} {error.what}", want=error.want, fix=error.fix)
        policy = self.config.on_error
        if policy == "raise":
            raise shown from error
        with self._lock:
            self.failed += 1
            failed = self.failed
        if failed > self.config.budget:
            what = f"{failed} failures of the environment {self.name!r}, the last: {error.what}"
            fix = "mend the environment; or a larger envs.budget"
            raise EpisodeError(what, want=f"at most {self.config.budget} in a run", fix=fix) from error
        if failed == 1:
            instead = "not scored" if policy == "none" else f"given {self.config.value:g}"
            log.warning(f"{shown.what}; such episodes are {instead}, and env/failed counts them")
        return None if policy == "none" else self.config.value

    def close(self) -> None:
        """End the event loop; calls under way are left behind. It also ends with this object and with the process."""
        if self._loop is not None:
            self._end()

    def __exit__(self, *_: Any) -> None:
        self.close()


def open_environments(config: EnvsConfig) -> AbstractContextManager[EnvironmentRunner | None]:
    """Open the runner of the environment that `config` names; None if it names none."""
    return EnvironmentRunner(config=config) if config.environment else nullcontext()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then cancel what is under way."""
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    with suppress(RuntimeError):  # it is closed already
        loop.call_soon_threadsafe(loop.stop)
    thread.join(END_SECONDS)


async def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call an async function in the loop, another in a thread; await the result if it is awaitable."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    value, error = await _call_in_thread(function, args)
    if error is not None:
        raise error
    return await value if isinstance(value, Awaitable) else value


def _call_in_thread(function: Callable[..., Any], args: tuple[Any, ...]) -> Awaitable[tuple[Any, Exception | None]]:
    """Call a function in a thread of its own; return its value, or the error that it raised."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

    def settle(outcome: tuple[Any, Exception | None]) -> None:
        if not future.done():  # it is where nobody waits any more
            future.set_result(outcome)

    def run() -> None:
        try:
            with block_exit():
                outcome: tuple[Any, Exception | None] = function(*args), None
        except Exception as error:
            outcome = None, error
        except BaseException as error:  # an exit in an environment must not end the loop
            outcome = None, EpisodeError(f"raised {type(error).__name__}: {excerpt(safe_format(error, str))}")
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, daemon=True).start()
    return future


def _raised(what: str, error: BaseException) -> EpisodeError:
    if isinstance(error, EpisodeError):
        return error
    text = safe_format(error, str)[:MAX_MESSAGE]
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return EpisodeError(f"raised {type(error).__name__} in {what}: {shown}")
