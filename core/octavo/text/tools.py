"""Tool calls in a model's output: how families write them, reading them as they come, and forcing one.

What is told in pieces, joined, is what a reader of the whole would be told: both come from the same parser.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from octavo.errors import RequestError, shown
from octavo.structured_output import StructuredOutput, WithinCalls
from octavo.text.calls import CallScanner
from octavo.text.schema import WHITE_SPACE, bounded
from octavo.text.tokenizer import Tokenizer

__all__ = [
    "FORMATS",
    "Part",
    "Tool",
    "ToolCallDelta",
    "ToolDelta",
    "ToolFormat",
    "ToolParser",
    "detect_format",
    "forced_calls",
    "heads_of",
    "read_tools",
    "strict_calls",
]

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Attributes:
        name: as the setting tool_parser has it.
        start: what stands before a call, or before the list of them.
        end: what stands after it.
        is_list: whether the calls after one start are a JSON list.
        is_bare: whether the start may be missing where a whole output is calls.
        arguments: the key of the arguments.
        between: what stands between two calls, besides a start.
        id_length: of a call's id, letters and digits alone; None: any id will do.

    """

    name: str
    start: str
    end: str = ""
    is_list: bool = False
    is_bare: bool = False
    arguments: str = "arguments"
    between: str = ""
    id_length: int | None = None

    def new_id(self) -> str:
        """A name for a call, that the family's chat templates take back."""
        return "call_" + secrets.token_hex(12) if self.id_length is None else secrets.token_hex(16)[: self.id_length]


FORMATS = {
    each.name: each
    for each in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>"),
        ToolFormat("llama3", "<|python_tag|>", is_bare=True, arguments="parameters", between=";"),
        ToolFormat("mistral", "[TOOL_CALLS]", is_list=True, between=",", id_length=9),
    )
}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema, which arguments are held to if `strict`."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class ToolCallDelta:
    """What a call gained. Its first piece has id and name, the others only arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Part: TypeAlias = str | ToolCallDelta


@dataclass
class ToolDelta:
    """What an output gained: pieces of content and of calls, in the order in which they were written."""

    parts: list[Part] = field(default_factory=list)

    @property
    def content(self) -> str:
        """The content alone."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[ToolCallDelta]:
        """The calls alone."""
        return [part for part in self.parts if not isinstance(part, str)]


def detect_format(templates: Collection[str]) -> ToolFormat | None:
    """The format that a model's chat templates show; None: none of those that are known."""
    source = "\n".join(templates)
    if "<tool_call>" in source and "<function=" not in source:
        return FORMATS["hermes"]
    if "[TOOL_CALLS]" in source and "[ARGS]" not in source:
        return FORMATS["mistral"]
    return FORMATS["llama3"] if "<|python_tag|>" in source or '"parameters": dictionary' in source else None


def read_tools(tools: Sequence[Any]) -> list[Tool]:
    """The functions of a request's `tools`.

    Raises:
        RequestError: they are malformed.

    """
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"there are {len(tools)} tools; at most {MAX_TOOLS} are allowed", "tools")
    found = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(
                'a tool is {"type": "function", "function": {"name": ..., "parameters": a JSON schema}}, the name of '
                f"letters, digits and _.:-, got {shown(tool)}",
                "tools",
            )
        parameters = function.get("parameters")
        if not isinstance(parameters, Mapping | None):
            raise RequestError(f"the parameters of tool {name} must be a JSON schema, got {shown(parameters)}", "tools")
        strict = function.get("strict")
        if not isinstance(strict, bool | None):
            raise RequestError(f"strict of tool {name} must be true or false, got {shown(strict)}", "tools")
        found.append(Tool(name, parameters or {"type": "object"}, bool(strict)))
    if len({tool.name for tool in found}) < len(found):
        raise RequestError("two tools have the same name", "tools")
    return found


def forced_calls(
    tool_format: ToolFormat, tools: Sequence[Tool], tokenizer: Tokenizer, *, parallel: bool, after: int | None = None
) -> StructuredOutput:
    """The form of an output that is calls of these tools, one or (with `parallel`) more, as the model writes them.

    `after` is the token that ends the model's reasoning, where that comes first.
    """
    start = f"{_marker(tool_format.start, tokenizer)} " if not tool_format.is_bare else ""
    end = f' "\\n" {_marker(tool_format.end, tokenizer)}' if tool_format.end else ""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        head = json.dumps(_head(tool_format, tool.name))
        rules += [f'call_{i}: {head} arguments_{i} "}}"', _arguments(i, tool)]
    if tool_format.is_list:
        more = _more(parallel, '", " call')
        first = f'start: {start}"[" call {more}"]"'
    elif tool_format.end:
        rules.append(f'whole: {start}"\\n" call{end}')
        first = "start: whole" + _more(parallel, '"\\n" whole')
    else:
        first = "start: call" + _more(parallel, f'"{tool_format.between} " call')
    return StructuredOutput(grammar="\n".join([first, *rules]), after_token_id=after)


