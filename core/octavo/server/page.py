"""The page at /: plain files that talk to the same endpoints as everybody, and to no other host."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from octavo.server.errors import not_found

__all__ = ["FILES", "index", "static"]

FOLDER = Path(__file__).parent / "static"
FILES = {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


async def index(request: Request) -> Response:
    """GET /."""
    return _file("index.html")


async def static(request: Request) -> Response:
    """GET /static/NAME."""
    name = request.path_params["name"]
    if name not in FILES:
        raise not_found(f"no such file; there are {', '.join(FILES)}")
    return _file(name)


def _file(name: str) -> Response:
    return FileResponse(FOLDER / name, media_type=FILES[name], headers=HEADERS)
