"""Environments that are made and not closed: each is closed behind its episode, and the others where the run ends.

An environment may hold a remote sandbox, which would go on without it, so an error that ends the run closes them too.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from covey.envs.calling import call
from covey.errors import EpisodeError

log = logging.getLogger(__name__)

Call = Callable[[str, Callable[..., Any]], Awaitable[Any]]
"""Coroutine function that calls a function by its name in errors, and raises EpisodeError if that fails."""


class OpenEnvironments:
    """Environments with a method `close` that was not called yet. It is used in the event loop alone.

    Args:
        name: name of the environment in warnings.
        at_once: largest number that `close_rest` closes at the same time.

    Attributes:
        failed: number of those that could not be closed.
    """

    def __init__(self, name: str, at_once: int):
        self._name, self._at_once = name, at_once
        self._closes: dict[int, Callable[..., Any]] = {}
        self.failed = 0

    def add(self, environment: Any) -> None:
        """Keep an environment that was made."""
        if callable(close := getattr(environment, "close", None)):
            self._closes[id(environment)] = close

    async def close(self, environment: Any, call: Call) -> None:
        """Close an environment whose episode is over. An error is logged: the episode is what it is."""
        close = self._closes.pop(id(environment), None)
        try:
            if close is not None:
                await call("close", close)
        except EpisodeError as error:
            self._report(error.what)

    async def close_rest(self, seconds: float) -> None:
        """Close all environments that are left, within a limit of time."""
        left, self._closes = [*self._closes.values()], {}
        places = asyncio.Semaphore(self._at_once)
        tasks = [asyncio.create_task(_close_in_place(close, places)) for close in left]
        late = (await asyncio.wait(tasks, timeout=seconds))[1] if tasks else ()
        for task in tasks:
            if task in late:
                task.cancel()
                self._report(f"took longer than {seconds:g} s in close, at the end of the run")
            elif (error := task.exception()) is not None:
                self._report(f"raised {type(error).__name__} in close: {error!s:.500}")
        if self.failed > 1:
            log.warning(f"{self.failed} environments {self._name!r} could not be closed")

    def _report(self, what: str) -> None:
        """Log the first error, and count all: there may be as many as there are episodes."""
        self.failed += 1
        if self.failed == 1:
            log.warning(f"the environment {self._name!r} {what}; what it holds may be left behind")


async def _close_in_place(close: Callable[..., Any], places: asyncio.Semaphore) -> None:
    async with places:
        await call(close, ())
