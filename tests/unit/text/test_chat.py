"""Chat templates of the kinds that models have, and what hostile ones and malformed messages end in."""

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from doubles.vocabularies import byte_level, write_folder
from jinja2 import TemplateError

from octavo.errors import RequestError
from octavo.text import chat
from octavo.text.chat import ChatTemplate
from octavo.text.tokenizer import load_tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOLD_BY_NONE = (
    "{% for message in messages %}{% if message['content'] is none %}(calls){% else %}{{ message['content'] }}"
    "{% endif %}{% endfor %}"
)
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- message.content }}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, multi_step=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') if message.content else '' %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

USER = {"role": "user", "content": "Hi  there "}
REPLY = {"role": "assistant", "content": "Hello"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"é": [1]}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "42"}
TOOL = {"type": "function", "function": {"name": "f", "description": "<é & 'x'>", "parameters": {}}}


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"} | special)


def refused(source: str, messages: Any = (USER,), **options: Any) -> str:
    """The error's message; one line, and short."""
    with pytest.raises(RequestError) as caught:
        template(source).render(messages if not isinstance(messages, tuple) else list(messages), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def test_chatml() -> None:
    assert template(CHATML).render([USER, REPLY, USER]) == (
        "<|im_start|>user\nHi  there <|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nHi  there <|im_end|>\n<|im_start|>assistant\n"
    )
    assert template(CHATML).render([USER], add_generation_prompt=False) == "<|im_start|>user\nHi  there <|im_end|>\n"


def test_llama3_kind() -> None:
    text = template(LLAMA3).render(
        [{"role": "system", "content": " Be brief. "}, USER, CALL, RESULT],
        tools=[TOOL],
        chat_template_kwargs={"date_string": "26 Jul 2024"},
    )
    assert text == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n"
        '{\n    "type": "function",\n    "function": {\n        "name": "f",\n        "description": "<é & \'x\'>",\n'
        '        "parameters": {}\n    }\n}\n\n'
        "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi  there<|eot_id|>"
        '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "f", "parameters": {"é": [1]}}<|eot_id|>'
        "<|start_header_id|>ipython<|end_header_id|>\n\n42<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert datetime.now().astimezone().strftime("%Y") in template(LLAMA3).render([USER])
    assert "single tool-calls" in refused(LLAMA3, [{**CALL, "tool_calls": CALL["tool_calls"] * 2}])


def test_mistral_kind() -> None:
    text = template(MISTRAL).render([USER, REPLY, USER])
    assert text == "<s>[INST] Hi  there  [/INST] Hello</s>[INST] Hi  there  [/INST]"
    assert "roles must alternate" in refused(MISTRAL, [USER, USER])


def test_qwen_kind() -> None:
    text = template(QWEN).render(
        [USER, CALL, RESULT], tools=[TOOL], chat_template_kwargs={"enable_thinking": False, "messages": "no"}
    )
    assert text == (
        '<|im_start|>system\n# Tools\n<tools>\n{"type": "function", "function": {"name": "f", '
        '"description": "<é & \'x\'>", "parameters": {}}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nHi  there <|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"é": [1]}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_loops_keep_all_that_templates_ask_of_them() -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
        "{{ loop.index }}/{{ loop.length }}{{ ' first' if loop.first }}{{ ' last' if loop.last }} "
        "{{ loop.previtem.content if loop.previtem is defined }};{% endfor %}"
        "{% for key, value in messages[0].items() if key == 'role' %}{{ key }}={{ value }}{% endfor %}"
        "{% for x in nothing %}{% else %} none{% endfor %}"
        "{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
        "{% for x in range(9) %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}"
    )
    text = template(source).render([USER, USER, REPLY])
    assert text == "1/3 first ;3/3 last Hi  there ;role=user none1201"


def test_trims_blocks_as_templates_expect() -> None:
    assert template("  {% if true %}\n  x\n  {% endif %}\n").render([USER]) == "  x\n"


def test_text_parts_join_and_absent_content_counts_as_none() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb"
    call = {key: value for key, value in CALL.items() if key != "content"}
    assert template("{{ messages[0].content is none }}").render([call]) == "True"
    assert template("{{ 'tool_calls' in messages[0] }}").render([{**REPLY, "tool_calls": []}]) == "False"
    assert template("{{ messages[0].content }}").render([{"role": "user", "content": ""}]) == ""


def test_arguments_that_are_no_json_are_shown_as_they_are() -> None:
    call = {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]}
    assert template("{{ messages[0].tool_calls[0].function.arguments }}").render([call]) == '{"a": '


