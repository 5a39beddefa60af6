"""Read the body of a request within bounds, as JSON of a known form."""

import asyncio
import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request

from covey_serve.errors import ApiError

SECONDS = 60.0
"""Time in which a body must arrive."""
FormT = TypeVar("FormT", bound="Form")


class Form(BaseModel):
    """Fields of a request; any other field is refused by name."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


async def read_bytes(request: Request, limit: int) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: it has more than `limit` bytes, or does not arrive in time.
    """
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(SECONDS):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise ApiError(f"the body has more than {limit:,} bytes", 413)
    except TimeoutError as error:
        raise ApiError(f"the body did not arrive within {SECONDS:.0f} seconds", 408) from error
    except ClientDisconnect as error:
        raise ApiError("the client has left", 499) from error
    return b"".join(parts)


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """Return the body of a request, a JSON object.

    Raises:
        ApiError: it is none, or as for `read_bytes`.
    """
    body = await read_bytes(request, limit)
    try:
        value = json.loads(body or b"{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise ApiError("the body is not a JSON object")
    return value


def parse(form: type[FormT], value: Any) -> FormT:
    """Return a request in this form.

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
