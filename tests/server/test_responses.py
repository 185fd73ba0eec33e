"""/v1/responses: OpenAI's newer shape of the same turns, whole and as events."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from openai import APIError, BadRequestError, OpenAI
from pydantic import BaseModel
from server.events import named_events
from server.served import Served
from server.spoken import SPOKEN, TWO_CALLS, WORDS

from octavo.errors import EngineDeadError
from octavo.server.errors import ApiError
from octavo.server.options import ServerOptions
from octavo.server.responses_input import messages_of

PATH = "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "name": "reply", "schema": SCHEMA, "strict": True}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "add", "description": "Adds.", "parameters": ADD, "strict": True},
    {"type": "function", "name": "now", "parameters": None},
]
LOGPROBS = ["message.output_text.logprobs", "reasoning.encrypted_content"]


def respond(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post(PATH, json={"input": "Hello", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text_of(response: dict[str, Any]) -> str:
    [item] = response["output"]
    [part] = item["content"]
    return str(part["text"])


def test_the_turn_is_that_of_chat(http: httpx.Client) -> None:
    found = respond(http, instructions="Be brief.", temperature=0, max_output_tokens=20)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    expected = http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, "max_tokens": 20}).json()
    assert text_of(found) == expected["choices"][0]["message"]["content"]
    usage, other = found["usage"], expected["usage"]
    assert usage["input_tokens"] == other["prompt_tokens"]
    assert usage["output_tokens"] == other["completion_tokens"]
    assert usage["total_tokens"] == other["total_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    again = respond(http, instructions="Be brief.", temperature=0, max_output_tokens=20)
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_what_was_asked_comes_back(http: httpx.Client) -> None:
    asked = {
        "instructions": "Be brief.",
        "max_output_tokens": 3,
        "max_tool_calls": 2,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "temperature": 0.5,
        "top_p": 0.9,
        "user": "u",
    }
    found = respond(http, **asked, text={"verbosity": "low"}, reasoning={"effort": "low"}, store=False)
    assert {name: found[name] for name in asked} == asked
    assert found["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert found["reasoning"] == {"effort": "low", "summary": None}
    assert (found["object"], found["model"], found["store"], found["error"]) == ("response", "tiny", False, None)
    named = http.post(PATH, json={"input": "Hello", "max_output_tokens": 1}, headers={"x-request-id": "mine"}).json()
    assert named["id"].startswith("resp-mine-")


def test_why_it_ended(http: httpx.Client) -> None:
    cut = respond(http, temperature=0, max_output_tokens=3, ignore_eos=True)
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"
    assert cut["completed_at"] is None
    done = respond(http, text={"format": FORM}, seed=5)
    assert (done["status"], done["incomplete_details"]) == ("completed", None)
    assert done["output"][0]["status"] == "completed"
    assert done["completed_at"] >= done["created_at"]


# Wishes, and whether they are for the model that thinks and calls tools.
WISHES: dict[str, tuple[bool, dict[str, Any]]] = {
    "greedy": (False, {"temperature": 0, "max_output_tokens": 20}),
    "seeded": (False, {"seed": 3, "max_output_tokens": 20}),
    "one token": (False, {"temperature": 0, "max_output_tokens": 1}),
    "no text": (False, {"temperature": 0, "max_output_tokens": 4, "logit_bias": {"1": 100}}),
    "stops": (False, {"seed": 5, "max_output_tokens": 60, "stop": ["e", "a", " "]}),
    "scores": (False, {"seed": 3, "max_output_tokens": 15, "include": LOGPROBS, "top_logprobs": 2}),
    "scores and an end": (False, {"seed": 3, "include": LOGPROBS, "text": {"format": FORM}}),
    "a form": (False, {"seed": 3, "text": {"format": FORM}, "max_output_tokens": 100}),
    "an agent": (True, {"tools": TOOLS, "structured_outputs": {"choice": [SPOKEN]}}),
    "two calls": (True, {"tools": TOOLS, "structured_outputs": {"choice": [TWO_CALLS]}}),
    "reasoning that is cut": (True, {"structured_outputs": {"choice": [SPOKEN]}, "max_output_tokens": 6}),
    "a call that is cut": (
        True,
        {"tools": TOOLS, "structured_outputs": {"choice": [TWO_CALLS]}, "max_output_tokens": 45},
    ),
}


def same(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from one to the next."""
    new = {"id", "call_id", "created_at", "completed_at"}
    output = [{name: value for name, value in item.items() if name not in new} for item in response["output"]]
    usage = {name: value for name, value in response["usage"].items() if name != "input_tokens_details"}
    return {**{name: value for name, value in response.items() if name not in new}, "output": output, "usage": usage}


