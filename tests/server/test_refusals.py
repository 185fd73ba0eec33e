"""What is wrong with a request is said in one short JSON body, with a status that no client repeats in vain."""

import json
import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI
from server.served import Served

from octavo.sampling_params import SamplingParams
from octavo.server.options import ServerOptions
from octavo.server.protocol import ChatRequest, CompletionRequest
from octavo.server.sampling import sampling_params

HELLO = [{"role": "user", "content": "Hello"}]


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.content) < 2000
    error: dict[str, Any] = answer.json()["error"]
    if answer.request.url.path.startswith("/v1/messages"):  # Anthropic's shape
        assert answer.json()["type"] == "error"
        assert set(error) == {"message", "type", "param"}
        return error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


COMPLETION_FAULTS: list[tuple[dict[str, Any], str | None]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [401]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [[1, True]]}, "prompt"),
    ({"prompt": "x" * 5000}, "prompt"),
    ({"prompt": "x" * 500_000}, "prompt"),
    ({"prompt": [5] * 512}, "prompt"),
    ({"prompt": [5] * 100_000}, "prompt"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 100}, "n"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": "a", "logit_bias": {"900": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": 1000}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "allowed_token_ids": [-5]}, "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "stop": 5}, "stop"),
    ({"prompt": "a", "seed": 2**70}, "seed"),
    ({"prompt": "a", "priority": 2**63}, "priority"),
    ({"prompt": "a", "priority": -(2**63) - 1}, "priority"),
    ({"prompt": "a", "allowed_token_ids": [5], "guided_choice": ["zebra"]}, "allowed_token_ids"),
    ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": 1}, "stream_options"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_interval": 0}, "stream_interval"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
    ({"prompt": "a", "length_penalty": 2}, "length_penalty"),
    ({"prompt": "a", "prompt_embeds": "AA=="}, "prompt_embeds"),
    ({"prompt": "a", "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"prompt": "a", "logits_processors": ["x"]}, "logits_processors"),
    ({"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"prompt": "a", "temperature": 0, "n": 2}, "n"),
]
CHAT_FAULTS: list[tuple[dict[str, Any], str | None]] = [
    ({}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": ["Hello"]}, "messages"),
    ({"messages": [{"content": "Hello"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HELLO, "logprobs": 1}, "logprobs"),
    ({"messages": HELLO, "modalities": ["audio"]}, "modalities"),
    ({"messages": HELLO, "functions": [{"name": "f"}]}, "functions"),
    ({"messages": HELLO, "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    ({"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt"),
    ({"messages": [{"role": "user", "content": "x" * 500_000}]}, "prompt"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "faults"), [("/v1/completions", COMPLETION_FAULTS), ("/v1/chat/completions", CHAT_FAULTS)]
)
def test_a_fault_is_named(
    http: httpx.Client, served: Served, path: str, faults: list[tuple[dict[str, Any], str | None]], stream: bool
) -> None:
    for body, param in faults:
        if stream and param in ("stream", "stream_options"):
            continue
        error = error_of(http.post(path, json={"stream": stream, **body}))
        assert (error["type"], error["param"]) == ("BadRequestError", param), f"{body!r:.200}: {error}"
    assert served.engine.num_live == 0


LONG = {  # by path: a body of many tokens, and of so many as there are letters
    "/v1/completions": lambda num: {"prompt": [5] * num},
    "/v1/chat/completions": lambda num: {"messages": [{"role": "user", "content": "x" * num}]},
    "/v1/responses": lambda num: {"input": "x" * num},
    "/v1/messages": lambda num: {"messages": [{"role": "user", "content": "x" * num}], "max_tokens": 1},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", LONG)
def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(http: httpx.Client, path: str, stream: bool) -> None:
    error = error_of(http.post(path, json={**LONG[path](600), "stream": stream}))
    assert error["param"] == {"/v1/messages": "messages", "/v1/responses": "input"}.get(path, "prompt")
    pattern = r"maximum context length is 512 tokens. However, your prompt has (6\d\d) tokens"
    if path == "/v1/messages":
        pattern = r"prompt is too long: (6\d\d) tokens > 512 maximum"
    assert re.search(pattern, error["message"])
    assert "max_model_len" in error["message"]


def test_the_last_token_of_the_context_can_be_had(http: httpx.Client) -> None:
    for num, more, status in (
        (511, {"max_tokens": 1}, 200),
        (511, {}, 200),
        (512, {}, 400),
        (512, {"max_tokens": 1}, 400),
        (512, {"max_tokens": 0, "echo": True}, 200),
        (513, {"max_tokens": 0, "echo": True}, 400),
    ):
        assert http.post("/v1/completions", json={"prompt": [5] * num, **more}).status_code == status, (num, more)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/completions", "max_tokens"),
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)
def test_more_output_than_the_context_leaves_is_refused_with_both_numbers(
    http: httpx.Client, path: str, name: str, stream: bool
) -> None:
    """In the words that clients of each protocol look for, to ask for less. What they did not ask for is cut."""
    body = {**LONG[path](100), "stream": stream, "stop": ["a", "e", " "], "stop_sequences": ["a", "e", " "]}
    error = error_of(http.post(path, json={**body, name: 500}))
    assert error["param"] == name
    if path == "/v1/messages":
        found = re.search(r"input length and `max_tokens` exceed context limit: (\d+) \+ 500 > 512,?", error["message"])
        assert found is not None, error
    else:
        found = re.search(
            r"This model's maximum context length is 512 tokens\. However, you requested \d+ tokens "
            r"\((\d+) in the messages, 500 in the completion\)",
            error["message"],
        )
        assert found is not None, error
        assert f"requested {int(found[1]) + 500} tokens" in error["message"]
    num_prompt = int(found[1])
    assert http.post(path, json={**body, name: 512 - num_prompt}).status_code == 200
    assert error_of(http.post(path, json={**body, name: 513 - num_prompt}))["param"] == name
    if path != "/v1/messages":
        assert http.post(path, json=body).status_code == 200


def test_what_the_model_s_files_recommend_is_cut_to_the_context(
    http: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(served.engine.description.sampling_defaults, "max_tokens", 4000)
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        assert http.post(path, json={**LONG[path](500 if path == "/v1/completions" else 400)}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b'"text"',
        b'{"prompt": "a",}',
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "logit_bias": {"5": 1e999}}',
        b'{"prompt": "a", "temperature": Infinity}',
    ],
    ids=lambda body: str(body[:16]),
)
def test_what_is_no_json_is_a_bad_request(http: httpx.Client, body: bytes) -> None:
    error_of(http.post("/v1/completions", content=body))


def test_half_characters_are_replaced(http: httpx.Client) -> None:
    answer = http.post("/tokenize", content=b'{"prompt": "a\\ud800b", "add_special_tokens": false}')
    assert answer.json()["tokens"] == http.post("/tokenize", json={"prompt": "a\ufffdb"}).json()["tokens"]
    content = b'{"messages": [{"role": "user", "content": "a\\udfffb"}], "max_tokens": 2, "stream": true}'
    assert "data: [DONE]" in http.post("/v1/chat/completions", content=content).text


def test_half_characters_in_a_tools_output_are_replaced(http: httpx.Client) -> None:
    """Agents cut what tools print anywhere."""
    messages = (
        b'{"max_tokens": 2, "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": '
        b'"f", "input": {"a": "\\udc00"}}]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", '
        b'"content": "\\ud83d"}]}], "stream": true}'
    )
    assert '"message_stop"' in http.post("/v1/messages", content=messages).text
    items = (
        b'{"max_output_tokens": 2, "input": [{"type": "function_call_output", "call_id": "c", "output": "\\ud83d"}]}'
    )
    assert http.post("/v1/responses", content=items).status_code == 200


def test_a_null_is_an_absent_field(http: httpx.Client) -> None:
    wishes: list[tuple[str, Any, dict[str, Any]]] = [
        ("/v1/completions", CompletionRequest, {"prompt": "Hello", "temperature": 0, "max_tokens": 3}),
        ("/v1/chat/completions", ChatRequest, {"messages": HELLO, "temperature": 0, "max_tokens": 3}),
    ]
    for path, kind, given in wishes:
        nulls = {name: None for name in kind.__struct_fields__ if name not in given}
        with_nulls, without = (http.post(path, json=body) for body in ({**nulls, **given}, given))
        assert with_nulls.status_code == without.status_code == 200, with_nulls.text
        assert with_nulls.json()["choices"] == without.json()["choices"]


def test_an_unknown_field_is_ignored_and_said_once(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "octavo.server"):
        for _ in range(3):
            body = {"prompt": "Hello", "max_tokens": 1, "field_of_nobody": {"a": [1]}}
            assert http.post("/v1/completions", json=body).status_code == 200
    assert caplog.text.count("field_of_nobody") == 1


def test_what_stands_for_nothing_is_taken(http: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "stream_options": {}, "functions": None, "tools": [], "user": "me"}
    body |= {"tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"}, "metadata": {}}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_what_the_model_recommends_holds_until_the_request_says_otherwise() -> None:
    recommended = {"temperature": 0.6, "top_k": 20}
    silent = sampling_params(CompletionRequest(prompt="a"), recommended, max_tokens=16, logprobs=None)
    assert silent == SamplingParams(temperature=0.6, top_k=20, max_tokens=16)
    loud = CompletionRequest(prompt="a", temperature=1.5, top_k=0)
    spoken = sampling_params(loud, recommended, max_tokens=16, logprobs=None)
    assert spoken == SamplingParams(temperature=1.5, max_tokens=16)


def test_what_is_not_there_is_not_found(http: httpx.Client, openai: OpenAI) -> None:
    error = error_of(http.post("/v1/completions", json={"prompt": "a", "model": "gpt-5" * 100}), 404)
    assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert error_of(http.get("/v1/models/nothing"), 404)["param"] == "model"
    with pytest.raises(NotFoundError, match="'nothing'"):
        openai.chat.completions.create(model="nothing", messages=[{"role": "user", "content": "Hello"}])
    message = error_of(http.post("/chat/completions", json={}), 404)["message"]
    assert "/v1/chat/completions" in message
    error_of(http.get("/v1/completions"), 405)


def test_a_body_over_the_limit_is_refused(http: httpx.Client, served: Served) -> None:
    prompt = "x" * (1 << 20)
    message = error_of(http.post("/v1/completions", json={"prompt": prompt}), 413)["message"]
    assert "1048576 bytes" in message

    def parts() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"x" * 100_000
        yield b'"}'

    error_of(http.post("/v1/completions", content=parts()), 413)
    assert http.get("/health").status_code == 200


def test_a_huge_body_is_refused_and_the_server_answers_all_along(served: Served) -> None:
    url = served.listen(ServerOptions())
    with httpx.Client(base_url=url, timeout=60) as http, httpx.Client(base_url=url, timeout=60) as other:

        def parts() -> Iterator[bytes]:
            yield b'{"prompt": "'
            for _ in range(64):
                yield b"x" * (1 << 20)
                assert other.get("/health").status_code == 200

        error_of(http.post("/v1/completions", content=parts()), 413)


def test_a_long_prompt_is_read_beside_the_event_loop(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as one takes, others are answered."""
    read, goes_on, begun = served.engine._inputs.tokenize, threading.Event(), threading.Event()

    def wait(*args: Any) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return read(*args)

    monkeypatch.setattr(served.engine._inputs, "tokenize", wait)
    with ThreadPoolExecutor() as threads:
        answers = [
            threads.submit(http.post, path, json=body)
            for path, body in (
                ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
                ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}),
                ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
                ("/v1/messages", {"messages": HELLO, "max_tokens": 1}),
                ("/tokenize", {"prompt": "a"}),
            )
        ]
        assert begun.wait(60)
        assert http.get("/health").status_code == 200
        goes_on.set()
        assert [answer.result().status_code for answer in answers] == [200] * len(answers)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/v1/responses", {"input": "Hello", "tools": [{"type": "function", "name": "f"}]}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "tools": [{"name": "f", "input_schema": {}}]}),
    ],
)
def test_tools_that_a_model_cannot_call_name_the_setting(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    error = error_of(http.post(path, json=body))
    assert error["param"] == "tools"
    assert "tool_parser" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [401]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "priority": 2**70}, "priority"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_the_other_endpoints_name_faults_too(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(http.post(path, json=body))["param"] == param


def test_tokens_and_back(http: httpx.Client) -> None:
    text = "Hello, wörld 你好"
    found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 512
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0


def test_keys_open_all_but_the_probes(served: Served) -> None:
    url = served.listen(ServerOptions(api_keys=("first", "second-ключ"), allowed_origins=("http://page.example",)))
    with httpx.Client(base_url=url, timeout=60) as http:
        for path in ("/health", "/ping", "/version"):
            assert http.get(path).status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "first"},
            {"x-api-key": "wrong"},
        ):
            error = error_of(http.get("/v1/models", headers=headers), 401)
            assert error["type"] == "AuthenticationError"
        good = (
            {"authorization": "Bearer first"},
            {"authorization": b"bearer " + "second-ключ".encode()},
            {"x-api-key": "first"},
        )
        for headers in good:
            assert http.get("/v1/models", headers=headers).status_code == 200
        asked = {"origin": "http://page.example", "access-control-request-method": "POST"}
        allowed = http.options("/v1/chat/completions", headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "http://page.example"


def test_the_document_has_every_body(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/CompletionRequest"}
    properties = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "echo", "suffix", "temperature", "seed"} <= set(properties)
    assert json.dumps(document)


def test_the_document_says_what_must_be_there(http: httpx.Client) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    for name, required in (
        ("CompletionRequest", ["prompt"]),
        ("ChatRequest", ["messages"]),
        ("ResponsesRequest", ["input"]),
        ("MessagesRequest", ["messages", "max_tokens"]),
        ("CountTokensRequest", ["messages"]),
        ("EmbeddingRequest", ["input"]),
        ("DetokenizeRequest", ["tokens"]),
    ):
        assert sorted(schemas[name]["required"]) == sorted(required)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_fault_of_ours_is_an_answer_like_others(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("a fault")

    monkeypatch.setattr("octavo.server.service.Service.check", fail)
    body = {"prompt": "a", "messages": HELLO, "max_tokens": 1}
    opened = []
    with httpx.Client(base_url=served.url, timeout=60) as http:
        for _ in range(3):
            trace: list[str] = []
            answer = http.post(
                path,
                json=body,
                headers={"x-request-id": "mine"},
                extensions={"trace": lambda name, info, trace=trace: trace.append(name)},
            )
            error = error_of(answer, 500)
            assert "a fault of the server" in error["message"]
            assert answer.headers["x-request-id"] == "mine"
            opened.append("connection.connect_tcp.started" in trace)
    assert opened == [True, False, False]  # the connection lives on
    assert caplog.text.count("RuntimeError: a fault") == 3


def test_a_request_keeps_its_id(http: httpx.Client) -> None:
    assert http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(http.get("/nothing").headers["x-request-id"]) == 32
