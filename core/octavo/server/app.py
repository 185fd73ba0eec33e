"""The application: endpoints, what stands before them, and what becomes of errors."""

import logging
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from octavo import __version__
from octavo.engine.async_engine import AsyncEngine
from octavo.errors import BusyError, OctavoError
from octavo.server import (
    chat,
    completions,
    embeddings,
    messages,
    metrics,
    page,
    protocol,
    requests,
    responses,
    status,
    tokens,
)
from octavo.server.admission import Admission
from octavo.server.body import UnknownFields
from octavo.server.errors import ApiError, as_api_error, error_response, log_refusal, not_found
from octavo.server.middleware import ApiKeys, Faults, Paced, RequestIds
from octavo.server.openapi import describe_schemas, operation_of
from octavo.server.options import ServerOptions
from octavo.server.profile import profile
from octavo.server.service import Service
from octavo.server.streaming import CLIENT_LEFT, ClientLeftError
from octavo.server.tracing import Tracing
from octavo.server.turns import parsers_of

__all__ = ["create_app"]

logger = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]

Body = type[msgspec.Struct]

ROUTES: tuple[tuple[str, str, Endpoint, Body | None], ...] = (
    ("POST", "/v1/completions", completions.create_completion, protocol.CompletionRequest),
    ("POST", "/v1/chat/completions", chat.create_chat_completion, protocol.ChatRequest),
    ("POST", "/v1/responses", responses.create_response, responses.ResponsesRequest),
    ("POST", "/v1/messages", messages.create_message, messages.MessagesRequest),
    ("POST", "/v1/messages/count_tokens", messages.count_tokens, messages.CountTokensRequest),
    ("POST", "/v1/embeddings", embeddings.create_embedding, protocol.EmbeddingRequest),
    ("GET", "/v1/models", status.list_models, None),
    ("GET", "/v1/models/{name:path}", status.retrieve_model, None),
    ("POST", "/tokenize", tokens.tokenize, protocol.TokenizeRequest),
    ("POST", "/detokenize", tokens.detokenize, protocol.DetokenizeRequest),
    ("GET", "/health", status.health, None),
    ("GET", "/ping", status.ping, None),
    ("POST", "/ping", status.ping, None),
    ("GET", "/version", status.version, None),
    ("GET", "/load", status.load, None),
    ("GET", "/metrics", metrics.metrics, None),
    ("GET", "/requests", requests.list_requests, None),
    ("GET", "/requests/{request_id:path}", requests.retrieve_request, None),
    ("GET", "/", page.index, None),
    ("GET", "/static/{name}", page.static, None),
)


def create_app(engine: AsyncEngine, options: ServerOptions) -> FastAPI:
    """The application over an engine, which may still be loading: until it is ready, requests get 503.

    `app.state.service` is what endpoints use. The engine is the caller's to stop.
    """
    app = FastAPI(title="Octavo", version=__version__, docs_url=None, redoc_url=None)
    parsers_of(options, engine.tokenizer)  # a name that is none is refused now, not at the first chat
    service = app.state.service = Service(engine, options)
    app.state.metrics = metrics.Metrics(engine, service.model, with_vllm_names=options.with_vllm_metrics)
    app.state.admission = Admission(
        engine,
        app.state.metrics,
        max_requests=options.max_waiting_requests,
        max_tokens=options.max_waiting_tokens,
    )
    app.state.tracing = None
    if options.otlp_traces_endpoint:
        app.state.tracing = Tracing(options.otlp_traces_endpoint, service.model)
        engine.observe(app.state.tracing)
    app.state.unknown_fields = UnknownFields()
    for method, path, endpoint, body in ROUTES:
        described = dict(operation_of(method, path, body, with_keys=bool(options.api_keys)))
        app.add_api_route(
            path, endpoint, methods=[method], response_model=None, response_class=Response, openapi_extra=described
        )
        if method == "GET":  # probes ask for the head alone; the document need not say so of each
            app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)
    # It waits for what it is asked to measure, so the document leaves it out: who tries every path would wait too.
    app.add_route("/profile", profile, methods=["POST"], include_in_schema=False)
    bodies = [body for *_, body in ROUTES if body is not None]
    describe_schemas(app, bodies, with_keys=bool(options.api_keys))
    app.add_exception_handler(HTTPException, _on_http_exception)
    for kind in (ApiError, OctavoError, ClientLeftError, ClientDisconnect):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(Faults)
    app.add_middleware(Paced)
    if options.api_keys:
        app.add_middleware(ApiKeys, keys=options.api_keys)
    app.add_middleware(RequestIds)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientLeftError | ClientDisconnect):
        logger.info("%s: the client left (%d)", request.url.path, CLIENT_LEFT)
        return Response(status_code=CLIENT_LEFT)
    known = as_api_error(error)
    assert known is not None, "handlers are of errors that are foreseen"
    if known.status < 500 or isinstance(error, BusyError):  # others ended as requests of the engine, which says so
        log_refusal(known, request.scope)
    return error_response(known, request.url.path)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Of the framework: no such path, or no such method."""
    assert isinstance(error, HTTPException)
    refused = ApiError(error.status_code, str(error.detail), headers=error.headers)
    if error.status_code == 404:
        paths = sorted({route.path for route in request.app.routes if isinstance(route, Route)})
        refused = not_found(f"no such path; there are {', '.join(paths)}")
    log_refusal(refused, request.scope)
    return error_response(refused, request.url.path)
