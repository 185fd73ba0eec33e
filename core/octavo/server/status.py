"""Endpoints that say what is there: models, health, version, load."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.server.errors import not_found
from octavo.server.service import Service

__all__ = ["health", "list_models", "load", "ping", "retrieve_model", "version"]


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "octavo",
        "root": service.engine.config.model.model,
        "parent": None,
        "max_model_len": service.max_model_len,
    }


async def list_models(request: Request) -> Response:
    """GET /v1/models."""
    service = _service(request)
    return _json({"object": "list", "data": [_model(service, name) for name in service.names]})


async def retrieve_model(request: Request) -> Response:
    """GET /v1/models/NAME; names may have slashes."""
    service, name = _service(request), request.path_params["name"]
    if name not in service.names:
        raise not_found(f"no model {name!r:.100} is served; there is {', '.join(service.names)}", "model")
    return _json(_model(service, name))


async def health(request: Request) -> Response:
    """GET /health: 200 while requests are served, 503 while the engine loads, starts again or is gone."""
    state = _service(request).engine.state
    return _json({"status": state}, 200 if state == "ready" else 503)


async def ping(request: Request) -> Response:
    """GET or POST /ping: as /health."""
    return await health(request)


async def version(request: Request) -> Response:
    """GET /version."""
    return _json({"version": __version__})


async def load(request: Request) -> Response:
    """GET /load: requests under way."""
    engine = _service(request).engine
    return _json({"server_load": engine.num_live})
