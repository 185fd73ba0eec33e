"""Errors as clients get them: {"error": {"message", "type", "param", "code"}}, and a status that says if to ask again.

Clients of OpenAI's library repeat a request after 408, 409, 429 and 500 up, so what is wrong with a request is
always 400, 404 or 413.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from octavo.errors import (
    BusyError,
    DeadlineError,
    EngineDeadError,
    OctavoError,
    RequestError,
    RequestFailedError,
    UnsupportedError,
)

__all__ = ["ApiError", "as_api_error", "error_body", "error_response", "not_found", "unsupported"]

MAX_MESSAGE = 1000  # characters; whatever a client sent, an answer about it is short

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        message: for a person.
        param: the field at fault, or None.
        headers: further ones of the answer, such as Retry-After.

    """

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + " ..."
        self.param = param
        self.headers = dict(headers or {})


def unsupported(name: str, why: str = "is not served") -> ApiError:
    """A field that is known and refused."""
    return ApiError(400, f"{name} {why}", name)


def not_found(message: str, param: str | None = None) -> ApiError:
    """Something that is not there."""
    return ApiError(404, message, param)


def as_api_error(error: BaseException) -> ApiError | None:
    """The answer to an error that was foreseen; None: a fault of ours, and nothing to tell but that."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), error.param)
    if isinstance(error, UnsupportedError):
        return ApiError(400, str(error), "model")
    if isinstance(error, BusyError):
        return ApiError(503, str(error), headers={"retry-after": f"{error.retry_after:.0f}"})
    if isinstance(error, DeadlineError):
        return ApiError(504, str(error), "timeout")
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error))
    if isinstance(error, RequestFailedError | OctavoError):
        return ApiError(500, str(error))
    return None


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object of an error, the same in an answer and in a stream."""
    kind = TYPES.get(error.status, "BadRequestError" if error.status < 500 else "InternalServerError")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.status}}


def error_response(error: ApiError) -> Response:
    """The answer."""
    return Response(
        msgspec.json.encode(error_body(error)), error.status, headers=error.headers, media_type="application/json"
    )
