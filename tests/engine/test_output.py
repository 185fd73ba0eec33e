"""A request's tokens are its own, bit for bit: alone or among others, cached or not, in chunks, through preemption."""

import itertools
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from doubles.tiny_llm import PRECISIONS, Oracle, greedy
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.engine.outputs import RequestOutput

STEM = [4 + (i * 37) % 390 for i in range(64)]


def prompts_of(num: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Prompts of odd lengths, some of which begin alike."""
    lengths = itertools.cycle([1, 7, 8, 9, 16, 17, 40])
    return [{"prompt_token_ids": [*STEM[: next(lengths)], 4 + seed, 5 + i]} for i in range(num)]


def check(oracle: Oracle, outputs: Sequence[RequestOutput], num_tokens: int) -> None:
    for output in outputs:
        assert (output.error, output.outputs[0].finish_reason) == (None, "length")
        assert len(output.outputs[0].token_ids) == num_tokens
        oracle.check_greedy(output.prompt_token_ids, output.outputs[0].token_ids)


# Batching


@pytest.mark.parametrize("num_others", [0, 1, 2, 8, 32])
def test_a_prompt_gives_the_same_alone_and_among_others(tiny: LLM, oracle: Oracle, num_others: int) -> None:
    tiny.reset_prefix_cache()
    (alone,) = tiny.generate(prompts_of(1), greedy(24))
    together = tiny.generate([*prompts_of(num_others, seed=9), *prompts_of(1)], greedy(24))
    check(oracle, [alone, *together], 24)
    assert alone.outputs[0].token_ids == together[-1].outputs[0].token_ids


@pytest.mark.parametrize("precision", PRECISIONS)
def test_log_probabilities_do_not_move_with_load(make_llm, precision: str) -> None:
    llm = make_llm(**PRECISIONS[precision], enable_prefix_caching=False)
    params = greedy(12, logprobs=2)
    (alone,) = llm.generate(prompts_of(1), params)
    *_, among = llm.generate([*prompts_of(9, seed=3), *prompts_of(1)], params)
    assert llm.executor.row_invariant
    assert alone.outputs[0].logprobs == among.outputs[0].logprobs


def test_a_repeated_run_with_threads_gives_the_same_set(make_llm) -> None:
    runs = [
        [output.outputs[0].token_ids for output in make_llm(num_threads=2).generate(prompts_of(4), greedy(6))]
        for _ in range(2)
    ]
    make_llm(num_threads=1)  # the number is the process's
    assert runs[0] == runs[1]


def test_equal_logits_go_to_the_lowest_id_however_the_token_is_chosen(
    tiny_folder: Path, tmp_path: Path, make_llm
) -> None:
    folder = tmp_path / "pairs"
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    head[1:400:2] = head[0:400:2]  # each odd id's logit equals that of the even id before it
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    params = [
        greedy(20),
        greedy(20, logprobs=1),
        greedy(20, repetition_penalty=1.0, logit_bias={5: 0.0}),
        SamplingParams(top_k=1, seed=5, temperature=1.7, max_tokens=20, ignore_eos=True),
        SamplingParams(top_k=1, top_p=0.5, min_p=0.1, seed=6, max_tokens=20, ignore_eos=True),
    ]
    outputs = make_llm(folder).generate(prompts_of(1) * 5, params)
    first = outputs[0].outputs[0].token_ids
    assert all(token_id % 2 == 0 for token_id in first)
    assert [output.outputs[0].token_ids for output in outputs] == [first] * 5


# Prefix cache


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("length", [7, 8, 9, 23, 24, 25, 40])
def test_cold_and_warm_runs_agree(make_llm, oracle: Oracle, precision: str, length: int) -> None:
    """Hits that end at k blocks of 8, one token less, one token more."""
    llm = make_llm(**PRECISIONS[precision])
    prompt = {"prompt_token_ids": STEM[:length]}
    (cold,) = llm.generate(prompt, greedy(16, logprobs=2))
    (warm,) = llm.generate(prompt, greedy(16, logprobs=2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, (length - 1) // 8 * 8)
    assert cold.outputs[0].logprobs == warm.outputs[0].logprobs
    if precision == "float32":
        check(oracle, [cold, warm], 16)


@pytest.mark.parametrize("caching", [True, False])
def test_many_that_share_a_prefix_agree_twice(make_llm, oracle: Oracle, caching: bool) -> None:
    llm = make_llm(enable_prefix_caching=caching)
    prompts = [{"prompt_token_ids": [*STEM[:41], 5 + i]} for i in range(12)]
    first, second = llm.generate(prompts, greedy(12)), llm.generate(prompts, greedy(12))
    check(oracle, [*first, *second], 12)
    assert {output.num_cached_tokens for output in second} == ({40} if caching else {0})


def test_what_was_generated_is_a_prefix_too(make_llm, oracle: Oracle) -> None:
    llm = make_llm()
    (first,) = llm.generate({"prompt_token_ids": STEM[:10]}, greedy(30))
    turn = [*STEM[:10], *first.outputs[0].token_ids, 77]
    (second,) = llm.generate({"prompt_token_ids": turn}, greedy(10))
    assert second.num_cached_tokens == 32  # of 39 computed ones, the full blocks
    check(oracle, [second], 10)


# Chunks


@pytest.mark.parametrize("num_batched_tokens", [1, 16, 17, 64, 2048])
def test_chunks_of_any_size_agree(make_llm, oracle: Oracle, num_batched_tokens: int) -> None:
    llm = make_llm(max_num_batched_tokens=num_batched_tokens)
    check(oracle, llm.generate([*prompts_of(5), {"prompt_token_ids": STEM * 3}], greedy(8)), 8)


def test_a_prompt_in_chunks_emits_nothing_before_its_first_token(make_llm) -> None:
    llm = make_llm(max_num_batched_tokens=16)
    first = next(llm.stream({"prompt_token_ids": STEM * 3}, greedy(4)))
    assert len(first.outputs[0].token_ids) == 1
    assert llm.stats.counts.num_steps >= 12


def test_a_long_prompt_does_not_starve_short_ones(make_llm) -> None:
    llm = make_llm(max_num_batched_tokens=32, num_blocks_override=256)
    long = llm.stream({"prompt_token_ids": (STEM * 8)[:500]}, greedy(2, prompt_logprobs=0))
    first = next(long)
    before = llm.stats.counts.num_steps
    llm.generate(prompts_of(1), greedy(4))
    assert llm.stats.counts.num_steps - before <= 6
    assert not first.outputs[0].token_ids
    *_, last = long
    assert len(last.prompt_logprobs) == 500 and len(last.outputs[0].token_ids) == 2


# Preemption


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_lose_and_double_nothing(
    make_llm, caplog: pytest.LogCaptureFixture, mode: str, caching: bool
) -> None:
    caplog.set_level(logging.INFO, "octavo.scheduler")
    swap = {"preemption_mode": "swap", "swap_space": 0.01} if mode == "swap" else {}
    llm = make_llm(num_blocks_override=10, max_num_batched_tokens=16, enable_prefix_caching=caching, **swap)
    params = [
        greedy(40),
        SamplingParams(seed=3, n=2, max_tokens=25, temperature=1.3, ignore_eos=True),
        SamplingParams(seed=4, max_tokens=40, top_p=0.9, presence_penalty=1.0, ignore_eos=True),
        greedy(40, logprobs=1),
        greedy(30, prompt_logprobs=1),
        greedy(45),
        greedy(45),
    ]
    prompts = [{"prompt_token_ids": [*STEM[:12], 50 + i]} for i in range(7)]
    calm = make_llm(enable_prefix_caching=caching)
    alone = [calm.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]
    streams = [llm.stream(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    texts = [{0: "", 1: ""} for _ in streams]
    sizes: list[list[int]] = [[] for _ in streams]
    last: list[RequestOutput | None] = [None] * len(streams)
    live = list(range(len(streams)))
    while live:
        for index in list(live):
            output = next(streams[index], None)
            if output is None:
                live.remove(index)
                continue
            last[index] = output
            sizes[index].append(output.num_generated_tokens)
            for sample in output.outputs:
                texts[index][sample.index] += sample.delta
    counts = llm.stats.counts
    times = [int(times) for record in caplog.records for times in re.findall(r"preempted (\d+) times", record.message)]
    assert len(times) == 14 and max(times) > 1
    assert (counts.num_swaps > 0) == (mode == "swap")
    for index, (output, expected) in enumerate(zip(last, alone, strict=True)):
        assert output is not None and output.error is None
        assert sizes[index] == sorted(sizes[index])
        for sample, right in zip(output.outputs, expected.outputs, strict=True):
            assert sample.token_ids == right.token_ids
            assert sample.finish_reason == right.finish_reason == "length"
            assert texts[index][sample.index] == sample.text
    assert [len(at) for at in last[3].outputs[0].logprobs] and len(last[3].outputs[0].logprobs) == 40
    assert len(last[4].prompt_logprobs) == 13
    llm._engine.step()
    llm._engine.scheduler.check()
    assert llm.stats.num_used_blocks == 0
