"""Tool calls and reasoning: what a whole output means, and that it means the same in pieces."""

import json
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from doubles.vocabularies import byte_level, write_folder
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import RequestError
from octavo.text.grammar import GrammarCompiler
from octavo.text.reasoning import (
    REASONING_FORMATS,
    ReasoningParser,
    begins_inside,
    detect_reasoning,
    end_token,
    num_reasoning_tokens,
)
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.text.tools import FORMATS, Tool, ToolParser, detect_format, forced_calls, read_tools, strict_calls
from octavo.text.turn import Turn

TOOLS = [
    Tool("get_weather", {"type": "object", "properties": {"city": {"enum": ["Rome", "Köln"]}}, "required": ["city"]}),
    Tool(
        "add",
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/n"}},
            "required": ["a"],
            "$defs": {"n": {"type": "integer"}},
        },
    ),
]
NAMES = [tool.name for tool in TOOLS]


@dataclass
class Whole:
    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)  # what came after what: texts joined, calls by number
    has_calls: bool = False


def read(pieces: list[str], tool_format: str = "", reasoning: str = "", inside: bool = False, **options: Any) -> Whole:
    """What a client makes of the deltas."""
    numbers = count()
    tools = None
    if tool_format:
        tools = ToolParser(FORMATS[tool_format], NAMES, make_id=lambda: f"id{next(numbers)}", **options)
    thinks = ReasoningParser(REASONING_FORMATS[reasoning], inside=inside) if reasoning else None
    turn, whole = Turn(thinks, tools), Whole()
    for i, piece in enumerate(pieces):
        delta = turn.add(piece, is_over=i == len(pieces) - 1)
        whole.reasoning += delta.reasoning
        whole.content += delta.content
        for part in delta.parts:
            told = part if isinstance(part, str) else f"call {part.index}"
            if isinstance(part, str) and whole.order and not whole.order[-1].startswith("call "):
                whole.order[-1] += told
            elif whole.order[-1:] != [told]:
                whole.order.append(told)
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(whole.calls)
                assert call.id is not None
                whole.calls.append([call.name, ""])
                whole.ids.append(call.id)
            else:
                assert call.id is None
            assert call.index == len(whole.calls) - 1
            whole.calls[-1][1] += call.arguments
    whole.has_calls = turn.has_calls
    return whole


ROME = '{"city": "Rome"}'
NESTED = '{"a": {"b": ["}", "\\"]", {"c": 1e5}]}, "d": "x</tool_call>"}'
CASES: list[tuple[str, str, str, list[list[str]]]] = [
    ("hermes", "Hello", "Hello", []),
    ("hermes", "", "", []),
    ("hermes", " spaces \n", " spaces \n", []),
    (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>',
        "",
        [["get_weather", ROME]],
    ),
    (
        "hermes",
        f'Let me.\n\n<tool_call>{{"name": "f", "arguments": {NESTED}}}</tool_call>\n',
        "Let me.",
        [["f", NESTED]],
    ),
    ("hermes", f'<tool_call>{{"arguments": {ROME}, "name": "f"}}</tool_call> and', " and", [["f", ROME]]),
    ("hermes", f'One <tool_call>{{"name": "f", "arguments": {ROME}}}</tool_call>two', "Onetwo", [["f", ROME]]),
    (
        "hermes",
        '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name":"g","arguments":{}}</tool_call>',
        "",
        [["f", "{}"], ["g", "{}"]],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [["f", '{"a": 1}']]),
    ("hermes", "<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", []),
    ("hermes", '<tool_call>{"nom": 5}</tool_call>', '<tool_call>{"nom": 5}</tool_call>', []),
    ("hermes", '<tool_call>{"name": [}]', '<tool_call>{"name": [}]', []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", '<tool_call>{"name": "f", "id": 5, "ok": true, "arguments": {"a', "", [["f", '{"a']]),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Rome"}}', "", [["get_weather", ROME]]),
    (
        "llama3",
        '{"type": "function", "name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}',
        "",
        [["add", '{"a": 1}'], ["add", '{"a": 2}']],
    ),
    ("llama3", '<|python_tag|>{"name": "other", "parameters": {}}', "", [["other", "{}"]]),
    ("llama3", '{"name": "John", "age": 3}', '{"name": "John", "age": 3}', []),
    ("llama3", ' {"city": "Rome"} is JSON', ' {"city": "Rome"} is JSON', []),
    ("llama3", 'So: {"name": "add", "parameters": {}}', 'So: {"name": "add", "parameters": {}}', []),
    ("llama3", '{"a": <|python_tag|>{"name": "add", "parameters": {}}', '{"a":', [["add", "{}"]]),
    (
        "llama3",
        '{"name": "add", <|python_tag|>{"name": "f", "parameters": {}}',
        "",
        [["add", "{}"], ["f", "{}"]],
    ),
    ("hermes", '<tool_call>{"a": <tool_call>{"name": "f"}</tool_call>', '<tool_call>{"a": ', [["f", "{}"]]),
    ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]',
        "",
        [["add", '{"a": 1}'], ["f", "{}"]],
    ),
    ("mistral", 'Yes.[TOOL_CALLS][{"name": "add", "arguments": {"a": [1, 2]}}]', "Yes.", [["add", '{"a": [1, 2]}']]),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", "[1, 2]", "[1, 2]", []),
]


