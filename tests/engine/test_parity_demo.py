"""The demo model's greedy tokens equal transformers' in float32, however the engine is set up.

The base set-up runs 56 prompts, text and chat; pairs of settings run on a dozen. Outputs are read along by
transformers token by token, so a difference in the first token of a chunk, a block or a resumed request shows.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from doubles.demo_reference import check_greedy
from transformers import LlamaForCausalLM

from octavo import LLM, SamplingParams

TEXTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at",
    "Roses are red, violets are",
    "SELECT name, age FROM users WHERE",
    "Die Hauptstadt von Deutschland ist",
    "La capitale de l'Italie est",
    "北京是",
    "🙂 means",
    "   leading spaces and\ttabs",
    "\n\n\n",
    "A",
    "# Title\n\n- item one\n- item two\n-",
    '{"name": "Ada", "age":',
    "In 1969, humans first landed on",
    "The derivative of x^2 is",
    "Dear Sir or Madam,",
    "To be, or not to be,",
    "import numpy as np\n\ndef softmax(x):",
    "The mitochondria is the",
    "Q: What is 2 + 2?\nA:",
]
LONG = "The history of the town begins with a river, a bridge and a market. " * 12
TEXTS += [LONG[: 100 * n] for n in range(1, 9)]
QUESTIONS = [
    "What is the capital of Italy?",
    "Write a haiku about rain.",
    "Name three primary colours.",
    "Explain gravity to a child.",
    "What is 17 times 3?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
]
SYSTEM = "You are a careful assistant. Answer briefly and politely, and say so when you do not know. " * 3

Prompt = str | list[dict[str, str]]
PROMPTS: list[Prompt] = [
    *TEXTS,
    *([{"role": "user", "content": question}] for question in QUESTIONS),
    *([{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}] for question in QUESTIONS),
    *(
        [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "Let me think."},
            {"role": "user", "content": "Go on."},
        ]
        for question in QUESTIONS
    ),
]
FEW = [PROMPTS[i] for i in (0, 2, 11, 24, 28, 31, 32, 33, 40, 41, 42, 50)]

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


def greedy(
    llm: LLM, prompts: list[Prompt], num_tokens: int = 64, ignore_eos: bool = False
) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt ids and output ids of each, all of one call."""
    ids = [
        llm.tokenizer.encode(prompt) if isinstance(prompt, str) else llm.tokenizer.encode_chat(prompt)
        for prompt in prompts
    ]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=ignore_eos)
    for output in llm.generate([{"prompt_token_ids": one} for one in ids], params):
        assert output.error is None
        yield output.prompt_token_ids, output.outputs[0].token_ids


def make(**settings: Any) -> LLM:
    return LLM("demo", dtype="float32", max_model_len=512, num_threads=1, **settings)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make(max_num_seqs=32) as llm:
        yield llm


def test_tokens_in_a_batch_equal_those_of_transformers(llm: LLM, demo_reference: LlamaForCausalLM) -> None:
    assert len(PROMPTS) >= 50
    eos = sorted(llm.description.eos_token_ids)
    for prompt, output in greedy(llm, PROMPTS):
        check_greedy(demo_reference, prompt, output, eos)


def test_tokens_alone_equal_those_of_transformers(llm: LLM, demo_reference: LlamaForCausalLM) -> None:
    eos = sorted(llm.description.eos_token_ids)
    for one in FEW[:8]:
        for prompt, output in greedy(llm, [one]):
            check_greedy(demo_reference, prompt, output, eos)


@pytest.mark.parametrize(("block_size", "chunk", "caching", "room"), PAIRWISE)
def test_settings_do_not_change_tokens(
    block_size: int, chunk: int, caching: bool, room: str, demo_reference: LlamaForCausalLM
) -> None:
    longest, num_tokens = 190, 48
    settings: dict[str, Any] = {}
    if room != "plenty":  # the longest fits, a dozen want to run
        settings["num_blocks_override"] = -(-(longest + num_tokens) // block_size)
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
            for prompt, output in greedy(llm, FEW, num_tokens, ignore_eos=True):
                assert len(prompt) <= longest
                check_greedy(demo_reference, prompt, output)
        if room != "plenty":
            assert llm.stats.counts.num_preemptions > 0
        if caching:
            assert llm.stats.counts.num_cached_prompt_tokens > 0
