"""The messages of /v1/messages, whose contents are blocks, as those that chat templates know."""

from collections.abc import Sequence
from typing import Any

from octavo.errors import shown
from octavo.server.errors import ApiError, check_one_of

__all__ = ["messages_of"]

ROLES = ("user", "assistant", "system")


def messages_of(given: Sequence[dict[str, Any]], system: str | Sequence[Any] | None) -> list[dict[str, Any]]:
    """The system's words first; results of calls are messages of their own, thinking and calls parts of theirs.

    Raises:
        ApiError: there are none, or a block is malformed. Blocks that are no text are left to the template's check.

    """
    if not given:
        raise ApiError(400, "messages is empty; at least one message is needed", "messages")
    for i, block in enumerate(system if isinstance(system, list) else ()):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise ApiError(400, f'system[{i}] must be {{"type": "text", "text": ...}}, got {shown(block)}', "system")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    called: dict[str, str] = {}
    for i, message in enumerate(given):
        check_one_of(f"messages[{i}].role", message.get("role", ""), ROLES, "messages")
        content = message.get("content")
        messages += _split(message, content, f"messages[{i}]", called) if isinstance(content, list) else [message]
    return messages


def _split(message: dict[str, Any], blocks: list[Any], where: str, called: dict[str, str]) -> list[dict[str, Any]]:
    """A message as chat has it, in several where it holds results. `called` is the tool of each call so far."""
    results: list[dict[str, Any]] = []
    parts: list[Any] = []
    calls: list[dict[str, Any]] = []
    thoughts = ""
    for i, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            results.append(_result(block, f"{where}.content[{i}]", called))
        elif kind == "tool_use":
            calls.append(_call(block, f"{where}.content[{i}]", called))
        elif kind == "thinking":
            thoughts += str(block.get("thinking") or "")
        elif kind != "redacted_thinking":
            parts.append(block)
    own: dict[str, Any] = {**message, "content": parts or (None if calls else "")}
    if thoughts:
        own["reasoning_content"] = thoughts
    if calls:
        own["tool_calls"] = calls
    is_said = bool(parts or calls or thoughts or not results)
    return [*results, own] if is_said else results  # results stand before what is said to them


def _call(block: dict[str, Any], where: str, called: dict[str, str]) -> dict[str, Any]:
    call_id, name, arguments = (block.get(key) for key in ("id", "name", "input"))
    if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, dict)):
        raise ApiError(
            400, f"{where} must have an id and a name, and an object as input, got {shown(block)}", "messages"
        )
    called[call_id] = name
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(block: dict[str, Any], where: str, called: dict[str, str]) -> dict[str, Any]:
    call_id, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(call_id, str):
        raise ApiError(400, f"{where} must have a tool_use_id, got {shown(call_id)}", "messages")
    named = {"name": called[call_id]} if call_id in called else {}
    return {"role": "tool", "tool_call_id": call_id, **named, "content": "" if content is None else content}
