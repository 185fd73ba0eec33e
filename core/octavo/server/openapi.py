"""The OpenAPI document: routes by the framework; bodies, answers and errors from our own types."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from octavo.server.errors import MESSAGES
from octavo.server.middleware import OPEN_FOLDER, OPEN_PATHS
from octavo.server.shapes import EVENTS, SHAPES, ErrorAnswer, MessagesErrorAnswer

__all__ = ["describe_schemas", "operation_of"]

REFERENCE = "#/components/schemas/{name}"
PROBES = ("/health", "/ping")  # answer 503 in the shape of 200

PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "/v1/models/{name}": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
    "/requests": [{"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1000}}],
    "/requests/{request_id}": [{"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}}],
    "/static/{name}": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
}
WAIT = {
    "name": "x-request-timeout",
    "in": "header",
    "description": "Seconds for which the request may wait to be admitted.",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}


def operation_of(method: str, route: str, body: type[msgspec.Struct] | None, *, with_keys: bool) -> Mapping[str, Any]:
    """What the document says of a route, beside its name and what its function's docstring says.

    Args:
        method: of HTTP.
        route: its path, as the framework writes it.
        body: what it takes; None: nothing.
        with_keys: whether the server asks for API keys.

    """
    path = re.sub(r":path\}", "}", route)
    described: dict[str, Any] = {"parameters": list(PARAMETERS.get(path, ()))}
    if body is not None:
        described["requestBody"] = {"required": True, "content": _json(body)}
        if path.startswith("/v1/"):
            described["parameters"].append(WAIT)
    answer = SHAPES.get((method, path), dict[str, Any])
    content = {answer: {"schema": {"type": "string"}}} if isinstance(answer, str) else _json(answer)
    if path in EVENTS:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    described["responses"] = {"200": {"description": "The answer.", "content": content}}
    for status in ("4XX", "5XX"):
        shape = MessagesErrorAnswer if path.startswith(MESSAGES) else ErrorAnswer
        described["responses"][status] = {"description": "An error.", "content": _json(shape)}
    if path in PROBES:
        described["responses"]["503"] = {"description": "No request is served now.", "content": content}
    if with_keys and path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
        described["security"] = [{"key": []}]
    return described


def describe_schemas(app: FastAPI, bodies: Iterable[type[msgspec.Struct]], *, with_keys: bool) -> None:
    """Let the app's document hold the schemas of these bodies, and of all answers."""
    kinds = [
        *bodies,
        ErrorAnswer,
        MessagesErrorAnswer,
        *(answer for answer in SHAPES.values() if not isinstance(answer, str)),
    ]

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, schemas = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
            components = described.setdefault("components", {})
            components.setdefault("schemas", {}).update(schemas)
            if with_keys:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = described
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _json(kind: Any) -> dict[str, Any]:
    schema = {"$ref": REFERENCE.format(name=kind.__name__)} if hasattr(kind, "__annotations__") else {"type": "object"}
    return {"application/json": {"schema": schema}}
