"""Forms: what is refused, what may come next, and what is kept."""

import gc
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.vocabularies import byte_level, train_sentencepiece, word_pieces, write_folder

from octavo.errors import RequestError
from octavo.structured_output import MAX_GRAMMAR_BYTES, StructuredOutput
from octavo.text.grammar import GrammarCompiler, GrammarState
from octavo.text.tokenizer import Tokenizer, load_tokenizer

EOS = (1, 3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_folder(tmp_path_factory.mktemp("vocabulary"), byte_level(), {"eos_token": "</s>"})
    return load_tokenizer(folder)


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, EOS)


def allowed(state: GrammarState, vocab_size: int) -> set[int]:
    logits = np.zeros(vocab_size, np.float32)
    state.mask(logits)
    return {int(i) for i in np.flatnonzero(logits == 0)}


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, **form: Any) -> bool | None:
    """Whether a text has the form; None: it is the beginning of one."""
    state = compiler.compile(StructuredOutput(**form)).begin()
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if token_id not in allowed(state, tokenizer.vocab_size):
            return False
        state.append(token_id)
    return True if EOS[0] in allowed(state, tokenizer.vocab_size) else None


POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "number"}}, "required": ["x"]}
FORMS: list[tuple[dict[str, Any], str, bool | None]] = [
    ({"regex": "[a-c]+[0-9]"}, "abca7", True),
    ({"regex": "[a-c]+[0-9]"}, "abca", None),
    ({"regex": "[a-c]+[0-9]"}, "xa7", False),
    ({"regex": "a|b"}, "ab", False),
    ({"regex": "日本?"}, "日", True),
    ({"choice": ["yes", "no", 'quote "it"\n']}, "yes", True),
    ({"choice": ["yes", "no", 'quote "it"\n']}, 'quote "it"\n', True),
    ({"choice": ["yes", "yes!"]}, "yes", True),
    ({"choice": ["yes", "no"]}, "maybe", False),
    ({"json_object": True}, '{"a": [1, -2.5e3, {"b": null}], "ü": "\\n"}', True),
    ({"json_object": True}, "[1]", False),
    ({"json_object": True}, '{"a": 1', None),
    ({"json_object": True}, '{"a":' + " " * 32 + "1}", True),
    ({"json_object": True}, '{"a":' + " " * 33 + "1}", False),
    ({"json_object": True}, '{"a":' + "9" * 40, False),
    ({"json_schema": POINT}, '{"x": 5, "y": 1.5}', True),
    ({"json_schema": POINT}, '{"x": 5.5}', False),
    ({"json_schema": POINT}, '{"x": 9007199254740991}', True),
    ({"json_schema": POINT}, '{"x": 9007199254740992}', False),
    ({"json_schema": json.dumps(POINT)}, '{"x": 5}', True),
    ({"json_schema": {"type": "integer", "minimum": 10**16}}, "20000000000000000", True),
    (
        {"json_schema": {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "integer"}}}},
        "[1]",
        True,
    ),
    ({"json_schema": {}}, "null", True),
    ({"json_schema": {"type": "number"}}, "1.5e10", True),
    ({"json_schema": {"type": "object"}}, '{"a":' + " " * 33, False),
    ({"grammar": 'start: "a" b\nb: "b"+'}, "abb", True),
    ({"grammar": 'root ::= "a" b\nb ::= "b" | "c"'}, "ac", True),
    ({"grammar": 'root ::= "a" b\nb ::= "b" | "c"'}, "ad", False),
]


@pytest.mark.parametrize(("form", "text", "expected"), FORMS, ids=[f"{i}" for i in range(len(FORMS))])
def test_what_has_the_form(
    compiler: GrammarCompiler, tokenizer: Tokenizer, form: dict[str, Any], text: str, expected: bool | None
) -> None:
    assert accepts(compiler, tokenizer, text, **form) is expected


