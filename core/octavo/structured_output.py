"""What form an output must have. Checked on construction as far as that goes without a grammar library."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.errors import RequestError, shown

__all__ = ["MAX_GRAMMAR_BYTES", "StructuredOutput", "WithinCalls"]

MAX_GRAMMAR_BYTES = 256 * 1024  # of a schema, regex, grammar or all choices; what is longer is no form but data


@dataclass(frozen=True)
class WithinCalls:
    """Where a form holds, of an output that is free but for its tool calls: in those of some tools.

    Attributes:
        tool_format: in which the model writes calls, one of `octavo.text.tools.FORMATS`.
        tools: names of all tools that may be called.
        strict: of those whose calls have the form.
        reasoning: how the model marks its reasoning, in which nothing is a call; None: it has none.
        begins_inside: whether the output begins within the reasoning.

    """

    tool_format: str
    tools: tuple[str, ...]
    strict: tuple[str, ...]
    reasoning: str | None = None
    begins_inside: bool = False


@dataclass(frozen=True)
class StructuredOutput:
    """The form of an output: exactly one of the first five.

    Attributes:
        json_object: any JSON object.
        json_schema: JSON that a schema allows, given as text or a mapping; properties come in its order.
        regex: a text that the whole of a regular expression matches (no look-around, no back references).
        choice: one of these texts.
        grammar: a text of a context-free grammar, in Lark's syntax or GBNF; its first rule is `start` or `root`.
        after_token_id: the form holds for what follows this token of the output (the end of a model's reasoning);
            None: from the beginning.
        within: the form is that of single tool calls, and what stands between them is free; None: of the output.

    """

    json_object: bool = False
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    after_token_id: int | None = None
    within: WithinCalls | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise RequestError(f"json_object must be true or false, got {shown(self.json_object)}", "json_object")
        self._check_choice()
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and text):
                raise RequestError(f"{name} must be a text of at least one character, got {shown(text)}", name)
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        given = [name for name in ("json_object", "json_schema", "regex", "choice", "grammar") if self._is_given(name)]
        if len(given) != 1:
            raise RequestError(
                "a structured output is exactly one of json_object, json_schema, regex, choice and grammar, got "
                f"{' and '.join(given) or 'none'}",
                given[1] if given else None,
            )
        num_bytes = sum(len(text.encode("utf-8", "replace")) for text in self._texts())
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise RequestError(f"{given[0]} has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed", given[0])

    @property
    def kind(self) -> str:
        """Which of the five it is; the name of the field."""
        return next(n for n in ("json_object", "json_schema", "regex", "choice", "grammar") if self._is_given(n))

    def but_after(self, token_id: int) -> "StructuredOutput":
        """The same form, for what follows a token."""
        return replace(self, after_token_id=token_id)

    def _is_given(self, name: str) -> bool:
        return getattr(self, name) not in (None, (), False)

    def _texts(self) -> Iterable[str]:
        return (*self.choice, *(text for text in (self.json_schema, self.regex, self.grammar) if isinstance(text, str)))

    def _check_choice(self) -> None:
        if isinstance(self.choice, str | bytes | Mapping) or not isinstance(self.choice, Iterable | None):
            raise RequestError(f"choice must be a list of texts, got {shown(self.choice)}", "choice")
        texts = tuple(self.choice or ())
        if not all(isinstance(text, str) and text for text in texts):
            raise RequestError(f"choice must be texts of at least one character, got {shown(texts)}", "choice")
        object.__setattr__(self, "choice", texts)


def _schema_text(schema: object) -> str:
    """The schema as JSON, its keys in the order given: that is the order in which properties are written."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise RequestError(f"json_schema is not JSON: {reason}", "json_schema") from error
    if not isinstance(value, dict):
        raise RequestError(f"json_schema must be an object, got {shown(value)}", "json_schema")
    return text
