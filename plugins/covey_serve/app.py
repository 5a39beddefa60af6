"""The application: the routes of the APIs behind a gate that knows who may ask."""

import hmac
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from covey.display import echo
from covey.errors import CoveyError
from covey_serve.errors import ApiError, as_api_error
from covey_serve.openai import OpenAI
from covey_serve.service import Service

OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine that a request may have."""
TYPES = ("application/json", "application/x-protobuf", "application/octet-stream")
"""Types of bodies that a page of another site cannot send without asking first."""


class Gate:
    """Refuse requests without the key. Without a key, answer this machine alone: a page of another site could reach the
    server under a name that it lets point here (DNS rebinding), or send it a form.

    Args:
        app: the application.
        key: the key that a request must have; None for none.
        shows: whether each request is a line on the terminal.
    """

    def __init__(self, app: ASGIApp, key: str | None, shows: bool):
        self._app, self._key, self._shows = app, key, shows

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status = time.perf_counter(), [0]

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        try:
            error = self._refusal(Request(scope))
            await (self._app if error is None else error.response())(scope, receive, noted)
        finally:
            if self._shows:
                seconds = time.perf_counter() - began
                echo(f"{scope['method']} {scope['path']:.200} {status[0] or 'cut'} {seconds:.2f} s")

    def _refusal(self, request: Request) -> ApiError | None:
        """Return why a request is refused."""
        headers = request.headers
        host = re.sub(r":\d+$", "", headers.get("host", ""))
        if self._key is None and host not in OWN_NAMES:
            return ApiError("without a key this server answers this machine alone", 403, code="host_not_allowed")
        if self._key is not None and request.url.path != "/health" and not self._knows(headers):
            return ApiError("the key is missing or wrong", 401, code="invalid_api_key")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind not in TYPES and headers.get("content-length", "") != "0":
            return ApiError(f"the body has the type {kind!r:.60}; application/json is wanted", 415)
        return None

    def _knows(self, headers: Mapping[str, str]) -> bool:
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode("utf-8", "replace"), str(self._key).encode())


def make_app(service: Service, routes: Sequence[Route] = (), key: str | None = None, shows: bool = False) -> Starlette:
    """Return the application.

    Args:
        service: the model.
        routes: routes besides those of OpenAI's API.
        key: key that each request must have.
        shows: whether each request is a line on the terminal.
    """

    async def refuse(request: Request, error: Exception) -> Response:
        api = as_api_error(error)
        if isinstance(error, HTTPException):
            api = ApiError(f"there is no {request.method} {request.url.path:.200}", error.status_code)
        service.metrics.refused[api.status] += 1
        return api.response()

    handlers: Any = dict.fromkeys((ApiError, CoveyError, TimeoutError, HTTPException, Exception), refuse)
    gate = Middleware(Gate, key=key, shows=shows)
    return Starlette(routes=[*OpenAI(service).routes(), *routes], middleware=[gate], exception_handlers=handlers)
