"""Encoding, decoding and names of tokens, for every kind of vocabulary."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from doubles.vocabularies import TEXTS, byte_fallback, byte_level, word_pieces, write_folder

from octavo.errors import ModelError, RequestError
from octavo.text.tokenizer import Tokenizer, load_tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("bytes"), byte_level(), SPECIAL))


@pytest.fixture(scope="module")
def pieces_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("pieces"), byte_fallback(), SPECIAL))


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back_as_they_were(bytes_tokenizer: Tokenizer, pieces_tokenizer: Tokenizer, text: str) -> None:
    for tokenizer in (bytes_tokenizer, pieces_tokenizer):
        ids = tokenizer.encode(text)
        assert ids == tokenizer.backend.encode(text).ids
        assert tokenizer.decode(ids) == text == tokenizer.backend.decode(ids)


def test_special_tokens_have_no_spaces_around_them_and_can_be_left_out(bytes_tokenizer: Tokenizer) -> None:
    ids = bytes_tokenizer.encode("<|user|>two  words<|end|><|end|> end")
    assert ids[0] == bytes_tokenizer.backend.token_to_id("<|user|>")
    assert bytes_tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>two  words<|end|><|end|> end"
    assert bytes_tokenizer.decode(ids) == "two  words end"
    assert bytes_tokenizer.decode(bytes_tokenizer.encode("a<tool｜call>b")) == "a<tool｜call>b"  # added, not special


def test_a_text_begins_with_the_tokens_that_the_folder_asks_for(tmp_path: Path) -> None:
    plain, templated = byte_level(), byte_level(add_bos=True)
    hello = plain.encode("Hello").ids
    cases: list[tuple[tokenizers.Tokenizer, dict[str, object], list[int]]] = [
        (plain, {}, hello),
        (templated, {}, [0, *hello]),
        (plain, {"add_bos_token": True}, [0, *hello]),
        (templated, {"add_bos_token": False}, hello),
        (plain, {"add_bos_token": True, "add_eos_token": True}, [0, *hello, 1]),
    ]
    for number, (backend, config, ids) in enumerate(cases):
        tokenizer = load_tokenizer(write_folder(tmp_path / str(number), backend, SPECIAL | config))
        assert tokenizer.encode("Hello") == ids
        assert tokenizer.encode("Hello", add_special_tokens=False) == hello


def test_special_tokens_are_named_by_config_or_map(tmp_path: Path) -> None:
    written = {"content": "<|end|>", "lstrip": False, "special": True}
    folder = write_folder(
        tmp_path,
        byte_level(),
        {"eos_token": written, "pad_token": "[absent]", "additional_special_tokens": ["<tool｜call>"]},
        special_tokens_map__json='{"bos_token": "<s>", "eos_token": "</s>"}',
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|end|>"}  # no row for [absent]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 3)
    assert tokenizer.decode(tokenizer.encode("a<tool｜call>b")) == "ab"
    assert tokenizer.vocab_size == byte_level().get_vocab_size()


def test_truncation_and_padding_of_a_file_do_not_apply(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    text = "The quick brown fox jumps"
    assert load_tokenizer(write_folder(tmp_path, backend)).encode(text) == byte_level().encode(text).ids


def test_lone_surrogates_are_replaced(bytes_tokenizer: Tokenizer) -> None:
    ids = bytes_tokenizer.encode("a\ud800b\ud83d\ude00\udc00")
    assert bytes_tokenizer.decode(ids) == "a\N{REPLACEMENT CHARACTER}b😀\N{REPLACEMENT CHARACTER}"
    assert bytes_tokenizer.encode_bad_words(["\ud800"])


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**40, 1.0, "1", True, None])
def test_ids_that_are_none_are_refused(bytes_tokenizer: Tokenizer, token_id: object) -> None:
    with pytest.raises(RequestError, match=r"integers from 0 to 400"):
        bytes_tokenizer.decode([0, token_id])  # type: ignore[list-item]


def test_rows_beyond_the_vocabulary_have_names_too(bytes_tokenizer: Tokenizer, tmp_path: Path) -> None:
    words = load_tokenizer(write_folder(tmp_path, word_pieces()))
    for tokenizer in (bytes_tokenizer, words):
        assert tokenizer.token_text(2**40) == f"token_id:{2**40}"
        assert tokenizer.token_bytes(2**40) == b""
        with pytest.raises(RequestError, match="got -1"):
            tokenizer.token_text(-1)


def test_every_token_has_a_name_of_its_own(bytes_tokenizer: Tokenizer, pieces_tokenizer: Tokenizer) -> None:
    for tokenizer in (bytes_tokenizer, pieces_tokenizer):
        names = [tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size)]
        assert all(names)
        assert len(set(names)) == len(names)


def test_names_are_literal_where_they_can_be(bytes_tokenizer: Tokenizer, pieces_tokenizer: Tokenizer) -> None:
    def name(tokenizer: Tokenizer, token: str) -> str:
        token_id = tokenizer.backend.token_to_id(token)
        assert token_id is not None
        return tokenizer.token_text(token_id)

    assert name(bytes_tokenizer, "</s>") == "</s>"
    assert name(bytes_tokenizer, "<tool｜call>") == "<tool｜call>"
    assert name(bytes_tokenizer, "Ġthe") == " the"
    assert name(bytes_tokenizer, "Ċ") == "\n"
    assert name(bytes_tokenizer, "ð") == r"bytes:\xf0"
    assert name(pieces_tokenizer, "▁the") == " the"
    assert name(pieces_tokenizer, "A") == "A"
    assert name(pieces_tokenizer, "<0x41>") == r"bytes:\x41"


def test_an_added_token_and_one_of_the_vocabulary_with_one_text(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([tokenizers.AddedToken(" the", normalized=False)])
    tokenizer = load_tokenizer(write_folder(tmp_path, backend))
    added, own = backend.token_to_id(" the"), backend.token_to_id("Ġthe")
    assert tokenizer.token_text(added) == " the"
    assert tokenizer.token_text(own) == f"token_id:{own}"
    assert tokenizer.token_bytes(added) == tokenizer.token_bytes(own) == b" the"


def test_token_bytes_join_to_the_text(bytes_tokenizer: Tokenizer, pieces_tokenizer: Tokenizer) -> None:
    for tokenizer, begin in ((bytes_tokenizer, b""), (pieces_tokenizer, b" ")):
        ids = tokenizer.encode("日本 fox 👋🏽</s>", add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids))
        assert joined == begin + "日本 fox 👋🏽</s>".encode()


def test_bad_words_stand_alone_within_and_after_a_space(
    bytes_tokenizer: Tokenizer, pieces_tokenizer: Tokenizer
) -> None:
    for tokenizer in (bytes_tokenizer, pieces_tokenizer):
        sequences = tokenizer.encode_bad_words(["fox", " the"])
        texts = {b"".join(map(tokenizer.token_bytes, ids)) for ids in sequences}
        assert {b"fox", b" fox", b"the", b" the"} <= texts
        assert len(set(sequences)) == len(sequences)
    assert bytes_tokenizer.encode_bad_words([]) == ()
    assert bytes_tokenizer.encode_bad_words(["\n"])
    assert bytes_tokenizer.encode_bad_words(["  "])


def test_threads_share_a_tokenizer(bytes_tokenizer: Tokenizer) -> None:
    words = ["fox", "the next sentence", "👋🏽"]
    expected = [(bytes_tokenizer.encode(text), bytes_tokenizer.encode_bad_words(words)) for text in TEXTS]

    def work(number: int) -> bool:
        text = TEXTS[number % len(TEXTS)]
        ids, bad = expected[number % len(TEXTS)]
        return (
            bytes_tokenizer.encode(text, add_special_tokens=number % 2 == 0) == ids
            and bytes_tokenizer.encode_bad_words(words) == bad
            and bytes_tokenizer.decode(ids) == text
        )

    with ThreadPoolExecutor(64) as threads:
        assert all(threads.map(work, range(1000)))


def test_decoders_of_other_kinds_are_the_librarys(tmp_path: Path) -> None:
    backend = word_pieces()
    tokenizer = load_tokenizer(write_folder(tmp_path, backend))
    ids = tokenizer.encode("The quick brown fox")
    assert tokenizer.decode(ids) == backend.decode(ids)
    assert tokenizer.token_text(ids[0])
    assert tokenizer.token_bytes(ids[0])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 3}', '{"model": {"type": "BPE", "vocab": {}}}', "\x00"])
def test_broken_tokenizer_files_fail_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="not a tokenizer that works") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_panic_of_the_library_is_an_error_like_any(tmp_path: Path) -> None:
    written = json.loads(byte_level(add_bos=True).to_str())
    written["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(ModelError, match="not a tokenizer that works"):
        load_tokenizer(tmp_path)


def test_a_text_that_the_vocabulary_cannot_write_fails_its_request(tmp_path: Path) -> None:
    written = json.loads(word_pieces().to_str())
    written["model"]["unk_token"] = "[absent]"
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the")
    with pytest.raises(RequestError, match="cannot take this text"):
        tokenizer.encode("日本")


def test_broken_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="no such file"):
        load_tokenizer(tmp_path / "nothing")
    write_folder(tmp_path, byte_level())
    for content in ("[1]", "{", '{"added_tokens_decoder": {"x": {}}}', '{"added_tokens_decoder": [1]}'):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
            load_tokenizer(tmp_path)


def test_tokens_of_the_config_alone_are_added_where_their_ids_follow(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    entries = {str(size): {"content": "<new>", "special": True}, str(size + 9): {"content": "<far>", "special": True}}
    tokenizer = load_tokenizer(write_folder(tmp_path, byte_level(), {"added_tokens_decoder": entries}))
    assert tokenizer.encode("<new>") == [size]
    assert tokenizer.vocab_size == size + 1
    assert size in tokenizer.special_token_ids