def read(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response at the end of a stream, after every event before it was held against it and its order."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *rest, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    final: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{final['status']}"
    for event in (created, in_progress):
        assert event["response"]["status"] == "in_progress"
        assert (event["response"]["output"], event["response"]["usage"]) == ([], None)
        assert event["response"]["id"] == final["id"]
    grouped = itertools.groupby(rest, key=lambda event: event["output_index"])
    by_item = [(index, list(events)) for index, events in grouped]
    assert [index for index, _ in by_item] == list(range(len(final["output"])))
    for (_, told), item in zip(by_item, final["output"], strict=True):
        kinds = [event["type"].removeprefix("response.") for event in told]
        added, done = told[0], told[-1]
        assert (kinds[0], kinds[-1]) == ("output_item.added", "output_item.done")
        assert (added["item"]["id"], added["item"]["status"]) == (item["id"], "in_progress")
        assert done["item"] == item
        assert {event["item_id"] for event in told[1:-1]} == {item["id"]}
        if item["type"] == "function_call":
            assert kinds[-2] == "function_call_arguments.done"
            assert set(kinds[1:-2]) <= {"function_call_arguments.delta"}
            assert added["item"]["arguments"] == ""
            assert "".join(event["delta"] for event in told[1:-2]) == told[-2]["arguments"] == item["arguments"]
            continue
        name = {"message": "output_text", "reasoning": "reasoning_text"}[item["type"]]
        assert kinds[1] == "content_part.added"
        assert kinds[-3:-1] == [f"{name}.done", "content_part.done"]
        assert set(kinds[2:-3]) <= {f"{name}.delta"}
        [part] = item["content"]
        assert (added["item"]["content"], told[1]["part"]["text"]) == ([], "")
        assert told[-2]["part"] == part
        assert "".join(event["delta"] for event in told[2:-3]) == told[-3]["text"] == part["text"]
        if name == "output_text":
            assert [each for event in told[2:-3] for each in event["logprobs"]] == part["logprobs"]
            assert told[-3]["logprobs"] == part["logprobs"]
    return final


@pytest.mark.parametrize("name", WISHES)
def test_the_stream_adds_up_to_the_whole(http: httpx.Client, agents: httpx.Client, name: str) -> None:
    is_agent, wish = WISHES[name]
    client = agents if is_agent else http
    whole = respond(client, **wish)
    assert same(read(named_events(client, PATH, input="Hello", **wish))) == same(whole)


def test_reasoning_text_and_calls_are_items(agents: httpx.Client) -> None:
    found = respond(agents, tools=TOOLS, structured_outputs={"choice": [SPOKEN]})
    thought, before, add, between, now = found["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": WORDS["reasoning"]}]
    assert (before["content"][0]["text"], between["content"][0]["text"]) == (WORDS["before"], WORDS["between"])
    assert (add["name"], add["arguments"]) == ("add", '{"a": 1}')
    assert (now["name"], now["arguments"]) == ("now", "{}")
    assert [item["type"] for item in found["output"]] == ["reasoning", *["message", "function_call"] * 2]
    assert add["call_id"] != now["call_id"]
    details = found["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] < found["usage"]["output_tokens"]


def test_scores_are_those_of_chat(http: httpx.Client) -> None:
    found = respond(http, temperature=0, max_output_tokens=6, include=LOGPROBS, top_logprobs=2)
    body = {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello"}], **body}).json()
    scores = found["output"][0]["content"][0]["logprobs"]
    expected = chat["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in scores] == [each["token"] for each in expected]
    assert all(len(each["top_logprobs"]) == 2 for each in scores)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}], ids=str)
def test_forced_calls(served: Served, choice: Any) -> None:
    url = served.listen(ServerOptions(served_model_names=("tiny",), tool_parser="hermes"))
    wish = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 7, "max_output_tokens": 200}
    with httpx.Client(base_url=url, timeout=60) as http:
        whole = respond(http, **wish)
        [call] = whole["output"]
        assert call["type"] == "function_call"
        assert choice == "required" or call["name"] == "add"
        if call["name"] == "add":
            jsonschema.validate(json.loads(call["arguments"]), ADD)
        assert same(read(named_events(http, PATH, input="Hello", **wish))) == same(whole)


class Reply(BaseModel):
    """What a test wants to hear."""

    ok: bool


def test_the_openai_client(openai: OpenAI) -> None:
    wish: dict[str, Any] = {"model": "tiny", "input": "Hello", "temperature": 0, "max_output_tokens": 12}
    whole = openai.responses.create(**wish)
    assert whole.output_text
    assert whole.usage is not None
    texts = [event.delta for event in openai.responses.create(**wish, stream=True) if _is_text(event)]
    assert "".join(texts) == whole.output_text
    with openai.responses.stream(**wish) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"
    parsed = openai.responses.parse(model="tiny", input="Hello", text_format=Reply, extra_body={"seed": 5})
    assert isinstance(parsed.output_parsed, Reply)
    with openai.responses.stream(model="tiny", input="Hello", text_format=Reply, extra_body={"seed": 5}) as forms:
        forms.until_done()
        assert forms.get_final_response().output_parsed == parsed.output_parsed
    with pytest.raises(BadRequestError, match="temperature"):
        openai.responses.create(model="tiny", input="Hello", temperature=1000)


def _is_text(event: Any) -> bool:
    return bool(event.type == "response.output_text.delta")


