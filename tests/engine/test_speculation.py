"""Guessed tokens through the whole engine: text, stops, forms and log-probabilities are what they are without."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.tiny_llm import greedy

from octavo import LLM, SamplingParams, StructuredOutput

PROMPTS = [[4 + (5 * i + 3 * j) % 11 for j in range(6 + 5 * i)] for i in range(6)]
FEW = tuple(range(40, 44))  # from so few tokens many runs come twice


@pytest.fixture(scope="module")
def guessing(tiny_folder: Path) -> Iterator[LLM]:
    guesses = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    settings = {"dtype": "float32", "num_threads": 1, "block_size": 8, "num_blocks_override": 128}
    with LLM(tiny_folder, speculative_config=guesses, **settings) as llm:
        yield llm


def found(llm: LLM, params: list[SamplingParams]) -> list[list[tuple[Any, ...]]]:
    outputs = llm.generate(PROMPTS, params)
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [
        [(sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason) for sample in output.outputs]
        for output in outputs
    ]


def sampled(seed: int, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "seed": seed, "max_tokens": 40, "allowed_token_ids": FEW, **params})


KINDS = {
    "sampled": [sampled(i) for i in range(6)],
    "filtered": [sampled(i, top_p=0.8, top_k=3, min_p=0.01) for i in range(6)],
    "penalised": [sampled(i, repetition_penalty=1.3, frequency_penalty=0.2, min_tokens=5) for i in range(6)],
    "several samples": [sampled(i, n=1 + i % 3) for i in range(6)],
    "bad words": [sampled(i, bad_words=["A B", "CD"], max_tokens=30) for i in range(6)],
    "stops": [sampled(i, stop=["AB", "DD"], include_stop_str_in_output=bool(i % 2)) for i in range(6)],
    "stop ids": [sampled(i, stop_token_ids=[FEW[i % 4]], min_tokens=3) for i in range(6)],
    "regex": [sampled(i, allowed_token_ids=None, structured=StructuredOutput(regex="(ab|ba)+c?")) for i in range(6)],
    "short": [sampled(i, max_tokens=1 + 4 * i) for i in range(6)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_the_same_with_guesses(tiny: LLM, guessing: LLM, kind: str) -> None:
    before = guessing.stats.counts.num_accepted_tokens
    assert found(guessing, KINDS[kind]) == found(tiny, KINDS[kind])
    assert guessing.stats.counts.num_accepted_tokens > before


def test_greedy_outputs_are_the_same_with_guesses(tiny: LLM, guessing: LLM) -> None:
    before = guessing.stats.counts.num_steps
    params = [greedy(60)] * len(PROMPTS)
    assert found(guessing, params) == found(tiny, params)
    assert guessing.stats.counts.num_steps - before < 60


def test_logprobs_are_those_of_each_token(tiny: LLM, guessing: LLM) -> None:
    params = [sampled(i, logprobs=2, prompt_logprobs=1) for i in range(6)]
    for one, other in zip(guessing.generate(PROMPTS, params), tiny.generate(PROMPTS, params), strict=True):
        a, b = one.outputs[0], other.outputs[0]
        assert a.logprobs is not None and len(a.logprobs) == len(a.token_ids)
        assert (a.token_ids, a.logprobs, one.prompt_logprobs) == (b.token_ids, b.logprobs, other.prompt_logprobs)
