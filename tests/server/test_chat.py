"""/v1/chat/completions: the assistant's turn, whole and in pieces, as OpenAI's client reads it."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from repo.sources import text_of
from server.events import chunks_of, joined
from server.served import Served
from server.spoken import SPOKEN, WORDS

from octavo import LLM, SamplingParams
from octavo.server.options import ServerOptions

PATH = "/v1/chat/completions"
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post(PATH, json={"messages": HELLO, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_tokens_are_those_of_an_offline_chat(http: httpx.Client, offline: LLM) -> None:
    [expected] = offline.chat(HELLO, SamplingParams(temperature=0, max_tokens=20))
    found = chat(http, temperature=0, max_completion_tokens=20, return_token_ids=True)
    [choice] = found["choices"]
    assert found["prompt_token_ids"] == expected.prompt_token_ids
    assert choice["token_ids"] == expected.outputs[0].token_ids
    assert choice["message"]["content"] == expected.outputs[0].text
    assert choice["finish_reason"] == expected.outputs[0].finish_reason
    assert http.post("/tokenize", json={"messages": HELLO}).json()["tokens"] == expected.prompt_token_ids


def test_messages_of_newer_clients(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}
    plain = chat(http, **fields)
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    assert chat(http, messages=parts, **fields)["prompt_token_ids"] == plain["prompt_token_ids"]


def test_the_newer_name_of_max_tokens_wins(http: httpx.Client) -> None:
    found = chat(http, temperature=0, max_tokens=30, max_completion_tokens=3, ignore_eos=True)
    assert found["usage"]["completion_tokens"] == 3


def test_without_max_tokens_all_the_rest_may_be_used(http: httpx.Client) -> None:
    found = chat(http, temperature=0, ignore_eos=True)
    assert found["usage"]["total_tokens"] == 512
    assert found["choices"][0]["finish_reason"] == "length"


WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 20},
    "samples": {"seed": 3, "n": 3, "max_tokens": 15},
    "scores": {"seed": 3, "max_tokens": 15, "logprobs": True, "top_logprobs": 2},
    "scores alone": {"seed": 3, "max_tokens": 15, "logprobs": True},
    "stops": {"seed": 5, "n": 4, "max_tokens": 60, "stop": ["e", "a", " "]},
    "one token": {"temperature": 0, "max_tokens": 1},
    "no text": {"temperature": 0, "max_tokens": 4, "logit_bias": {"1": 100}},
}


@pytest.mark.parametrize("name", WISHES)
def test_the_joined_stream_is_the_whole(http: httpx.Client, name: str) -> None:
    wish = WISHES[name]
    whole = chat(http, **wish)
    pieces = joined(chunks_of(http, PATH, messages=HELLO, **wish))
    assert len(pieces) == len(whole["choices"])
    for choice in whole["choices"]:
        piece = pieces[choice["index"]]
        assert piece["text"] == choice["message"]["content"]
        assert piece["finish_reason"] == choice["finish_reason"]
        assert piece["logprobs"] == (
            {"content": choice["logprobs"]["content"], "refusal": []} if choice["logprobs"] else {}
        )


def test_the_role_comes_first_and_together_with_the_first_token(http: httpx.Client) -> None:
    body = {"messages": HELLO, "stream": True, "seed": 1, "n": 2, "max_tokens": 5, "ignore_eos": True, "logprobs": True}
    with http.stream("POST", PATH, json=body) as answer:
        first_write = next(answer.iter_raw()).decode()
    events = [json.loads(event.removeprefix("data: ")) for event in first_write.split("\n\n") if event]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"][0]["index"] == 0]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert len(deltas) >= 2
    assert "role" not in deltas[1]
    chunks = chunks_of(http, PATH, **{**body, "logprobs": None})
    roles = [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1]


def test_usage_comes_last_in_a_chunk_without_choices(http: httpx.Client) -> None:
    wish = {"messages": HELLO, "temperature": 0, "max_tokens": 5}
    *content, last = chunks_of(http, PATH, **wish, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in content)


def test_scores_in_chat_have_a_form_of_their_own(http: httpx.Client) -> None:
    [choice] = chat(http, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3)["choices"]
    for entry in choice["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 3
        best = entry["top_logprobs"][0]
        assert (entry["token"], entry["logprob"], entry["bytes"]) == (best["token"], best["logprob"], best["bytes"])
    [choice] = chat(http, temperature=0, max_tokens=6, logprobs=True)["choices"]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])
    text = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]).decode("utf-8", "replace")
    assert text == choice["message"]["content"]


def test_the_last_turn_is_gone_on_with(http: httpx.Client, offline: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I say"}]
    wish = {"messages": messages, "continue_final_message": True, "temperature": 0, "max_tokens": 5}
    plain = chat(http, **wish, return_token_ids=True)
    ids = offline.tokenizer.encode_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert plain["prompt_token_ids"] == ids
    echoed = chat(http, **wish, echo=True)["choices"][0]["message"]["content"]
    assert echoed == "I say" + plain["choices"][0]["message"]["content"]
    assert joined(chunks_of(http, PATH, **wish, echo=True))[0]["text"] == echoed


def test_a_template_of_the_request_needs_trust(http: httpx.Client, served: Served) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    refused = http.post(PATH, json={"messages": HELLO, "chat_template": template})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template"
    with httpx.Client(base_url=served.listen(ServerOptions(trust_request_chat_template=True)), timeout=60) as trusting:
        found = chat(trusting, chat_template=template, max_tokens=1, return_token_ids=True)
        assert (
            found["prompt_token_ids"] == trusting.post("/tokenize", json={"prompt": "Be brief.Hello"}).json()["tokens"]
        )


SPEAKS: dict[str, Any] = {
    "structured_outputs": {"choice": [SPOKEN]},
    "tools": [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "now")
    ],
}


def test_reasoning_content_and_calls_streamed_and_whole(agents: httpx.Client) -> None:
    [choice] = chat(agents, **SPEAKS)["choices"]
    said = choice["message"]
    assert said["reasoning"] == said["reasoning_content"] == WORDS["reasoning"]
    assert said["content"] == WORDS["before"] + WORDS["between"]
    assert [call["function"] for call in said["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert choice["finish_reason"] == "tool_calls"
    chunks = chunks_of(agents, PATH, messages=HELLO, **SPEAKS)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == WORDS["reasoning"]
    assert joined(chunks)[0] == {"text": said["content"], "logprobs": {}, "finish_reason": "tool_calls"}
    calls: dict[int, dict[str, str]] = {}
    for piece in [piece for delta in deltas for piece in delta.get("tool_calls", ())]:
        assert ("id" in piece) == (piece["index"] not in calls), "id and name come once, first"
        call = calls.setdefault(piece["index"], {"name": piece["function"].get("name", ""), "arguments": ""})
        call["arguments"] += piece["function"].get("arguments", "")
    assert list(calls.values()) == [call["function"] for call in said["tool_calls"]]


def test_usage_tells_reasoning_apart(agents: httpx.Client, http: httpx.Client) -> None:
    wish = {**SPEAKS, "top_k": 1}
    usage = chat(agents, **wish)["usage"]
    details = usage["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < usage["completion_tokens"]
    stream = {**wish, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = chunks_of(agents, PATH, messages=HELLO, **stream)
    assert last["usage"]["completion_tokens_details"] == details
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == details["reasoning_tokens"]
    twice = chat(agents, **wish, n=2)["usage"]
    assert twice["completion_tokens_details"]["reasoning_tokens"] == 2 * details["reasoning_tokens"]
    assert "completion_tokens_details" not in chat(http, max_tokens=1)["usage"]


def test_reasoning_can_be_left_out(agents: httpx.Client) -> None:
    [choice] = chat(agents, **SPEAKS, include_reasoning=False)["choices"]
    assert not {"reasoning", "reasoning_content"} & set(choice["message"])
    chunks = chunks_of(agents, PATH, messages=HELLO, **SPEAKS, include_reasoning=False)
    assert not any("reasoning" in chunk["choices"][0]["delta"] for chunk in chunks)
    assert joined(chunks)[0]["text"] == choice["message"]["content"]


def test_a_turn_is_sent_back_as_it_came(served: Served) -> None:
    """Reasoning under either name, and arguments as text, are what templates know."""
    template = "{% for m in messages %}{{ m.reasoning_content or '' }}|{{ m.tool_calls | tojson }}{% endfor %}"
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]}
    parsed = {**call, "function": {"name": "add", "arguments": {"a": 1}}}
    with httpx.Client(base_url=served.listen(ServerOptions(trust_request_chat_template=True)), timeout=60) as http:
        found = chat(http, messages=[turn], chat_template=template, max_tokens=1, return_token_ids=True)
        text = http.post("/detokenize", json={"tokens": found["prompt_token_ids"]}).json()["prompt"]
    assert text == f"Hm.|{json.dumps([parsed])}"


def test_effort_and_tools_reach_the_template(served: Served) -> None:
    template = "{{ reasoning_effort }} {{ enable_thinking }} {{ tools and tools[0].function.name }}"
    options = ServerOptions(trust_request_chat_template=True, tool_parser="hermes")
    with httpx.Client(base_url=served.listen(options), timeout=60) as http:
        for wish, text in (
            ({"reasoning_effort": "low"}, "low  None"),
            ({"reasoning_effort": "none", "tools": SPEAKS["tools"]}, "none False add"),
            ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "none True None"),
        ):
            found = chat(http, **wish, chat_template=template, max_tokens=1, return_token_ids=True)  # type: ignore[arg-type]
            ids = found["prompt_token_ids"]
            assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text
        body = {"messages": HELLO, "chat_template": template, "tools": SPEAKS["tools"]}
        ids = http.post("/tokenize", json=body).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"].endswith(" add")


def test_the_openai_client(openai: OpenAI) -> None:
    wish: dict[str, Any] = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_completion_tokens": 12}
    whole = openai.chat.completions.create(**wish, logprobs=True, top_logprobs=1)
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content is not None
    assert whole.usage is not None
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    chunks = list(openai.chat.completions.create(**wish, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_example_of_the_readme(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    readme = text_of(Path("README.md"))
    [example] = [code for code in re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S) if "OpenAI(" in code]
    example = example.replace("http://127.0.0.1:8000", served.url).replace('"demo"', '"tiny"')
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out
