"""Errors as clients get them: {"error": {"message", "type", "param", "code"}}, and a status that says if to ask again.

Those of Anthropic's paths are {"type": "error", "error": {"type", "message", "param"}}.
Clients of OpenAI's library repeat a request after 408, 409, 429 and 500 up, so what is wrong with a request is
always 400, 404 or 413.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from octavo.errors import (
    BusyError,
    DeadlineError,
    EngineDeadError,
    OctavoError,
    RequestError,
    RequestFailedError,
    UnsupportedError,
    shown,
)

__all__ = [
    "MESSAGES",
    "ApiError",
    "as_api_error",
    "asked",
    "check_one_of",
    "context_exceeded",
    "error_body",
    "error_response",
    "log_refusal",
    "not_found",
    "own_fault",
    "unsupported",
]

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

MESSAGES = "/v1/messages"  # this path and what lies under it answer as Anthropic's clients expect it
MESSAGES_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}

logger = logging.getLogger(__name__)


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


def check_one_of(where: str, value: object, allowed: Collection[str], param: str) -> None:
    """Refuse a value that is none of those that are known; None is no value.

    Raises:
        ApiError: names the place, and what may stand there.

    """
    if value is not None and not (isinstance(value, str) and value in allowed):
        raise ApiError(400, f"{where} must be one of {', '.join(allowed)}, got {shown(value)}", param)


def not_found(message: str, param: str | None = None) -> ApiError:
    """Something that is not there."""
    return ApiError(404, message, param)


def context_exceeded(path: str, limit: int, num_prompt: int, num_output: int | None, name: str) -> ApiError:
    """A prompt alone, or with the output that its client wants, is longer than the model's context.

    Clients look for these words and numbers, drop messages or ask for less, and come again.

    Args:
        path: of the endpoint: each protocol has its own words.
        limit: tokens of prompt and output together.
        num_prompt: tokens of the prompt.
        num_output: tokens that the client asked for; None: the prompt alone is too long.
        name: of the field that is too large.

    """
    is_messages = _is_messages(path)
    if num_output is None:
        words = (
            f"prompt is too long: {num_prompt} tokens > {limit} maximum"
            if is_messages
            else f"This model's maximum context length is {limit} tokens. However, your prompt has {num_prompt} tokens"
        )
        return ApiError(
            400, f"{words}, and at least one is for the output; shorten the prompt or raise max_model_len", name
        )
    if is_messages:
        words = f"input length and `max_tokens` exceed context limit: {num_prompt} + {num_output} > {limit}"
        advice = "decrease input length or `max_tokens`"
    else:
        words = (
            f"This model's maximum context length is {limit} tokens. However, you requested {num_prompt + num_output} "
            f"tokens ({num_prompt} in the messages, {num_output} in the completion)"
        )
        advice = f"shorten the prompt, lower {name} or leave it out"
    return ApiError(400, f"{words}; {advice}, or raise max_model_len", name)


def own_fault() -> ApiError:
    """What is told of a fault of ours; the log has the rest."""
    return ApiError(500, "this request failed by a fault of the server")


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


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """The JSON object of an error at a path, the same in an answer and in a stream."""
    if _is_messages(path):
        kind = MESSAGES_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message, "param": error.param}}
    kind = TYPES.get(error.status, "BadRequestError" if error.status < 500 else "InternalServerError")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.status}}


def _is_messages(path: str) -> bool:
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def error_response(error: ApiError, path: str) -> Response:
    """The answer to a request for a path."""
    return Response(
        msgspec.json.encode(error_body(error, path)), error.status, headers=error.headers, media_type="application/json"
    )


def log_refusal(error: ApiError, scope: Scope) -> None:
    """A line on a request that ends before the engine hears of it: no other tells of it."""
    logger.info("%s: refused (%d): %s", asked(scope), error.status, error.message)


def asked(scope: Scope) -> str:
    """Method and path for a line of the log: as they were sent, so that a path is one line."""
    return f"{scope['method']} {scope.get('raw_path', b'')[:100].decode('latin-1')}"
