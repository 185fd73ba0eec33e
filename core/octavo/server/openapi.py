"""The OpenAPI document: routes by the framework, bodies from our own types."""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

__all__ = ["body_of", "describe_bodies"]

REFERENCE = "#/components/schemas/{name}"


def body_of(kind: type[msgspec.Struct] | None) -> Mapping[str, Any]:
    """What a route's entry says of its body."""
    if kind is None:
        return {}
    schema = {"$ref": REFERENCE.format(name=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_bodies(app: FastAPI, kinds: list[type[msgspec.Struct]]) -> None:
    """Let the app's document hold the schemas of these bodies."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, schemas = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
            described.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
            app.openapi_schema = described
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
