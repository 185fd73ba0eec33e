"""Models served on the device: the host's tokens in every way of running them, with one copy back a step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo_refdev.device import Device
from octavo_refdev.platform import RefdevPlatform

MakeLLM = Callable[..., LLM]
PROMPTS = [list(text) for text in (b"the quick brown fox jumps over", b"hi", b"abc" * 9, b"a longer prompt " * 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def tokens(llm: LLM, params: SamplingParams = GREEDY, prompts: Sequence[list[int]] = PROMPTS) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def test_two_platforms_in_one_process_agree(make_llm: MakeLLM) -> None:
    host, device = make_llm("cpu"), make_llm("refdev")
    expected = tokens(host)
    assert tokens(device) == expected
    assert tokens(host) == expected
    assert device.executor.facts()["platform"] == "refdev on refdev:0"


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
    assert tokens(make_llm("refdev", **settings)) == tokens(make_llm("cpu"))


def test_a_cached_prefix_serves(make_llm: MakeLLM) -> None:
    llm = make_llm("refdev")
    first = tokens(llm)
    assert tokens(llm) == first == tokens(make_llm("cpu"))
    assert llm.stats.counts.num_cached_prompt_tokens >= 8 * (3 + 3 + 5)


@pytest.mark.parametrize(
    "settings", [{"preemption_mode": "recompute"}, {"preemption_mode": "swap", "swap_space": 0.01}], ids=str
)
def test_preempted_requests_go_on(make_llm: MakeLLM, settings: dict[str, Any]) -> None:
    llm = make_llm("refdev", num_blocks_override=14, max_model_len=96, enable_prefix_caching=False, **settings)
    params = SamplingParams(temperature=0, max_tokens=40)
    assert tokens(llm, params) == tokens(make_llm("cpu"), params)
    assert llm.stats.counts.num_preemptions > 0
    assert (llm.stats.counts.num_swaps > 0) == ("swap_space" in settings)


def test_samples_share_blocks_until_they_part(make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=10, logprobs=2, prompt_logprobs=2)
    found, expected = tokens(make_llm("refdev"), params), tokens(make_llm("cpu"), params)
    assert found == expected
    assert any(len({tuple(sample) for sample in samples}) > 1 for samples in found)


def test_bfloat16_weights_and_cache(make_llm: MakeLLM) -> None:
    one, other = make_llm("refdev", dtype="bfloat16"), make_llm("refdev", dtype="bfloat16", max_num_batched_tokens=16)
    assert [len(sample) for samples in tokens(one) for sample in samples] == [12] * len(PROMPTS)
    assert one.executor.memory_plan.block_bytes == other.executor.memory_plan.block_bytes == 2 * 2 * 8 * 2 * 16 * 2


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.8, seed=1, max_tokens=12),
        SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=3),
        [GREEDY, *(SamplingParams(temperature=1, seed=i, max_tokens=12, prompt_logprobs=1) for i in range(3))],
    ],
    ids=["greedy", "sampled", "log-probabilities", "all at once"],
)
def test_a_step_brings_one_copy_back_and_waits_for_nothing_else(make_llm: MakeLLM, device: Device, params: Any) -> None:
    llm = make_llm("refdev", max_num_batched_tokens=24)
    device.counts.clear()
    device.strict = True
    tokens(llm, params)
    assert device.counts["to_host"] <= llm.stats.counts.num_steps
    assert device.counts["sync"] == 0


@pytest.mark.parametrize("num_prompts", [1, 9])
def test_copies_to_the_device_are_as_few_in_a_large_batch(make_llm: MakeLLM, device: Device, num_prompts: int) -> None:
    llm = make_llm("refdev")
    device.counts.clear()
    tokens(llm, prompts=[[i, *PROMPTS[0]] for i in range(num_prompts)])
    assert device.counts["to_device"] <= 12 * llm.stats.counts.num_steps


def test_a_layer_of_experts_tells_the_host_once_who_was_chosen(
    make_llm: MakeLLM, tiny_mixtral: Path, device: Device
) -> None:
    expected = tokens(make_llm("cpu", tiny_mixtral))
    llm = make_llm("refdev", tiny_mixtral)
    device.counts.clear()
    device.strict = True
    assert tokens(llm) == expected
    assert device.counts["to_host"] <= llm.stats.counts.num_steps * (1 + 2)
    assert device.counts["sync"] == 0


def test_a_model_run_by_transformers(make_llm: MakeLLM, device: Device) -> None:
    expected = tokens(make_llm("cpu", model_impl="hf"))
    llm = make_llm("refdev", model_impl="hf")
    device.counts.clear()
    device.strict = True
    assert tokens(llm) == expected
    assert device.counts["to_host"] <= llm.stats.counts.num_steps
    assert device.counts["sync"] == 0


def test_embeddings(make_llm: MakeLLM, device: Device) -> None:
    expected = [output.embedding for output in make_llm("cpu").embed(PROMPTS)]
    llm = make_llm("refdev")
    device.counts.clear()
    device.strict = True
    found = [output.embedding for output in llm.embed(PROMPTS)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert device.counts["to_host"] <= llm.stats.counts.num_steps


def test_the_platform_is_made_once(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = RefdevPlatform.__init__

    def counted(self: RefdevPlatform, index: int) -> None:
        made.append(index)
        make(self, index)

    monkeypatch.setattr(RefdevPlatform, "__init__", counted)
    make_llm("refdev")
    assert made == [0]


def test_a_closed_engine_gives_its_memory_back(make_llm: MakeLLM, device: Device) -> None:
    before = device.used()
    with make_llm("refdev") as llm:
        tokens(llm)
        assert device.used() > before
    assert device.used() == before
    assert torch.zeros(3, device="refdev").cpu().tolist() == [0, 0, 0]
