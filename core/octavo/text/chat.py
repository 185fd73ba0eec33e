"""Chat templates: a conversation to the prompt text that the model was trained on.

Templates are Jinja programs that come with a model, written for the environment of the transformers library, which
is rebuilt here: sandboxed, with `raise_exception`, `strftime_now`, `tojson`, loop controls and the `generation` tag.
A template is somebody else's program, so it cannot reach Python objects, and its output and time are bounded. Its
memory is not: let only those whom you trust choose a template.
"""

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import RequestError

__all__ = ["ChatTemplate"]

_MAX_OUTPUT_CHARS = 64 << 20
_MAX_SECONDS = 10.0
_MAX_REPEATED = 1 << 20  # length of what `*` may make
_MAX_POWER = 1000
_MAX_MESSAGE = 300
_WATCH = "watched"  # the filter that every loop's items pass
_CONTINUE = "<<the model goes on here>> "  # the space at its end shows whether the template trims


class ChatTemplate:
    """The chat templates of one model. Threads may share it.

    Args:
        templates: name to Jinja source; "default" is used unless tools are given and there is a "tool_use".
        special_tokens: role ("bos_token", ...) to literal text, known to templates by these names.

    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._environment = _Environment()
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: objects with a role and a content: a text, a list of text parts, or None beside tool calls.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: end with the beginning of the assistant's turn.
            continue_final_message: leave the last message's turn open, so that the model goes on with it.
            chat_template: Jinja source, or the name of one of the model's templates, instead of the default.
            chat_template_kwargs: further names for the template, such as documents or enable_thinking.

        Raises:
            RequestError: messages are malformed, or the template refuses them, is broken, or there is none.

        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message keeps the last turn open, add_generation_prompt opens another; set one of them",
                "continue_final_message",
            )
        conversation = [_message(message, f"messages[{i}]") for i, message in enumerate(_checked_list(messages))]
        if continue_final_message:
            last = conversation[-1]
            if not isinstance(last.get("content"), str):
                raise RequestError("continue_final_message needs a last message with text", "continue_final_message")
            last["content"] += _CONTINUE
        names = {
            "documents": None,
            **self._special_tokens,
            **(chat_template_kwargs or {}),
            "messages": conversation,
            "tools": _checked_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._template(chat_template, has_tools=bool(tools))
        try:
            text = self._run(template, names)
        except RequestError:
            # Beside tool calls some templates look for no content at all, others only put texts together.
            silent = [message for message in conversation if message["content"] is None]
            if not silent:
                raise
            for message in silent:
                message["content"] = ""
            text = self._run(template, names)
        return _cut(text) if continue_final_message else text

    def _template(self, chosen: str | None, has_tools: bool) -> jinja2.Template:
        if chosen is None:
            chosen = "tool_use" if has_tools and "tool_use" in self.templates else "default"
            if chosen not in self.templates:
                raise RequestError(
                    "the model has no chat template; use completions, or give one as chat_template", "chat_template"
                )
        source = self.templates.get(chosen)
        if source is None:  # a request's own is compiled for it alone
            return self._compile(chosen)
        if chosen not in self._compiled:
            self._compiled[chosen] = self._compile(source)
        return self._compiled[chosen]

    def _compile(self, source: str) -> jinja2.Template:
        try:
            return self._environment.from_string(source)
        except Exception as error:
            raise RequestError(f"the chat template cannot be compiled: {_line(error)}", "chat_template") from error

    def _run(self, template: jinja2.Template, names: Mapping[str, Any]) -> str:
        chunks, num_chars = [], 0
        try:
            with self._environment.limited(_MAX_SECONDS):
                for chunk in template.generate(names):
                    num_chars += len(chunk)
                    if num_chars > _MAX_OUTPUT_CHARS:
                        raise jinja2.TemplateRuntimeError(f"more than {_MAX_OUTPUT_CHARS} characters of prompt")
                    chunks.append(chunk)
        except Exception as error:  # a template is a program: it may fail in any way
            raise RequestError(f"the chat template refuses these messages: {_line(error)}", "messages") from error
        return "".join(chunks)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + " ..."


def _cut(text: str) -> str:
    """Cut after the last message's own text, without its trailing space where the template trims messages."""
    at = text.rfind(_CONTINUE.rstrip())
    if at < 0:
        raise RequestError(
            "continue_final_message: the chat template leaves out the last message's text", "continue_final_message"
        )
    return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()


def _checked_list(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"messages must be a list, got {type(messages).__name__}", "messages")
    if not messages:
        raise RequestError("messages is empty; at least one message is needed", "messages")
    return messages


def _checked_tools(tools: Any) -> list[Any] | None:
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of objects", "tools")
    return list(tools)


def _message(message: Any, where: str) -> dict[str, Any]:
    """A copy of a message as templates expect it: content as one text, arguments of tool calls as objects."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content, got {type(message).__name__}", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"{where}.role must be a text such as system, user or assistant, got {role!r:.40}", "messages"
        )
    copy = {str(key): value for key, value in message.items()}
    calls = message.get("tool_calls")
    if calls:
        copy["tool_calls"] = _tool_calls(calls, where)
    else:
        copy.pop("tool_calls", None)  # templates ask whether it is there, not whether it is empty
    copy["content"] = _content(message.get("content"), where, optional=role == "assistant" and bool(calls))
    return copy


def _content(content: Any, where: str, optional: bool) -> str | None:
    if isinstance(content, str) or (content is None and optional):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(
            f"{where}.content must be a text or a list of text parts, got {type(content).__name__}", "messages"
        )
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise RequestError(
                f'{where}.content[{i}] must be {{"type": "text", "text": ...}}, got type {kind!r:.40}; '
                "only text is understood",
                "messages",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls with arguments as objects: clients send them as JSON texts, templates write them out as objects."""
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{where}.tool_calls must be a list of objects", "messages")
    parsed = []
    for call in calls:
        if call.get("type") not in (None, "function"):
            raise RequestError(f"{where}.tool_calls are of type function, got type {call['type']!r:.40}", "messages")
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            call = {**call, "function": {**function, "arguments": _arguments(function["arguments"])}}
        parsed.append(dict(call))
    return parsed


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return text  # what a model wrote wrong is shown to it as it is
    return value if isinstance(value, dict) else text


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here its inside is simply kept."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The environment that templates are written for, with bounds."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self._local = threading.local()
        self.filters["tojson"] = _tojson
        self.filters[_WATCH] = self._watched
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Within this context, in this thread, loops and calls end with an error after so many seconds."""
        self._local.deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            del self._local.deadline

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> jinja2.Template:
        """Compile a template with the items of every loop passed through the watch on time."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _WATCH, [], [], None, None, lineno=loop.lineno)
        return super().from_string(tree, *args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call something for a template, if there is time left."""
        self._check_time()
        return super().call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiply for a template, if the outcome stays small."""
        if operator == "**" and (abs(left) > _MAX_POWER or abs(right) > _MAX_POWER):
            raise jinja2.TemplateRuntimeError(f"a power of numbers over {_MAX_POWER}")
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str | list | tuple) and len(repeated) * times > _MAX_REPEATED:
                raise jinja2.TemplateRuntimeError(f"a text or list repeated to a length over {_MAX_REPEATED}")
        return super().call_binop(context, operator, left, right)

    def _watched(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._check_time()
            yield item

    def _check_time(self) -> None:
        if time.monotonic() > getattr(self._local, "deadline", float("inf")):
            raise jinja2.TemplateRuntimeError(f"it takes more than {_MAX_SECONDS:g} seconds")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
