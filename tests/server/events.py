"""Reading streams as strictly as clients do."""

import json
from typing import Any

import httpx

__all__ = ["chunks_of", "joined", "named_events"]


def chunks_of(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which ends with [DONE] after one blank line each."""
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        text = answer.read().decode()
        assert answer.status_code == 200, text
        assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last, rest = text.split("\n\n")
    assert rest == ""
    assert last == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert all("finish_reason" in choice for chunk in chunks for choice in chunk["choices"])
    return chunks


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What the chunks add up to, by choice: text, lists of logprobs, and the one finish reason, which comes last."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "logprobs": {}, "finish_reason": None})
            assert choice["finish_reason"] is None, "something came after the end"
            choice["text"] += piece["text"] if "text" in piece else piece["delta"].get("content") or ""
            for name, more in (piece["logprobs"] or {}).items():
                choice["logprobs"][name] = choice["logprobs"].get(name, []) + (more or [])
            choice["finish_reason"] = piece["finish_reason"]
    assert all(choice["finish_reason"] for choice in choices.values())
    return choices


def named_events(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream in which each has a name, which is its type."""
    answer = http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
