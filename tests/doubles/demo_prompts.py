"""Prompts for the demo model, text and chat, and its greedy tokens after them."""

from collections.abc import Iterator
from typing import Any

from octavo import LLM, SamplingParams

__all__ = ["FEW", "PROMPTS", "Prompt", "greedy", "make"]

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


def make(**settings: Any) -> LLM:
    """The demo model in float32."""
    return LLM("demo", dtype="float32", max_model_len=512, num_threads=1, **settings)


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