# Outputs of calls alone, by format, and what the second of them is called.
CUT = {
    "hermes": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    ),
    "llama3": '{"name": "add", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {"city": "Rome"}}',
    "mistral": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {"city": "Rome"}}]'
    ),
}
ADD, WEATHER = '{"a": 1}', '{"city": "Rome"}'


@pytest.mark.parametrize("only_calls", [False, True])
@pytest.mark.parametrize("tool_format", sorted(CUT))
def test_of_a_call_that_is_cut_nothing_is_content(tool_format: str, only_calls: bool) -> None:
    """Wherever the output is cut: there is the call as far as it goes, or nothing. Streamed, it is the same."""
    text, num_told = CUT[tool_format], []
    assert read([text], tool_format).calls == [["add", ADD], ["get_weather", WEATHER]]
    for end in range(len(text)):
        whole = read([text[:end]], tool_format, only_calls=only_calls)
        assert read([*text[:end], ""], tool_format, only_calls=only_calls) == whole, end
        for (name, arguments), (full, rest) in zip(whole.calls, [("add", ADD), ("get_weather", WEATHER)], strict=False):
            assert name == full
            assert rest.startswith(arguments)
        num_told.append(len(whole.calls))
        if only_calls or whole.calls:
            assert whole.content == "", text[:end]
        else:  # what may be content as well as a call
            assert whole.content == text[: len(whole.content)]
            assert whole.content in ("", "<", "[") or tool_format == "llama3"
            assert len(whole.content) <= len('{"name'), whole.content
    assert num_told == sorted(num_told)
    assert set(num_told) == {0, 1, 2}


@pytest.mark.parametrize(
    ("tool_format", "text", "content"),
    [
        ("hermes", "Yes. <tool_call>", "Yes."),
        ("hermes", 'Yes. <tool_call>\n{"na', "Yes."),
        ("hermes", "Yes. <tool_ca", "Yes. "),
        ("hermes", "a <tool", "a <tool"),
        ("hermes", "\n<tool", "\n"),
        ("hermes", "<", "<"),
        ("mistral", "Yes.[TOOL_CALLS", "Yes."),
        ("mistral", "Yes.[TOOL_CALLS] [", "Yes."),
        ("llama3", '{"name": "get_', ""),
        ("llama3", '{"name": "gen', '{"name": "gen'),
        ("llama3", '{"city": "Ro', '{"city": "Ro'),
        ("llama3", '<|python_tag|>{"name": "ot', ""),
    ],
)
def test_a_cut_call_after_text(tool_format: str, text: str, content: str) -> None:
    whole = read([text], tool_format)
    assert (whole.content, whole.calls) == (content, [])
    assert read([*text, ""], tool_format) == whole


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), CASES, ids=[f"{i}" for i in range(len(CASES))])
def test_an_output_means_the_same_in_any_pieces(
    tool_format: str, text: str, content: str, calls: list[list[str]]
) -> None:
    whole = read([text], tool_format)
    assert (whole.content, whole.calls) == (content, calls)
    assert read([*text, ""], tool_format) == whole
    for size in (2, 3, 7):
        assert read([text[i : i + size] for i in range(0, len(text), size)] or [""], tool_format) == whole


