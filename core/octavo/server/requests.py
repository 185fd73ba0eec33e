"""What is under way and why it takes so long: GET /requests, GET /requests/ID."""

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.history import RequestRecord
from octavo.server.errors import ApiError, not_found
from octavo.server.service import Service

__all__ = ["list_requests", "retrieve_request"]

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000


async def list_requests(request: Request) -> Response:
    """GET /requests: the engine at a glance, and the newest requests, those under way first."""
    service: Service = request.app.state.service
    given = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not given.isdecimal() or not 1 <= int(given) <= MAX_LIMIT:
        raise ApiError(400, f"limit must be from 1 to {MAX_LIMIT}, got {given!r:.40}", "limit")
    records = service.engine.history.records()
    shown = sorted(records, key=lambda record: record.finished is not None)[: int(given)]
    data = {"engine": _engine(service.engine, service.model, records), "data": [record.summary() for record in shown]}
    return Response(msgspec.json.encode(data), media_type="application/json")


async def retrieve_request(request: Request) -> Response:
    """GET /requests/ID: one request's figures and timeline. ID is the answer's, or x-request-id as it was sent."""
    service: Service = request.app.state.service
    name = request.path_params["request_id"]
    timeline = service.engine.timeline(name)
    if timeline is None:
        raise not_found(f"no request {name!r:.140} is known; the newest {MAX_LIMIT} are kept", "request_id")
    return Response(msgspec.json.encode(timeline), media_type="application/json")


def _engine(engine: AsyncEngine, model: str, records: Iterable[RequestRecord]) -> dict[str, Any]:
    """What runs, what the KV blocks hold, and how fast it goes."""
    stats, history = engine.stats, engine.history
    ended = [record for record in records if record.first_token is not None]
    first = sorted(record.first_token - record.received for record in ended if record.first_token is not None)
    gaps = sorted(
        (record.last_token - record.first_token) / (record.num_generated_tokens / record.n - 1)
        for record in ended
        if record.first_token is not None and record.last_token is not None and record.num_generated_tokens > record.n
    )
    waits = sorted(record.admitted - record.received for record in records if record.admitted is not None)
    return {
        "model": model,
        "state": engine.state,
        "num_restarts": engine.num_restarts,
        "num_running": history.num_in["running"],
        "num_waiting": history.num_in["waiting"],
        "num_swapped": history.num_in["swapped"],
        "blocks": {
            "total": stats.num_blocks,
            "used": stats.num_used_blocks,
            "shared": stats.num_shared_blocks,
            "cached": stats.num_cached_blocks,
            "size": engine.config.cache.block_size,
            "host_total": stats.num_host_blocks,
            "host_used": stats.num_used_host_blocks,
        },
        "rates": {
            "generated": history.rate("num_generated_tokens", 5.0),
            "computed": history.rate("num_computed_tokens", 5.0),
        },
        "totals": history.totals,
        "latencies": {
            "first_token": {"p50": _quantile(first, 0.5), "p95": _quantile(first, 0.95)},
            "between_tokens": {"p50": _quantile(gaps, 0.5), "p95": _quantile(gaps, 0.95)},
            "in_queue": {"p50": _quantile(waits, 0.5), "p95": _quantile(waits, 0.95)},
        },
    }


def _quantile(values: list[float], share: float) -> float | None:
    """Of sorted values; None where there are none."""
    return values[min(int(share * len(values)), len(values) - 1)] if values else None
