"""Settings of the HTTP servers of Covey's commands."""

import asyncio
import math
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0
"""Time in which the headers of a request must arrive."""


class TimedProtocol(H11Protocol):
    """A connection that is closed if the headers of a request do not arrive in time, which uvicorn does not limit, or
    if there are too many: uvicorn would refuse the requests of all.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._watch()
        if len(self.connections) >= (self.config.limit_concurrency or math.inf):
            self.connections.discard(self)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Take data, and wait for the rest of the headers, or no longer."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def server_config(app: Any, connections: int) -> uvicorn.Config:
    """Return the settings for a server of `app`, an ASGI application, which takes at most `connections` at a time:
    plain HTTP, no log of its own, and no word about its software.
    """
    return uvicorn.Config(
        app,
        http=TimedProtocol,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=connections + 1,
        timeout_graceful_shutdown=1,
    )
