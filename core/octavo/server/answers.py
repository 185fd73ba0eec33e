"""What answers share, whatever the protocol: whole or as events, and how far each choice of a stream has been told."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.inputs import TokenizedPrompt
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server.body import parse_body
from octavo.server.errors import ApiError
from octavo.server.protocol import ChunkedRequest, Extras
from octavo.server.service import Caller, Service, usage_of
from octavo.server.streaming import DONE, EventStream, event, merged, while_connected

__all__ = ["Answer", "Choice", "ChunkedAnswer", "json_response", "renamed", "respond"]

Asked = TypeVar("Asked", bound=Extras)


class Answer(ABC):
    """One request under way.

    Attributes:
        caller: whose it is.
        names: of fields that this request calls otherwise than the engine does, for its errors.

    """

    caller: Caller
    names: Mapping[str, str]

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """The answer in one."""

    @abstractmethod
    def stream(self) -> AsyncGenerator[bytes]:
        """The answer as events; those that are ready together are sent together."""

    def error_event(self, body: dict[str, Any]) -> bytes:
        """The event that ends a stream which failed; `body` is that of an error's answer."""
        return event(body)


async def respond(
    request: Request, kind: type[Asked], prepare: Callable[[Service, Request, Asked], Coroutine[Any, Any, Answer]]
) -> Response:
    """The answer to a request of this kind, whole or as events. The work ends when the client leaves.

    Args:
        request: whose body is not read yet.
        kind: of the body.
        prepare: makes the answer of a body for a model that is served.

    """
    service: Service = request.app.state.service
    body = await parse_body(request, kind)
    service.check(body.model)
    answer = await while_connected(request, prepare(service, request, body))
    if body.stream:
        return EventStream(answer.stream(), answer.caller.request_id, answer.error_event)
    return json_response(await while_connected(request, answer.whole()))


def json_response(data: Any) -> Response:
    """An answer in one."""
    return Response(msgspec.json.encode(data), media_type="application/json")


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors in here name a field as the protocol at hand does, where another one's name stands in `names`."""
    try:
        yield
    except RequestError as error:
        name = names.get(error.param or "")
        if name is None:
            raise
        raise ApiError(400, str(error), name) from error
    except ApiError as error:
        error.param = names.get(error.param or "", error.param)
        raise


@dataclass
class Choice:
    """How far one sample has been told."""

    index: int
    num_chars: int = 0
    num_tokens: int = 0
    is_begun: bool = False
    is_ended: bool = False

    def advance(self, sample: CompletionOutput) -> None:
        """All that there is of the sample was told."""
        self.num_chars, self.num_tokens = len(sample.text), len(sample.token_ids)
        self.is_ended = sample.finish_reason is not None


AnyChoice = TypeVar("AnyChoice", bound=Choice)
Body = TypeVar("Body", bound=ChunkedRequest)


class ChunkedAnswer(Answer, Generic[Body, AnyChoice]):
    """Choices of one or more prompts, in a stream as chunks with a piece of one choice each.

    Args:
        service: that serves it.
        body: the request.
        params: of its samples.
        prompts: what they follow.
        choices: n for each prompt, of which nothing was told.
        caller: whose it is.
        names: see `Answer`.
        kind: what the answer calls itself.

    """

    def __init__(
        self,
        service: Service,
        body: Body,
        params: SamplingParams,
        prompts: Sequence[TokenizedPrompt],
        choices: Sequence[Sequence[AnyChoice]],
        caller: Caller,
        names: Mapping[str, str],
        kind: str,
    ) -> None:
        self.caller = caller
        self.names = names
        self._service = service
        self._body = body
        self._params = params
        self._prompts = prompts
        self._choices = choices
        self._head = {"id": caller.request_id, "object": kind, "created": caller.created, "model": service.model}

    @abstractmethod
    def _whole_choice(
        self, place: int, choice: AnyChoice, output: RequestOutput, sample: CompletionOutput
    ) -> dict[str, Any]:
        """All of a choice."""

    @abstractmethod
    def _pieces(
        self, place: int, choice: AnyChoice, output: RequestOutput, sample: CompletionOutput
    ) -> Iterable[dict[str, Any]]:
        """What a choice gained since it was last told; none where there is nothing to tell."""

    def _rest(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """What else the whole answer has."""
        return {}

    def _usage(self, places: Sequence[int], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The tokens of these prompts, whose outputs were told as far as they are counted."""
        return usage_of(outputs)

    async def whole(self) -> dict[str, Any]:
        latest: dict[int, RequestOutput] = {}
        with renamed(self.names):
            async for ready in merged(self._outputs()):
                latest.update(ready)
        outputs = [latest[place] for place in range(len(self._prompts))]
        choices = [
            self._whole_choice(place, choice, output, sample)
            for place, output in enumerate(outputs)
            for choice, sample in zip(self._choices[place], output.outputs, strict=True)
        ]
        return {
            **self._head,
            "choices": choices,
            "usage": self._usage(range(len(outputs)), outputs),
            **self._rest(outputs),
        }

    async def stream(self) -> AsyncGenerator[bytes]:
        options = self._body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        in_all = wants_usage and options is not None and bool(options.continuous_usage_stats)
        latest: dict[int, RequestOutput] = {}
        with renamed(self.names):
            async for ready in merged(self._outputs()):
                latest.update(ready)
                events = [told for place, output in ready for told in self._events(place, output, in_all)]
                if events:
                    yield b"".join(events)
        ends = [DONE]
        if wants_usage:
            places = sorted(latest)
            usage = {"usage": self._usage(places, [latest[place] for place in places])}
            ends.insert(0, event({**self._head, "choices": [], **usage}))
        yield b"".join(ends)

    def _events(self, place: int, output: RequestOutput, with_usage: bool) -> Iterator[bytes]:
        """What the choices of one prompt gained."""
        interval = self._body.stream_interval or 1
        for choice, sample in zip(self._choices[place], output.outputs, strict=True):
            num_new = len(sample.token_ids) - choice.num_tokens
            if choice.is_ended or (sample.finish_reason is None and num_new < interval):
                continue
            pieces = self._pieces(place, choice, output, sample)
            usage = {"usage": self._usage([place], [output])} if with_usage else {}
            for piece in pieces:
                yield event({**self._head, "choices": [piece], **usage})

    def _outputs(self) -> list[AsyncIterator[RequestOutput]]:
        return self._service.generate(self._prompts, self._params, self.caller, self._body)
