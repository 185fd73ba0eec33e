"""POST /v1/chat/completions: a conversation through the model's chat template, and the assistant's turn."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.inputs import Conversation, TokenizedPrompt
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import shown
from octavo.sampling_params import MAX_LOGPROBS, SamplingParams
from octavo.server.body import parse_body
from octavo.server.errors import ApiError, unsupported
from octavo.server.logprobs import ChatLogprobs, prompt_logprobs
from octavo.server.protocol import ChatRequest
from octavo.server.sampling import check_served, sampling_params
from octavo.server.service import Caller, Service, usage_of
from octavo.server.streaming import DONE, EventStream, event, while_connected
from octavo.server.turns import Turns, delta_of
from octavo.text.turn import Turn

__all__ = ["conversation_of", "create_chat_completion"]


async def create_chat_completion(request: Request) -> Response:
    """Answer a request, streaming or whole."""
    service: Service = request.app.state.service
    body = await parse_body(request, ChatRequest)
    service.check(body.model)
    work = await while_connected(request, _prepare(service, request, body))
    if body.stream:
        return EventStream(work.stream(), work.caller.request_id)
    answer = await while_connected(request, work.whole())
    return Response(msgspec.json.encode(answer), media_type="application/json")


def conversation_of(service: Service, body: Any, tools: Sequence[dict[str, Any]] | None = None) -> Conversation:
    """The conversation of a request that has `messages` and what goes with them.

    Raises:
        ApiError: it brings a template, and the server was not started to run those.

    """
    if body.chat_template is not None and not service.options.trust_request_chat_template:
        raise unsupported(
            "chat_template",
            "is a program, and is run only where the server was started to trust it (trust_request_chat_template)",
        )
    names = dict(body.chat_template_kwargs or {})
    if getattr(body, "documents", None) is not None:
        names["documents"] = body.documents
    return Conversation(
        [_message(message) for message in body.messages],
        tools=tools,
        add_generation_prompt=_opens_a_turn(body),
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template,
        chat_template_kwargs=names,
        add_special_tokens=bool(body.add_special_tokens),
    )


def _opens_a_turn(body: Any) -> bool:
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return bool(body.add_generation_prompt)


def _message(message: Any) -> Any:
    """A message with roles as templates know them: newer clients say developer for system."""
    if isinstance(message, dict) and message.get("role") == "developer":
        return {**message, "role": "system"}
    return message


async def _prepare(service: Service, request: Request, body: ChatRequest) -> "_Chat":
    check_served(body)
    _check_chat(body)
    recommended = service.engine.description.sampling_defaults
    wanted = [body.max_completion_tokens, body.max_tokens, recommended.get("max_tokens")]
    max_tokens = next((number for number in wanted if number is not None), None)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(body, recommended, max_tokens=max_tokens, logprobs=logprobs)
    turns = Turns(service.options, service.engine.tokenizer, body)
    prompt = await service.tokenize(
        conversation_of(service, body, turns.tools),
        truncate=body.truncate_prompt_tokens,
        side=body.truncation_side,
        num_output=max_tokens or 1,
    )
    params = turns.params(params, prompt.token_ids)
    return _Chat(service, body, params, prompt, turns, Caller.of(request, "chatcmpl", body.request_id))


def _check_chat(body: ChatRequest) -> None:
    if body.top_logprobs is not None:
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            allowed = f"from 0 to {MAX_LOGPROBS}"
            raise ApiError(400, f"top_logprobs must be {allowed}, got {shown(body.top_logprobs)}", "top_logprobs")
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs is given and logprobs is not true", "top_logprobs")
    if body.audio or any(kind != "text" for kind in body.modalities or ()):
        raise unsupported("modalities" if body.modalities else "audio", "is not served: answers are text")
    for name in ("mm_processor_kwargs", "functions", "function_call"):
        if getattr(body, name) not in (None, [], {}, "none", "auto"):
            raise unsupported(name)


@dataclass
class _Choice:
    """How far one sample has been told."""

    index: int
    turn: Turn | None
    num_chars: int = 0
    num_tokens: int = 0
    is_begun: bool = False
    is_ended: bool = False


class _Chat:
    """One request under way, and what its answer is made of."""

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        params: SamplingParams,
        prompt: TokenizedPrompt,
        turns: Turns,
        caller: Caller,
    ) -> None:
        self._turns = turns
        self._tells_reasoning = body.include_reasoning is not False
        self.caller = caller
        self._service = service
        self._body = body
        self._params = params
        self._prompt = prompt
        self._echo = _last_words(body) if body.echo else ""
        self._logprobs: ChatLogprobs | None = None
        if body.logprobs:
            self._logprobs = ChatLogprobs(
                service.engine.tokenizer,
                body.top_logprobs or 0,
                as_token_ids=bool(body.return_tokens_as_token_ids),
            )
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = {"id": caller.request_id, "object": kind, "created": caller.created, "model": service.model}

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        output: RequestOutput | None = None
        async for output in self._outputs():  # noqa: B007
            pass
        assert output is not None
        answer = {
            **self._head,
            "choices": [self._whole_choice(sample) for sample in output.outputs],
            "usage": usage_of([output]),
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
        }
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    def _whole_choice(self, sample: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._echo + sample.text, "refusal": None}
        reason = sample.finish_reason
        if not self._turns.is_plain:
            turn = self._turns.begin()
            gained = turn.add(sample.text, is_over=True)
            message |= delta_of(gained, with_reasoning=self._tells_reasoning, streamed=False)
            message["content"] = (self._echo + gained.content) or (None if gained.calls else "")
            reason = _reason(sample, turn)
        choice: dict[str, Any] = {
            "index": sample.index,
            "message": message,
            "logprobs": self._logprobs and self._logprobs.take(sample.token_ids, sample.logprobs or ()),
            "finish_reason": reason,
            "stop_reason": sample.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice

    async def stream(self) -> AsyncGenerator[bytes]:
        """The answer as events; those that are ready together are sent together."""
        options = self._body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        in_all = wants_usage and options is not None and bool(options.continuous_usage_stats)
        plain = self._turns.is_plain
        choices = [_Choice(i, None if plain else self._turns.begin()) for i in range(self._params.n)]
        output: RequestOutput | None = None
        async for output in self._outputs():
            usage = {"usage": usage_of([output])} if in_all else {}
            events = [
                event({**self._head, "choices": [piece], **usage})
                for choice, sample in zip(choices, output.outputs, strict=True)
                for piece in self._pieces(choice, sample)
            ]
            if events:
                yield b"".join(events)
        assert output is not None
        ends = [DONE]
        if wants_usage:
            ends.insert(0, event({**self._head, "choices": [], "usage": usage_of([output])}))
        yield b"".join(ends)

    def _outputs(self) -> AsyncIterator[RequestOutput]:
        return self._service.generate([self._prompt], self._params, self.caller, self._body)[0]

    def _pieces(self, choice: _Choice, sample: CompletionOutput) -> list[dict[str, Any]]:
        """What a choice gained since it was last told, the role first: it says that tokens have begun to come."""
        is_over = sample.finish_reason is not None
        num_new = len(sample.token_ids) - choice.num_tokens
        if choice.is_ended or (not is_over and num_new < (self._body.stream_interval or 1)):
            return []
        text = sample.text[choice.num_chars :]
        pieces = []
        if not choice.is_begun:
            choice.is_begun = True
            pieces.append(_piece(choice.index, {"role": "assistant", "content": ""}))
            if choice.turn is None:
                text = self._echo + text
            elif self._echo:
                pieces.append(_piece(choice.index, {"content": self._echo}))
        delta: dict[str, Any] = {"content": text} if text or not is_over else {}
        if choice.turn is not None:
            gained = choice.turn.add(text, is_over=is_over)
            delta = delta_of(gained, with_reasoning=self._tells_reasoning, streamed=True)
            text = "told" if delta else ""
        if not (text or is_over or self._logprobs is not None or self._body.return_token_ids):
            choice.num_chars = len(sample.text)
            return pieces
        new = slice(choice.num_tokens, None)
        piece = _piece(choice.index, delta)
        if self._logprobs is not None:
            piece["logprobs"] = self._logprobs.take(sample.token_ids[new], (sample.logprobs or ())[new])
        if self._body.return_token_ids:
            piece["token_ids"] = sample.token_ids[new]
        if is_over:
            piece["finish_reason"], piece["stop_reason"] = _reason(sample, choice.turn), sample.stop_reason
        choice.num_chars, choice.num_tokens, choice.is_ended = len(sample.text), len(sample.token_ids), is_over
        return [*pieces, piece]


def _reason(sample: CompletionOutput, turn: Turn | None) -> str | None:
    """Why a sample ended; one that was cut was cut, also while it wrote a call."""
    called = turn is not None and turn.has_calls and sample.finish_reason == "stop"
    return "tool_calls" if called else sample.finish_reason


def _piece(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _last_words(body: ChatRequest) -> str:
    """What the assistant had already said, where the answer goes on with it."""
    last = body.messages[-1] if body.messages else None
    if isinstance(last, dict) and last.get("role") == "assistant" and isinstance(last.get("content"), str):
        return str(last["content"])
    return ""