@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
                "<|python_tag|>",
                '{"name": "add", ',
                '"arguments": ',
                '{"a": 1}',
                "}",
                "]",
                "[",
                ",",
                ";",
                "\n",
                "text",
                '"',
                "\\",
                "<",
                "<think>",
                "</think>",
                " ",
            ]
        ),
        max_size=14,
    ),
    st.data(),
)
def test_any_text_means_the_same_in_any_pieces(tool_format: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces, tool_format, "think") == read([text], tool_format, "think")


def test_only_one_call_where_they_may_not_be_parallel() -> None:
    text = "".join(f'<tool_call>{{"name": "f", "arguments": {{"a": {i}}}}}</tool_call>\n' for i in range(3))
    assert read([text], "hermes", parallel=False).calls == [["f", '{"a": 0}']]
    assert read([text], "hermes").ids == ["id0", "id1", "id2"]
    assert read([text], "hermes").has_calls


THOUGHTS: list[tuple[str, bool, str, str]] = [
    ("<think>\nhm, a < b\n</think>\n\nAnswer.", False, "hm, a < b", "Answer."),
    ("hm\n</think>\nAnswer </think>", True, "hm", "Answer </think>"),
    ("<think>again</think>x", True, "again", "x"),
    ("No thought <think>", False, "", "No thought <think>"),
    ("<think>\n\n</think>\n\nAnswer", False, "", "Answer"),
    ("<think>cut </thi", False, "cut", ""),
    ("<think>a <", False, "a <", ""),
    ("<thi", False, "", ""),
    ("<", False, "", "<"),
    ("<thirty", False, "", "<thirty"),
    ("", True, "", ""),
]


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"), THOUGHTS, ids=[f"{i}" for i in range(len(THOUGHTS))]
)
def test_reasoning_is_told_apart(text: str, inside: bool, reasoning: str, content: str) -> None:
    for pieces in ([text], [*text, ""], [text[i : i + 3] for i in range(0, len(text), 3)] or [""]):
        whole = read(pieces, "", "think", inside)
        assert (whole.reasoning, whole.content) == (reasoning, content)


def test_calls_come_after_reasoning() -> None:
    text = '<think>maybe <tool_call>{"name": "f"}</tool_call></think>\n'
    text += '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    whole = read([*text, ""], "hermes", "think")
    assert whole.reasoning == 'maybe <tool_call>{"name": "f"}</tool_call>'
    assert (whole.content, whole.calls) == ("", [["add", "{}"]])


def test_formats_are_seen_in_templates() -> None:
    assert detect_format(["... <tool_call> ..."]) is FORMATS["hermes"]
    assert detect_format(["... [TOOL_CALLS] ..."]) is FORMATS["mistral"]
    assert detect_format(["... <|python_tag|> ..."]) is FORMATS["llama3"]
    assert detect_format(["<tool_call>\n<function="]) is None
    assert detect_format(["plain"]) is None
    assert detect_reasoning(["{{ content.split('</think>') }}"]) is REASONING_FORMATS["think"]
    assert detect_reasoning(["plain"]) is None


