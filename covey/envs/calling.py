"""Calls of functions that are not trusted to return: async ones in the event loop, others in a thread of their own."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from covey.display import safe_format
from covey.errors import EpisodeError
from covey.exits import block_exit
from covey.rewards.call import excerpt

F = TypeVar("F", bound=Callable[..., Any])


class LateError(EpisodeError):
    """An environment took longer than `envs.timeout`."""


class FaultError(EpisodeError):
    """A fault of this machine, and not of the call that the model wrote, which ends the episode by `envs.on_error`."""


def independent(function: F) -> F:
    """Declare that a call of this tool neither depends on the other calls of a turn nor changes what they return, so
    that neighbouring calls of such tools run at once.
    """
    function.independent = True  # type: ignore[attr-defined]
    return function


async def call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
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
