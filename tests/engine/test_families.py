"""Every native family through the engine: transformers' greedy tokens alone, batched, cached, in chunks, preempted."""

from pathlib import Path

import pytest
from doubles.family_cases import CASES
from doubles.tiny_llm import Oracle, greedy
from doubles.vocabularies import byte_level, write_folder

from octavo import LLM

NUM_OUTPUT = 16
BLOCK = 8


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    oracle = Oracle(CASES[case].save(tmp_path))
    write_folder(tmp_path, byte_level())
    prompts = [[(7 * i * i + 3 * i + n) % 150 for i in range(n)] for n in (45, 19, 33)]
    prompts.append(prompts[0][:29] + prompts[1])  # parts with the first within a block, and within windows
    settings = {"model_impl": "native", "dtype": "float32", "num_threads": 1, "block_size": BLOCK, "max_model_len": 64}

    def run(llm: LLM, *chosen: list[int]) -> list[int]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in chosen], greedy(NUM_OUTPUT))
        for prompt, output in zip(chosen, outputs, strict=True):
            assert output.error is None
            found = output.outputs[0].token_ids
            assert len(found) == NUM_OUTPUT
            oracle.check_greedy(prompt, found)
        return [output.num_cached_tokens for output in outputs]

    with LLM(tmp_path, num_blocks_override=64, **settings) as llm:
        run(llm, prompts[0])
        assert run(llm, prompts[3], prompts[0]) == [24, 40]
        assert run(llm, *prompts[1:3]) == [0, 0]
    with LLM(tmp_path, num_blocks_override=18, max_num_batched_tokens=17, max_num_seqs=4, **settings) as llm:
        run(llm, *prompts)
        assert llm.stats.counts.num_preemptions > 0