def strict_calls(
    tool_format: ToolFormat, tools: Sequence[Tool], *, reasoning: str | None, begins_inside: bool
) -> StructuredOutput | None:
    """The form of an output that is free but for calls of strict tools; None: no tool is.

    Once the model has begun such a call and named the tool, the rest of it is held to the tool's schema. It may space
    a call as it likes; one whose arguments stand before the name is as it is. Keywords as in `WithinCalls`.
    """
    strict = [tool for tool in tools if tool.strict]
    if not strict:
        return None
    typed = r'("\"type\"" WS? ":" WS? "\"function\"" WS? "," WS?)?'
    rules = ["start: call REST", "call: " + " | ".join(f"call_{i}" for i in range(len(strict)))]
    for i, tool in enumerate(strict):
        name, key = json.dumps(json.dumps(tool.name)), json.dumps(json.dumps(tool_format.arguments))
        head = rf'"{{" WS? {typed} "\"name\"" WS? ":" WS? {name} WS? "," WS? {key} WS? ":" WS?'
        rules += [f'call_{i}: {head} arguments_{i} WS? "}}"', _arguments(i, tool)]
    rules += [f"WS: /{WHITE_SPACE}/", r"REST: /(.|\n)*/"]  # of the token that ends the call
    names = tuple(tool.name for tool in tools), tuple(tool.name for tool in strict)
    within = WithinCalls(tool_format.name, *names, reasoning=reasoning, begins_inside=begins_inside)
    return StructuredOutput(grammar="\n".join(rules), within=within)


def heads_of(within: WithinCalls) -> list[str]:
    """How calls of the strict tools begin, up to the arguments."""
    return [_head(FORMATS[within.tool_format], name) for name in within.strict]


def _head(tool_format: ToolFormat, name: str) -> str:
    return f'{{"name": "{name}", "{tool_format.arguments}": '


