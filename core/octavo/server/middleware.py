"""What stands before every endpoint: keys, names, turns. Plain ASGI, so that streams cost nothing more."""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.errors import ApiError, asked, error_response, log_refusal, own_fault

__all__ = ["OPEN_PATHS", "ApiKeys", "Faults", "Paced", "RequestIds"]

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version", "/metrics"})
OPEN_FOLDER = "/static/"  # of the page, which asks for a key and sends it with what it asks for
NUM_A_TURN = 2  # requests that begin in one turn of the event loop: some milliseconds of work
REQUEST_ID = re.compile(r"[\x20-\x7e]{1,256}")

logger = logging.getLogger(__name__)


class ApiKeys:
    """Lets nobody in without one of the keys, but to the paths that probes use.

    The scope's "octavo.api_key" says which key it was, by its place.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not scope["path"].startswith(OPEN_FOLDER):
            headers = Headers(scope=scope)
            scheme, _, token = headers.get("authorization", "").partition(" ")
            given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            place = self._find(given)
            if place is None:
                message = "the API key is wrong" if given else "an API key is needed: Authorization: Bearer KEY"
                refused = ApiError(401, message, headers={"www-authenticate": "Bearer"})
                log_refusal(refused, scope)
                await error_response(refused, scope["path"])(scope, receive, send)
                return
            scope["octavo.api_key"] = place
        await self._app(scope, receive, send)

    def _find(self, given: str) -> int | None:
        """The place of a key; the time this takes says nothing about the keys."""
        digest = _digest(given.encode("latin-1"))  # as headers were decoded
        places = [place for place, key in enumerate(self._digests) if hmac.compare_digest(key, digest)]
        return places[0] if places else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Faults:
    """Answers what fails by a fault of ours as any other error is answered: on a connection that lives on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if scope["type"] != "http" or has_begun:
                raise
            logger.exception("%s failed", asked(scope))
            await error_response(own_fault(), scope["path"])(scope, receive, send)


class RequestIds:
    """Sends x-request-id back, or one made here.

    The scope's "octavo.received" says when the request came. Its "octavo.send" is for the body of an answer that has
    begun: what stands between here and the endpoint looks at beginnings alone, and streams have many pieces.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["octavo.received"] = time.time()
        scope["octavo.send"] = send
        given = Headers(scope=scope).get("x-request-id", "")
        own = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = own
            await send(message)

        await self._app(scope, receive, send_with_id)


class Paced:
    """Lets what is POSTed begin a few at a time, in its order, so that thousands at once keep no probe waiting.

    The event loop serves in turn whatever is ready. A request costs it a millisecond or so before it waits for the
    engine, so 2,000 that came together would make every other answer wait for seconds.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False
        self._num_begun = 0  # in this turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] not in OPEN_PATHS:
            await self._turn()
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            self._num_begun = 0
            loop.call_soon(self._next, loop)
        if self._num_begun < NUM_A_TURN and not self._waiting:
            self._num_begun += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """A turn of the loop begins."""
        self._num_begun = 0
        while self._waiting and self._num_begun < NUM_A_TURN:
            turn = self._waiting.popleft()
            if not turn.done():  # else its connection's task was cancelled
                turn.set_result(None)
                self._num_begun += 1
        self._is_turning = self._num_begun > 0
        if self._is_turning:
            loop.call_soon(self._next, loop)
