"""/v1/messages: Anthropic's shape over the same chat."""

import json
from typing import Any

import httpx
import pytest
from anthropic import Anthropic, BadRequestError
from server.served import Served

PATH = "/v1/messages"
HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    "system": "Be brief.",
}
CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}


def message(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post(PATH, json={**HELLO, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events_of(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    *events, rest = http.post(PATH, json={**HELLO, **body, "stream": True}).text.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_the_turn_is_that_of_chat(http: httpx.Client) -> None:
    wish = {"temperature": 0, "max_tokens": 20}
    found = message(http, **wish)
    expected = http.post("/v1/chat/completions", json={**CHAT, **wish}).json()
    assert found["content"] == [{"type": "text", "text": expected["choices"][0]["message"]["content"]}]
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "tiny")
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == expected["usage"]["completion_tokens"]
    assert http.post(f"{PATH}/count_tokens", json=HELLO).json() == {"input_tokens": expected["usage"]["prompt_tokens"]}


@pytest.mark.parametrize("wish", [{"max_tokens": 12}, {"max_tokens": 200, "stop_sequences": ["a", "e", "o", "i", " "]}])
def test_the_joined_stream_is_the_whole(http: httpx.Client, wish: dict[str, Any]) -> None:
    whole = message(http, temperature=0, **wish)
    first, begin, *deltas, end, last, stop = events_of(http, temperature=0, **wish)
    assert first["message"]["content"] == []
    assert (begin["type"], end["type"], stop["type"]) == ("content_block_start", "content_block_stop", "message_stop")
    assert "".join(delta["delta"]["text"] for delta in deltas) == whole["content"][0]["text"]
    assert last["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_why_it_ended(http: httpx.Client) -> None:
    assert message(http, temperature=0, max_tokens=3)["stop_reason"] == "max_tokens"
    text = message(http, temperature=0, max_tokens=8)["content"][0]["text"]
    stopped = message(http, temperature=0, max_tokens=8, stop_sequences=[text[-1]])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[-1])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4, "messages": []}, "messages"),
        ({"max_tokens": 4, "messages": "Hello"}, "messages"),
        ({"max_tokens": 4, "temperature": 1000}, "temperature"),
        ({"max_tokens": 4, "tools": [{"name": "f"}]}, "tools"),
    ],
)
def test_a_fault_is_named(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = http.post(PATH, json={**HELLO, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_the_anthropic_client(served: Served, http: httpx.Client) -> None:
    wish: dict[str, Any] = {"model": "tiny", "max_tokens": 10, "extra_body": {"temperature": 0}, **HELLO}
    with Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**wish)
        assert whole.content[0].type == "text"
        with client.messages.stream(**wish) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
            assert stream.get_final_message().stop_reason == whole.stop_reason
        counted = client.messages.count_tokens(model="tiny", **HELLO)
        assert counted.input_tokens == http.post("/tokenize", json=CHAT).json()["count"]
        with pytest.raises(BadRequestError, match="temperature"):
            client.messages.create(**{**wish, "extra_body": {"temperature": 1000}})
