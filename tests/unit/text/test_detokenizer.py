"""Streams of text equal one decode, whatever the ids, and never show half a character."""

import pytest
from doubles.vocabularies import TEXTS, byte_fallback, byte_level, word_pieces, write_folder
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer, load_tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
IDS = st.lists(st.integers(0, 359), max_size=40)


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [], skip)
    return [*(detokenizer.add([token_id]) for token_id in ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("bytes"), byte_level(), SPECIAL))


@pytest.fixture(scope="module")
def pieces_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("pieces"), byte_fallback(), SPECIAL))


@pytest.fixture(scope="module")
def words_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("words"), word_pieces()))


@given(ids=IDS, skip=st.booleans(), prompt=IDS)
def test_any_ids_of_bytes_equal_the_librarys_decode(
    bytes_tokenizer: Tokenizer, ids: list[int], skip: bool, prompt: list[int]
) -> None:
    whole = bytes_tokenizer.backend.decode(ids, skip_special_tokens=skip)
    assert bytes_tokenizer.decode(ids, skip) == whole
    assert "".join(streamed(bytes_tokenizer, ids, prompt, skip)) == whole


@given(ids=IDS, skip=st.booleans())
def test_any_ids_of_pieces_equal_one_decode(pieces_tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(streamed(pieces_tokenizer, ids, skip=skip)) == pieces_tokenizer.decode(ids, skip)


@given(text=st.text(max_size=30))
def test_sound_pieces_equal_the_librarys_decode(pieces_tokenizer: Tokenizer, text: str) -> None:
    ids = pieces_tokenizer.encode(text)
    assert "".join(streamed(pieces_tokenizer, ids)) == pieces_tokenizer.backend.decode(ids)


@given(ids=IDS, cuts=st.lists(st.integers(0, 40), max_size=5))
def test_several_ids_at_once_give_the_same(bytes_tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    detokenizer = Detokenizer(bytes_tokenizer)
    text, begin = "", 0
    for end in [*sorted(cuts), len(ids)]:
        text += detokenizer.add(ids[begin:end])
        begin = max(begin, end)
    assert text + detokenizer.flush() == bytes_tokenizer.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_no_half_character_in_between(bytes_tokenizer: Tokenizer, pieces_tokenizer: Tokenizer, text: str) -> None:
    for tokenizer in (bytes_tokenizer, pieces_tokenizer):
        parts = streamed(tokenizer, tokenizer.encode(text))
        assert "".join(parts) == text
        assert sum(part.count(BROKEN) for part in parts) == text.count(BROKEN)


def test_a_character_is_shown_as_soon_as_it_is_complete(bytes_tokenizer: Tokenizer) -> None:
    ids = [bytes_tokenizer.backend.token_to_id(token) for token in ("ð", "Ł", "ĳ", "ĭ", "a")]
    assert streamed(bytes_tokenizer, ids) == ["", "", "", "👋", "a", ""]


def test_a_cut_character_shows_at_the_end_as_one_decode_does(
    bytes_tokenizer: Tokenizer, pieces_tokenizer: Tokenizer
) -> None:
    for tokenizer in (bytes_tokenizer, pieces_tokenizer):
        ids = tokenizer.encode("a👋")[:-1]
        parts = streamed(tokenizer, ids)
        assert "".join(parts) == tokenizer.decode(ids) == tokenizer.backend.decode(ids)
        assert parts[-1] in (BROKEN, BROKEN * 3)
        assert not any(BROKEN in part for part in parts[:-1])


def test_a_broken_character_leaves_its_neighbours_whole(pieces_tokenizer: Tokenizer) -> None:
    byte = {value: pieces_tokenizer.backend.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    ids = [byte[value] for value in "é".encode()] + [byte[0xFF]] + [byte[value] for value in "ß".encode()]
    assert pieces_tokenizer.decode(ids) == f"é{BROKEN}ß"
    assert streamed(pieces_tokenizer, ids) == ["", "é", BROKEN, "", "ß", ""]


def test_a_leading_space_is_kept_where_the_output_continues_a_prompt(pieces_tokenizer: Tokenizer) -> None:
    fox = pieces_tokenizer.encode("fox fox", add_special_tokens=False)
    bos = pieces_tokenizer.bos_token_id
    assert bos is not None
    prompt = [bos, *pieces_tokenizer.encode("the")]
    assert "".join(streamed(pieces_tokenizer, fox)) == "fox fox"
    assert "".join(streamed(pieces_tokenizer, fox, prompt)) == " fox fox"
    assert "".join(streamed(pieces_tokenizer, fox, [bos])) == "fox fox"  # nothing visible goes before
    assert "".join(streamed(pieces_tokenizer, fox, [bos], skip=False)) == " fox fox"
    whole = pieces_tokenizer.decode(prompt + fox)
    assert whole == pieces_tokenizer.decode(prompt) + "".join(streamed(pieces_tokenizer, fox, prompt))


def test_special_tokens_are_skipped_or_literal(bytes_tokenizer: Tokenizer) -> None:
    ids = bytes_tokenizer.encode("a<|end|>b <|end|>")
    assert "".join(streamed(bytes_tokenizer, ids)) == "ab "
    assert "".join(streamed(bytes_tokenizer, ids, skip=False)) == "a<|end|>b <|end|>"


def test_ids_beyond_the_vocabulary_show_nothing(bytes_tokenizer: Tokenizer) -> None:
    assert streamed(bytes_tokenizer, [10**6]) == ["", ""]


@given(ids=st.lists(st.integers(0, 199), max_size=20), prompt=st.lists(st.integers(0, 199), min_size=6, max_size=6))
def test_decoders_of_other_kinds_go_on_from_the_prompt(
    words_tokenizer: Tokenizer, ids: list[int], prompt: list[int]
) -> None:
    before, after = (words_tokenizer.decode(i, False) for i in (prompt, prompt + ids))
    assert before + "".join(streamed(words_tokenizer, ids, prompt, skip=False)) == after
