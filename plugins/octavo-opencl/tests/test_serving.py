"""Models served with their keys and values in OpenCL buffers: the host's tokens in every way of running them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from octavo import LLM, SamplingParams

MakeLLM = Callable[..., LLM]
PROMPTS = [list(text) for text in (b"the quick brown fox jumps over", b"hi", b"abc" * 9, b"a longer prompt " * 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def tokens(llm: LLM, params: SamplingParams = GREEDY, prompts: Sequence[list[int]] = PROMPTS) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def test_two_platforms_in_one_process_agree(make_llm: MakeLLM) -> None:
    host, device = make_llm("cpu"), make_llm("opencl")
    expected = tokens(host)
    assert tokens(device) == expected
    assert tokens(host) == expected
    (attention,) = (row for row in device.executor.manifest.rows if row.call.startswith("attention"))
    assert (attention.provider, attention.tier, attention.skipped) == ("opencl", "native", ())


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 8},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 1},
        {"block_size": 16, "max_num_batched_tokens": 33},
        {"block_size": 32},
    ],
    ids=str,
)
def test_every_setting_gives_the_hosts_tokens(make_llm: MakeLLM, settings: dict[str, Any]) -> None:
    assert tokens(make_llm("opencl", **settings)) == tokens(make_llm("cpu"))


def test_a_cached_prefix_serves(make_llm: MakeLLM) -> None:
    llm = make_llm("opencl")
    first = tokens(llm)
    assert tokens(llm) == first == tokens(make_llm("cpu"))
    assert llm.stats.counts.num_cached_prompt_tokens >= 8 * (3 + 3 + 5)


@pytest.mark.parametrize(
    "settings", [{"preemption_mode": "recompute"}, {"preemption_mode": "swap", "swap_space": 0.01}], ids=str
)
def test_preempted_requests_go_on(make_llm: MakeLLM, settings: dict[str, Any]) -> None:
    llm = make_llm("opencl", num_blocks_override=14, max_model_len=96, enable_prefix_caching=False, **settings)
    params = SamplingParams(temperature=0, max_tokens=40)
    assert tokens(llm, params) == tokens(make_llm("cpu"), params)
    assert llm.stats.counts.num_preemptions > 0
    assert (llm.stats.counts.num_swaps > 0) == ("swap_space" in settings)


def test_samples_share_blocks_until_they_part(make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=10, logprobs=2, prompt_logprobs=2)
    found, expected = tokens(make_llm("opencl"), params), tokens(make_llm("cpu"), params)
    assert found == expected
    assert any(len({tuple(sample) for sample in samples}) > 1 for samples in found)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_narrow_keys_and_values(make_llm: MakeLLM, kv_dtype: str) -> None:
    settings = {"kv_cache_dtype": kv_dtype, "enable_prefix_caching": False}
    one, chunked = make_llm("opencl", **settings), make_llm("opencl", max_num_batched_tokens=8, **settings)
    assert tokens(one) == tokens(chunked)
    assert one.executor.memory_plan.block_bytes == 2 * 2 * 8 * 2 * 16 * 2


def test_the_demo_model_says_what_it_says_on_the_host(make_llm: MakeLLM) -> None:
    questions = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at"]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    said = {}
    for platform in ("cpu", "opencl"):
        with make_llm(platform, "demo", block_size=32, max_model_len=256) as llm:
            said[platform] = [output.outputs[0].token_ids for output in llm.generate(questions, params)]
    assert said["opencl"] == said["cpu"]
    assert len({tuple(one) for one in said["cpu"]}) == len(questions)
