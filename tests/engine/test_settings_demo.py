"""The demo model's greedy tokens, bit by bit those of the base set-up however the engine is set up.

Pairs of settings run on a dozen prompts. That the base set-up gives transformers' tokens is test_parity_demo's.
"""

from itertools import product
from typing import Any

import pytest
from doubles.demo_prompts import FEW, greedy, make

LONGEST, NUM_TOKENS = 190, 48  # of the prompts; of each output

# Every pair of values of any two settings occurs.
BLOCK_SIZES, CHUNKS, CACHING, ROOM = (8, 16, 32), (16, 17, 512), (True, False), ("plenty", "recompute", "swap")
PAIRWISE = [
    (8, 16, True, "plenty"),
    (8, 17, False, "recompute"),
    (8, 512, True, "swap"),
    (16, 16, False, "swap"),
    (16, 17, True, "plenty"),
    (16, 512, True, "recompute"),
    (32, 16, True, "recompute"),
    (32, 17, True, "swap"),
    (32, 512, False, "plenty"),
]


def test_the_settings_cover_every_pair() -> None:
    columns = (BLOCK_SIZES, CHUNKS, CACHING, ROOM)
    for i, j in product(range(4), repeat=2):
        if i < j:
            wanted = set(product(columns[i], columns[j]))
            assert wanted == {(case[i], case[j]) for case in PAIRWISE}, f"settings {i} and {j}"


@pytest.fixture(scope="module")
def calm() -> list[tuple[list[int], list[int]]]:
    """Prompts and outputs where nothing is shared, cut or preempted."""
    with make(max_num_seqs=16, enable_prefix_caching=False) as llm:
        assert llm.executor.row_invariant
        found = [one for prompt in FEW for one in greedy(llm, [prompt], NUM_TOKENS, ignore_eos=True)]
    assert max(len(prompt) for prompt, _ in found) <= LONGEST
    return found


@pytest.mark.parametrize(("block_size", "chunk", "caching", "room"), PAIRWISE)
def test_settings_do_not_change_tokens(
    block_size: int, chunk: int, caching: bool, room: str, calm: list[tuple[list[int], list[int]]]
) -> None:
    settings: dict[str, Any] = {}
    if room != "plenty":  # the longest fits, a dozen want to run
        settings["num_blocks_override"] = -(-(LONGEST + NUM_TOKENS) // block_size)
        settings["preemption_mode"] = room
        settings["swap_space"] = 1.0 if room == "swap" else 0.0
    with make(
        block_size=block_size,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, 12),
        enable_prefix_caching=caching,
        **settings,
    ) as llm:
        for _ in range(2 if caching else 1):  # cold, then warm
            assert list(greedy(llm, FEW, NUM_TOKENS, ignore_eos=True)) == calm
        if room != "plenty":
            assert llm.stats.counts.num_preemptions > 0
        if caching:
            assert llm.stats.counts.num_cached_prompt_tokens > 0
