"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's shape over the same chat."""

from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.inputs import Conversation, TokenizedPrompt
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.body import parse_body
from octavo.server.errors import ApiError, unsupported
from octavo.server.protocol import GenerationRequest
from octavo.server.sampling import sampling_params
from octavo.server.service import Caller, Service
from octavo.server.streaming import EventStream, named_event, while_connected

__all__ = ["CountTokensRequest", "MessagesRequest", "count_tokens", "create_message"]

REASONS = {"length": "max_tokens", "abort": "end_turn"}


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """What makes the prompt."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """A turn that is asked for."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


async def count_tokens(request: Request) -> Response:
    """How long the prompt is."""
    service: Service = request.app.state.service
    body = await parse_body(request, CountTokensRequest)
    service.check_model(body.model)
    prompt = await while_connected(request, service.engine.tokenize(_conversation(body)))
    return _json({"input_tokens": len(prompt.token_ids)})


async def create_message(request: Request) -> Response:
    """Answer a request, streaming or whole."""
    service: Service = request.app.state.service
    body = await parse_body(request, MessagesRequest)
    service.check(body.model)
    if body.max_tokens < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {body.max_tokens}", "max_tokens")
    params = sampling_params(
        GenerationRequest(temperature=body.temperature, top_k=body.top_k, top_p=body.top_p, stop=body.stop_sequences),
        service.engine.description.sampling_defaults,
        max_tokens=body.max_tokens,
        logprobs=None,
    )
    prompt = await while_connected(request, service.tokenize(_conversation(body)))
    work = _Message(service, params, prompt, Caller.of(request, "msg"), (body.metadata or {}).get("user_id"))
    if body.stream:
        return EventStream(work.stream(), work.caller.request_id, _error_event)
    return _json(await while_connected(request, work.whole()))


def _error_event(body: dict[str, Any]) -> bytes:
    return named_event({"type": "error", **body})


def _json(data: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")


def _conversation(body: CountTokensRequest) -> Conversation:
    """The conversation as chat templates know it: the system's words first, blocks of text as parts."""
    if body.tools and (body.tool_choice or {}).get("type") != "none":
        raise unsupported("tools", "are not served on this path; use /v1/chat/completions")
    if not body.messages:
        raise ApiError(400, "messages is empty; at least one message is needed", "messages")
    system = [{"role": "system", "content": body.system}] if body.system else []
    return Conversation([*system, *body.messages])


class _Message:
    """One request under way, and what its answer is made of."""

    def __init__(
        self, service: Service, params: SamplingParams, prompt: TokenizedPrompt, caller: Caller, user: object
    ) -> None:
        self.caller = caller
        self._shared = GenerationRequest(user=user if isinstance(user, str) else None)
        self._service = service
        self._params = params
        self._prompt = prompt

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        output: RequestOutput | None = None
        async for output in self._outputs():  # noqa: B007
            pass
        assert output is not None
        [sample] = output.outputs
        return self._message([{"type": "text", "text": sample.text}], _usage(output), **_ending(sample))

    async def stream(self) -> AsyncGenerator[bytes]:
        """The answer as events: a message begins, its one block grows, and both end."""
        num_chars = 0
        output: RequestOutput | None = None
        async for output in self._outputs():
            [sample] = output.outputs
            events = []
            if not num_chars and (sample.text or output.finished):
                started = self._message(
                    [], {**_usage(output), "output_tokens": 0}, stop_reason=None, stop_sequence=None
                )
                events.append(named_event({"type": "message_start", "message": started}))
                block = {"type": "text", "text": ""}
                events.append(named_event({"type": "content_block_start", "index": 0, "content_block": block}))
            if len(sample.text) > num_chars:
                delta = {"type": "text_delta", "text": sample.text[num_chars:]}
                events.append(named_event({"type": "content_block_delta", "index": 0, "delta": delta}))
                num_chars = len(sample.text)
            if events:
                yield b"".join(events)
        assert output is not None
        end = {"type": "message_delta", "delta": _ending(output.outputs[0]), "usage": _usage(output)}
        endings: list[dict[str, Any]] = [{"type": "content_block_stop", "index": 0}, end, {"type": "message_stop"}]
        yield b"".join(map(named_event, endings))

    def _outputs(self) -> Any:
        return self._service.generate([self._prompt], self._params, self.caller, self._shared)[0]

    def _message(self, content: list[Any], usage: dict[str, int], **ending: Any) -> dict[str, Any]:
        return {
            "id": self.caller.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._service.model,
            "content": content,
            "usage": usage,
            **ending,
        }


def _ending(sample: CompletionOutput) -> dict[str, Any]:
    """Why the turn ended, in this protocol's words."""
    if isinstance(sample.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
    return {"stop_reason": REASONS.get(sample.finish_reason or "", "end_turn"), "stop_sequence": None}


def _usage(output: RequestOutput) -> dict[str, int]:
    """Prompt tokens that the cache served are counted apart here."""
    return {
        "input_tokens": output.num_prompt_tokens - output.num_cached_tokens,
        "cache_read_input_tokens": output.num_cached_tokens,
        "output_tokens": output.num_generated_tokens,
    }
