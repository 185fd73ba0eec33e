"""Random requests on random small engines: each gets, bit for bit, what it has alone on a calm one, text included."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.tiny_llm import PRECISIONS

from octavo import LLM, SamplingParams
from octavo.engine.outputs import RequestOutput

STEM = [4 + (i * 37) % 390 for i in range(40)]


def random_request(rng: random.Random) -> tuple[dict[str, list[int]], SamplingParams]:
    prompt = STEM[: rng.randrange(0, 30)] + [4 + rng.randrange(390) for _ in range(rng.randrange(1, 6))]
    choices: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": rng.randrange(3)},
        {"temperature": 0, "prompt_logprobs": rng.randrange(3)},
        {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"temperature": 1.5, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 20, "n": rng.randrange(1, 4), "logprobs": 1},
        {"temperature": 2.0, "min_p": 0.01, "n": 2, "prompt_logprobs": 0},
        {"temperature": 1.0, "stop": ["e", "o "], "min_tokens": 2},
        {"temperature": 1.0, "stop_token_ids": list(range(100, 160)), "n": 2},
        {"temperature": 1.0, "bad_words": ["the", "."], "presence_penalty": 1.0},
        {"temperature": 1.0, "logit_bias": {1: 3.0}, "ignore_eos": False},
    ]
    params = {
        "ignore_eos": True,
        "seed": rng.randrange(2**64),
        "max_tokens": rng.randrange(0, 20),
        **rng.choice(choices),
    }
    params["max_tokens"] = max(params["max_tokens"], params.get("min_tokens", 0))
    return {"prompt_token_ids": prompt}, SamplingParams(**params)


@pytest.fixture(scope="module", params=PRECISIONS)
def calm(request: pytest.FixtureRequest, tiny_folder: Path) -> Iterator[tuple[str, LLM]]:
    """A precision's name, and an engine of it with room for everybody."""
    settings = {"num_threads": 1, "block_size": 16, "num_blocks_override": 256}
    with LLM(tiny_folder, **PRECISIONS[request.param], **settings) as llm:
        yield request.param, llm


def told(output: RequestOutput) -> list[Any]:
    """All that a caller learns, but when and from where."""
    assert output.error is None and output.finished
    return [output.prompt_logprobs, *({**vars(sample), "delta": None} for sample in output.outputs)]


@pytest.mark.parametrize("seed", range(10))
def test_each_random_request_gets_what_it_has_alone(calm: tuple[str, LLM], make_llm, seed: int) -> None:
    precision, llm_alone = calm
    rng = random.Random(f"{precision} {seed}")
    swap = rng.random() < 0.5
    chunked = rng.random() < 0.8
    size = rng.choice([8, 16, 32])
    settings = {
        "block_size": size,
        "num_blocks_override": 224 // size + rng.randrange(4),
        "max_model_len": 64,
        "max_num_seqs": rng.choice([3, 5, 16]),
        "max_num_batched_tokens": rng.choice([5, 16, 17, 64]) if chunked else 80,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": rng.random() < 0.7,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "preemption_mode": "swap" if swap else "recompute",
        "swap_space": rng.choice([0.00005, 0.01]) if swap else 0.0,
    }
    llm = make_llm(**PRECISIONS[precision], **settings)
    assert llm.executor.row_invariant
    requests = [random_request(rng) for _ in range(24)]
    alone = [told(llm_alone.generate(prompt, params)[0]) for prompt, params in requests]
    waiting = list(range(len(requests)))
    streams: dict[int, Any] = {}
    texts: dict[int, list[str]] = {}
    while waiting or streams:
        if waiting and (not streams or rng.random() < 0.3):
            if rng.random() < 0.3:  # several in one call, while the streams wait
                batch, waiting = waiting[:4], waiting[4:]
                outputs = llm.generate(
                    [requests[i][0] for i in batch],
                    [requests[i][1] for i in batch],
                    priority=[rng.randrange(3) for _ in batch],
                )
                for i, output in zip(batch, outputs, strict=True):
                    assert told(output) == alone[i]
                continue
            index = waiting.pop(0)
            streams[index] = llm.stream(*requests[index])
            texts[index] = [""] * requests[index][1].n
        index = rng.choice(list(streams))
        if rng.random() < 0.01:
            streams.pop(index).close()
            continue
        output = next(streams[index])
        for sample in output.outputs:
            texts[index][sample.index] += sample.delta
        if output.finished:
            assert next(streams.pop(index), None) is None
            assert told(output) == alone[index]
            assert texts[index] == [sample.text for sample in output.outputs]
        llm._engine.scheduler.check()
    llm._engine.step()
    llm._engine.scheduler.check()
    assert not llm._engine.has_work and not llm._news and not len(llm._outputs)
    assert (llm.stats.num_running, llm.stats.num_waiting, llm.stats.num_used_blocks) == (0, 0, 0)
