"""A tiny model through the engine, its tokens held to transformers': cached, in chunks, batched, preempted."""

import re
from pathlib import Path

from octavo import LLM

from .tiny_llm import Oracle, greedy
from .tiny_models import Tiny
from .vocabularies import byte_level, write_folder

__all__ = ["check_through_engine"]

NUM_OUTPUT = 16
BLOCK = 8


def check_through_engine(case: Tiny, folder: Path, *, model_impl: str, vocabulary: int, program: str) -> None:
    """Write the model to `folder` and run four prompts of ids below `vocabulary`; the fourth parts with the first
    within a block, and within windows. `program`: what serves it says so.
    """
    oracle = Oracle(case.save(folder))
    write_folder(folder, byte_level())
    prompts = [[(7 * i * i + 3 * i + n) % vocabulary for i in range(n)] for n in (45, 19, 33)]
    prompts.append(prompts[0][:29] + prompts[1])
    settings = {"dtype": "float32", "num_threads": 1, "block_size": BLOCK, "max_model_len": 64}

    def run(llm: LLM, *chosen: list[int]) -> list[int]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in chosen], greedy(NUM_OUTPUT))
        for prompt, output in zip(chosen, outputs, strict=True):
            assert output.error is None
            found = output.outputs[0].token_ids
            assert len(found) == NUM_OUTPUT
            oracle.check_greedy(prompt, found)
        return [output.num_cached_tokens for output in outputs]

    with LLM(folder, model_impl=model_impl, num_blocks_override=64, **settings) as llm:
        assert re.match(program, llm.executor.facts()["program"])
        run(llm, prompts[0])
        assert run(llm, prompts[3], prompts[0]) == [24, 40]
        assert run(llm, *prompts[1:3]) == [0, 0]
    tight = {"num_blocks_override": 18, "max_num_batched_tokens": 17, "max_num_seqs": 4}
    with LLM(folder, model_impl=model_impl, **tight, **settings) as llm:
        run(llm, prompts[0])
        llm.reset_prefix_cache()
        run(llm, *prompts)
        assert llm.stats.counts.num_preemptions > 0
