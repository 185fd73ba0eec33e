"""Request bodies: read up to a limit, decoded field by field, so that an error names its field."""

import json
import logging
import re
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec
from starlette.requests import Request

from octavo.server.errors import ApiError

__all__ = ["UnknownFields", "decode_body", "parse_body", "read_body"]

MAX_DISCARDED = 256 << 20  # bytes of a body that is too long which are taken, so that the client hears the answer
MANY_BYTES = 4 << 20  # of a body whose parts are counted before it is decoded, which blocks all others
MAX_PARTS = 1 << 20  # commas of such a body
MAX_NAMES = 100  # unknown fields that are logged
MAX_REASON = 200  # characters
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=msgspec.Struct)

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class UnknownFields:
    """Says once a name that clients send a field which nothing here knows."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def note(self, name: str, where: str) -> None:
        """A request to `where` had the field."""
        if name not in self._known and len(self._known) < MAX_NAMES:
            self._known.add(name)
            logger.warning("%s: unknown field %.60r is ignored (said once)", where, name)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: it is longer than `limit` bytes (413).

    """
    told = request.headers.get("content-length", "")
    too_long = ApiError(413, f"the request's body is longer than {limit} bytes (max_body_bytes)")
    if told.isdecimal() and int(told) > limit and request.headers.get("expect", "").lower() == "100-continue":
        raise too_long
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= limit:
            chunks.append(chunk)
        else:
            chunks.clear()
            if num_bytes > MAX_DISCARDED:
                break
    if num_bytes > limit:
        raise too_long
    return b"".join(chunks)


async def parse_body(request: Request, kind: type[Kind]) -> Kind:
    """The body as a `kind`.

    Raises:
        ApiError: it is too long, no JSON, or a field has a wrong type.
        ClientDisconnect: the client left before the end.

    """
    app = request.app.state
    body = await read_body(request, app.service.options.max_body_bytes)
    if len(body) > MANY_BYTES and body.count(b",") > MAX_PARTS:
        raise ApiError(413, f"the request's body is longer than {MANY_BYTES} bytes and has more than {MAX_PARTS} parts")
    return decode_body(body, kind, app.unknown_fields, request.url.path)


def decode_body(body: bytes, kind: type[Kind], unknown: UnknownFields, where: str) -> Kind:
    """JSON as a `kind`: a null counts as absent, unknown fields are passed over.

    Raises:
        ApiError: no JSON object, or a field is missing or has a wrong type.

    """
    decoders = _decoders(kind)
    given: dict[str, Any] = {}
    for name, raw in _fields_of(body).items():
        decoder = decoders.get(name)
        if decoder is None:
            unknown.note(name, where)
        elif raw != b"null":
            given[name] = _decode(decoder, raw, name)
    for name in _required(kind):
        if name not in given:
            raise ApiError(400, f"{name} is missing", name)
    return kind(**given)


def _fields_of(body: bytes) -> dict[str, bytes]:
    try:
        try:
            fields = _object.decode(body)
        except msgspec.ValidationError as error:
            raise ApiError(400, "the request's body must be a JSON object") from error
        except msgspec.DecodeError:
            if not SURROGATE.search(body):
                raise
            fields = _object.decode(_without_lone_surrogates(body))
    except (ValueError, RecursionError) as error:  # of msgspec, of json, of UTF-8
        raise ApiError(400, f"the request's body is not JSON: {_reason(error)}") from error
    return {name: bytes(raw).strip() for name, raw in fields.items()}


def _decode(decoder: msgspec.json.Decoder[Any], raw: bytes, name: str) -> Any:
    try:
        return decoder.decode(raw)
    except (ValueError, RecursionError) as error:
        choices = [choice for part in get_args(decoder.type) for choice in get_args(part) if isinstance(choice, str)]
        allowed = f" (one of {', '.join(choices)})" if choices else ""
        raise ApiError(400, f"{name}: {_reason(error)}{allowed}", name) from error


def _without_lone_surrogates(raw: bytes) -> bytes:
    """JSON whose strings hold U+FFFD for what is no character: tools cut texts anywhere, and send the halves."""
    text = json.dumps(json.loads(raw), ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:MAX_REASON]


@cache
def _decoders(kind: type[msgspec.Struct]) -> dict[str, msgspec.json.Decoder[Any]]:
    return {field.encode_name: msgspec.json.Decoder(field.type) for field in msgspec.structs.fields(kind)}


@cache
def _required(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind) if field.required]
