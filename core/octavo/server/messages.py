"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's shape over the same chat."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.inputs import Conversation
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import shown
from octavo.server.answers import json_response, renamed, respond
from octavo.server.blocks import Block, BlockAnswer, Step
from octavo.server.body import parse_body
from octavo.server.errors import ApiError, check_one_of
from octavo.server.messages_input import messages_of
from octavo.server.protocol import Effort, Extras, generation_of
from octavo.server.sampling import check_absent, sampling_params
from octavo.server.service import Caller, Service
from octavo.server.streaming import while_connected
from octavo.server.structured import form_names
from octavo.server.turns import Turns, effort_names

__all__ = ["CountTokensRequest", "MessagesRequest", "count_tokens", "create_message"]

REASONS = {"length": "max_tokens"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config",
}
DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
REFUSED = {
    "container": "is not served: no code is run here",
    "mcp_servers": "is not served: tools are run by the client",
}


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model is to think, and whether its thoughts are told. How long it may is not bounded apart."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class CacheControl(msgspec.Struct, kw_only=True):
    """Of no effect: prefixes are cached by themselves."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CountTokensRequest(Extras, kw_only=True):
    """What makes the prompt. Of what is inherited only the model counts here; the rest is for the turn."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None

    # Of no effect here.
    cache_control: CacheControl | None = None
    context_management: Any = None

    # Refused, where they ask for something.
    container: Any = None
    mcp_servers: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """A turn that is asked for."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: Any = None


async def count_tokens(request: Request) -> Response:
    """How long the prompt is."""
    service: Service = request.app.state.service
    body = await parse_body(request, CountTokensRequest)
    service.check_model(body.model)
    check_absent(body, REFUSED)
    with renamed(NAMES):
        conversation = _conversation(body, _turns(service, body))
        prompt = await while_connected(request, service.engine.tokenize(conversation))
    return json_response({"input_tokens": len(prompt.token_ids)})


async def create_message(request: Request) -> Response:
    """Answer a request, streaming or whole."""
    return await respond(request, MessagesRequest, _prepare)


async def _prepare(service: Service, request: Request, body: MessagesRequest) -> "_Message":
    check_absent(body, REFUSED)
    if body.max_tokens < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {shown(body.max_tokens)}", "max_tokens")
    user = (body.metadata or {}).get("user_id")
    with renamed(NAMES):
        asked = generation_of(
            body,
            stop=body.stop_sequences,
            user=user if isinstance(user, str) else None,
            response_format=_response_format(body.output_config or {}),
        )
        recommended = service.engine.description.sampling_defaults
        params = sampling_params(asked, recommended, max_tokens=body.max_tokens, logprobs=None)
        turns = _turns(service, body)
        prompt = await service.tokenize(_conversation(body, turns))
        service.check_length(prompt, body.max_tokens, request.url.path)
        params = turns.params(params, prompt.token_ids)
    thinking = body.thinking
    thinks = thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"
    caller = Caller.of(request, "msg", body.request_id)
    names = {**NAMES, **form_names(asked, NAMES), **turns.forms}
    return _Message(service, asked, params, prompt, turns, caller, names, with_reasoning=thinks)


def _response_format(config: Mapping[str, Any]) -> dict[str, Any] | None:
    wanted = config.get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise ApiError(400, f"output_config.format must be of type json_schema, got {shown(wanted)}", "output_config")
    if wanted.get("schema") is None:
        raise ApiError(400, "output_config.format needs a schema", "output_config")
    return {"type": "json_schema", "json_schema": {"schema": wanted["schema"]}}


def _turns(service: Service, body: CountTokensRequest) -> Turns:
    """What the assistant's turn may be."""
    given = body.tool_choice or {}
    choice = given.get("name") if given.get("type") == "tool" else CHOICES.get(str(given.get("type")))
    if body.tool_choice is not None and not (isinstance(choice, str) and choice):
        raise ApiError(
            400,
            'tool_choice is {"type": "auto"}, "any", "none", or {"type": "tool", "name": ...}, got '
            f"{shown(body.tool_choice)}",
            "tool_choice",
        )
    if not isinstance(given.get("disable_parallel_tool_use"), bool | None):
        raise ApiError(400, "tool_choice.disable_parallel_tool_use must be true or false", "tool_choice")
    tools = [_tool(tool) for tool in body.tools or []]
    parallel = not given.get("disable_parallel_tool_use")
    return Turns(service.options, service.engine.tokenizer, tools, choice, parallel=parallel)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in chat's form."""
    if tool.get("type") not in (None, "custom"):
        raise ApiError(400, f"tools of type {shown(tool['type'])} are not served: tools are run by the client", "tools")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _conversation(body: CountTokensRequest, turns: Turns) -> Conversation:
    """The conversation as chat templates know it."""
    effort = (body.output_config or {}).get("effort")
    check_one_of("output_config.effort", effort, get_args(Effort), "output_config")
    names = {} if effort is None else effort_names(effort)
    if body.thinking is not None and body.thinking.type != "adaptive":
        names["enable_thinking"] = body.thinking.type == "enabled"
    return Conversation(messages_of(body.messages, body.system), tools=turns.tools, chat_template_kwargs=names)


class _Message(BlockAnswer):
    """One request under way, and what its answer is made of."""

    def error_event(self, body: dict[str, Any]) -> bytes:
        return self._encode(body)

    def _begun(self, output: RequestOutput) -> list[dict[str, Any]]:
        usage = {**_usage(output), "output_tokens": 0}
        return [{"type": "message_start", "message": self._message([], usage, stop_reason=None, stop_sequence=None)}]

    def _told(self, step: Step) -> list[dict[str, Any]]:
        block, text = step.block, step.text
        if step.what == "begin":
            empty = Block(block.index, block.kind, name=block.name, call_id=block.call_id)
            return [{"type": "content_block_start", "index": block.index, "content_block": _content(empty)}]
        if step.what == "end":
            signature = {"type": "signature_delta", "signature": ""}
            signed = [self._delta(block, signature)] if block.kind == "reasoning" else []
            return [*signed, {"type": "content_block_stop", "index": block.index}]
        kind, name = DELTAS.get(block.kind, ("input_json_delta", "partial_json"))
        return [self._delta(block, {"type": kind, name: text})]

    @staticmethod
    def _delta(block: Block, delta: dict[str, str]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": block.index, "delta": delta}

    def _ended(self, output: RequestOutput) -> list[dict[str, Any]]:
        end = {"type": "message_delta", "delta": self._ending(output.outputs[0]), "usage": _usage(output)}
        return [end, {"type": "message_stop"}]

    def _answer(self, output: RequestOutput) -> dict[str, Any]:
        content = [_content(block) for block in self._blocks]
        return self._message(content, _usage(output), **self._ending(output.outputs[0]))

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

    def _ending(self, sample: CompletionOutput) -> dict[str, Any]:
        """Why the turn ended, in this protocol's words."""
        if isinstance(sample.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
        called = self._turn.has_calls and sample.finish_reason == "stop"
        reason = "tool_use" if called else REASONS.get(sample.finish_reason or "", "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(block.text)}


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object: of those that were cut what is there, as Anthropic's client has it too."""
    try:
        found = from_json(text, allow_partial=True) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _usage(output: RequestOutput) -> dict[str, int]:
    """Prompt tokens that the cache served are counted apart here."""
    return {
        "input_tokens": output.num_prompt_tokens - output.num_cached_tokens,
        "cache_read_input_tokens": output.num_cached_tokens,
        "output_tokens": output.num_generated_tokens,
    }