def _arguments(place: int, tool: Tool) -> str:
    """The rule of a tool's arguments."""
    schema = {**bounded(dict(tool.parameters)), "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return f"arguments_{place}: %json {json.dumps(schema)}"


def _more(parallel: bool, another: str) -> str:
    return f" ({another})* " if parallel else " "


def _marker(text: str, tokenizer: Tokenizer) -> str:
    """A marker in a grammar: its token where that is a special one, which is no text."""
    token_id = tokenizer.backend.token_to_id(text)
    return f"<[{token_id}]>" if token_id in tokenizer.special_token_ids else json.dumps(text)


class ToolParser:
    """Splits one output into content and tool calls as it comes. Special tokens must be in the text.

    Args:
        tool_format: of the model.
        tool_names: that the request offers; a call without a start must be of one of them.
        parallel: whether calls after the first one are told.
        only_calls: whether the output was held to be calls, so that nothing of one that is cut is content.
        make_id: names a call; None: as the format has it.

    """

    def __init__(
        self,
        tool_format: ToolFormat,
        tool_names: Collection[str],
        *,
        parallel: bool = True,
        only_calls: bool = False,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        self.num_calls = 0
        self._format = tool_format
        self._names = frozenset(tool_names)
        self._parallel = parallel
        self._only_calls = only_calls
        self._make_id = make_id or tool_format.new_id
        self._buffer = ""
        self._state = self._content
        self._told_content = False
        self._is_bare = False  # the call under way has no start
        self._is_list_open = False
        self._raw = ""  # of the call under way, what was taken before it
        self._scanner = CallScanner()
        self._is_told = False  # whether the call under way has had its first piece
        self._has_arguments = False
        self._out = ToolDelta()

    @property
    def open_call(self) -> tuple[str, str] | None:
        """The tool of the call under way, and the call's text so far; None: no call is, or has named its tool yet."""
        if self._state != self._in_call or not self._is_told or self._scanner.name is None:
            return None
        return self._scanner.name, self._scanner.raw

    def add(self, text: str) -> ToolDelta:
        """What new text of the output gives."""
        self._out = ToolDelta()
        self._buffer += text
        while self._state():
            pass
        return self._out

    def finish(self) -> ToolDelta:
        """What was held back when the output ended.

        A call that was cut stays as far as it was told: from its name on. What was written of it before is no content.
        """
        self._out = ToolDelta()
        if self._state == self._content:
            rest = self._buffer
            held = _begun(rest, self._format.start)
            is_all = not self._told_content and rest.strip() == rest[len(rest) - held :]
            if self.num_calls or self._only_calls or 2 * held > len(self._format.start) or (is_all and held > 1):
                rest = rest[: len(rest) - held]
            if rest.strip() or not self.num_calls:
                self._tell(rest)
        elif self._state == self._in_call and self._is_bare and not self._is_told and not self._begins_call():
            self._tell(self._raw + self._scanner.raw)
        self._buffer = ""
        return self._out

    def _begins_call(self) -> bool:
        """Whether the JSON under way, which nothing opened, may be a call that was cut before its name was complete."""
        if self.num_calls or self._only_calls:
            return True
        begun = self._scanner.begun_name
        return begun is not None and any(name.startswith(begun) for name in self._names)

    # Each state takes what it can of the buffer and says whether another may go on.

    def _content(self) -> bool:
        start = self._format.start
        if self._format.is_bare and not self._told_content and self._buffer.lstrip().startswith("{"):
            self._raw, self._is_bare, self._state = "", True, self._before_call
            return True
        at = self._buffer.find(start)
        if at >= 0:
            before = self._buffer[:at].rstrip()
            if before:
                self._tell(before)
            self._raw, self._buffer = self._buffer[len(before) : at + len(start)], self._buffer[at + len(start) :]
            self._is_bare, self._is_list_open, self._state = False, False, self._before_call
            return True
        held = _begun(self._buffer, start)
        sure = self._buffer[: len(self._buffer) - held].rstrip()  # spaces before a call are not told
        if sure:
            self._tell(sure)
            self._buffer = self._buffer[len(sure) :]
        return False

    def _before_call(self) -> bool:
        rest = self._buffer.lstrip()
        opens = rest[:1]
        if self._format.is_list and opens == "[" and not self._is_list_open:
            self._is_list_open = True
            self._move(len(self._buffer) - len(rest) + 1)
            return True
        if not rest:
            return False
        if opens != "{":
            self._give_up(self._raw)
            return True
        self._move(len(self._buffer) - len(rest))
        self._scanner, self._is_told, self._has_arguments = CallScanner(), False, False
        self._state = self._in_call
        return True

    def _move(self, num: int) -> None:
        self._raw, self._buffer = self._raw + self._buffer[:num], self._buffer[num:]

    def _in_call(self) -> bool:
        scanner = self._scanner
        if not self._buffer:
            return False
        self._buffer = self._buffer[scanner.feed(self._buffer) :]
        if scanner.name and not self._is_told and (not self._is_bare or scanner.name in self._names):
            self._is_told = True
            self._call(id=self._make_id(), name=scanner.name)
        if self._is_told and (arguments := scanner.take_arguments()):
            self._has_arguments = True
            self._call(arguments=arguments)
        if not (scanner.is_complete or scanner.is_broken):
            return False
        taken = scanner.raw
        if scanner.is_broken and taken[-1] == self._format.start[0]:  # with it a call may begin
            taken, self._buffer = taken[:-1], taken[-1] + self._buffer
        if not self._is_told:
            self._give_up(self._raw + taken)
            return True
        if not self._has_arguments:
            self._call(arguments="{}")
        self.num_calls += 1
        self._state = self._after_call
        return True

    def _after_call(self) -> bool:
        rest, end = self._buffer.lstrip(), self._format.end or ("]" if self._format.is_list else "")
        if not rest or (end and len(rest) < len(end) and end.startswith(rest)):
            return False
        self._raw, self._state = "", self._content
        if end and rest.startswith(end):
            self._buffer = rest[len(end) :]
        elif self._format.between and rest.startswith(self._format.between):
            self._raw, self._buffer, self._state = rest[:1], rest[1:], self._before_call
        elif self._is_bare and rest.startswith("{"):
            self._state = self._before_call
        return True

    def _give_up(self, raw: str) -> None:
        """What looked like a call is none: it is content after all; in what had no start, one may still be."""
        if self._is_bare:
            self._told_content, self._buffer = True, raw + self._buffer
        else:
            self._tell(raw)
        self._state = self._content

    def _tell(self, content: str) -> None:
        if content:
            self._out.parts.append(content)
            self._told_content = True

    def _call(self, **gained: Any) -> None:
        if self._parallel or not self.num_calls:
            self._out.parts.append(ToolCallDelta(self.num_calls, **gained))


def _begun(text: str, marker: str) -> int:
    """How many characters at the end of a text may be the beginning of a marker."""
    longest = min(len(marker) - 1, len(text))
    return next((num for num in range(longest, 0, -1) if text.endswith(marker[:num])), 0)