@pytest.fixture
def agent_client(agents_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{agents_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_round_of_tools_with_the_openai_client(agent_client: OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "Hello"}]
    wish: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "store": False, "include": ["reasoning.encrypted_content"]}
    spoken = {"structured_outputs": {"choice": [SPOKEN]}}
    with agent_client.responses.stream(input=items, **wish, extra_body=spoken) as stream:
        arguments = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        first = stream.get_final_response()
    assert "".join(arguments) == '{"a": 1}{}'
    assert [item.type for item in first.output] == ["reasoning", *["message", "function_call"] * 2]
    items += first.output
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "2"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = agent_client.responses.create(input=items, **wish, max_output_tokens=4)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_a_fault_within_a_stream_is_raised_by_the_client(served: Served, openai: OpenAI) -> None:
    async def fail(live: Any) -> None:
        served.engine._requests.fail(live, EngineDeadError("as planned"))
        await served.engine.abort([live.message.request_id])

    wish: dict[str, Any] = {"extra_body": {"ignore_eos": True}, "stream": True}
    with openai.responses.create(model="tiny", input="Hello", **wish) as stream:
        events = iter(stream)
        assert next(events).type == "response.created"
        [live] = served.engine._requests
        served.call(fail(live))
        with pytest.raises(APIError, match="as planned"):
            list(events)
    served.wait_until(served.is_idle)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"input": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 400}),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_all(served: Served, path: str, body: dict[str, Any], stream: bool) -> None:
    body = {**body, "ignore_eos": True, "stream": stream}
    with httpx.Client(base_url=served.url, timeout=60) as http:
        if stream:
            with http.stream("POST", path, json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(path, json=body, timeout=0.05)
    served.wait_until(served.is_idle)


CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
INPUTS: list[tuple[str | None, Any, list[dict[str, Any]]]] = [
    (None, "Hello", [{"role": "user", "content": "Hello"}]),
    (
        "Be brief.",
        [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "developer", "content": "Be quick."},
        ],
        [
            {"role": "system", "content": "Be brief.\n\nBe kind."},
            {"role": "user", "content": "a\nb"},
            {"role": "system", "content": "Be quick."},
        ],
    ),
    (
        None,
        [
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
            CALL,
            {**CALL, "call_id": "c2", "name": "now", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
            {"type": "function_call_output", "call_id": "c9", "output": "?"},
        ],
        [
            {
                "role": "assistant",
                "content": "I add.",
                "reasoning_content": "Hm.",
                "tool_calls": [
                    CALLED,
                    {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
            {"role": "tool", "tool_call_id": "c2", "name": "now", "content": "noon"},
            {"role": "tool", "tool_call_id": "c9", "content": "?"},
        ],
    ),
    (None, [CALL], [{"role": "assistant", "content": None, "tool_calls": [CALLED]}]),
    (
        None,
        [
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": "Yes."},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "reasoning", "summary": []},
            CALL,
            {"role": "assistant", "content": "Done."},
        ],
        [
            {"role": "assistant", "content": "No."},
            {"role": "assistant", "content": "Yes."},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALLED]},
            {"role": "assistant", "content": "Done."},
        ],
    ),
]


@pytest.mark.parametrize(("instructions", "given", "expected"), INPUTS, ids=range(len(INPUTS)))
def test_items_as_templates_know_them(
    instructions: str | None, given: str | list[Any], expected: list[dict[str, Any]]
) -> None:
    assert messages_of(given, instructions) == expected


@pytest.mark.parametrize(
    "item",
    [
        "Hello",
        {},
        {"role": "odd", "content": "Hello"},
        {"role": "user"},
        {"role": "user", "content": 5},
        {"role": "user", "content": ["Hello"]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
        {"role": "user", "content": [{"type": ["input_text"], "text": "x"}]},
        {"type": "function_call", "call_id": "c1", "name": "f"},
        {"type": "function_call_output", "output": "x"},
        {"type": "function_call_output", "call_id": "c1", "output": {"a": 1}},
        {"type": "reasoning", "content": "Hm."},
        {"type": "item_reference", "id": "msg_1"},
        {"type": "web_search_call"},
    ],
    ids=str,
)
def test_an_item_that_is_none_is_refused(item: Any) -> None:
    with pytest.raises(ApiError, match=r"input\[1\]") as caught:
        messages_of([{"role": "user", "content": "Hello"}, item], None)
    assert caught.value.param == "input"


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": "x" * 5000}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"text": {"format": {"type": "odd"}}}, "text"),
    ({"text": {"format": "json_object"}}, "text"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "odd"}}}}, "text"),
    ({"text": {"format": FORM}, "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    ({"tools": TOOLS}, "tools"),  # the model knows no way to call them
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"truncation": "auto"}, "truncation"),
    ({"model": "other"}, "model"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param"), FAULTS, ids=str)
def test_a_fault_is_named(http: httpx.Client, body: dict[str, Any], param: str, stream: bool) -> None:
    answer = http.post(PATH, json={"input": "Hello", "stream": stream, **body})
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param
    assert len(answer.content) < 2000


def test_scores_beside_reasoning_are_refused(agents: httpx.Client) -> None:
    answer = agents.post(PATH, json={"input": "Hello", "include": LOGPROBS})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include")
