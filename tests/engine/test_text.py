"""Tokens to text through the engine: streams, stop strings, characters in pieces. The tokens are scripted."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from doubles.tiny_llm import CHAT_TEMPLATE, greedy, write_tiny_llm
from doubles.vocabularies import byte_level, write_folder

from octavo import LLM, SamplingParams
from octavo.engine.outputs import RequestOutput

Script = Callable[[LLM, Sequence[int]], None]

TEXTS = [
    "Plain words, then more.",
    "Family 👨‍👩‍👧 and 👋🏽 flags 🇩🇪!",
    "中文文本，日本語テキスト、한국어",
    "e\u0301 a\u0308 n\u0303 combining; \u200b zero width",
    "runs   of    spaces\n\n\n\tand tabs\t\t",
    "  leading, trailing  ",
    "<|user|> special <|end|> words </s> stay apart",
]
BROKEN = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Make a model's next request produce these tokens, and then 5 for ever."""

    def install(llm: LLM, token_ids: Sequence[int]) -> None:
        execute, counts = type(llm.executor).execute_model, dict[int, int]()

        def scripted(step):
            result = execute(llm.executor, step)
            for seq_id in result.token_ids:
                at = counts[seq_id] = counts.get(seq_id, -1) + 1
                result.token_ids[seq_id] = [token_ids[at] if at < len(token_ids) else 5]
            return result

        monkeypatch.setattr(llm.executor, "execute_model", scripted)

    return install


@pytest.fixture(scope="module")
def demo_words(tmp_path_factory: pytest.TempPathFactory, demo_file: Path) -> LLM:
    """A tiny model with the demo model's vocabulary, by the setting `tokenizer`."""
    folder = tmp_path_factory.mktemp("demo_words")
    write_tiny_llm(folder, vocab_size=49152)
    return LLM(folder, tokenizer=demo_file, dtype="float32", num_threads=1, block_size=16, num_blocks_override=64)


@pytest.fixture(params=["tiny", "demo_words"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue(request.param)


def both_ways(llm: LLM, params: SamplingParams) -> tuple[list[str], RequestOutput]:
    """The deltas of a stream, and the output of the same request without one; both must agree."""
    outputs, deltas = [], []
    for output in llm.stream("Say", params):
        deltas.append(output.outputs[0].delta)
        outputs.append(output.outputs[0].finish_reason)
    (whole,) = llm.generate("Say", params)
    sample = whole.outputs[0]
    assert "".join(deltas) == sample.text == output.outputs[0].text
    assert output.outputs[0].token_ids == sample.token_ids
    assert outputs[:-1] == [None] * (len(outputs) - 1), "one finish reason, and it is the last thing"
    assert outputs[-1] == sample.finish_reason is not None
    return deltas, whole


# Text


@pytest.mark.parametrize("text", TEXTS)
def test_the_joined_stream_is_one_decode_with_no_half_character_in_between(llm: LLM, script: Script, text: str) -> None:
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    script(llm, ids)
    deltas, whole = both_ways(llm, greedy(len(ids), skip_special_tokens=False))
    assert whole.outputs[0].text == text == llm.tokenizer.decode(ids, skip_special_tokens=False)
    assert not any(BROKEN in delta for delta in deltas)
    _, plain = both_ways(llm, greedy(len(ids)))
    assert plain.outputs[0].text == llm.tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["👨‍👩‍👧 🇩🇪", "中文文", "e\u0301\u200bn"])
def test_a_cut_inside_a_character_ends_stream_and_whole_alike(llm: LLM, script: Script, text: str) -> None:
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    script(llm, ids)
    for cut in range(1, len(ids)):
        deltas, whole = both_ways(llm, greedy(cut))
        assert whole.outputs[0].finish_reason == "length"
        assert whole.outputs[0].text == llm.tokenizer.decode(ids[:cut])
        assert not any(BROKEN in delta for delta in deltas[:-1])


def test_special_tokens_stand_literally_without_spaces_of_ours(llm: LLM, script: Script) -> None:
    special = sorted(llm.tokenizer.special_token_ids)[:3]
    word = llm.tokenizer.encode("word", add_special_tokens=False)
    ids = [special[0], *word, special[1], *word, special[2]]
    script(llm, ids)
    names = [llm.tokenizer.token_text(token) for token in special]
    _, kept = both_ways(llm, greedy(len(ids), skip_special_tokens=False))
    assert kept.outputs[0].text == f"{names[0]}word{names[1]}word{names[2]}"
    _, dropped = both_ways(llm, greedy(len(ids)))
    assert dropped.outputs[0].text == "wordword"


def test_random_tokens_stream_as_they_decode(llm: LLM) -> None:
    for seed in range(4):
        params = SamplingParams(seed=seed, temperature=5.0, max_tokens=40, ignore_eos=True)
        _, whole = both_ways(llm, params)
        assert whole.outputs[0].text == llm.tokenizer.decode(whole.outputs[0].token_ids)


def test_without_detokenizing_there_are_tokens_only(tiny: LLM) -> None:
    (output,) = tiny.generate("Say", greedy(5, detokenize=False, stop=["x"]))
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 5)


