"""Log-probabilities of output and prompt are the model's own, whatever was cached, cut or beside them."""

import json
import math
from collections.abc import Sequence

import pytest
import torch
from doubles.tiny_llm import Oracle, greedy

from octavo import LLM, SamplingParams
from octavo.engine.outputs import Logprob, RequestOutput

PROMPT = [4 + (i * 37) % 390 for i in range(45)]


def given(token_ids: Sequence[int]) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(token_ids)}


def check_prompt(oracle: Oracle, output: RequestOutput, num_top: int) -> None:
    """Every entry is what transformers gives; the first is None."""
    assert output.error is None and output.prompt_logprobs is not None
    ids = output.prompt_token_ids
    first, *entries = output.prompt_logprobs
    assert first is None and len(entries) == len(ids) - 1
    right = oracle.logprobs(ids)
    for position, entry in enumerate(entries, start=1):
        check_entry(entry, right[position - 1], ids[position], num_top)


def check_entry(entry, right: torch.Tensor, token_id: int, num_top: int) -> None:
    assert token_id in entry and num_top <= len(entry) <= num_top + 1
    for key, value in entry.items():
        assert isinstance(value, Logprob) and value.decoded_token
        assert math.isfinite(value.logprob) and value.logprob == pytest.approx(float(right[key]), abs=1e-4)
    texts = {value.decoded_token for value in entry.values()}
    assert len(texts) == len(entry)
    ranks = sorted(value.rank for value in entry.values())
    assert ranks[:num_top] == list(range(1, num_top + 1))
    own = entry[token_id]
    near = ((right - right[token_id]).abs() < 2e-5).sum()
    assert abs(own.rank - 1 - int((right > right[token_id]).sum())) < near
    json.dumps([value.logprob for value in entry.values()], allow_nan=False)


# Of the output


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_output_log_probabilities_are_the_models_own(tiny: LLM, oracle: Oracle, num_top: int) -> None:
    params = SamplingParams(
        seed=4, temperature=2.5, top_k=50, presence_penalty=1.5, logit_bias={9: 3.0}, max_tokens=12, ignore_eos=True
    )
    (output,) = tiny.generate(given(PROMPT[:10]), params.but(logprobs=num_top))
    (plain,) = tiny.generate(given(PROMPT[:10]), params)
    sample = output.outputs[0]
    assert plain.outputs[0].token_ids == sample.token_ids and plain.outputs[0].logprobs is None
    assert sample.logprobs is not None and len(sample.logprobs) == 12
    right = oracle.logprobs([*PROMPT[:10], *sample.token_ids])[9:]
    for entry, row, token_id in zip(sample.logprobs, right[:-1], sample.token_ids, strict=True):
        check_entry(entry, row, token_id, num_top)
    total = sum(entry[token_id].logprob for entry, token_id in zip(sample.logprobs, sample.token_ids, strict=True))
    assert sample.cumulative_logprob == pytest.approx(total)


def test_each_token_has_its_entry_however_the_output_ends(tiny: LLM) -> None:
    (free,) = tiny.generate(given(PROMPT[:10]), greedy(20))
    text, tokens = free.outputs[0].text, free.outputs[0].token_ids
    params = [
        greedy(20, logprobs=1, stop=text[4:6]),
        greedy(20, logprobs=1, stop_token_ids=[tokens[7]]),
        SamplingParams(temperature=0, logit_bias={1: 100.0}, logprobs=1),
    ]
    for output in tiny.generate([given(PROMPT[:10])] * 3, params):
        sample = output.outputs[0]
        assert sample.finish_reason == "stop" and len(sample.logprobs or []) == len(sample.token_ids) > 0