BAD_TOOLS: list[Any] = [
    [5],
    [{"type": "function"}],
    [{"type": "other", "function": {"name": "f"}}],
    [{"type": "function", "function": {"name": "a b"}}],
    [{"type": "function", "function": {"name": "f", "parameters": 5}}],
    [{"type": "function", "function": {"name": "f"}}] * 2,
    [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)],
]


@pytest.mark.parametrize("tools", BAD_TOOLS, ids=[f"{i}" for i in range(len(BAD_TOOLS))])
def test_malformed_tools_are_refused(tools: Any) -> None:
    with pytest.raises(RequestError, match="tool") as caught:
        read_tools(tools)
    assert caught.value.param == "tools"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    special = ("<s>", "</s>", "<think>", "</think>", "[TOOL_CALLS]")
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("v"), byte_level(special), {"eos_token": "</s>"}))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_forced_calls_are_read_back(tokenizer: Tokenizer, name: str) -> None:
    """Whatever is drawn from the form of forced calls, the parser reads as such."""
    form = forced_calls(FORMATS[name], TOOLS, tokenizer, parallel=True)
    grammar = GrammarCompiler(tokenizer, [1]).compile(form)
    random = np.random.default_rng(5)
    num_complete = 0
    for _ in range(8):
        state, ids = grammar.begin(), []
        for _ in range(200):
            logits = random.normal(size=tokenizer.vocab_size).astype(np.float32)
            logits[1] += 2
            state.mask(logits)
            ids.append(int(logits.argmax()))
            if ids[-1] == 1:
                break
            state.append(ids[-1])
        if ids[-1] != 1:
            continue
        num_complete += 1
        whole = read([tokenizer.decode(ids[:-1], skip_special_tokens=False)], name)
        assert whole.content == ""
        assert whole.has_calls
        for called, arguments in whole.calls:
            assert called in NAMES
            value = json.loads(arguments)
            assert value["city"] in ("Rome", "Köln") if called == "get_weather" else isinstance(value["a"], int)
    assert num_complete > 0


STRICT = [replace(TOOLS[0], strict=True), TOOLS[1]]  # get_weather in Rome or Köln; add takes what the model likes
BEGUN = {
    "hermes": 'Well. <tool_call>\n{"name": "%s", ',
    "llama3": '{"name":"%s",',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "%s", ',
}


def written(tokenizer: Tokenizer, name: str, text: str, end: str, reasoning: str | None = None) -> str:
    """What is drawn after the beginning of an output whose tools are those of STRICT, until it ends on `end`."""
    form = strict_calls(FORMATS[name], STRICT, reasoning=reasoning, begins_inside=False)
    assert form is not None
    ids = tokenizer.encode(text, add_special_tokens=False)
    state = GrammarCompiler(tokenizer, [1]).compile(form).begin(ids)
    assert not state.is_waiting
    random = np.random.default_rng(3)
    for _ in range(300):
        logits = random.normal(size=tokenizer.vocab_size).astype(np.float32)
        logits[1] += 9  # the end of the output, wherever it may come
        state.mask(logits)
        token_id = int(logits.argmax())
        if token_id == 1:
            break
        ids.append(token_id)
        state.append(token_id)
        if tokenizer.decode(ids, skip_special_tokens=False).endswith(end):
            break
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_call_of_a_strict_tool_is_held_to_its_schema_once_it_is_begun(tokenizer: Tokenizer, name: str) -> None:
    text = BEGUN[name] % "get_weather"
    whole = read([written(tokenizer, name, text, "nothing")], name)
    called, arguments = whole.calls[-1]
    assert called == "get_weather"
    assert json.loads(arguments)["city"] in ("Rome", "Köln")
    assert whole.has_calls


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Well. ",
        'As JSON: {"name": "get_weather", ',
        "Well. <tool_call>",
        'Well. <tool_call>{"name": "add", ',
        'Well. <tool_call>{"arguments": {}, "name": "get_weather"',
        'Well. <tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}',
        '<think>Maybe <tool_call>{"name": "get_weather", ',
    ],
)
def test_what_is_no_call_of_a_strict_tool_is_free(tokenizer: Tokenizer, text: str) -> None:
    """Any token may come, the end too."""
    assert written(tokenizer, "hermes", text, "nothing", "think") == text


