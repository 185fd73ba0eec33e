"""The input of /v1/responses, which is items, as the messages that chat templates know."""

from collections.abc import Sequence
from typing import Any

from octavo.errors import shown
from octavo.server.errors import ApiError

__all__ = ["messages_of"]

TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


def messages_of(given: str | Sequence[Any], instructions: str | None) -> list[dict[str, Any]]:
    """The messages of an input. Reasoning, a text and calls that follow each other are one turn of the assistant.

    Raises:
        ApiError: it is empty, or an item is malformed or of a kind that is not served.

    """
    reader = _Reader()
    if instructions:
        reader.messages.append({"role": "system", "content": instructions})
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not items:
        raise ApiError(400, "input is empty; at least one item is needed", "input")
    for i, item in enumerate(items):
        reader.add(item, f"input[{i}]")
    return _with_one_system(reader.messages)


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Instructions and developers' messages at the beginning are one: many templates take no more."""
    num = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if num < 2:
        return messages
    return [{"role": "system", "content": "\n\n".join(each["content"] for each in messages[:num])}, *messages[num:]]


class _Reader:
    """Takes items one after the other."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._called: dict[str, str] = {}  # the tool of each call so far

    def add(self, item: Any, where: str) -> None:
        """Take the next item."""
        if not isinstance(item, dict):
            raise ApiError(400, f"{where} must be an object, got {shown(item)}", "input")
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            self._output(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind == "item_reference":
            raise ApiError(
                400, f"{where} refers to an item, and none is stored; send the item itself (store: false)", "input"
            )
        else:
            raise ApiError(
                400,
                f"{where}.type must be message, function_call, function_call_output or reasoning, got {shown(kind)}",
                "input",
            )

    def _message(self, item: dict[str, Any], where: str) -> None:
        role = ROLES.get(str(item.get("role")))
        if role is None:
            raise ApiError(
                400, f"{where}.role must be one of {', '.join(ROLES)}, got {shown(item.get('role'))}", "input"
            )
        text = _text(item.get("content"), f"{where}.content")
        if role != "assistant":
            self.messages.append({"role": role, "content": text})
            return
        turn = self._turn()
        if turn.get("content") or "tool_calls" in turn:
            turn = self._new_turn()
        turn["content"] = text

    def _call(self, item: dict[str, Any], where: str) -> None:
        call_id, name, arguments = (item.get(key) for key in ("call_id", "name", "arguments"))
        if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, str)):
            raise ApiError(400, f"{where} must have call_id, name and arguments, all texts, got {shown(item)}", "input")
        self._called[call_id] = name
        turn = self._turn()
        turn["content"] = turn["content"] or None
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        turn.setdefault("tool_calls", []).append(call)

    def _output(self, item: dict[str, Any], where: str) -> None:
        call_id = item.get("call_id")
        if not isinstance(call_id, str):
            raise ApiError(400, f"{where} must have a call_id, got {shown(call_id)}", "input")
        named = {"name": self._called[call_id]} if call_id in self._called else {}
        text = _text(item.get("output"), f"{where}.output")
        self.messages.append({"role": "tool", "tool_call_id": call_id, **named, "content": text})

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise ApiError(400, f"{where}.content must be a list of parts, got {shown(parts)}", "input")
        text = "\n".join(str(part.get("text") or "") for part in parts)
        if text:
            self._new_turn()["reasoning_content"] = text

    def _turn(self) -> dict[str, Any]:
        """The assistant's turn that is under way, or else a new one."""
        is_open = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        return self.messages[-1] if is_open else self._new_turn()

    def _new_turn(self) -> dict[str, Any]:
        self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a text or a list of parts, got {shown(content)}", "input")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(TEXTS[kind]) if isinstance(kind, str) and kind in TEXTS else None
        if not isinstance(text, str):
            raise ApiError(
                400,
                f'{where}[{i}] must be {{"type": "input_text", "text": ...}}, got type {shown(kind)}; only text is '
                "understood",
                "input",
            )
        texts.append(text)
    return "\n".join(texts)