# Of the prompt


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("num_batched_tokens", [1, 16, 2048])
def test_prompt_log_probabilities_twice_cached_or_not_longer_than_a_chunk(
    make_llm, oracle: Oracle, max_tokens: int, num_top: int, num_batched_tokens: int
) -> None:
    llm = make_llm(max_num_batched_tokens=num_batched_tokens)
    params = greedy(max_tokens, prompt_logprobs=num_top, logprobs=num_top)
    first = llm.generate(given(PROMPT), params)
    llm.generate(given(PROMPT), greedy(3))  # an ordinary request fills the cache
    again = llm.generate([given(PROMPT), given(PROMPT)], params)
    for output in (*first, *again):
        check_prompt(oracle, output, num_top)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (max_tokens, "length")
        assert len(output.outputs[0].logprobs or []) == max_tokens
    (hit,) = llm.generate(given(PROMPT), greedy(1))
    assert hit.num_cached_tokens == 40


@pytest.mark.parametrize("lengths", [(45, 20), (20, 45), (24, 25), (25, 24)])
def test_overlapping_prompts_in_both_orders_give_the_same(make_llm, oracle: Oracle, lengths: tuple[int, int]) -> None:
    llm = make_llm()
    for together in (False, True):
        llm.reset_prefix_cache()
        prompts = [given(PROMPT[:length]) for length in lengths]
        params = greedy(2, prompt_logprobs=2)
        outputs = llm.generate(prompts, params) if together else [llm.generate(one, params)[0] for one in prompts]
        for output in outputs:
            check_prompt(oracle, output, 2)


def test_a_prompt_of_one_token_has_one_empty_entry(tiny: LLM) -> None:
    (output,) = tiny.generate(given([7]), greedy(0, prompt_logprobs=1))
    assert output.prompt_logprobs == [None]
    assert output.outputs[0].finish_reason == "length"


def test_prompt_log_probabilities_beside_others_and_for_several_samples(tiny: LLM, oracle: Oracle) -> None:
    params = [
        greedy(5),
        SamplingParams(n=3, seed=1, max_tokens=5, prompt_logprobs=1, ignore_eos=True),
        greedy(0, prompt_logprobs=2),
        greedy(4, logprobs=1),
    ]
    outputs = tiny.generate([given([*PROMPT[:30], 5 + i]) for i in range(4)], params)
    check_prompt(oracle, outputs[1], 1)
    check_prompt(oracle, outputs[2], 2)
    assert outputs[0].prompt_logprobs is None and outputs[3].prompt_logprobs is None
    assert [len(sample.token_ids) for sample in outputs[1].outputs] == [5, 5, 5]
    oracle.check_greedy(outputs[0].prompt_token_ids, outputs[0].outputs[0].token_ids)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_prompt_log_probabilities_survive_preemption(make_llm, oracle: Oracle, mode: str) -> None:
    swap = {"preemption_mode": "swap", "swap_space": 0.01} if mode == "swap" else {}
    llm = make_llm(num_blocks_override=10, max_num_batched_tokens=12, scheduling_policy="priority", **swap)
    prompts = [given([*PROMPT, 4 + i]) for i in range(3)]
    slow = llm.stream(prompts[0], greedy(5, prompt_logprobs=1))
    next(slow)  # a part of its prompt is scored; then others go first
    outputs = llm.generate(prompts[1:], greedy(8, prompt_logprobs=1), priority=[-1, -2])
    *_, last = slow
    for output in (last, *outputs):
        check_prompt(oracle, output, 1)
    assert llm.stats.counts.num_preemptions > 0


def test_scoring_a_long_prompt_takes_no_memory_of_prompt_times_vocabulary(make_llm, monkeypatch) -> None:
    """Rows of logits are made a few at a time: the head is never asked for all of them."""
    import octavo.contract.row_outputs as rows

    monkeypatch.setattr(rows, "CHUNK_ELEMENTS", 401 * 7)
    sizes = []
    llm = make_llm(max_num_batched_tokens=512)
    program = llm.executor._worker._runner._program
    head = program._logits
    monkeypatch.setattr(program, "_logits", lambda hidden: sizes.append(len(hidden)) or head(hidden))
    (output,) = llm.generate(given(PROMPT * 10), greedy(1, prompt_logprobs=1))
    assert len(output.prompt_logprobs or []) == 450
    assert sum(sizes) >= 450 and max(sizes) <= 7