@pytest.mark.parametrize(
    "schema", [{"type": "integer"}, {"type": ["integer", "null"]}, {"items": [{"type": "number"}]}]
)
def test_a_schema_is_not_changed_for_whoever_gave_it(schema: dict[str, Any], compiler: GrammarCompiler) -> None:
    before = json.dumps(schema)
    compiler.compile(StructuredOutput(json_schema=schema))
    assert json.dumps(schema) == before


BAD_FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": "("}, "regex", "unclosed group"),
    ({"regex": r"(a)\1"}, "regex", "backreferences"),
    ({"regex": "(" * 5000 + ")" * 5000}, "regex", "regex"),
    ({"grammar": "start: nothing"}, "grammar", "unknown name"),
    ({"grammar": 'root ::= "a'}, "grammar", "grammar"),
    ({"grammar": "root ::= " + "(" * 5000}, "grammar", "grammar"),
    ({"grammar": "root ::= " + '"a" ' * 5000}, "grammar", "may be longer"),
    ({"json_schema": {"type": "nope"}}, "json_schema", "nope"),
    ({"json_schema": {"properties": {"a": False}, "required": ["a"], "type": "object"}}, "json_schema", "json_schema"),
    ({"json_schema": {"unevaluatedProperties": False}}, "json_schema", "unevaluatedProperties"),
    ({"json_schema": {"$ref": "#"}}, "json_schema", "json_schema"),
    ({"json_schema": {"$ref": "http://elsewhere/schema"}}, "json_schema", "json_schema"),
    (
        {"json_schema": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(9)]} for i in range(9)]}},
        "json_schema",
        "large",
    ),
]


@pytest.mark.parametrize(("form", "param", "reason"), BAD_FORMS, ids=[f"{i}" for i in range(len(BAD_FORMS))])
def test_what_cannot_be_compiled_is_refused(
    compiler: GrammarCompiler, form: dict[str, Any], param: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        compiler.compile(StructuredOutput(**form))
    assert caught.value.param == param
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)
    assert len(compiler) == 0


@pytest.mark.parametrize("regex", ["((((a{1000}){1000}){1000}){1000})", "x((a{1000}){1000})"])
def test_a_catastrophic_form_ends_in_an_error(compiler: GrammarCompiler, tokenizer: Tokenizer, regex: str) -> None:
    """At the latest where it is followed; what it may cost is bounded by fuel, not by a clock."""

    def follow() -> None:
        state = compiler.compile(StructuredOutput(regex=regex)).begin()
        for _ in range(20):
            state.append(min(allowed(state, tokenizer.vocab_size) - set(EOS)))

    with pytest.raises(RequestError, match=r"complex|too many|too big"):
        follow()


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one"),
    ({"regex": "a", "choice": ["b"]}, "regex and choice"),
    ({"regex": ""}, "regex must be"),
    ({"regex": 5}, "regex must be"),
    ({"choice": "abc"}, "choice must be"),
    ({"choice": ["a", ""]}, "choice must be"),
    ({"choice": [1]}, "choice must be"),
    ({"json_schema": "{"}, "not JSON"),
    ({"json_schema": "[" * 100000}, "not JSON"),
    ({"json_schema": [1]}, "an object"),
    ({"json_schema": {"const": float("nan")}}, "not JSON"),
    ({"json_schema": {"const": object()}}, "not JSON"),
    ({"json_object": 1}, "json_object must be"),
    ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, f"at most {MAX_GRAMMAR_BYTES}"),
]


