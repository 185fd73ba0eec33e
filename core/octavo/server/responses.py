"""POST /v1/responses: OpenAI's newer shape of a turn, whole and as events. Nothing is stored."""

import secrets
import time
from collections.abc import Mapping
from itertools import count
from typing import Any, Literal, get_args

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.inputs import Conversation, TokenizedPrompt
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import shown
from octavo.sampling_params import MAX_LOGPROBS, SamplingParams
from octavo.server.answers import renamed, respond
from octavo.server.blocks import Block, BlockAnswer, Step
from octavo.server.errors import ApiError, check_one_of, unsupported
from octavo.server.logprobs import ChatLogprobs
from octavo.server.protocol import Effort, Extras, GenerationRequest, ServiceTier, generation_of
from octavo.server.responses_input import messages_of
from octavo.server.sampling import check_absent, sampling_params
from octavo.server.service import Caller, Service
from octavo.server.streaming import named_event
from octavo.server.structured import form_names
from octavo.server.turns import Turns, effort_names

__all__ = ["ResponsesRequest", "create_response"]

LOGPROBS = "message.output_text.logprobs"
INCLUDES = (  # all but the first are of what never comes here
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
SUMMARIES = ("auto", "concise", "detailed")
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
}
REFUSED = {
    "background": "is not served: nothing is stored, so an answer comes at once or as a stream",
    "conversation": "is not served: nothing is stored; send the conversation's items as input",
    "previous_response_id": "is not served: nothing is stored; send the conversation's items as input",
    "store": "is not served: nothing is stored; leave it out, or set it to false",
    "prompt": "is not served: no prompts are stored; use instructions and input",
    "context_management": "is not served: the client decides what it leaves out of its input",
    "moderation": "is not served",
}


class ResponsesRequest(Extras, kw_only=True):
    """A turn that is asked for."""

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stop: str | list[str] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Of no effect here.
    max_tool_calls: int | None = None  # of tools that a server runs
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None
    service_tier: ServiceTier | None = None
    stream_options: Any = None

    # Refused, where they ask for something.
    background: bool | None = None
    conversation: Any = None
    previous_response_id: str | None = None
    store: bool | None = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None


async def create_response(request: Request) -> Response:
    """Answer a request, streaming or whole."""
    return await respond(request, ResponsesRequest, _prepare)


async def _prepare(service: Service, request: Request, body: ResponsesRequest) -> "_Response":
    check_absent(body, REFUSED)
    if body.truncation == "auto":
        raise unsupported("truncation", "auto is not served: an input that is too long is refused")
    _check_choices(body)
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise ApiError(
            400, f"max_output_tokens must be at least 1, got {shown(body.max_output_tokens)}", "max_output_tokens"
        )
    with renamed(NAMES):
        asked = generation_of(
            body,
            stop=body.stop,
            user=body.safety_identifier or body.user,
            response_format=_response_format(body.text or {}),
        )
        recommended = service.engine.description.sampling_defaults
        max_tokens = recommended.get("max_tokens") if body.max_output_tokens is None else body.max_output_tokens
        params = sampling_params(asked, recommended, max_tokens=max_tokens, logprobs=_num_logprobs(body))
        turns = Turns(
            service.options,
            service.engine.tokenizer,
            [_tool(tool) for tool in body.tools or []],
            _choice_of(body),
            parallel=body.parallel_tool_calls is not False,
        )
        if params.logprobs is not None and not turns.is_plain:
            raise unsupported("include", f"{LOGPROBS} is not served beside tools or reasoning")
        effort = (body.reasoning or {}).get("effort")
        conversation = Conversation(
            messages_of(body.input, body.instructions),
            tools=turns.tools,
            chat_template_kwargs={} if effort is None else effort_names(effort),
        )
        prompt = await service.tokenize(conversation)
        service.check_length(prompt, body.max_output_tokens, request.url.path, "max_output_tokens")
        params = turns.params(params, prompt.token_ids)
    return _Response(service, asked, params, prompt, turns, Caller.of(request, "resp", body.request_id), body)


