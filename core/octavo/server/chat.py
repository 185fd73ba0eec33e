"""POST /v1/chat/completions: a conversation through the model's chat template, and the assistant's turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.inputs import Conversation, TokenizedPrompt
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import shown
from octavo.sampling_params import MAX_LOGPROBS, SamplingParams
from octavo.server.answers import Choice, ChunkedAnswer, renamed, respond
from octavo.server.errors import ApiError, check_one_of, unsupported
from octavo.server.logprobs import ChatLogprobs, prompt_logprobs
from octavo.server.protocol import ChatRequest
from octavo.server.sampling import check_served, sampling_params
from octavo.server.service import Caller, Service
from octavo.server.structured import form_names
from octavo.server.turns import Turns, choice_of, delta_of, effort_names
from octavo.text.turn import Turn

__all__ = ["conversation_of", "create_chat_completion"]

ROLES = ("developer", "system", "user", "assistant", "tool", "function")


async def create_chat_completion(request: Request) -> Response:
    """Answer a request, streaming or whole."""
    return await respond(request, ChatRequest, _prepare)


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
    templates = [body.chat_template or "", *service.engine.tokenizer.chat_template.templates.values()]
    for i, message in enumerate(body.messages):
        _check_role(message, f"messages[{i}].role", templates)
    names = dict(body.chat_template_kwargs or {})
    if getattr(body, "documents", None) is not None:
        names["documents"] = body.documents
    if getattr(body, "reasoning_effort", None) is not None:
        names = {**effort_names(body.reasoning_effort), **names}
    return Conversation(
        [_message(message) for message in body.messages],
        tools=tools,
        add_generation_prompt=_opens_a_turn(body),
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template,
        chat_template_kwargs=names,
        add_special_tokens=bool(body.add_special_tokens),
    )


def _check_role(message: Any, where: str, templates: Sequence[str]) -> None:
    """A role is one of the protocol's, or one that the model's template names."""
    role = message.get("role") if isinstance(message, dict) else None
    if isinstance(role, str) and role and not any(f"'{role}'" in text or f'"{role}"' in text for text in templates):
        check_one_of(where, role, ROLES, "messages")


def _opens_a_turn(body: Any) -> bool:
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return bool(body.add_generation_prompt)


def _message(message: Any) -> Any:
    """A message as templates know it, where newer clients say developer for system, reasoning for its content."""
    if not isinstance(message, dict):
        return message
    if message.get("role") == "developer":
        return {**message, "role": "system"}
    if isinstance(message.get("reasoning"), str):
        return {"reasoning_content": message["reasoning"], **message}
    return message


async def _prepare(service: Service, request: Request, body: ChatRequest) -> "_Chat":
    check_served(body)
    _check_chat(body)
    recommended = service.engine.description.sampling_defaults
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    max_tokens = recommended.get("max_tokens") if asked is None else asked
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    with renamed({"max_tokens": name}):
        params = sampling_params(body, recommended, max_tokens=max_tokens, logprobs=logprobs)
    turns = Turns(
        service.options,
        service.engine.tokenizer,
        body.tools or [],
        choice_of(body),
        parallel=body.parallel_tool_calls is not False,
    )
    prompt = await service.tokenize(
        conversation_of(service, body, turns.tools),
        truncate=body.truncate_prompt_tokens,
        side=body.truncation_side,
        num_output=max_tokens or 1,
    )
    service.check_length(prompt, asked, request.url.path, name)
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
class _Choice(Choice):
    """How far one sample has been told, its turn (without one all text is content) and its reasoning so far."""

    turn: Turn | None = None
    reasoning: str = ""


class _Chat(ChunkedAnswer[ChatRequest, _Choice]):
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
        choices = [[_Choice(i, turn=None if turns.is_plain else turns.begin()) for i in range(params.n)]]
        names = {**form_names(body), **turns.forms}
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service, body, params, [prompt], choices, caller, names, kind)
        self._turns = turns
        self._tells_reasoning = body.include_reasoning is not False
        self._echo = _last_words(body) if body.echo else ""
        self._logprobs: ChatLogprobs | None = None
        if body.logprobs:
            self._logprobs = ChatLogprobs(
                service.engine.tokenizer,
                body.top_logprobs or 0,
                as_token_ids=bool(body.return_tokens_as_token_ids),
            )

    def _rest(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        rest: dict[str, Any] = {"prompt_logprobs": prompt_logprobs(output.prompt_logprobs)}
        if self._body.return_token_ids:
            rest["prompt_token_ids"] = output.prompt_token_ids
        return rest

    def _usage(self, places: Sequence[int], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        usage = super()._usage(places, outputs)
        if self._turns.has_reasoning:
            [choices], [output] = self._choices, outputs
            counts = map(
                self._turns.num_reasoning_tokens, [s.token_ids for s in output.outputs], [c.reasoning for c in choices]
            )
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(counts)}
        return usage

    def _whole_choice(
        self, place: int, choice: _Choice, output: RequestOutput, sample: CompletionOutput
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._echo + sample.text, "refusal": None}
        if choice.turn is not None:
            gained = choice.turn.add(sample.text, is_over=True)
            choice.reasoning = gained.reasoning
            message |= delta_of(gained, with_reasoning=self._tells_reasoning, streamed=False)
            message["content"] = (self._echo + gained.content) or (None if gained.calls else "")
        whole: dict[str, Any] = {
            "index": sample.index,
            "message": message,
            "logprobs": self._logprobs and self._logprobs.take(sample.token_ids, sample.logprobs or ()),
            "finish_reason": _reason(sample, choice.turn),
            "stop_reason": sample.stop_reason,
        }
        if self._body.return_token_ids:
            whole["token_ids"] = sample.token_ids
        return whole

    def _pieces(
        self, place: int, choice: _Choice, output: RequestOutput, sample: CompletionOutput
    ) -> list[dict[str, Any]]:
        """What a choice gained since it was last told, the role first: it says that tokens have begun to come."""
        is_over = sample.finish_reason is not None
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
            choice.reasoning += gained.reasoning
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
        choice.advance(sample)
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