def test_messages_are_not_changed() -> None:
    message = {"role": "user", "content": "x"}
    template(CHATML).render([message], continue_final_message=True, add_generation_prompt=False)
    assert message == {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ("hi", "must be a list"),
        (None, "must be a list"),
        ({"role": "user"}, "must be a list"),
        (["hi"], "messages[0] must be an object"),
        ([USER, {"content": "x"}], "messages[1].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "only text is understood"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "content[0]"),
        ([{"role": "assistant", "tool_calls": 5}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "tool_calls"),
        ([{"role": "u" * 100_000, "content": {}}], "messages[0].content"),
    ],
)
def test_malformed_messages_are_named(messages: Any, says: str) -> None:
    assert says in refused(CHATML, messages)


def test_malformed_tools_are_named() -> None:
    assert "tools must be a list" in refused(CHATML, tools="x")
    assert "tools must be a list" in refused(CHATML, tools=["x"])
    assert template("{{ tools is none }}").render([USER], tools=[]) == "True"


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        (CHATML, "The answer is ", "<|im_start|>assistant\nThe answer is "),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[/]{% endfor %}", " a b ", "[assistant]a b"),
    ],
)
def test_the_last_message_can_be_continued(source: str, content: str, text: str) -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [USER, {"role": "assistant", "content": content}]
    assert template(source).render(messages, **options).endswith(text)
    assert "leaves out" in refused("{{ messages[0].content }}", messages, **options)
    assert "set one of them" in refused(source, messages, continue_final_message=True)
    assert "text" in refused(source, [USER, CALL], **options)


def test_named_templates() -> None:
    templates = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "{{ documents | length }}"}, {})
    assert templates.render([USER]) == "plain"
    assert templates.render([USER], tools=[TOOL]) == "tools"
    assert templates.render([USER], chat_template="rag", chat_template_kwargs={"documents": [1, 2]}) == "2"
    assert templates.render([USER], chat_template="own {{ messages | length }}") == "own 1"
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplate({}, {}).render([USER])


def test_templates_are_found_in_a_folder(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "listed tools"}]
    tokenizer = load_tokenizer(write_folder(tmp_path, byte_level(), {"chat_template": listed}))
    assert tokenizer.render_chat([USER]) == "listed"
    assert tokenizer.render_chat([USER], tools=[TOOL]) == "listed tools"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("from a folder")
    write_folder(tmp_path, byte_level(), {"chat_template": "plain"}, chat_template__json='{"chat_template": "json"}')
    assert load_tokenizer(tmp_path).render_chat([USER]) == "plain"
    assert load_tokenizer(tmp_path).render_chat([USER], chat_template="rag") == "from a folder"
    write_folder(tmp_path, byte_level(), {}, chat_template__json='{"chat_template": "json"}')
    assert load_tokenizer(tmp_path).render_chat([USER]) == "json"
    write_folder(tmp_path, byte_level(), {"chat_template": "plain"}, chat_template__jinja="file")
    assert load_tokenizer(tmp_path).render_chat([USER]) == "file"


def test_a_prompt_begins_with_one_token_of_beginning(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": MISTRAL}
    tokenizer = load_tokenizer(write_folder(tmp_path, byte_level(add_bos=True), config))
    ids = tokenizer.encode_chat([USER])
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(0) == 1
    assert ids == tokenizer.encode(tokenizer.render_chat([USER]), add_special_tokens=False)


def test_surrogates_in_messages_do_no_harm(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, byte_level(), {"chat_template": "{{ messages | tojson }}"}))
    ids = tokenizer.encode_chat([{"role": "user", "content": "a\udfff"}])
    assert "a\N{REPLACEMENT CHARACTER}" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for %}", "cannot be compiled"),
        ("{{ x", "cannot be compiled"),
        ("{% generation %}", "cannot be compiled"),
        ("{% import 'x' as y %}", "refuses"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ messages[7].content }}", "refuses"),
        ("{{ messages[0].content + 1 }}", "refuses"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.__class__.__init__.__globals__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update({}) }}", "unsafe"),
        ("{{ raise_exception('x' * 5000) }}", "xxx ..."),
        ("{{ raise_exception('two\nlines') }}", "two lines"),
        ("{{ 1 // 0 }}", "refuses"),
        ("{{ range(10**9) }}", "refuses"),
        ("{{ 'x' * 10**10 }}", "repeated"),
        ("{{ [1] * 10**10 }}", "repeated"),
        ("{{ 9 ** 9 ** 9 }}", "power"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "refuses"),
    ],
)
def test_broken_and_hostile_templates_end_in_one_line(source: str, says: str) -> None:
    assert says in refused(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% for i in range(9) %}{{ m(n - 1) if n }}{% endfor %}{% endmacro %}{{ m(40) }}",
    ],
)
def test_endless_templates_are_ended(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(chat, "_MAX_SECONDS", 0.1)
    assert "seconds" in refused(source)


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_MAX_OUTPUT_CHARS", 1000)
    assert "more than 1000 characters" in refused("{% for i in range(500) %}{{ 'xyz' }}{% endfor %}")


def test_the_bound_on_time_is_of_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    templates = template("{% for m in messages %}{{ m.role }}{% endfor %}")
    assert templates.render([USER]) == "user"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
    assert templates.render([USER]) == "user"


def test_a_templates_own_refusal_is_kept_as_the_cause() -> None:
    with pytest.raises(RequestError) as caught:
        template("{{ raise_exception('no') }}").render([USER])
    assert isinstance(caught.value.__cause__, TemplateError)
    assert caught.value.param == "messages"


def test_a_turn_of_calls_alone_suits_every_template() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatTemplate({"default": TOLD_BY_NONE}, {}).render(turns, add_generation_prompt=False) == "1+1(calls)"
    text = ChatTemplate({"default": CHATML}, {}).render(turns, add_generation_prompt=False)
    assert text == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    with pytest.raises(RequestError, match="no such turn"):
        ChatTemplate({"default": "{{ raise_exception('no such turn') }}"}, {}).render(turns)