def test_a_lone_surrogate_is_replaced(tiny: LLM) -> None:
    for prompt in ("a \ud800 b", {"prompt": "\udfff"}):
        (output,) = tiny.generate(prompt, greedy(2))
        assert output.error is None
        assert BROKEN in tiny.tokenizer.decode(output.prompt_token_ids)
    (chat,) = tiny.chat([{"role": "user", "content": "a \ud800 b"}], greedy(2))
    assert chat.error is None


def test_sixty_four_threads_read_prompts_at_once(tiny: LLM) -> None:
    words = ["fox", "naïve", "3.14", "def"]
    with ThreadPoolExecutor(64) as pool:

        def call(number: int) -> list[int]:
            prompt, word = TEXTS[number % len(TEXTS)] * 5, words[number % len(words)]
            (output,) = tiny.generate(prompt, greedy(2, bad_words=[word], stop=["\u4e2d"]))
            assert output.error is None
            assert word not in output.outputs[0].text
            return output.prompt_token_ids

        found = list(pool.map(call, range(64)))
    for number, token_ids in enumerate(found):
        assert token_ids == tiny.tokenizer.encode(TEXTS[number % len(TEXTS)] * 5)


@pytest.fixture(scope="module")
def begins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer that begins texts with <s>, and sampling defaults of its own."""
    folder = tmp_path_factory.mktemp("begins")
    write_tiny_llm(folder)
    defaults = {"eos_token_id": 1, "temperature": 0.0, "repetition_penalty": 1.5, "top_k": 7}
    write_folder(
        folder,
        byte_level(add_bos=True),
        {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE},
        generation_config__json=json.dumps(defaults),
    )
    return folder


def test_an_empty_prompt_starts_from_the_beginning_token_where_there_is_one(begins: Path, make_llm) -> None:
    llm = make_llm(begins)
    for output in llm.generate(["", {"prompt": ""}], greedy(3)):
        assert (output.error, output.prompt_token_ids) == (None, [0])
        assert len(output.outputs[0].token_ids) == 3
    (nothing,) = llm.generate({"prompt_token_ids": []}, greedy(3))
    assert nothing.error is not None
    (text,) = llm.generate("hello", greedy(1))
    (chat,) = llm.chat([{"role": "user", "content": "hello"}], greedy(1))
    assert text.prompt_token_ids.count(0) == chat.prompt_token_ids.count(0) == 1


def test_without_parameters_the_models_own_defaults_hold(begins: Path, make_llm) -> None:
    llm = make_llm(begins)
    own = SamplingParams(temperature=0.0, repetition_penalty=1.5, top_k=7)
    assert llm.default_sampling_params() == own
    (output,) = llm.generate("The quick brown fox")
    (same,) = llm.generate("The quick brown fox", own)
    (other,) = llm.generate("The quick brown fox", own.but(repetition_penalty=1.0))
    assert output.outputs[0].token_ids == same.outputs[0].token_ids != other.outputs[0].token_ids
    *_, streamed = llm.stream("The quick brown fox")
    assert streamed.outputs[0].token_ids == output.outputs[0].token_ids


# Chat


def test_chat_reads_what_the_template_writes_with_one_beginning(tiny: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello <|end|>"}]
    (output,) = tiny.chat(messages, greedy(3))
    text = tiny.tokenizer.render_chat(messages)
    assert text.startswith("<s><|user|>system: Be brief.<|end|>") and text.endswith("<|user|>assistant: ")
    assert output.prompt_token_ids == tiny.tokenizer.encode(text, add_special_tokens=False)
    assert output.prompt_token_ids.count(0) == 1
    *_, streamed = tiny.stream_chat(messages, greedy(3))
    assert streamed.prompt_token_ids == output.prompt_token_ids
    assert streamed.outputs[0].text == output.outputs[0].text
    assert "{{ bos_token }}" in CHAT_TEMPLATE


def test_chats_come_back_in_order(tiny: LLM) -> None:
    chats = [[{"role": "user", "content": f"number {i}"}] for i in range(5)]
    outputs = tiny.chat(chats, [greedy(i + 1) for i in range(5)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4, 5]
    for chat, output in zip(chats, outputs, strict=True):
        assert output.prompt_token_ids == tiny.tokenizer.encode_chat(chat)


# Stop strings


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("one two three four", "three"),  # a token of its own, or several
        ("one two three four", "o th"),  # begins and ends in the middle of tokens
        ("one two three four", "re"),
        ("ab ab ab abc ab", "ab abc"),  # begins again before it is complete
        ("naïve 中文 end", "文"),
        ("smile 👋🏽 end", "👋🏽"),
        ("line\n\nnext", "\n\n"),
        ("one two", "one"),  # at the very beginning
    ],
)
def test_the_output_ends_exactly_before_a_stop_string(
    llm: LLM, script: Script, text: str, stop: str, include: bool
) -> None:
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    script(llm, ids)
    deltas, whole = both_ways(llm, greedy(60, stop=[stop, "never there"], include_stop_str_in_output=include))
    sample = whole.outputs[0]
    assert sample.text == text[: text.index(stop) + len(stop) * include]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    shown = "".join(deltas)
    assert len(sample.token_ids) <= len(ids)
    assert stop in llm.tokenizer.decode(sample.token_ids)
    assert stop not in llm.tokenizer.decode(sample.token_ids[:-1])
    assert shown == sample.text
    llm._engine.step()
    assert (llm.stats.num_running, llm.stats.num_used_blocks) == (0, 0)


def test_a_special_token_can_be_a_stop_string(tiny: LLM, script: Script) -> None:
    script(tiny, tiny.tokenizer.encode("words<|user|>more", add_special_tokens=False))
    _, whole = both_ways(tiny, greedy(60, stop="<|user|>", skip_special_tokens=False))
    assert (whole.outputs[0].text, whole.outputs[0].stop_reason) == ("words", "<|user|>")


def test_only_what_may_begin_a_stop_string_is_held_back(tiny: LLM, script: Script) -> None:
    text = "a b END c EN d"
    ids = [tiny.tokenizer.encode(char, add_special_tokens=False)[0] for char in text]
    script(tiny, ids)
    deltas, whole = both_ways(tiny, greedy(len(ids), stop="ENDE"))
    assert deltas == [*"a b ", "", "", "", "END ", *"c ", "", "", "EN ", "d"]
    assert whole.outputs[0].finish_reason == "length"
    deltas, whole = both_ways(tiny, greedy(7, stop="ENDE"))  # cut while text is held back
    assert deltas[-1] == "END" and whole.outputs[0].text == "a b END"


@pytest.mark.parametrize("min_tokens", [0, 3, 7, 8])
def test_min_tokens_holds_off_stop_strings(tiny: LLM, script: Script, min_tokens: int) -> None:
    ids = [tiny.tokenizer.encode(char, add_special_tokens=False)[0] for char in "xyzxyzxyzxyz"]
    script(tiny, ids)
    _, whole = both_ways(tiny, greedy(12, stop="z", min_tokens=min_tokens))
    end = next(end for end in (3, 6, 9, 12) if end > min_tokens)
    assert (len(whole.outputs[0].token_ids), whole.outputs[0].stop_reason) == (end, "z")


def test_an_end_beats_a_stop_string_that_is_not_complete(tiny: LLM, script: Script) -> None:
    script(tiny, [*tiny.tokenizer.encode("abc", add_special_tokens=False), 1])
    params = SamplingParams(temperature=0, max_tokens=20, stop="abcd")
    _, whole = both_ways(tiny, params)
    assert (whole.outputs[0].text, whole.outputs[0].finish_reason, whole.outputs[0].stop_reason) == (
        "abc",
        "stop",
        None,
    )


def test_each_sample_stops_alone(tiny: LLM) -> None:
    params = SamplingParams(n=8, seed=1, temperature=4.0, max_tokens=40, ignore_eos=True)
    (free,) = tiny.generate("Say", params)
    stop = "o"
    (output,) = tiny.generate("Say", params.but(stop=stop))
    assert {sample.finish_reason for sample in output.outputs} == {"stop", "length"}
    for before, sample in zip(free.outputs, output.outputs, strict=True):
        assert sample.text == before.text.split(stop)[0]
        assert sample.token_ids == before.token_ids[: len(sample.token_ids)]
        assert sample.finish_reason == ("stop" if stop in before.text else "length")


def test_a_stop_string_that_the_last_token_completes_is_the_reason(tiny: LLM, script: Script) -> None:
    ids = [tiny.tokenizer.encode(char, add_special_tokens=False)[0] for char in "abcdef"]
    script(tiny, ids)
    _, whole = both_ways(tiny, greedy(4, stop="cd"))
    sample = whole.outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("ab", "stop", "cd")
    _, cut = both_ways(tiny, greedy(3, stop="cd"))
    assert (cut.outputs[0].text, cut.outputs[0].finish_reason) == ("abc", "length")
