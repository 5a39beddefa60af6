"""Errors in the form of OpenAI's API."""

from typing import Any

from starlette.responses import JSONResponse

from covey.errors import CoveyError


class ApiError(Exception):
    """An error that the client gets.

    Args:
        message: what is wrong, and what would be right.
        status: HTTP status.
        param: name of the field that is wrong.
        code: name of the error.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        # Words of the client may hold halves of characters, which no response can.
        message, param = (text and text.encode("utf-8", "replace").decode() for text in (self.message, self.param))
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the response of the server."""
        return JSONResponse(self.body, self.status)


def as_api_error(error: BaseException) -> ApiError:
    """Return any exception as the error that the client gets: mistakes in words, bugs by their type alone."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CoveyError):
        busy = "requests wait already" in error.what
        parts = [error.what, *(f"wanted: {error.want}" for _ in error.want[:1]), *(error.fix for _ in error.fix[:1])]
        return ApiError("; ".join(parts), 429 if busy else 400, code="queue_full" if busy else None)
    if isinstance(error, TimeoutError):
        return ApiError("the request took longer than the server allows", 504, code="timeout")
    return ApiError(f"the server failed: {type(error).__name__}", 500)