def _check_choices(body: ResponsesRequest) -> None:
    """Refuse what is none of the protocol's values, be it of effect here or not."""
    reasoning = body.reasoning or {}
    check_one_of("reasoning.effort", reasoning.get("effort"), get_args(Effort), "reasoning")
    for name in ("summary", "generate_summary"):
        check_one_of(f"reasoning.{name}", reasoning.get(name), SUMMARIES, "reasoning")
    check_one_of("text.verbosity", (body.text or {}).get("verbosity"), ("low", "medium", "high"), "text")
    for what in body.include or ():
        check_one_of("include", what, INCLUDES, "include")


def _num_logprobs(body: ResponsesRequest) -> int | None:
    num = body.top_logprobs or 0
    if not 0 <= num <= MAX_LOGPROBS:
        raise ApiError(400, f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {shown(num)}", "top_logprobs")
    wants = LOGPROBS in (body.include or ())
    if num and not wants:
        raise ApiError(400, f"top_logprobs is given and include has no {LOGPROBS}", "top_logprobs")
    return num if wants else None


def _response_format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """The form of the text, as chat has it."""
    given = text.get("format")
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "json_schema":
        if given.get("schema") is None:
            raise ApiError(400, "text.format of type json_schema needs a schema", "text")
        return {"type": kind, "json_schema": {"schema": given["schema"]}}
    if kind not in ("text", "json_object"):
        allowed = "text, json_object or json_schema"
        raise ApiError(400, f"text.format must have type {allowed}, got {shown(given)}", "text")
    return {"type": kind}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in chat's form."""
    if tool.get("type") != "function":
        raise ApiError(
            400, f"tools are of type function, which the client runs; got type {shown(tool.get('type'))}", "tools"
        )
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice_of(body: ResponsesRequest) -> str | None:
    choice = body.tool_choice
    if choice in (None, "none", "auto", "required"):
        return None if choice is None else str(choice)
    name = choice.get("name") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(name, str) or not name:
        raise ApiError(
            400,
            'tool_choice is "none", "auto", "required" or {"type": "function", "name": ...} with the name of one of '
            f"the tools, got {shown(choice)}",
            "tool_choice",
        )
    return name


class _Response(BlockAnswer):
    """One request under way, and what its answer is made of."""

    def __init__(
        self,
        service: Service,
        asked: GenerationRequest,
        params: SamplingParams,
        prompt: TokenizedPrompt,
        turns: Turns,
        caller: Caller,
        body: ResponsesRequest,
    ) -> None:
        names = {**NAMES, **form_names(asked, NAMES), **turns.forms}
        super().__init__(service, asked, params, prompt, turns, caller, names, with_reasoning=True)
        self._turns = turns
        self._numbers = count()
        self._ids: dict[int, str] = {}
        self._is_cut = False
        self._logprobs: ChatLogprobs | None = None
        if params.logprobs is not None:
            self._logprobs = ChatLogprobs(service.engine.tokenizer, params.logprobs, as_token_ids=False)
        self._scores: list[dict[str, Any]] = []  # of all tokens so far
        self._num_told_scores = 0
        self._head = {
            "id": caller.request_id,
            "object": "response",
            "created_at": caller.created,
            "model": service.model,
            "background": False,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def error_event(self, body: dict[str, Any]) -> bytes:
        error = body["error"]
        flat = {"code": error["type"], "message": error["message"], "param": error["param"]}
        return self._encode({"type": "error", **flat, "error": error})  # clients look in either place

    def _encode(self, data: dict[str, Any]) -> bytes:
        return named_event({**data, "sequence_number": next(self._numbers)})

    def _read(self, sample: CompletionOutput) -> None:
        self._is_cut = sample.finish_reason == "length"
        if self._logprobs is not None:
            new = slice(len(self._scores), None)
            self._scores += self._logprobs.take(sample.token_ids[new], (sample.logprobs or ())[new])["content"]

    def _begun(self, output: RequestOutput) -> list[dict[str, Any]]:
        response = {**self._head, **_state("in_progress"), "output": [], "usage": None}
        return [{"type": f"response.{what}", "response": response} for what in ("created", "in_progress")]

    def _told(self, step: Step) -> list[dict[str, Any]]:
        return [
            {"type": f"response.{what}", "output_index": step.block.index, **more}
            for what, more in (self._call(step) if step.block.kind == "call" else self._words(step))
        ]

    def _words(self, step: Step) -> list[tuple[str, dict[str, Any]]]:
        """The events of a text or of reasoning."""
        block = step.block
        where = {"item_id": self._id(block), "content_index": 0}
        name = "output_text" if block.kind == "text" else "reasoning_text"
        if step.what == "begin":
            item = {**self._item(block, "in_progress"), "content": []}
            part = self._part(block, "", [])
            return [("output_item.added", {"item": item}), ("content_part.added", {**where, "part": part})]
        grown = []
        if step.what == "grow" or self._num_told_scores < len(self._scores):  # the last tokens may have no text
            grown.append((f"{name}.delta", {**where, "delta": step.text, **self._new_scores(block)}))
        if step.what == "grow":
            return grown
        scores = {"logprobs": self._scores} if block.kind == "text" else {}
        return [
            *grown,
            (f"{name}.done", {**where, "text": block.text, **scores}),
            ("content_part.done", {**where, "part": self._part(block, block.text, self._scores)}),
            ("output_item.done", {"item": self._item(block)}),
        ]

    def _new_scores(self, block: Block) -> dict[str, Any]:
        """Logprobs of tokens that were not told yet."""
        if block.kind != "text":
            return {}
        new, self._num_told_scores = self._scores[self._num_told_scores :], len(self._scores)
        return {"logprobs": new}

    def _call(self, step: Step) -> list[tuple[str, dict[str, Any]]]:
        """The events of a tool call."""
        block, where = step.block, {"item_id": self._id(step.block)}
        if step.what == "begin":
            return [("output_item.added", {"item": {**self._item(block, "in_progress"), "arguments": ""}})]
        if step.what == "grow":
            return [("function_call_arguments.delta", {**where, "delta": step.text})]
        done = {**where, "name": block.name, "arguments": block.text}
        return [("function_call_arguments.done", done), ("output_item.done", {"item": self._item(block)})]

    def _ended(self, output: RequestOutput) -> list[dict[str, Any]]:
        answer = self._answer(output)
        return [{"type": f"response.{answer['status']}", "response": answer}]

    def _answer(self, output: RequestOutput) -> dict[str, Any]:
        items = [self._item(block) for block in self._blocks]
        state = _state("incomplete" if self._is_cut else "completed")
        return {**self._head, **state, "output": items, "usage": self._usage(output)}

    def _item(self, block: Block, status: str | None = None) -> dict[str, Any]:
        """A block as an item of the output, of this status or, when it is over, of its own."""
        if status is None:
            status = "incomplete" if self._is_cut and block is self._blocks[-1] else "completed"
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        if block.kind == "call":
            return {
                **item,
                "type": "function_call",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": block.text,
            }
        content = [self._part(block, block.text, self._scores)]
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _part(self, block: Block, text: str, scores: list[dict[str, Any]]) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}

    def _id(self, block: Block) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        return self._ids.setdefault(block.index, f"{prefix}_{secrets.token_hex(12)}")

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        [sample] = output.outputs
        reasoning = "".join(block.text for block in self._blocks if block.kind == "reasoning")
        num_reasoning = self._turns.num_reasoning_tokens(sample.token_ids, reasoning)
        return {
            "input_tokens": output.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens},
            "output_tokens": output.num_generated_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": output.num_prompt_tokens + output.num_generated_tokens,
        }


def _state(status: str) -> dict[str, Any]:
    is_cut = status == "incomplete"
    ended = time.time() if status == "completed" else None
    return {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "completed_at": ended and int(ended),
    }
