"""Every field that clients send is decided on: served, of no effect, or refused by its name. The table says which."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest

from octavo.server.messages import MessagesRequest
from octavo.server.protocol import ChatRequest, CompletionRequest
from octavo.server.responses import ResponsesRequest

Answer = dict[str, Any]


@dataclass(frozen=True)
class Served:
    """A field that does something.

    Attributes:
        good: a value of it.
        bad: a value that is refused under the field's name.
        shows: whether an answer is such as the good value makes it.
        more: fields that must stand beside it.

    """

    good: Any
    bad: Any
    shows: Callable[[Answer], bool] = lambda answer: True
    more: Mapping[str, Any] = msgspec.UNSET  # type: ignore[assignment]


@dataclass(frozen=True)
class Refused:
    """A field that is refused where it asks for something."""

    value: Any


@dataclass(frozen=True)
class Idle:
    """A field of no effect."""

    value: Any


Fate = Served | Refused | Idle


def ids(answer: Answer) -> list[int]:
    """The tokens of the first choice."""
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def said(answer: Answer) -> str:
    """Its text, in whichever shape."""
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    part = answer["content"][0] if "content" in answer else answer["output"][0]["content"][0]
    return str(part["text"])


def num_said(answer: Answer) -> int:
    """How many tokens were generated."""
    usage = answer["usage"]
    return int(usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"])


SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "Hello"}]
TURNS = [*HELLO, {"role": "assistant", "content": "I say"}]

# What every endpoint that generates has.
EXTRAS: dict[str, Fate] = {
    "model": Served("second-name", "other"),
    "stream": Served(False, "yes"),
    "temperature": Served(0, -1),
    "top_k": Served(1, -2),
    "top_p": Served(0.01, 0),
    "min_p": Served(1.0, 2),
    "repetition_penalty": Served(1.5, 0),
    "presence_penalty": Served(1.5, 9),
    "frequency_penalty": Served(1.5, 9),
    "logit_bias": Served({"40": 100}, {"900": 1}, lambda answer: len(set(said(answer))) == 1),
    "allowed_token_ids": Served([40], [-5], lambda answer: len(set(said(answer))) == 1),
    "bad_words": Served(["a"], [5], lambda answer: "a" not in said(answer)),
    "min_tokens": Served(6, 9, lambda answer: num_said(answer) == 6),
    "stop_token_ids": Served([40], ["a"], lambda answer: num_said(answer) == 1, {"logit_bias": {"40": 100}}),
    "include_stop_str_in_output": Served(True, 1),
    "ignore_eos": Served(True, "no", lambda answer: num_said(answer) == 6, {"logit_bias": {"1": 5}}),
    "seed": Served(2, 2**70),
    "skip_special_tokens": Served(False, 1),
    "spaces_between_special_tokens": Served(False, 1),
    "structured_outputs": Served({"choice": ["yes"]}, {"nothing": 1}, lambda answer: said(answer) == "yes"),
    "priority": Served(1, "high"),
    "request_id": Served("mine", 5, lambda answer: "-mine-" in answer["id"]),
    "cache_salt": Served("grain", 5),
    "timeout": Served(60, 0),
}

# What completions and chat share.
CHUNKED: dict[str, Fate] = {
    **EXTRAS,
    "n": Served(2, 0, lambda answer: len(answer["choices"]) == 2),
    "max_tokens": Served(3, -1, lambda answer: num_said(answer) <= 3),
    "stop": Served(["e", "a", " "], [""], lambda answer: not set("ea ") & set(said(answer))),
    "stream_options": Served({}, 1),
    "best_of": Served(1, 2),
    "prompt_logprobs": Served(1, -1, lambda answer: "logprob" in str(answer)),
    "user": Served("me", 5),
    "truncation_side": Served("right", "up", more={"truncate_prompt_tokens": 2}),
    "return_tokens_as_token_ids": Served(True, 1),
    "return_token_ids": Served(True, 1, lambda answer: len(ids(answer)) == num_said(answer)),
    "stream_interval": Served(2, 0),
    "response_format": Served({"type": "json_object"}, {"type": "odd"}, lambda answer: said(answer).lstrip()[0] == "{"),
    "guided_json": Served(SCHEMA, {"type": "odd"}, lambda answer: said(answer).lstrip()[0] == "{"),
    "guided_regex": Served("[ab]{3}", "(", lambda answer: set(said(answer)) <= set("ab")),
    "guided_choice": Served(["yes"], [""], lambda answer: said(answer) == "yes"),
    "guided_grammar": Served('start: "x"', "start: (", lambda answer: said(answer) == "x"),
    "guided_decoding_backend": Idle("xgrammar"),
    "session_id": Idle("s"),
    "metadata": Idle({"a": "b"}),
    "store": Idle(True),
    "service_tier": Idle("auto"),
    "vllm_xargs": Idle({"a": 1}),
    "guided_whitespace_pattern": Refused(" "),
    "use_beam_search": Refused(True),
    "length_penalty": Refused(2),
    "logits_processors": Refused(["x"]),
    "logprob_token_ids": Refused([5]),
    "prompt_embeds": Refused("AA=="),
    "kv_transfer_params": Refused({"a": 1}),
    "repetition_detection": Refused({"a": 1}),
    "thinking_token_budget": Refused(5),
}


TABLE: dict[str, tuple[type[msgspec.Struct], dict[str, Any], dict[str, Fate]]] = {
    "/v1/completions": (
        CompletionRequest,
        {"prompt": "Hello", "seed": 1, "max_tokens": 6},
        {
            **CHUNKED,
            "prompt": Served([[40, 41]], [-1], lambda answer: answer["usage"]["prompt_tokens"] == 2),
            "echo": Served(True, 1, lambda answer: said(answer).startswith("Hello")),
            "logprobs": Served(2, 21, lambda answer: len(answer["choices"][0]["logprobs"]["top_logprobs"]) > 0),
            "truncate_prompt_tokens": Served(2, -2, lambda answer: answer["usage"]["prompt_tokens"] == 2),
            "add_special_tokens": Served(False, 1),
            "suffix": Refused("b"),
        },
    ),
    "/v1/chat/completions": (
        ChatRequest,
        {"messages": HELLO, "seed": 1, "max_tokens": 6},
        {
            **CHUNKED,
            "messages": Served(TURNS, ["Hello"]),
            "max_completion_tokens": Served(3, -1, lambda answer: num_said(answer) <= 3),
            "logprobs": Served(True, 1, lambda answer: len(answer["choices"][0]["logprobs"]["content"]) > 0),
            "top_logprobs": Served(2, 21, lambda answer: "top_logprobs" in str(answer), {"logprobs": True}),
            "truncate_prompt_tokens": Served(2, -2, lambda answer: answer["usage"]["prompt_tokens"] == 2),
            "add_special_tokens": Served(True, 1),
            "echo": Served(True, 1, lambda answer: said(answer).startswith("I say"), {"messages": TURNS}),
            "add_generation_prompt": Served(False, 1),
            "continue_final_message": Served(True, 1, more={"messages": TURNS}),
            "chat_template": Refused("{{ messages }}"),  # unless the server was started to trust it
            "chat_template_kwargs": Served({"enable_thinking": False}, 5),
            "documents": Served([{"title": "t", "text": "x"}], 5),
            "tools": Served([TOOL], [{"type": "odd"}]),
            "tool_choice": Served("auto", {"type": "odd"}, more={"tools": [TOOL]}),
            "parallel_tool_calls": Served(False, 1),
            "reasoning_effort": Served("low", 5),
            "include_reasoning": Served(False, 1),
            "functions": Refused([{"name": "f"}]),
            "function_call": Refused({"name": "f"}),
            "modalities": Refused(["audio"]),
            "audio": Refused({"voice": "x"}),
            "mm_processor_kwargs": Refused({"a": 1}),
        },
    ),
    "/v1/responses": (
        ResponsesRequest,
        {"input": "Hello", "seed": 1, "max_output_tokens": 6},
        {
            **EXTRAS,
            "input": Served(HELLO, 5),
            "instructions": Served("Be brief.", 5, lambda answer: answer["instructions"] == "Be brief."),
            "max_output_tokens": Served(3, 0, lambda answer: num_said(answer) <= 3),
            "stop": Served(["e", "a", " "], [""], lambda answer: not set("ea ") & set(said(answer))),
            "text": Served(
                {"format": {"type": "json_object"}},
                {"format": {"type": "odd"}},
                lambda answer: said(answer).lstrip()[0] == "{",
            ),
            "reasoning": Served({"effort": "low"}, 5, lambda answer: answer["reasoning"]["effort"] == "low"),
            "include": Served(["message.output_text.logprobs"], 5, lambda answer: "logprob'" in str(answer)),
            "top_logprobs": Served(
                2, 21, lambda answer: answer["top_logprobs"] == 2, {"include": ["message.output_text.logprobs"]}
            ),
            "truncation": Served("disabled", "auto"),
            "tools": Served([{"type": "function", "name": "f"}], [{"type": "web_search"}]),
            "tool_choice": Served("auto", "odd", more={"tools": [{"type": "function", "name": "f"}]}),
            "parallel_tool_calls": Served(False, 1, lambda answer: answer["parallel_tool_calls"] is False),
            "metadata": Served({"a": "b"}, {"a": 1}, lambda answer: answer["metadata"] == {"a": "b"}),
            "user": Served("me", 5, lambda answer: answer["user"] == "me"),
            "safety_identifier": Served("me", 5, lambda answer: answer["safety_identifier"] == "me"),
            "prompt_cache_key": Served("k", 5, lambda answer: answer["prompt_cache_key"] == "k"),
            "max_tool_calls": Served(2, "two", lambda answer: answer["max_tool_calls"] == 2),
            "prompt_cache_retention": Idle("24h"),
            "service_tier": Idle("auto"),
            "stream_options": Idle({"include_obfuscation": False}),
            "background": Refused(True),
            "conversation": Refused("conv_1"),
            "previous_response_id": Refused("resp_1"),
            "store": Refused(True),
            "prompt": Refused({"id": "pmpt_1"}),
            "context_management": Refused([{"type": "compaction"}]),
            "moderation": Refused({"model": "x"}),
        },
    ),
    "/v1/messages": (
        MessagesRequest,
        {"messages": HELLO, "seed": 1, "max_tokens": 6},
        {
            **EXTRAS,
            "messages": Served(TURNS, "Hello"),
            "max_tokens": Served(3, 0, lambda answer: num_said(answer) <= 3),
            "system": Served([{"type": "text", "text": "Be brief."}], 5),
            "stop_sequences": Served(["e", "a", " "], [""], lambda answer: not set("ea ") & set(said(answer))),
            "tools": Served([{"name": "f", "input_schema": SCHEMA}], [{"type": "bash_20250124", "name": "bash"}]),
            "tool_choice": Served({"type": "auto"}, {"type": "odd"}, more={"tools": [{"name": "f"}]}),
            "thinking": Served({"type": "disabled"}, {"type": "odd"}),
            "output_config": Served(
                {"format": {"type": "json_schema", "schema": SCHEMA}},
                {"format": {"type": "odd"}},
                lambda answer: said(answer).lstrip()[0] == "{",
            ),
            "metadata": Served({"user_id": "me"}, 5),
            "service_tier": Served("auto", "odd"),
            "cache_control": Idle({"type": "ephemeral"}),
            "context_management": Idle({"edits": []}),
            "inference_geo": Idle("eu"),
            "container": Refused("c"),
            "mcp_servers": Refused([{"url": "x"}]),
        },
    ),
}
CASES = [(path, name) for path, (*_, fates) in TABLE.items() for name in fates]

# What the public lists of the two older protocols have, texts alone, as servers of this kind read them.
LISTED = {
    "/v1/completions": """
        model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
        stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty length_penalty
        stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
        spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs
        logprob_token_ids bad_words prompt_embeds add_special_tokens response_format structured_outputs priority
        request_id session_id return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs
        repetition_detection stream_interval thinking_token_budget best_of guided_json guided_regex guided_choice
        guided_grammar guided_decoding_backend guided_whitespace_pattern logits_processors
    """,
    "/v1/chat/completions": """
        messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
        presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
        parallel_tool_calls reasoning_effort user use_beam_search top_k min_p repetition_penalty length_penalty
        stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
        spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs
        logprob_token_ids bad_words prompt_embeds add_special_tokens structured_outputs priority request_id session_id
        return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs repetition_detection
        stream_interval thinking_token_budget echo add_generation_prompt continue_final_message documents chat_template
        chat_template_kwargs mm_processor_kwargs include_reasoning functions function_call
    """,
}


def test_the_table_is_whole() -> None:
    for path, (kind, _, fates) in TABLE.items():
        assert set(fates) == set(kind.__struct_fields__), path
    for path, names in LISTED.items():
        assert set(names.split()) <= set(TABLE[path][2]), path


@pytest.mark.parametrize(("path", "name"), CASES, ids=lambda part: part.removeprefix("/v1/"))
def test_a_field_is_served_or_idle_or_refused(http: httpx.Client, agents: httpx.Client, path: str, name: str) -> None:
    _, base, fates = TABLE[path]
    fate = fates[name]
    client = agents if name in ("tools", "tool_choice") else http  # others know no way to call them

    def ask(value: Any, more: Mapping[str, Any]) -> httpx.Response:
        return client.post(path, json={**base, **more, name: value})

    match fate:
        case Served(good, bad, shows, more):
            beside = {} if more is msgspec.UNSET else more
            answer = ask(good, beside)
            assert answer.status_code == 200, answer.text
            assert shows(answer.json()), answer.text
            refused = ask(bad, beside)
        case Refused(value):
            refused = ask(value, {})
        case Idle(value):
            answer = ask(value, {})
            assert answer.status_code == 200, answer.text
            assert said(answer.json()) == said(client.post(path, json=base).json())
            return
    assert refused.status_code == (404 if name == "model" else 400), refused.text
    assert refused.json()["error"]["param"] == name, refused.text


@pytest.mark.parametrize("path", TABLE)
def test_nulls_and_unknown_fields_change_nothing(http: httpx.Client, path: str) -> None:
    _, base, fates = TABLE[path]
    plain = http.post(path, json=base).json()
    nulls = {name: None for name in fates if name not in base}
    answer = http.post(path, json={**base, **nulls, "no_such_field": {"a": [1]}, "prediction": "x"})
    assert answer.status_code == 200, answer.text
    assert said(answer.json()) == said(plain)


CALL = {"id": "c", "type": "odd", "function": {"name": "f", "arguments": "{}"}}
FORM = {"type": "json_schema", "schema": SCHEMA}

# Fields that have a choice of values, and what is none of them: path, fields, whose name the error has.
ODD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"truncation_side": "odd"}, "truncation_side"),
    ("/v1/completions", {"service_tier": "odd"}, "service_tier"),
    ("/v1/completions", {"guided_decoding_backend": "odd"}, "guided_decoding_backend"),
    ("/v1/completions", {"response_format": {"type": "odd"}}, "response_format"),
    ("/v1/completions", {"response_format": {"type": 5}}, "response_format"),
    ("/v1/completions", {"structured_outputs": {"json": SCHEMA, "structural_tag": "x"}}, "structured_outputs"),
    ("/v1/completions", {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "structured_outputs"),
    ("/v1/chat/completions", {"reasoning_effort": "odd"}, "reasoning_effort"),
    ("/v1/chat/completions", {"service_tier": "odd"}, "service_tier"),
    ("/v1/chat/completions", {"store": "odd"}, "store"),
    ("/v1/chat/completions", {"modalities": ["odd"]}, "modalities"),
    ("/v1/chat/completions", {"function_call": "odd"}, "function_call"),
    ("/v1/chat/completions", {"tool_choice": "odd"}, "tool_choice"),
    (
        "/v1/chat/completions",
        {"tool_choice": {"type": "odd", "function": {"name": "f"}}, "tools": [TOOL]},
        "tool_choice",
    ),
    ("/v1/chat/completions", {"tools": [{**TOOL, "type": "odd"}]}, "tools"),
    ("/v1/chat/completions", {"messages": [{"role": "odd", "content": "x"}]}, "messages"),
    ("/v1/chat/completions", {"messages": [*HELLO, {"role": "assistant", "tool_calls": [CALL]}]}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "odd", "text": "x"}]}]}, "messages"),
    ("/v1/responses", {"reasoning": {"effort": "odd"}}, "reasoning"),
    ("/v1/responses", {"reasoning": {"effort": 5}}, "reasoning"),
    ("/v1/responses", {"reasoning": {"summary": "odd"}}, "reasoning"),
    ("/v1/responses", {"reasoning": {"generate_summary": "odd"}}, "reasoning"),
    ("/v1/responses", {"text": {"verbosity": "odd"}}, "text"),
    ("/v1/responses", {"text": {"format": {**FORM, "type": "odd"}}}, "text"),
    ("/v1/responses", {"include": ["odd"]}, "include"),
    ("/v1/responses", {"truncation": "odd"}, "truncation"),
    ("/v1/responses", {"service_tier": "odd"}, "service_tier"),
    ("/v1/responses", {"prompt_cache_retention": "odd"}, "prompt_cache_retention"),
    ("/v1/responses", {"tool_choice": {"type": "odd", "name": "f"}}, "tool_choice"),
    ("/v1/responses", {"tools": [{"type": "odd", "name": "f"}]}, "tools"),
    ("/v1/responses", {"input": [{"role": "odd", "content": "x"}]}, "input"),
    ("/v1/responses", {"input": [{"type": "odd"}]}, "input"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "odd", "text": "x"}]}]}, "input"),
    ("/v1/messages", {"thinking": {"type": "odd"}}, "thinking"),
    ("/v1/messages", {"thinking": {}}, "thinking"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": "odd"}}, "thinking"),
    ("/v1/messages", {"thinking": {"type": "adaptive", "display": "odd"}}, "thinking"),
    ("/v1/messages", {"output_config": {"effort": "odd"}}, "output_config"),
    ("/v1/messages", {"output_config": {"format": {**FORM, "type": "odd"}}}, "output_config"),
    ("/v1/messages", {"service_tier": "odd"}, "service_tier"),
    ("/v1/messages", {"cache_control": {"type": "odd"}}, "cache_control"),
    ("/v1/messages", {"cache_control": {"type": "ephemeral", "ttl": "odd"}}, "cache_control"),
    ("/v1/messages", {"tool_choice": {"type": "odd"}, "tools": [{"name": "f"}]}, "tool_choice"),
    (
        "/v1/messages",
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "odd"}, "tools": [{"name": "f"}]},
        "tool_choice",
    ),
    ("/v1/messages", {"tools": [{"type": "odd", "name": "f"}]}, "tools"),
    ("/v1/messages", {"messages": [{"role": "odd", "content": "x"}]}, "messages"),
    ("/v1/messages", {"messages": [{"content": "x"}]}, "messages"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "odd", "text": "x"}]}]}, "messages"),
    ("/v1/messages", {"system": [{"type": "odd", "text": "x"}]}, "system"),
    ("/v1/embeddings", {"encoding_format": "odd"}, "encoding_format"),
    ("/v1/embeddings", {"truncation_side": "odd"}, "truncation_side"),
    ("/v1/embeddings", {"pooling": "odd"}, "pooling"),
    ("/tokenize", {"messages": [{"role": "odd", "content": "x"}]}, "messages"),
]


@pytest.mark.parametrize(("path", "fields", "param"), ODD, ids=str)
def test_what_is_no_choice_is_refused(agents: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    base = TABLE[path][1] if path in TABLE else {"input": "Hello"} if path == "/v1/embeddings" else {}
    answer = agents.post(path, json={**base, **fields})
    assert answer.status_code == 400, answer.text
    found = answer.json()
    assert found["error"]["param"] == param, answer.text
    assert path != "/v1/messages" or (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"guided_decoding_backend": "xgrammar:disable-any-whitespace"}),
        ("/v1/chat/completions", {"reasoning_effort": "minimal", "service_tier": "flex", "store": False}),
        ("/v1/chat/completions", {"messages": [{"role": "developer", "content": "x"}, *HELLO]}),
        ("/v1/responses", {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}}),
        ("/v1/responses", {"reasoning": {"effort": None, "summary": "auto"}, "prompt_cache_retention": "24h"}),
        ("/v1/messages", {"thinking": {"type": "adaptive", "display": None}, "output_config": {"effort": "max"}}),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}}),
        ("/v1/messages", {"cache_control": {"type": "ephemeral", "ttl": "1h"}}),
    ],
    ids=str,
)
def test_what_is_a_choice_is_taken(agents: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    answer = agents.post(path, json={**TABLE[path][1], **fields})
    assert answer.status_code == 200, answer.text


def test_an_error_says_what_may_be_chosen(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", "truncation_side": "odd"})
    assert "left, right" in answer.json()["error"]["message"]
    answer = http.post("/v1/messages", json={"messages": [{"role": "odd", "content": "x"}], "max_tokens": 1})
    assert "user, assistant" in answer.json()["error"]["message"]


HUGE = {"a": ["x" * 1000, [1, {"b": None}]] * 20}  # of no type that any field but a few has


@pytest.mark.parametrize("path", TABLE)
def test_an_error_never_carries_the_request_back(http: httpx.Client, path: str) -> None:
    _, base, fates = TABLE[path]
    for name in fates:
        for value in (HUGE, [HUGE], str(HUGE), [str(HUGE)]):
            answer = http.post(path, json={**base, name: value})
            assert answer.status_code < 500, f"{name}: {answer.text:.300}"
            assert answer.status_code == 200 or len(answer.content) < 2000, f"{name}: {answer.text:.300}"