@pytest.mark.parametrize(("form", "reason"), BAD_FIELDS, ids=[f"{i}" for i in range(len(BAD_FIELDS))])
def test_malformed_fields(form: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        StructuredOutput(**form)


def test_an_end_comes_only_where_the_form_is_complete(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(StructuredOutput(choice=["a", "ab"])).begin()
    [a], [b] = (tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    assert not allowed(state, tokenizer.vocab_size) & set(EOS)
    state.append(a)
    assert allowed(state, tokenizer.vocab_size) == {b, *EOS}
    state.append(b)
    assert allowed(state, tokenizer.vocab_size) == set(EOS)


def test_special_tokens_are_no_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(StructuredOutput(regex=r"(?s:.*)")).begin()
    found = allowed(state, tokenizer.vocab_size)
    assert found & tokenizer.special_token_ids == set(EOS)
    assert tokenizer.backend.token_to_id("<tool｜call>") in found  # an added token that is not special is text


def test_a_sequence_begins_where_its_tokens_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(StructuredOutput(json_object=True))
    ids = tokenizer.encode('{"key": "value", "n": 12', add_special_tokens=False)
    walked = grammar.begin()
    for token_id in ids:
        walked.append(token_id)
    other = grammar.begin(ids)
    assert allowed(walked, tokenizer.vocab_size) == allowed(other, tokenizer.vocab_size)
    other.append(tokenizer.encode("}", add_special_tokens=False)[0])
    assert allowed(walked, tokenizer.vocab_size) != allowed(other, tokenizer.vocab_size)


def test_a_token_that_does_not_fit_ends_its_sequence_alone(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(StructuredOutput(choice=["a"]))
    state, other = grammar.begin(), grammar.begin()
    state.append(tokenizer.encode("z", add_special_tokens=False)[0])
    with pytest.raises(RequestError, match="cannot be followed further") as error:
        allowed(state, tokenizer.vocab_size)
    assert error.value.param == "choice"
    assert allowed(other, tokenizer.vocab_size)


def test_a_form_may_begin_after_a_token(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    marker = tokenizer.backend.token_to_id("<|user|>")
    state = compiler.compile(StructuredOutput(choice=["a"], after_token_id=marker)).begin()
    assert state.is_waiting
    assert len(allowed(state, tokenizer.vocab_size)) == tokenizer.vocab_size
    for token_id in (*tokenizer.encode("anything", add_special_tokens=False), marker):
        state.append(token_id)
    assert not state.is_waiting
    assert allowed(state, tokenizer.vocab_size) == set(tokenizer.encode("a", add_special_tokens=False))


def test_few_forms_are_kept_and_those_in_use_are_found(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, EOS, num_kept=2)
    held = compiler.compile(StructuredOutput(regex="x"))
    for i in range(10):
        compiler.compile(StructuredOutput(regex=f"a{i}"))
    gc.collect()
    assert len(compiler) == 3
    assert compiler.compile(StructuredOutput(regex="x")) is held


def test_threads_share_a_compiler(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    found: list[set[int]] = []

    def work() -> None:
        for i in range(20):
            state = compiler.compile(StructuredOutput(regex=f"[ab]{{{i % 4 + 1}}}")).begin()
            found.append(allowed(state, tokenizer.vocab_size))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(tokens >= {tokenizer.encode("a", add_special_tokens=False)[0]} for tokens in found)


def test_a_sentencepiece_vocabulary_serves(tmp_path: Path) -> None:
    from doubles.vocabularies import sentencepiece_gguf

    tokenizer = load_tokenizer(sentencepiece_gguf(tmp_path / "tokens.gguf", train_sentencepiece()))
    compiler = GrammarCompiler(tokenizer, [tokenizer.eos_token_id or 0])
    state = compiler.compile(StructuredOutput(json_schema={"const": "ü 日"})).begin()
    text: list[int] = []
    for _ in range(40):
        best = min(allowed(state, tokenizer.vocab_size))
        if best == tokenizer.eos_token_id:
            break
        text.append(best)
        state.append(best)
    assert tokenizer.decode(text) == '"ü 日"'


def test_vocabularies_that_cannot_serve_say_so(tmp_path: Path, tokenizer: Tokenizer) -> None:
    other = load_tokenizer(write_folder(tmp_path, word_pieces(), {}))
    with pytest.raises(RequestError, match="byte-level or sentencepiece"):
        GrammarCompiler(other, [0]).compile(StructuredOutput(json_object=True))
    with pytest.raises(RequestError, match="end-of-sequence"):
        GrammarCompiler(tokenizer, []).compile(StructuredOutput(json_object=True))
