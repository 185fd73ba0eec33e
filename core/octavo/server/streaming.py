"""Answers that grow: server-sent events, several outputs at once, and clients that leave."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.engine.outputs import RequestOutput
from octavo.server.errors import ApiError, as_api_error, error_body, error_response, own_fault

__all__ = ["DONE", "ClientLeftError", "EventStream", "event", "merged", "named_event", "while_connected"]

CLIENT_LEFT = 499  # in logs alone: nobody is there to read it
DONE = b"data: [DONE]\n\n"

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_encoder = msgspec.json.Encoder()


class ClientLeftError(Exception):
    """The client closed its connection before it had its answer."""


def event(data: dict[str, Any]) -> bytes:
    """An event with a JSON object."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """The same, under the name that its "type" has: what Anthropic's clients go by."""
    return f"event: {data['type']}\n".encode() + event(data)


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns; it is cancelled when the client leaves.

    Raises:
        ClientLeftError: it did.

    """
    return await _while_connected(request.receive, work)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeftError
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(
    streams: Sequence[AsyncIterator[RequestOutput]],
) -> AsyncGenerator[list[tuple[int, RequestOutput]]]:
    """The outputs of several requests as they grow, with the place of each; all that are ready come together.

    An error of one ends all. An output that grew twice before it was asked for comes once.
    """
    if len(streams) == 1:
        async for output in streams[0]:
            yield [(0, output)]
        return
    grown: dict[int, RequestOutput] = {}
    news = asyncio.Event()

    async def follow(place: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async for output in stream:
                grown[place] = output
                news.set()
        finally:
            news.set()

    tasks = [asyncio.ensure_future(follow(place, stream)) for place, stream in enumerate(streams)]
    try:
        while True:
            await news.wait()
            news.clear()
            ended = [task for task in tasks if task.done()]
            for task in ended:
                task.result()
            ready = sorted(grown.items())
            grown.clear()
            if ready:
                yield ready
            if len(ended) == len(tasks):
                return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """An answer of server-sent events.

    The status waits for the first of them, so that what fails before is an error of its own; what fails later is an
    event, and the end. When the client leaves, the events' source is closed.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], where: str, encode: Callable[[dict[str, Any]], bytes] = event
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._where = where
        self._encode = encode
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            refused = await _while_connected(receive, self._send_all(scope, send))
        except ClientLeftError:
            logger.info("%s: the client left its stream (%d)", self._where, CLIENT_LEFT)
            return
        if refused is not None:
            await error_response(refused, scope["path"])(scope, receive, send)

    async def _send_all(self, scope: Scope, begin: Send) -> ApiError | None:
        """Begin the answer and send the events; what came instead of the first is returned."""
        send: Send = scope.get("octavo.send", begin)
        is_begun = False
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    if not is_begun:
                        is_begun = True
                        await begin({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:
                known = as_api_error(error)
                if known is None:
                    logger.exception("%s: a stream failed", self._where)
                    known = own_fault()
                if not is_begun:
                    return known
                logger.warning("%s: a stream ended early: %s", self._where, known.message)
                body = self._encode(error_body(known, scope["path"]))
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None
