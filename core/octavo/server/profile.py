"""POST /profile: where the time of the engine's steps goes, while it serves."""

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from octavo.engine.profiling import MAX_STEPS
from octavo.server.errors import ApiError
from octavo.server.service import Service
from octavo.server.step_times import picture_of, summary_of, table_of
from octavo.server.streaming import while_connected

__all__ = ["profile"]

DEFAULT_STEPS = 100
DEFAULT_SECONDS = 10.0
MAX_SECONDS = 600.0
FORMATS = ("json", "text", "trace")


async def profile(request: Request) -> Response:
    """Time the next `steps` steps, or those of the next `seconds`, and answer then.

    `format` is json (figures), text (a table) or trace (a file for ui.perfetto.dev or chrome://tracing, with the
    requests that ran meanwhile). One profile is taken at a time.
    """
    service: Service = request.app.state.service
    num_steps = int(_number(request, "steps", DEFAULT_STEPS, MAX_STEPS, least=1.0))
    seconds = _number(request, "seconds", DEFAULT_SECONDS, MAX_SECONDS, least=0.01)
    form = request.query_params.get("format", "json")
    if form not in FORMATS:
        raise ApiError(400, f"format must be one of {', '.join(FORMATS)}, got {form!r:.40}", "format")
    service.check(None)
    profiled = await while_connected(request, service.engine.profile(num_steps, seconds))
    if form == "text":
        return PlainTextResponse(table_of(summary_of(profiled)))
    if form == "json":
        return Response(msgspec.json.encode(summary_of(profiled)), media_type="application/json")
    picture = picture_of(profiled, service.engine.history.records())
    headers = {"content-disposition": 'attachment; filename="octavo-steps.json"'}
    return Response(msgspec.json.encode(picture), media_type="application/json", headers=headers)


def _number(request: Request, name: str, default: float, most: float, *, least: float) -> float:
    given = request.query_params.get(name, str(default))
    try:
        value = float(given)
    except ValueError:
        value = float("nan")
    if not least <= value <= most or (name == "steps" and value != int(value)):
        kind = "a whole number" if name == "steps" else "a number"
        raise ApiError(400, f"{name} must be {kind} from {least:g} to {most:g}, got {given!r:.40}", name)
    return value
