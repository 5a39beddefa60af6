"""Read the body of a request within bounds, and answer it: one way for all requests of both APIs."""

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from covey_serve.errors import ApiError

if TYPE_CHECKING:
    from covey_serve.service import Limits

SECONDS = 60.0
"""Time in which a body must arrive."""
FormT = TypeVar("FormT", bound="Form")


class Form(BaseModel):
    """Fields of a request; any other field is refused by name."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def post(limits: "Limits", path: str, form: type[FormT] | None, answer: Callable[[Any], Any]) -> Route:
    """Return the route of a POST request.

    Args:
        limits: bounds of the body and of the time.
        path: its path.
        form: form of the body; None if it is passed on as it is.
        answer: function from the body to a response, to an object for JSON, or to what can be awaited for one. It is
            cancelled when the client leaves, or when its time is over.
    """

    async def work(body: bytes) -> Response:
        async with asyncio.timeout(limits.seconds):
            value = answer(body if form is None else parse(form, body))
            value = await value if inspect.isawaitable(value) else value
        return value if isinstance(value, Response) else JSONResponse(value)

    async def handle(request: Request) -> Response:
        working = asyncio.create_task(work(await read_bytes(request, limits.body)))
        leaving = asyncio.create_task(_until_gone(request))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ApiError("the client has left", 499)
            return working.result()
        finally:
            leaving.cancel()
            working.cancel()

    return Route(path, handle, methods=["POST"])


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_bytes(request: Request, limit: int) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: it has more than `limit` bytes, is compressed, or does not arrive in time.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError("the body is compressed; this server takes it as it is", 415)
    body = bytearray()
    try:
        async with asyncio.timeout(SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise ApiError(f"the body has more than {limit:,} bytes", 413)
    except TimeoutError as error:
        raise ApiError(f"the body did not arrive within {SECONDS:.0f} seconds", 408) from error
    except ClientDisconnect as error:
        raise ApiError("the client has left", 499) from error
    return bytes(body)


def parse(form: type[FormT], body: bytes) -> FormT:
    """Return a request, a JSON object, in this form.

    Raises:
        ApiError: it is none, or a field is unknown, missing or wrong; the error names it.
    """
    try:
        value = json.loads(body or b"{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise ApiError("the body is not a JSON object")
    return validate(form, value)


def validate(form: type[FormT], value: Any) -> FormT:
    """Return a value of JSON in this form.

    Raises:
        ApiError: a field is unknown, missing or wrong; the error names it.
    """
    try:
        return form.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise ApiError(f"this server does not know the field {name!r:.80}", param=name) from None
        raise ApiError(f"{name}: {first['msg']}" if name else first["msg"], param=name or None) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(name)
