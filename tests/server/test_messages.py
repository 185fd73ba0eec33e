"""/v1/messages: Anthropic's shape over the same chat."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from anthropic import Anthropic, BadRequestError
from pydantic import BaseModel
from server.events import named_events
from server.served import Served
from server.spoken import SPOKEN, TWO_CALLS, WORDS

from octavo.server.errors import ApiError
from octavo.server.messages_input import messages_of
from octavo.server.options import ServerOptions

PATH = "/v1/messages"
HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    "system": "Be brief.",
}
BAD = {"type": "odd"}
CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}


def message(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post(PATH, json={**HELLO, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events_of(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    return named_events(http, PATH, **{**HELLO, **body})


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
        ({"max_tokens": 4, "messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        ({"max_tokens": 4, "stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": 4, "container": "c"}, "container"),
        ({"max_tokens": 4, "mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"max_tokens": 4, "output_config": {"format": {"type": "odd"}}}, "output_config"),
        ({"max_tokens": 4, "output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"max_tokens": 4, "output_config": {"format": {"type": "json_schema", "schema": BAD}}}, "output_config"),
    ],
)
def test_a_fault_is_named(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = http.post(PATH, json={**HELLO, **body})
    assert answer.status_code == 400
    found = answer.json()
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert found["error"]["param"] == param


def test_errors_of_all_kinds_are_in_this_shape(http: httpx.Client, served: Served) -> None:
    locked = served.listen(ServerOptions(api_keys=("k",)))
    streamed = {**HELLO, "max_tokens": 4, "stream": True, "allowed_token_ids": [5]}
    streamed |= {"structured_outputs": {"choice": ["zebra"]}}  # fails when the engine has it
    for answer, status, kind in (
        (http.post(PATH, json={**HELLO, "max_tokens": 4, "model": "none"}), 404, "not_found_error"),
        (http.post(f"{PATH}/nothing", json=HELLO), 404, "not_found_error"),
        (http.get(PATH), 405, "invalid_request_error"),
        (http.post(PATH, content=b"x" * (2 << 20)), 413, "request_too_large"),
        (http.post(PATH, json=streamed), 400, "invalid_request_error"),
        (httpx.post(locked + PATH, json=HELLO, headers={"x-api-key": "wrong"}), 401, "authentication_error"),
    ):
        assert answer.status_code == status, answer.text
        found = answer.json()
        assert (found["type"], found["error"]["type"]) == ("error", kind)
        assert set(found["error"]) == {"type", "message", "param"}


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
        with pytest.raises(BadRequestError, match="temperature") as refused:
            client.messages.create(**{**wish, "extra_body": {"temperature": 1000}})
        assert isinstance(refused.value.body, dict)
        assert refused.value.body["error"]["type"] == "invalid_request_error"


TOOLS: list[dict[str, Any]] = [
    {
        "name": "add",
        "description": "Adds.",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
    {"type": "custom", "name": "now", "input_schema": {"type": "object"}},
]


@pytest.fixture(scope="module")
def client(agents_url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=agents_url, api_key="none", max_retries=0) as client:
        yield client


def joined_blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that the events of a stream add up to."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        else:
            assert event["index"] == len(blocks) - 1
        is_open = event["type"] != "content_block_stop"
        match event.get("delta"):
            case {"type": "text_delta", "text": text}:
                blocks[-1]["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                blocks[-1]["thinking"] += text
            case {"type": "input_json_delta", "partial_json": text}:
                blocks[-1]["json"] += text
            case {"type": "signature_delta", "signature": text}:
                blocks[-1]["signature"] += text
    assert not is_open
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    return blocks


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


@pytest.mark.parametrize("thinks", [True, False])
def test_thinking_text_and_calls_streamed_and_whole(agents: httpx.Client, thinks: bool) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024} if thinks else None
    wish = {"max_tokens": 300, "tools": TOOLS, "thinking": thinking, "structured_outputs": {"choice": [SPOKEN]}}
    whole = message(agents, **wish)
    thought = [{"type": "thinking", "thinking": WORDS["reasoning"], "signature": ""}]
    assert without_ids(whole["content"]) == [
        *(thought if thinks else []),
        {"type": "text", "text": WORDS["before"]},
        {"type": "tool_use", "name": "add", "input": {"a": 1}},
        {"type": "text", "text": WORDS["between"]},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    ids = [block["id"] for block in whole["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == 2
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    events = events_of(agents, **wish)
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    assert without_ids(joined_blocks(events)) == without_ids(whole["content"])
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_one_call_where_no_more_are_wanted(agents: httpx.Client) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    wish = {"max_tokens": 300, "tools": TOOLS, "structured_outputs": {"choice": [TWO_CALLS]}}
    assert [block["name"] for block in message(agents, **wish)["content"]] == ["add", "now"]
    assert [block["name"] for block in message(agents, **wish, tool_choice=choice)["content"]] == ["add"]


def test_tools_that_may_not_be_called_are_text(agents: httpx.Client) -> None:
    wish = {"max_tokens": 300, "tools": TOOLS, "structured_outputs": {"choice": [TWO_CALLS]}}
    found = message(agents, **wish, tool_choice={"type": "none"})
    [block] = found["content"]
    assert block["text"] == TWO_CALLS.partition("</think>")[2]
    assert found["stop_reason"] == "end_turn"


@pytest.fixture(scope="module")
def callers(served: Served) -> Iterator[Anthropic]:
    url = served.listen(ServerOptions(served_model_names=("tiny",), tool_parser="hermes"))
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}], ids=str)
def test_forced_calls_with_the_anthropic_client(callers: Anthropic, choice: Any) -> None:
    wish: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "tools": TOOLS, "extra_body": {"seed": 7}}
    wish |= {"messages": HELLO["messages"], "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    whole = callers.messages.create(**wish)
    assert whole.stop_reason == "tool_use"
    [call] = whole.content
    assert call.type == "tool_use"
    assert choice["type"] == "any" or call.name == "add"
    if call.name == "add":
        jsonschema.validate(call.input, TOOLS[0]["input_schema"])
    with callers.messages.stream(**wish) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        [again] = stream.get_final_message().content
    assert again.type == "tool_use"
    assert (again.name, again.input) == (call.name, call.input)
    assert json.loads("".join(pieces)) == call.input


def test_a_call_that_is_cut_has_what_was_written(agents: httpx.Client) -> None:
    text = '</think><tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, "' + "x" * 200
    wish = {"tools": TOOLS, "structured_outputs": {"choice": [text]}, "max_tokens": 120}
    found = message(agents, **wish)
    assert found["stop_reason"] == "max_tokens"
    [call] = found["content"]
    assert call["input"]["a"] == 1
    assert call["input"]["b"][0] == 2
    body = {"model": "tiny", "messages": HELLO["messages"], "max_tokens": 120, "tools": TOOLS}
    with Anthropic(base_url=str(agents.base_url), api_key="none", max_retries=0) as client:  # noqa: SIM117
        with client.messages.stream(**body, extra_body=wish) as stream:  # type: ignore[arg-type]
            [again] = stream.get_final_message().content
    assert again.type == "tool_use"
    assert again.input["b"][0] == 2  # type: ignore[index]


def test_a_round_of_tools_with_the_anthropic_client(client: Anthropic) -> None:
    wish: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "tools": TOOLS}
    wish["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    first = client.messages.create(messages=messages, **wish, extra_body={"structured_outputs": {"choice": [SPOKEN]}})
    with client.messages.stream(
        messages=messages, **wish, extra_body={"structured_outputs": {"choice": [SPOKEN]}}
    ) as stream:
        thoughts = "".join(event.thinking for event in stream if event.type == "thinking")
        final = stream.get_final_message()
    assert thoughts == WORDS["reasoning"]
    assert [block.type for block in final.content] == [block.type for block in first.content]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "2"}]}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    before = client.messages.count_tokens(model="tiny", messages=messages[:1], tools=TOOLS)  # type: ignore[arg-type]
    after = client.messages.count_tokens(model="tiny", messages=messages, tools=TOOLS)  # type: ignore[arg-type]
    assert after.input_tokens > before.input_tokens
    second = client.messages.create(messages=messages, **{**wish, "max_tokens": 4})
    usage = second.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == after.input_tokens


class Reply(BaseModel):
    """What a test wants to hear."""

    ok: bool


def test_a_form_with_the_anthropic_client(served: Served) -> None:
    with Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        found = client.messages.parse(
            model="tiny", max_tokens=200, messages=[{"role": "user", "content": "Hello"}], output_format=Reply
        )
    assert isinstance(found.parsed_output, Reply)


def test_blocks_as_templates_know_them() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
    text = {"type": "text", "text": "Well."}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "2"}
    assert messages_of(
        [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, text, call]},
            {"role": "user", "content": [result, {"type": "tool_result", "tool_use_id": "c2"}, text]},
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, call]},
            {"role": "user", "content": [{**result, "is_error": True}]},
        ],
        "Be brief.",
    ) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": [text],
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": [text]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
    ]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "tool_use", "id": "c1", "name": "add"},
        {"type": "tool_use", "id": "c1", "input": {}},
        {"type": "tool_use", "name": "add", "input": {}},
        {"type": "tool_result", "content": "2"},
    ],
    ids=str,
)
def test_a_block_that_lacks_something_is_refused(block: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=r"messages\[0\]\.content\[0\]"):
        messages_of([{"role": "user", "content": [block]}], None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "odd"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
    ids=str,
)
def test_tools_that_are_none_are_refused(agents: httpx.Client, body: dict[str, Any], param: str) -> None:
    for path in (PATH, f"{PATH}/count_tokens"):
        answer = agents.post(path, json={**HELLO, "max_tokens": 4, **body})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
