"""Forms of outputs and tool calls, as clients ask for them."""

import json
import re
from typing import Any

import jsonschema
import pytest
from httpx import Client
from openai import OpenAI
from server.served import Served
from server.spoken import TWO_CALLS

from octavo.errors import ConfigError
from octavo.server.app import create_app
from octavo.server.options import ServerOptions

HELLO = [{"role": "user", "content": "Hello there"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {**SCHEMA, "required": ["ok"]}}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def with_tools(served: Served) -> OpenAI:
    url = served.listen(ServerOptions(tool_parser="hermes"))
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": json.dumps(SCHEMA)},
    ],
    ids=str,
)
def test_a_schema_in_each_way(http: Client, fields: dict[str, Any]) -> None:
    body = {"messages": HELLO, "max_tokens": 100, "seed": 5, **fields}
    [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_other_forms(http: Client) -> None:
    for fields, form in (
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["one"]}, "one"),
        ({"guided_grammar": 'root ::= "x" | "y"'}, "x|y"),
    ):
        [choice] = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 60, **fields}).json()["choices"]
        assert re.fullmatch(form, choice["text"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "odd"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}}, "response_format"),
        ({"structured_outputs": {"nothing": 1}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_json": {"const": "x" * 300_000}}, "guided_json"),
        ({"tools": TOOLS}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
    ids=str,
)
def test_what_is_no_form_is_a_400(http: Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 5, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=str)
def test_forced_calls_streamed_and_whole(with_tools: OpenAI, choice: Any) -> None:
    wish: dict[str, Any] = {"model": "", "messages": HELLO, "tools": TOOLS, "tool_choice": choice, "seed": 7}
    wish |= {"parallel_tool_calls": False, "max_tokens": 150}
    del wish["model"]
    model = with_tools.models.list().data[0].id
    whole = with_tools.chat.completions.create(model=model, **wish).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls is not None
    [call] = whole.message.tool_calls
    assert call.type == "function"
    if call.function.name == "add":
        jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])  # type: ignore[index]
    else:
        assert choice == "required"
    assert whole.message.content is None

    name, arguments, ids, reasons = "", "", [], []
    for chunk in with_tools.chat.completions.create(model=model, stream=True, **wish):
        [piece] = chunk.choices
        assert not piece.delta.content
        for part in piece.delta.tool_calls or ():
            assert part.index == 0
            assert part.function is not None
            ids += [part.id] if part.id else []
            name += part.function.name or ""
            arguments += part.function.arguments or ""
        reasons += [piece.finish_reason] if piece.finish_reason else []
    assert (name, arguments) == (call.function.name, call.function.arguments)
    assert len(ids) == 1
    assert reasons == ["tool_calls"]


def test_a_cut_call_is_cut(with_tools: OpenAI) -> None:
    model = with_tools.models.list().data[0].id
    wish: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 12, "messages": HELLO}
    assert with_tools.chat.completions.create(model=model, **wish).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, "max_tokens"),
        ("/v1/responses", {"input": "Hello"}, "max_output_tokens"),
        ("/v1/messages", {"messages": HELLO}, "max_tokens"),
    ],
)
def test_no_answer_shows_how_a_call_is_written(agents: Client, path: str, body: dict[str, Any], limit: str) -> None:
    """However early it is cut, streamed or whole."""
    tools: list[dict[str, Any]] = [{"type": "function", **each["function"]} for each in TOOLS]
    if path == "/v1/chat/completions":
        tools = TOOLS
    elif path == "/v1/messages":
        tools = [{"name": each["name"], "input_schema": each.get("parameters", {})} for each in tools]
    wish = {**body, "tools": tools, "structured_outputs": {"choice": [TWO_CALLS]}}
    num_tokens = agents.post("/tokenize", json={"prompt": TWO_CALLS, "add_special_tokens": False}).json()["count"]
    for num in range(1, num_tokens, 3):
        for stream in (False, True):
            answer = agents.post(path, json={**wish, limit: num, "stream": stream})
            assert answer.status_code == 200
            told = answer.text.replace(json.dumps(tools, separators=(",", ":")), "")
            for marker in ("tool_call>", "<tool", "</tool"):
                assert marker not in told, (num, told)
            lines = [line for line in told.splitlines() if "function_call_arguments" not in line]
            words = re.findall(r'"(?:content|text|delta)":"([^"]*)"', "\n".join(lines))
            assert not any(word.strip("<") for word in words), (num, words)


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, "max_tokens"),
        ("/v1/responses", {"input": "Hello"}, "max_output_tokens"),
        ("/v1/messages", {"messages": HELLO}, "max_tokens"),
    ],
)
def test_a_strict_tool_that_is_not_called_changes_nothing_and_a_bad_one_is_refused(
    agents: Client, path: str, body: dict[str, Any], limit: str
) -> None:
    def ask(schema: Any, strict: Any, **more: Any) -> Any:
        tool: dict[str, Any] = {"name": "add", "strict": strict}
        tool["input_schema" if path == "/v1/messages" else "parameters"] = schema
        if path == "/v1/chat/completions":
            tool = {"type": "function", "function": tool}
        elif path == "/v1/responses":
            tool["type"] = "function"
        wish = {**body, "tools": [tool], limit: 12, "temperature": 0, **more}
        return agents.post(path, json=wish)

    def told(answer: Any) -> Any:
        found = answer.json()
        return found["choices"] if "choices" in found else found["content"] if "content" in found else found["usage"]

    assert told(ask(SCHEMA, True)) == told(ask(SCHEMA, False)) == told(ask(SCHEMA, True, ignore_eos=True))
    for schema, strict in (({"type": "object", "properties": {"a": {"type": "odd"}}}, True), (SCHEMA, "yes")):
        answer = ask(schema, strict)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "tools"


def test_tools_that_are_not_called_change_nothing(with_tools: OpenAI) -> None:
    model = with_tools.models.list().data[0].id
    wish: dict[str, Any] = {"max_tokens": 12, "messages": HELLO, "temperature": 0}
    texts = [
        with_tools.chat.completions.create(model=model, **wish, **more).choices[0].message.content
        for more in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"})
    ]
    assert texts[0] == texts[1] == texts[2]


def test_a_parser_that_is_none_is_refused_at_the_start(served: Served) -> None:
    with pytest.raises(ConfigError, match="hermes"):
        create_app(served.engine, ServerOptions(tool_parser="odd"))
