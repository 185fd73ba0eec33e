"""What cannot be served is refused at once, in one line that names the rule, and alone."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from doubles.tiny_llm import Oracle, greedy
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, RequestError

GOOD = "The quick brown fox"
HUGE = 10**5000  # Python refuses to write it out


def refused(llm: LLM, prompt: Any, params: Any = None) -> str:
    """The error of a prompt that stands between two good ones, which must be served."""
    one = greedy(3)
    outputs = llm.generate([GOOD, prompt, GOOD], [one, params or one, one])
    assert [output.error is None for output in outputs] == [True, False, True]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 0, 3]
    assert {sample.finish_reason for sample in outputs[1].outputs} == {"error"}
    assert outputs[1].finished
    error = outputs[1].error
    assert error is not None and "\n" not in error and len(error) < 500
    return error


@pytest.mark.parametrize(
    ("prompt", "rule"),
    [
        ("", "the prompt is empty, and this model has no token to begin from"),
        ([], "the prompt has no tokens; at least one is needed"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt has no tokens"),
        ({}, "has 'prompt' or 'prompt_token_ids', got nothing"),
        ({"prompt": None}, "has 'prompt' or 'prompt_token_ids', got 'prompt'"),
        ({"text": "x"}, "got 'text'"),
        ({"prompt": "a", "prompt_token_ids": [5]}, "has 'prompt' or 'prompt_token_ids'"),
        ({"prompt": {"prompt": "a"}}, "has 'prompt' or 'prompt_token_ids'"),
        ({"prompt_token_ids": [401]}, "prompt holds 401; token ids are integers from 0 to 400"),
        ({"prompt_token_ids": [5, -1]}, "prompt holds -1"),
        ({"prompt_token_ids": [5, 2.0]}, "prompt holds 2.0"),
        ({"prompt_token_ids": [5, True]}, "prompt holds True"),
        ({"prompt_token_ids": [5, None]}, "prompt holds None"),
        ({"prompt_token_ids": ["5"]}, "prompt holds '5'"),
        ({"prompt_token_ids": [2**70]}, "prompt holds 1180591620717411303424"),
        ({"prompt_token_ids": [HUGE]}, "prompt holds a value of type int that cannot be written"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids are integers, got '12'; a text goes under 'prompt'"),
        ({"prompt_token_ids": 5}, "a prompt is a text, token ids or a mapping, got int"),
        (None, "got NoneType"),
        (5.5, "got float"),
        (b"bytes", "got bytes"),
        (["x"], "prompt holds 'x'"),
    ],
)
def test_a_bad_prompt_fails_alone(tiny: LLM, prompt: Any, rule: str) -> None:
    assert rule in refused(tiny, prompt)


def test_empty_prompts_by_themselves(tiny: LLM) -> None:
    for prompts in ("", [""], [[]], {"prompt": ""}):
        (output,) = tiny.generate(prompts, greedy(2))  # type: ignore[arg-type]
        assert output.error is not None and output.finished
        assert output.num_prompt_tokens == output.num_generated_tokens == 0
    assert tiny.generate([], greedy(2)) == []
    with pytest.raises(RequestError, match="the prompt is empty"):
        next(tiny.stream("", greedy(2)))
    (output,) = tiny.generate(GOOD, greedy(2))
    assert output.error is None


def test_prompts_that_are_none_at_all_raise(tiny: LLM) -> None:
    for prompts in (None, 5, iter(["a"])):
        with pytest.raises(RequestError, match="a prompt is a text, token ids or a mapping"):
            tiny.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="a stream is of one prompt, got 2"):
        next(tiny.stream(["a", "b"]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("messages", "rule"),
    [
        ([], "messages is empty; at least one message is needed"),
        ([{}], "messages[0].role must be a text"),
        ([{"role": "user"}], "messages[0].content must be a text"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text is understood"),
        (["hello"], "messages[0] must be an object"),
    ],
)
def test_a_bad_conversation_fails_alone(tiny: LLM, messages: Any, rule: str) -> None:
    good = [{"role": "user", "content": "hello"}]
    first, bad, last = tiny.chat([good, messages, good], greedy(3))
    assert bad.error is not None and rule in bad.error and bad.outputs[0].finish_reason == "error"
    assert first.error is last.error is None and len(last.outputs[0].token_ids) == 3
    with pytest.raises(RequestError, match="messages"):
        next(tiny.stream_chat(messages, greedy(3)))


def test_what_is_no_conversation_fails_in_one_line(tiny: LLM) -> None:
    for messages in ("hello", {"role": "user", "content": "x"}, None, []):
        (output,) = tiny.chat(messages, greedy(3))  # type: ignore[arg-type]
        assert output.error is not None and "messages" in output.error
    (empty,) = tiny.chat([{"role": "user", "content": ""}], greedy(3))
    assert empty.error is None


@pytest.mark.parametrize("excess", [0, 1, 300_000])
def test_a_prompt_over_the_limit_is_refused_at_once_with_both_numbers(make_llm, excess: int) -> None:
    llm = make_llm(max_model_len=100)
    num = 100 + excess
    error = refused(llm, {"prompt_token_ids": [9] * num})
    assert f"the prompt has {num} tokens and max_model_len is 100" in error
    assert "shorten the prompt or raise max_model_len" in error
    assert f"has {num} tokens" in refused(llm, "\x01" * num)
    (longest,) = llm.generate({"prompt_token_ids": [9] * 99}, greedy(5))
    assert (len(longest.outputs[0].token_ids), longest.outputs[0].finish_reason) == (1, "length")
    (scored,) = llm.generate({"prompt_token_ids": [9] * 100}, greedy(0, prompt_logprobs=0))
    assert scored.error is None and len(scored.prompt_logprobs or []) == 100


def test_too_many_samples_are_refused(make_llm) -> None:
    llm = make_llm(max_num_seqs=4)
    assert "n is 5, at most 4 samples run at once; lower n, or raise max_num_seqs" in refused(
        llm, GOOD, SamplingParams(n=5)
    )


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        ({"allowed_token_ids": [401]}, "allowed_token_ids holds 401; token ids are integers from 0 to 400"),
        ({"stop_token_ids": [401]}, "stop_token_ids holds 401"),
        ({"logit_bias": {401: 1.0}}, "logit_bias holds 401"),
    ],
)
def test_ids_of_parameters_that_the_model_has_not_fail_alone(tiny: LLM, params: dict[str, Any], rule: str) -> None:
    assert rule in refused(tiny, GOOD, SamplingParams(**params))


def test_priorities_that_are_no_list_fail(tiny: LLM) -> None:
    for priority in (1, {1}, 1.5):
        with pytest.raises(RequestError, match="priority is a list with one integer for each prompt, got"):
            tiny.generate([GOOD], greedy(1), priority=priority)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="a priority is an integer, got 'a'"):
        tiny.generate([GOOD], greedy(1), priority="a")  # type: ignore[arg-type]


def test_names_that_users_of_vllm_know(tiny: LLM) -> None:
    assert tiny.get_default_sampling_params() == tiny.default_sampling_params()
    assert tiny.get_tokenizer().encode(GOOD) == tiny.generate(GOOD, greedy(1))[0].prompt_token_ids
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    encode = tiny.get_tokenizer().encode

    def read(messages: Any, **how: Any) -> list[int]:
        (output,) = tiny.chat(messages, greedy(1), **how)
        assert output.error is None
        return output.prompt_token_ids

    assert read(said, chat_template="{{ messages[1].content }}") == encode("bc")
    shown = {"chat_template": "{{ messages[0].content }}{{ style }}", "chat_template_kwargs": {"style": "!"}}
    assert read(said, **shown) == encode("a!")
    ended = tiny.get_tokenizer().render_chat(said, add_generation_prompt=False)
    opened = read(said, add_generation_prompt=False, continue_final_message=True)
    assert ended.startswith(tiny.get_tokenizer().decode(opened, skip_special_tokens=False))
    assert tiny.get_tokenizer().decode(opened).endswith("bc")


def test_outputs_have_what_callers_of_vllm_read(tiny: LLM) -> None:
    (output,) = tiny.generate(GOOD, greedy(3))
    metrics = output.metrics
    assert metrics is not None and metrics.first_scheduled_time is not None and metrics.first_token_time is not None
    assert metrics.last_token_time is not None and metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
    assert metrics.first_token_time <= metrics.last_token_time <= metrics.finished_time
    assert metrics.time_in_queue == metrics.first_scheduled_time - metrics.arrival_time
    assert output.lora_request is None
    assert output.outputs[0].finished()
    (embedded,) = tiny.embed(GOOD)
    assert embedded.outputs.embedding == embedded.embedding and embedded.embedding
    (refused,) = tiny.generate("", greedy(3))
    assert (refused.metrics, refused.lora_request) == (None, None)


def test_numbers_of_numpy_are_numbers(tiny: LLM) -> None:
    ids = tiny.tokenizer.encode(GOOD)
    (expected,) = tiny.generate({"prompt_token_ids": ids}, greedy(5))
    array = np.array(ids)
    for prompt in (array, list(array), {"prompt_token_ids": array}, {"prompt_token_ids": list(array.astype(np.int32))}):
        (output,) = tiny.generate(prompt, greedy(5))
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.prompt_token_ids == ids and {type(token_id) for token_id in output.prompt_token_ids} == {int}
    one, two = tiny.generate(np.array([ids, ids]), greedy(5))
    assert one.outputs[0].token_ids == two.outputs[0].token_ids == expected.outputs[0].token_ids
    assert "prompt holds 0.5" in refused(tiny, {"prompt_token_ids": np.array([0.5])})
    assert "prompt holds True" in refused(tiny, {"prompt_token_ids": np.array([True])})
    params = SamplingParams(
        n=np.int64(1),
        max_tokens=np.int32(3),
        temperature=np.float32(0.5),
        top_p=np.float64(0.5),
        seed=np.uint64(2**63),
        stop_token_ids=np.array([5, 6]),
        logit_bias={np.int64(9): np.float32(1.5)},
    )
    plain = SamplingParams(
        max_tokens=3, temperature=0.5, top_p=0.5, seed=2**63, stop_token_ids=(5, 6), logit_bias={9: 1.5}
    )
    assert params == plain
    assert msgspec.msgpack.encode(params) == msgspec.msgpack.encode(plain)
    with pytest.raises(RequestError, match="n must be an integer"):
        SamplingParams(n=np.float64(1.0))  # type: ignore[arg-type]


def test_what_are_no_parameters_fail(tiny: LLM) -> None:
    assert "sampling_params must be SamplingParams, got dict" in refused(tiny, GOOD, {"n": 1})
    for given in ([SamplingParams()] * 2, {"n": 1}, 5):
        with pytest.raises(RequestError, match="give one SamplingParams for all or a list of one for each"):
            tiny.generate(GOOD, given)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="1 prompts and 2 priorities"):
        tiny.generate(GOOD, priority=[1, 2])
    for priority in ("x", 1.5, None):
        with pytest.raises(RequestError, match="a priority is an integer"):
            tiny.generate(GOOD, priority=[priority])  # type: ignore[list-item]
    (output,) = tiny.generate(GOOD, greedy(2))
    assert output.error is None


def test_a_format_that_the_files_are_not_is_refused(make_llm, demo_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"load_format is gguf, and .* has safetensors files; set it to auto"):
        make_llm(load_format="gguf")
    with pytest.raises(ConfigError, match=r"load_format is safetensors, and .* has gguf files"):
        make_llm(demo_file, load_format="safetensors")
    (output,) = make_llm(load_format="safetensors").generate(GOOD, greedy(2))
    assert output.error is None


BAD_PARAMS: list[dict[str, Any]] = [
    {"n": 0},
    {"n": True},
    {"n": 1.0},
    {"n": 129},
    {"n": 2, "temperature": 0},
    {"temperature": -0.1},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": "1"},
    {"temperature": None},
    {"temperature": HUGE},
    {"top_k": -2},
    {"top_k": 1.5},
    {"top_p": 0.0},
    {"top_p": 1.01},
    {"min_p": -1},
    {"repetition_penalty": 0},
    {"repetition_penalty": float("nan")},
    {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"min_tokens": -1},
    {"min_tokens": 5, "max_tokens": 4},
    {"max_tokens": -1},
    {"max_tokens": HUGE},
    {"logprobs": 21},
    {"logprobs": -1},
    {"prompt_logprobs": True},
    {"seed": 2**64},
    {"seed": 1.0},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": [5]},
    {"stop": 5},
    {"stop": b"x"},
    {"bad_words": [""]},
    {"bad_words": 5},
    {"bad_words": {"a": 1}},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": 5},
    {"stop_token_ids": "12"},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [1.0]},
    {"allowed_token_ids": 7},
    {"logit_bias": {5: float("nan")}},
    {"logit_bias": {5: 101}},
    {"logit_bias": {5: HUGE}},
    {"logit_bias": {-1: 1}},
    {"logit_bias": {"5": 1}},
    {"logit_bias": [1, 2]},
    {"logit_bias": 3},
]


@pytest.mark.parametrize("params", BAD_PARAMS, ids=lambda params: " ".join(params))
def test_bad_parameters_name_the_field_in_one_short_line(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert caught.value.param in params
    assert caught.value.param in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_bad_request_never_touches_its_batch(tiny: LLM, oracle: Oracle) -> None:
    outputs = tiny.generate([GOOD, "", GOOD, {"prompt_token_ids": [9999]}], greedy(12))
    assert [output.error is None for output in outputs] == [True, False, True, False]
    for output in outputs[::2]:
        oracle.check_greedy(output.prompt_token_ids, output.outputs[0].token_ids)


@pytest.mark.parametrize("num_beside", [0, 1])
def test_a_token_without_numbers_spoils_no_cached_block_for_others(
    num_beside: int, tiny_folder: Path, oracle: Oracle, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][300] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    llm = LLM(folder, dtype="float32", num_threads=1, block_size=16, num_blocks_override=64, max_num_batched_tokens=64)
    shared = list(range(5, 37))
    bad, good = [*shared, 300, *[7] * 60], [*shared, 9]  # the first chunk of `bad` fills the blocks of `shared`
    beside = [good] * num_beside
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in (bad, *beside)], greedy(4))
    assert outputs[0].error == "the model gave logits that are not numbers"
    for output in [*outputs[1:], *llm.generate([{"prompt_token_ids": good}], greedy(4))]:
        assert output.error is None
        oracle.check_greedy(good, output.outputs[0].token_ids)
