"""The demo model's greedy tokens equal transformers' in float32.

56 prompts, text and chat. Outputs are read along by transformers token by token. Alone they are the same bit by bit.
"""

from collections.abc import Iterator

import pytest
from doubles.demo_prompts import PROMPTS, greedy, make
from doubles.demo_reference import check_greedy
from transformers import LlamaForCausalLM

from octavo import LLM


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make(max_num_seqs=32) as llm:
        yield llm


@pytest.fixture(scope="module")
def batch(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """Prompts and outputs of all in one call."""
    assert len(PROMPTS) >= 50
    return list(greedy(llm, PROMPTS))


def test_tokens_in_a_batch_equal_those_of_transformers(
    llm: LLM, batch: list[tuple[list[int], list[int]]], demo_reference: LlamaForCausalLM
) -> None:
    eos = sorted(llm.description.eos_token_ids)
    for prompt, output in batch:
        check_greedy(demo_reference, prompt, output, eos)


def test_tokens_alone_equal_those_in_a_batch(llm: LLM, batch: list[tuple[list[int], list[int]]]) -> None:
    assert llm.executor.row_invariant
    for i in range(0, len(PROMPTS), 5):
        llm.reset_prefix_cache()
        assert list(greedy(llm, [PROMPTS[i]])) == [batch[i]]
