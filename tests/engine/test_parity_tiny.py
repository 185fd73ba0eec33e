"""The full grid of settings on a tiny model: greedy tokens equal transformers' in each."""

import random
from itertools import product
from typing import Any

import pytest
from doubles.tiny_llm import Oracle, greedy

NUM_TOKENS = 24
LONGEST = 62


def prompts() -> list[list[int]]:
    """Sixteen prompts of 1 to 62 tokens; six share their first 40, two are equal, the last four grow by a block."""
    draw = random.Random(7)
    stem = [draw.randrange(4, 260) for _ in range(40)]
    shared = [stem + [draw.randrange(4, 260) for _ in range(n)] for n in (0, 1, 7, 8, 9, 20)]
    alone = [[draw.randrange(4, 260) for _ in range(n)] for n in (1, 2, 15, 16, 33, 60, 61, LONGEST)]
    return [shared[2], alone[4], *shared, *alone]


@pytest.mark.parametrize(
    ("block_size", "chunk", "caching", "room"),
    list(product((8, 16, 32), (16, 17, 512), (True, False), ("plenty", "recompute", "swap"))),
)
def test_every_setting_gives_the_tokens_of_transformers(
    make_llm: Any, oracle: Oracle, block_size: int, chunk: int, caching: bool, room: str
) -> None:
    settings: dict[str, Any] = {"num_blocks_override": 16 * (LONGEST + NUM_TOKENS) // block_size}
    if room != "plenty":
        settings = {
            "num_blocks_override": 2 * -(-(LONGEST + NUM_TOKENS) // block_size) - 1,  # not two at their longest
            "preemption_mode": room,
            "swap_space": 0.01 if room == "swap" else 0.0,
        }
    llm = make_llm(
        block_size=block_size,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, 16),
        enable_prefix_caching=caching,
        **settings,
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts()]
    params = greedy(NUM_TOKENS)
    together = [output.outputs[0].token_ids for output in llm.generate(inputs, params)]
    alone = [llm.generate(one, params)[0].outputs[0].token_ids for one in inputs[::4]]
    for prompt, found in zip([*prompts(), *prompts()[::4]], [*together, *alone], strict=True):
        assert len(found) == NUM_TOKENS
        oracle.check_greedy(prompt, found)
    counts = llm.stats.counts
    assert (counts.num_preemptions > 0) == (room != "plenty")
    assert (counts.num_swaps > 0) == (room == "swap")
    assert (counts.num_cached_prompt_tokens > 0) == caching
    assert llm.stats.num_used_blocks == 0
