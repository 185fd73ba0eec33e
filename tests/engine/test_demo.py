"""The demo model through the offline engine: what depends on a real vocabulary and real weights."""

import math

import pytest
import torch
from doubles.tiny_llm import greedy
from transformers import LlamaForCausalLM

from octavo import LLM, SamplingParams

CAPITAL = "The capital of France is"
OTHERS = ["Once upon a time", "def add(a, b):", "Roses are red,", "1, 2, 3,", "Dear Sir", "Water", "🙂", "In 1969"]


def test_a_seeded_request_and_log_probabilities_do_not_move_with_load(demo: LLM) -> None:
    seeded = SamplingParams(seed=11, temperature=0.8, top_p=0.95, max_tokens=12, ignore_eos=True)
    scored = greedy(12, logprobs=2)
    alone = [demo.generate(CAPITAL, params)[0].outputs[0] for params in (seeded, scored)]
    loads = [SamplingParams(temperature=1.0, max_tokens=6, repetition_penalty=1.5)] * len(OTHERS)
    first, *_, last = demo.generate([CAPITAL, *OTHERS, CAPITAL], [seeded, *loads, scored])
    assert first.outputs[0].token_ids == alone[0].token_ids
    assert last.outputs[0].token_ids == alone[1].token_ids
    for one, other in zip(alone[1].logprobs or [], last.outputs[0].logprobs or [], strict=True):
        assert one.keys() == other.keys()
        for token_id, entry in one.items():
            assert entry.logprob == pytest.approx(other[token_id].logprob, abs=1e-3)
            assert (entry.rank, entry.decoded_token) == (other[token_id].rank, other[token_id].decoded_token)


def test_prompt_log_probabilities_equal_those_of_transformers(demo: LLM, demo_reference: LlamaForCausalLM) -> None:
    """A prompt of several chunks, cold and with its beginning cached."""
    text = "Emoji 👨‍👩‍👧 and 中文, then a list:\n" + "\n".join(f"{i}. item number {i * i}" for i in range(16))
    ids = demo.tokenizer.encode(text)
    assert len(ids) > 2 * 64
    with torch.no_grad():
        right = demo_reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    demo.reset_prefix_cache()
    for _ in range(2):
        (output,) = demo.generate(text, greedy(1, prompt_logprobs=5))
        first, *entries = output.prompt_logprobs or []
        assert first is None and len(entries) == len(ids) - 1
        for position, entry in enumerate(entries, start=1):
            assert 5 <= len(entry) <= 6 and ids[position] in entry
            assert len({alternative.decoded_token for alternative in entry.values()}) == len(entry)
            for token_id, alternative in entry.items():
                assert alternative.decoded_token and math.isfinite(alternative.logprob)
                assert alternative.logprob == pytest.approx(float(right[position - 1, token_id]), abs=2e-3)
        demo.generate(text, greedy(1))


def test_a_conversation_streams_as_it_is_answered(demo: LLM) -> None:
    messages = [{"role": "user", "content": "Say hello in Chinese and add a smiley."}]
    params = greedy(24)
    (whole,) = demo.chat(messages, params)
    deltas = []
    for output in demo.stream_chat(messages, params):
        deltas.append(output.outputs[0].delta)
        assert "\N{REPLACEMENT CHARACTER}" not in deltas[-1]
    assert output.prompt_token_ids == whole.prompt_token_ids
    assert "".join(deltas) == whole.outputs[0].text == demo.tokenizer.decode(whole.outputs[0].token_ids)
    assert demo.tokenizer.decode(whole.prompt_token_ids, skip_special_tokens=False).count("<|im_start|>user") == 1


def test_the_answer_ends_at_the_models_own_end(demo: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    (output,) = demo.chat(messages, SamplingParams(temperature=0, max_tokens=40))
    sample = output.outputs[0]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
    assert sample.token_ids[-1] in demo.description.eos_token_ids
    assert "Paris" in sample.text and "<|im_end|>" not in sample.text
    (longer,) = demo.chat(messages, SamplingParams(temperature=0, max_tokens=12, min_tokens=12))
    assert len(longer.outputs[0].token_ids) == 12


def test_a_penalty_changes_the_text(demo: LLM) -> None:
    prompt = "row, row, row, row, row, row, row,"
    plain, less = demo.generate([prompt] * 2, [greedy(12), greedy(12, frequency_penalty=2.0, repetition_penalty=1.5)])
    assert plain.outputs[0].text.count("row") > less.outputs[0].text.count("row")


def test_in_bfloat16_cold_and_warm_runs_agree(demo_file) -> None:
    settings = {"max_model_len": 256, "num_blocks_override": 32, "block_size": 16, "num_threads": 1}
    with LLM(demo_file, dtype="bfloat16", **settings) as llm:
        ids = llm.tokenizer.encode("The history of the town begins with a river, a bridge and a market. " * 4)
        for length in (47, 48, 49):
            prompt = {"prompt_token_ids": ids[:length]}
            (cold,) = llm.generate(prompt, greedy(8, logprobs=2))
            (warm,) = llm.generate(prompt, greedy(8, logprobs=2))
            assert warm.num_cached_tokens == (length - 1) // 16 * 16
            for one, other in zip(cold.outputs[0].logprobs or [], warm.outputs[0].logprobs or [], strict=True):
                best = [max(entries, key=lambda token: (entries[token].logprob, -token)) for entries in (one, other)]
                values = sorted((entry.logprob for entry in one.values()), reverse=True)
                if best[0] != best[1]:
                    assert values[0] - values[1] < 0.1
                    break
                assert one[best[0]].logprob == pytest.approx(other[best[0]].logprob, abs=0.1)
            llm.reset_prefix_cache()
