"""What a request's tools and a model's ways make of its parameters."""

from typing import Any

import pytest
from doubles.vocabularies import byte_level, write_folder

from octavo.sampling_params import SamplingParams
from octavo.server.errors import ApiError
from octavo.server.options import ServerOptions
from octavo.server.turns import Turns
from octavo.structured_output import StructuredOutput, WithinCalls
from octavo.text.tokenizer import Tokenizer, load_tokenizer

SPECIAL = ("<s>", "</s>", "<think>", "</think>", "<tool_call>")
END = SPECIAL.index("</think>")
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One in which the markers are special tokens."""
    folder = tmp_path_factory.mktemp("special")
    write_folder(folder, byte_level(SPECIAL), {"bos_token": "<s>", "eos_token": "</s>"})
    return load_tokenizer(folder)


def turns(tokenizer: Tokenizer, choice: str | None = None, tools: Any = TOOLS, **options: Any) -> Turns:
    given = {"tool_parser": "hermes", "reasoning_parser": "think", **options}
    return Turns(ServerOptions(**given), tokenizer, tools, choice, parallel=True)


def test_markers_that_are_special_tokens_stay_in_the_text(tokenizer: Tokenizer) -> None:
    plain = SamplingParams()
    assert not turns(tokenizer).params(plain, [5]).skip_special_tokens
    assert not turns(tokenizer, tool_parser="none", tools=[]).params(plain, [5]).skip_special_tokens
    without = turns(tokenizer, tool_parser="none", reasoning_parser="none", tools=[])
    assert without.is_plain
    assert without.params(plain, [5]) == plain


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_form_holds_after_reasoning_that_the_prompt_opened(tokenizer: Tokenizer, is_inside: bool) -> None:
    prompt = tokenizer.encode("Hi<think>" if is_inside else "Hi", add_special_tokens=False)
    after = END if is_inside else None
    asked = SamplingParams(structured=StructuredOutput(json_object=True))
    held = turns(tokenizer).params(asked, prompt).structured
    assert held == StructuredOutput(json_object=True, after_token_id=after)
    forced = turns(tokenizer, "required").params(SamplingParams(), prompt).structured
    assert forced is not None
    assert forced.after_token_id == after
    assert forced.grammar is not None
    assert f"<[{SPECIAL.index('<tool_call>')}]>" in forced.grammar
    assert "add" in forced.grammar
    named = turns(tokenizer, "now").params(SamplingParams(), prompt).structured
    assert named is not None
    assert named.grammar is not None
    assert "add" not in named.grammar


def test_which_tools_are_shown_and_where_errors_of_their_forms_belong(tokenizer: Tokenizer) -> None:
    assert turns(tokenizer).tools == turns(tokenizer, "now").tools == TOOLS
    assert turns(tokenizer, "none").tools is None
    assert turns(tokenizer, "auto", tools=[]).tools is None
    assert turns(tokenizer, "required").forms == {"grammar": "tools"}
    assert turns(tokenizer).forms == {}


@pytest.mark.parametrize("is_inside", [True, False])
def test_strict_tools_are_held_within_calls_that_the_model_begins(tokenizer: Tokenizer, is_inside: bool) -> None:
    prompt = tokenizer.encode("Hi<think>" if is_inside else "Hi", add_special_tokens=False)
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    of_auto = turns(tokenizer, tools=strict)
    held = of_auto.params(SamplingParams(), prompt).structured
    assert held is not None
    assert held.after_token_id is None
    assert held.within == WithinCalls("hermes", ("add", "now"), ("add",), "think", is_inside)
    assert of_auto.forms == {"grammar": "tools"}
    assert turns(tokenizer).params(SamplingParams(), prompt).structured is None
    assert turns(tokenizer, "none", tools=strict).params(SamplingParams(), prompt).structured is None
    forced = turns(tokenizer, "required", tools=strict).params(SamplingParams(), prompt).structured
    assert forced is not None
    assert forced.within is None
    own = StructuredOutput(json_object=True)
    kept = of_auto.params(SamplingParams(structured=own), prompt).structured
    assert kept is not None
    assert (kept.json_object, kept.within) == (True, None)


@pytest.mark.parametrize(("choice", "tools"), [("required", []), ("other", TOOLS), ("add", [])])
def test_a_choice_of_nothing_is_refused(tokenizer: Tokenizer, choice: str, tools: list[Any]) -> None:
    with pytest.raises(ApiError) as caught:
        turns(tokenizer, choice, tools)
    assert caught.value.param == "tool_choice"
