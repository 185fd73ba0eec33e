"""Tokenizers rebuilt from GGUF files equal the ones they were made from."""

import json
from pathlib import Path

import pytest
from doubles.vocabularies import (
    CORPUS,
    TEXTS,
    byte_level,
    byte_level_gguf,
    sentencepiece_gguf,
    train_sentencepiece,
    write_gguf,
)
from gguf import TokenType
from tokenizers import pre_tokenizers

from octavo.errors import ModelError, UnsupportedError
from octavo.text.splits import SPLITS
from octavo.text.tokenizer import load_tokenizer


@pytest.mark.parametrize("text", [*TEXTS, *CORPUS, "<|user|>a<|end|> b<tool｜call>c"])
def test_byte_level_equals_its_original(tmp_path: Path, text: str) -> None:
    original = byte_level()
    path = byte_level_gguf(tmp_path / "a.gguf", original, pre="gpt-2", bos_token_id=0, eos_token_id=1)
    tokenizer = load_tokenizer(path)
    ids = original.encode(text).ids
    assert tokenizer.encode(text) == ids
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == original.decode(ids, skip_special_tokens=skip)


def test_facts_of_a_byte_level_file(tmp_path: Path) -> None:
    original = byte_level()
    path = byte_level_gguf(
        tmp_path / "a.gguf",
        original,
        pre="gpt-2",
        bos_token_id=0,
        eos_token_id=3,
        unknown_token_id=4_000_000,  # beyond the table: not there
        add_bos_token=True,
        add_eos_token=True,
        chat_template="{{ bos_token }}hi",
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|end|>"}
    assert tokenizer.encode("fox") == [0, *original.encode("fox").ids, 3]
    assert tokenizer.encode("fox", add_special_tokens=False) == original.encode("fox").ids
    assert tokenizer.special_token_ids == {0, 1, 2, 3}
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<s>hi"


def test_padding_tokens_are_no_tokens_and_doubles_are_decoded_once(tmp_path: Path) -> None:
    tokens = ["a", "b", "ab", "a", "", "[PAD5]", "[PAD6]"]
    types = [TokenType.NORMAL] * 5 + [TokenType.UNUSED] * 2
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", tokens, types, pre="gpt-2", merges=["a b"]))
    assert tokenizer.vocab_size == 5
    assert tokenizer.encode("aab") == [0, 2]
    assert len({tokenizer.token_text(token_id) for token_id in range(5)}) == 5


def test_names_of_splits_that_begin_with_a_token_by_default(tmp_path: Path) -> None:
    original = byte_level()
    for name, begins in (("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False)):
        path = byte_level_gguf(tmp_path / f"{name}.gguf", original, pre=name, bos_token_id=0, eos_token_id=1)
        assert (load_tokenizer(path).encode("fox")[0] == 0) == begins


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_every_split_keeps_every_byte(name: str) -> None:
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    for text in (*TEXTS, *CORPUS):
        parts = [part for part, _ in SPLITS[name].pre_tokenizer().pre_tokenize_str(text)]
        assert len("".join(parts)) == len(text.encode())
        assert set("".join(parts)) <= alphabet


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("gpt-2", "It's 12345  foo\n\n1", "It|'s|Ġ12345|Ġ|Ġfoo|Ċ|Ċ|1"),
        ("smollm", "a  12\n\n1", "a|ĠĠ|1|2|ĊĊ|1"),
        ("llama-bpe", "It'S 12345  foo\n\n1", "It|'S|Ġ|123|45|Ġ|Ġfoo|ĊĊ|1"),
        ("qwen2", "it's 12 (ok)!\n", "it|'s|Ġ|1|2|Ġ(|ok|)!Ċ"),
        ("gpt-4o", "HelloWorld isn't", "Hello|World|Ġisn't"),
        ("tekken", "HelloWorld 12", "Hello|World|Ġ|1|2"),
        ("deepseek-v3", "x=1234 foo", "x|=|123|4|Ġfoo"),
        ("deepseek-llm", "two words, 12\n34", "two|Ġwords|,|Ġ|1|2|Ċ|3|4"),
        ("default", "a+b 1234", "a|+|b|Ġ|123|4"),
    ],
)
def test_splits(name: str, text: str, parts: str) -> None:
    assert [part for part, _ in SPLITS[name].pre_tokenizer().pre_tokenize_str(text)] == parts.split("|")


def test_a_part_that_is_a_token_is_taken_whole_where_the_split_says_so(tmp_path: Path) -> None:
    tokens = ["a", "b", "c", "ab", "abc"]  # no merges lead to abc
    types = [TokenType.NORMAL] * 5
    for name, ids in (("llama-bpe", [4]), ("qwen2", [3, 2])):
        path = write_gguf(tmp_path / f"{name}.gguf", tokens, types, pre=name, merges=["a b"])
        assert load_tokenizer(path).encode("abc") == ids


def test_sentencepiece_equals_its_original(tmp_path: Path) -> None:
    model = train_sentencepiece()
    tokenizer = load_tokenizer(sentencepiece_gguf(tmp_path / "a.gguf", model))
    for text in (*TEXTS, *CORPUS):
        text = text.replace("\x00", "")  # which sentencepiece cannot take
        ids = model.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text == model.decode(ids)
    assert tokenizer.encode("fox") == [model.bos_id(), *model.encode("fox")]
    assert tokenizer.special_token_ids == {model.unk_id(), model.bos_id(), model.eos_id()}


def test_sentencepiece_without_a_space_before_the_text(tmp_path: Path) -> None:
    model = train_sentencepiece(add_dummy_prefix=False)
    tokenizer = load_tokenizer(sentencepiece_gguf(tmp_path / "a.gguf", model, add_space_prefix=False))
    for text in (*CORPUS, " a <tool> b", "  two"):
        ids = model.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text


def test_runs_of_spaces_named_by_the_vocabulary_are_merged(tmp_path: Path) -> None:
    tokens = ["<unk>", "▁", "a", "▁a", "▁▁", "▁▁▁"]
    types = [TokenType.UNKNOWN, *[TokenType.NORMAL] * 3, *[TokenType.USER_DEFINED] * 2]
    scores = [0.0, -3.0, -4.0, -1.0, 0.0, 0.0]
    path = write_gguf(
        tmp_path / "a.gguf", tokens, types, "llama", scores=scores, add_bos_token=False, add_space_prefix=False
    )
    assert load_tokenizer(path).encode("   a  a") == [5, 2, 4, 2]


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"kind": "t5"}, UnsupportedError, "'t5'"),
        ({"pre": "of-tomorrow"}, UnsupportedError, "of-tomorrow"),
        ({"pre": 7}, ModelError, "not of type str"),
        ({"merges": [1, 2]}, ModelError, "merges"),
        ({"tokens": []}, ModelError, "no tokenizer"),
        ({"types": [1]}, ModelError, "1 numbers for 2 tokens"),
        ({"bos_token_id": "x"}, ModelError, "not of type int"),
        ({"kind": "llama", "scores": [0.5]}, ModelError, "1 numbers for 2 tokens"),
    ],
)
def test_contradictions_fail_in_one_line(
    tmp_path: Path, values: dict[str, object], error: type[ModelError], says: str
) -> None:
    settings: dict[str, object] = {"tokens": ["a", "b"], "types": [1, 1], "pre": "gpt-2"} | values
    path = write_gguf(tmp_path / "a.gguf", **settings)  # type: ignore[arg-type]
    with pytest.raises(error, match=says) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


def test_long_pieces_take_no_long_time(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "a", "aa", "a" * 1_000_000]
    path = write_gguf(
        tmp_path / "a.gguf", tokens, [2, 3, 3, 1, 1, 1], "llama", scores=[0.0] * 6, add_space_prefix=False
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("aaa") == [1, 4, 3]
    assert tokenizer.special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def test_merges_of_unknown_pieces_do_no_harm(tmp_path: Path) -> None:
    merges = ["a b", "x y", "", " ", "a", "a  b"]
    path = write_gguf(tmp_path / "a.gguf", ["a", "b", "ab"], [1, 1, 1], pre="gpt-2", merges=merges)
    assert load_tokenizer(path).encode("ab") == [2]


def test_the_demo_models_tokenizer(demo_file: Path) -> None:
    tokenizer = load_tokenizer(demo_file)
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_token_ids == set(range(17))
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>") == [1, 4093, 198, 2]
    for text in (*TEXTS, *CORPUS, "<|im_start|>  two<|im_end|><|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    names = {tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size)}
    assert len(names) == tokenizer.vocab_size
    prompt = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}]).count(1) == 3
    assert json.loads(tokenizer.backend.to_str())["model"]["type"] == "BPE"
