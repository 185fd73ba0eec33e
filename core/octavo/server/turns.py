"""What a chat request makes of the assistant's text: reasoning, content, tool calls; and which calls it forces."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from octavo.errors import ConfigError, shown
from octavo.sampling_params import SamplingParams
from octavo.server.errors import ApiError, unsupported
from octavo.server.options import ServerOptions
from octavo.server.protocol import ChatRequest
from octavo.text.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
    begins_inside,
    detect_reasoning,
    end_token,
    num_reasoning_tokens,
)
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools import (
    FORMATS,
    ToolCallDelta,
    ToolFormat,
    ToolParser,
    detect_format,
    forced_calls,
    read_tools,
    strict_calls,
)
from octavo.text.turn import Turn, TurnDelta

__all__ = ["Turns", "choice_of", "delta_of", "effort_names", "parsers_of"]

_Format = TypeVar("_Format")


def parsers_of(options: ServerOptions, tokenizer: Tokenizer) -> tuple[ToolFormat | None, ReasoningFormat | None]:
    """The formats that the settings name, or else the model's chat templates show.

    Raises:
        ConfigError: a setting names none that is known.

    """
    templates = list(tokenizer.chat_template.templates.values())
    tools = _chosen("tool_parser", options.tool_parser, FORMATS, detect_format(templates))
    reasoning = _chosen("reasoning_parser", options.reasoning_parser, REASONING_FORMATS, detect_reasoning(templates))
    return tools, reasoning


def _chosen(setting: str, name: str | None, known: Mapping[str, _Format], detected: _Format | None) -> _Format | None:
    if name is None or name == "none":
        return detected if name is None else None
    if name not in known:
        raise ConfigError(f"{setting} must be none or one of {', '.join(known)}, got {name!r:.100}")
    return known[name]


class Turns:
    """The turns of one request, one for each of its n samples.

    Args:
        options: of the server, which may name the formats.
        tokenizer: of the model.
        tools: that may be called, in chat's form.
        choice: none, auto, required, or the name of the one tool that must be called; None: auto.
        parallel: whether several calls may be made.

    Attributes:
        tools: for the chat template; None: it is to know of none.

    Raises:
        ApiError, RequestError: tools or tool_choice are malformed, or the model's way to call tools is not known.

    """

    def __init__(
        self,
        options: ServerOptions,
        tokenizer: Tokenizer,
        tools: Sequence[Any],
        choice: str | None,
        *,
        parallel: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._format, self._reasoning = parsers_of(options, tokenizer)
        self._parallel = parallel
        self._inside = False
        self._tools = read_tools(tools)
        self._choice = _checked(choice, [tool.name for tool in self._tools])
        if self._choice == "none":
            self._tools = []
        self.tools: Sequence[dict[str, Any]] | None = tools if self._tools else None
        if self._tools and self._format is None:
            raise unsupported(
                "tools",
                "are not served for this model: its chat template shows no way to call them that is known; start the "
                f"server with tool_parser set to one of {', '.join(FORMATS)}",
            )

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return not self._tools and self._reasoning is None

    @property
    def has_reasoning(self) -> bool:
        """Whether the model thinks before it speaks."""
        return self._reasoning is not None

    @property
    def forms(self) -> Mapping[str, str]:
        """How errors of the form that forces calls are to call the field that it came from; see `form_names`."""
        has_form = self._choice != "auto" or any(tool.strict for tool in self._tools)
        return {"grammar": "tools"} if self._tools and has_form else {}

    def params(self, params: SamplingParams, prompt_ids: Sequence[int]) -> SamplingParams:
        """The parameters as these turns need them: with forms of forced calls, and markers left in the text."""
        markers = []
        after = None
        if self._reasoning is not None:
            markers += [self._reasoning.start, self._reasoning.end]
            self._inside = begins_inside(self._reasoning, self._tokenizer, prompt_ids)
            after = end_token(self._reasoning, self._tokenizer) if self._inside else None
        structured = params.structured
        own = structured  # of the request
        if self._tools and self._format is not None:
            markers += [self._format.start, self._format.end]
            if self._choice != "auto":
                named = [tool for tool in self._tools if self._choice in ("required", tool.name)]
                several = self._parallel and self._choice == "required"
                structured = forced_calls(self._format, named, self._tokenizer, parallel=several, after=after)
            elif own is None:
                reasoning = self._reasoning.name if self._reasoning is not None else None
                structured = strict_calls(self._format, self._tools, reasoning=reasoning, begins_inside=self._inside)
        if own is not None and structured is own and after is not None:
            structured = own.but_after(after)
        special = self._tokenizer.special_token_ids
        hidden = any(marker and self._tokenizer.backend.token_to_id(marker) in special for marker in markers)
        skips = params.skip_special_tokens and not hidden
        return params.but(structured=structured, skip_special_tokens=skips)

    def begin(self) -> Turn:
        """A sample's turn."""
        tools = reasoning = None
        if self._reasoning is not None:
            reasoning = ReasoningParser(self._reasoning, inside=self._inside)
        if self._tools and self._format is not None:
            names, is_forced = [tool.name for tool in self._tools], self._choice != "auto"
            tools = ToolParser(self._format, names, parallel=self._parallel, only_calls=is_forced)
        return Turn(reasoning, tools)

    def num_reasoning_tokens(self, token_ids: Sequence[int], reasoning: str) -> int:
        """How many of an output's tokens are its reasoning, of which this is the text."""
        if self._reasoning is None:
            return 0
        return num_reasoning_tokens(self._reasoning, self._tokenizer, token_ids, reasoning)


def _checked(choice: str | None, names: Collection[str]) -> str:
    if choice in (None, "auto", "none"):
        return "auto" if names and choice != "none" else "none"
    if not names:
        raise ApiError(400, "tool_choice asks for a call and there are no tools", "tool_choice")
    if choice != "required" and choice not in names:
        raise ApiError(400, f"tool_choice must name one of the tools, {shown(list(names))}", "tool_choice")
    return str(choice)


def choice_of(body: ChatRequest) -> str | None:
    """A chat request's tool_choice as `Turns` takes it."""
    choice = body.tool_choice
    if choice in (None, "none", "auto", "required"):
        return None if choice is None else str(choice)
    is_function = isinstance(choice, dict) and choice.get("type") in (None, "function")
    function = choice.get("function") if is_function and isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ApiError(
            400,
            'tool_choice is "none", "auto", "required" or {"type": "function", "function": {"name": ...}} with the '
            f"name of one of the tools, got {shown(choice)}",
            "tool_choice",
        )
    return name


def effort_names(effort: str) -> dict[str, Any]:
    """How hard a model is to think, in the words that chat templates know."""
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


def delta_of(delta: TurnDelta, *, with_reasoning: bool, streamed: bool) -> dict[str, Any]:
    """What a turn gained, in the words of the protocol."""
    gained: dict[str, Any] = {}
    if delta.reasoning and with_reasoning:
        gained["reasoning"] = gained["reasoning_content"] = delta.reasoning  # newer and older clients
    if delta.content:
        gained["content"] = delta.content
    if delta.calls:
        gained["tool_calls"] = _calls(delta.calls, streamed)
    return gained


def _calls(deltas: Collection[ToolCallDelta], streamed: bool) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        call = calls.setdefault(delta.index, {"index": delta.index} if streamed else {})
        function = call.setdefault("function", {})
        if delta.name is not None:
            call |= {"id": delta.id, "type": "function"}
            function["name"] = delta.name
        function["arguments"] = function.get("arguments", "") + delta.arguments
    return list(calls.values())
