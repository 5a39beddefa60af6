"""Settings of the HTTP servers of Covey's commands."""

from typing import Any

import uvicorn


def server_config(app: Any, connections: int) -> uvicorn.Config:
    """Return the settings for a server of `app`, an ASGI application, which takes at most `connections` at a time:
    plain HTTP, no log of its own, and no word about its software.
    """
    return uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=connections,
        timeout_graceful_shutdown=1,
    )