def test_a_strict_call_is_followed_by_anything_and_held_again(tokenizer: Tokenizer) -> None:
    first = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>\nAnd '
    assert written(tokenizer, "hermes", first, "nothing") == first
    again = first + '<tool_call>{"name": "get_weather", '
    whole = read([written(tokenizer, "hermes", again, "nothing")], "hermes")
    assert [name for name, _ in whole.calls] == ["get_weather"] * 2
    assert json.loads(whole.calls[1][1])["city"] in ("Rome", "Köln")


def test_a_strict_tool_whose_schema_is_too_much_is_refused_before_any_call(tokenizer: Tokenizer) -> None:
    patterns = {f"p{i}": {"type": "string", "pattern": "^(a|b|ab)*c{1,50}$"} for i in range(500)}
    tool = Tool("wide", {"type": "object", "properties": patterns}, strict=True)
    form = strict_calls(FORMATS["hermes"], [tool], reasoning=None, begins_inside=False)
    assert form is not None
    with pytest.raises(RequestError, match="the grammar cannot be used") as caught:
        GrammarCompiler(tokenizer, [1]).compile(form)
    assert caught.value.param == "grammar"


def test_strict_is_for_tools_that_say_so() -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    assert [tool.strict for tool in read_tools([{"type": "function", "function": function}])] == [False]
    assert read_tools([{"type": "function", "function": {**function, "strict": True}}])[0].strict
    with pytest.raises(RequestError, match="strict of tool f must be true or false"):
        read_tools([{"type": "function", "function": {**function, "strict": "yes"}}])
    assert strict_calls(FORMATS["hermes"], TOOLS, reasoning=None, begins_inside=False) is None


def test_reasoning_that_the_prompt_opened(tokenizer: Tokenizer) -> None:
    think, r1 = REASONING_FORMATS["think"], REASONING_FORMATS["deepseek_r1"]

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    assert begins_inside(think, tokenizer, ids("Hi<think>\n"))
    assert not begins_inside(think, tokenizer, ids("Hi<think>\n\n</think>\n\n"))
    assert not begins_inside(think, tokenizer, ids("Hi"))
    assert begins_inside(r1, tokenizer, ids("Hi"))
    assert end_token(think, tokenizer) == 3


def test_content_and_calls_come_in_their_order() -> None:
    whole = read(['One <tool_call>{"name": "f", "arguments": {}}</tool_call>two'], "hermes")
    assert whole.order == ["One", "call 0", "two"]


def test_ids_are_such_as_the_family_s_templates_take() -> None:
    assert {len(FORMATS["mistral"].new_id()) for _ in range(20)} == {9}
    assert FORMATS["mistral"].new_id().isalnum()
    assert FORMATS["hermes"].new_id().startswith("call_")


def test_tokens_of_reasoning_are_counted_to_its_end(tokenizer: Tokenizer) -> None:
    think = REASONING_FORMATS["think"]
    ids = tokenizer.encode("<think>Hm.</think>Yes.", add_special_tokens=False)
    num = ids.index(tokenizer.backend.token_to_id("</think>")) + 1
    assert num_reasoning_tokens(think, tokenizer, ids, "Hm.") == num
    assert num_reasoning_tokens(think, tokenizer, ids[: num - 1], "Hm.") == num - 1, "it was cut"
    assert num_reasoning_tokens(think, tokenizer, ids, "") == 0
    spelt = replace(think, end="</thought>")
    assert num_reasoning_tokens(spelt, tokenizer, ids, "Hm.") == len(tokenizer.encode("Hm.", add_special_tokens=False))
