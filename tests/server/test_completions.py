"""/v1/completions: the tokens of an offline run, in every form that clients ask for."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI
from server.events import chunks_of, joined
from server.served import Served

from octavo import LLM, SamplingParams

PATH = "/v1/completions"
PROMPTS = [[4 + (7 * i + 3 * j) % 250 for j in range(5 + 17 * i)] for i in range(6)]


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def test_tokens_are_those_of_an_offline_run_alone_and_among_others(http: httpx.Client, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in offline.generate(PROMPTS, params)]  # type: ignore[arg-type]
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}

    def one(prompt: list[int]) -> list[int]:
        [choice] = complete(http, prompt=prompt, **fields)["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["prompt_token_ids"] == prompt
        ids: list[int] = choice["token_ids"]
        return ids

    assert [one(prompt) for prompt in PROMPTS] == expected
    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(one, PROMPTS * 2)) == expected * 2
    together = complete(http, prompt=PROMPTS, **fields)
    assert [choice["token_ids"] for choice in together["choices"]] == expected


def test_samples_of_several_prompts_are_numbered_prompt_by_prompt(http: httpx.Client, offline: LLM) -> None:
    params = SamplingParams(temperature=1, seed=3, n=3, max_tokens=8, ignore_eos=True)
    expected = [s.token_ids for output in offline.generate(PROMPTS[:2], params) for s in output.outputs]  # type: ignore[arg-type]
    answer = complete(http, prompt=PROMPTS[:2], seed=3, n=3, max_tokens=8, ignore_eos=True, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    num_prompt = len(PROMPTS[0]) + len(PROMPTS[1])
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        num_prompt,
        48,
        num_prompt + 48,
    )


def test_prompts_of_every_form(http: httpx.Client) -> None:
    fields = {"temperature": 0, "max_tokens": 6}
    ids = http.post("/tokenize", json={"prompt": "Hello"}).json()["tokens"]
    [text] = texts(complete(http, prompt="Hello", **fields))
    assert texts(complete(http, prompt=["Hello"], **fields)) == [text]
    assert texts(complete(http, prompt=ids, **fields)) == [text]
    assert texts(complete(http, prompt=[ids, ids], **fields)) == [text, text]


def test_a_repeated_prompt_is_served_from_the_cache_and_says_so(http: httpx.Client) -> None:
    prompt = [9 + i % 60 for i in range(100)]
    first, second = (complete(http, prompt=prompt, temperature=0, max_tokens=5) for _ in range(2))
    assert texts(first) == texts(second)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "Hello there", "temperature": 0, "max_tokens": 24},
    "seeded samples": {"prompt": "Hello there", "seed": 11, "n": 3, "max_tokens": 16},
    "several prompts": {"prompt": ["Hello", "there", "you"], "seed": 5, "n": 2, "max_tokens": 12},
    "stops": {"prompt": "abc", "seed": 4, "max_tokens": 60, "stop": ["e", "a", "o", "\x02"], "n": 4},
    "kept stops": {"prompt": "abc", "seed": 4, "max_tokens": 60, "stop": "a", "include_stop_str_in_output": True},
    "echo": {"prompt": ["Hello", "you"], "seed": 1, "max_tokens": 5, "echo": True},
    "echo of ids": {"prompt": [0, 72, 80], "seed": 1, "max_tokens": 5, "echo": True, "logprobs": 2},
    "scores": {"prompt": "Hello there", "seed": 2, "max_tokens": 12, "logprobs": 3, "n": 2},
    "nothing": {"prompt": "Hello", "max_tokens": 0, "echo": True},
    "penalties": {"prompt": "Hello", "temperature": 0, "max_tokens": 20, "repetition_penalty": 1.8},
    "in steps": {"prompt": "Hello", "temperature": 0, "max_tokens": 20, "stream_interval": 6},
}


@pytest.mark.parametrize("name", WISHES)
def test_the_joined_stream_is_the_whole(http: httpx.Client, name: str) -> None:
    wish = WISHES[name]
    whole = complete(http, **wish)
    pieces = joined(chunks_of(http, PATH, **wish))
    assert len(pieces) == len(whole["choices"])
    for choice in whole["choices"]:
        piece = pieces[choice["index"]]
        assert piece["text"] == choice["text"]
        assert piece["finish_reason"] == choice["finish_reason"]
        assert piece["logprobs"] == (choice["logprobs"] or {})


def test_a_seed_gives_the_same_among_others(http: httpx.Client) -> None:
    def one(seed: int | None) -> str:
        return texts(complete(http, prompt="Hello", seed=seed, max_tokens=12, ignore_eos=True))[0]

    alone = [one(seed) for seed in range(4)]
    assert len(set(alone)) == 4
    seeds = [0, None, 1, None, 2, None, 3, None] * 2
    with ThreadPoolExecutor(len(seeds)) as threads:
        among = list(threads.map(one, seeds))
    assert [text for text, seed in zip(among, seeds, strict=True) if seed is not None] == alone * 2


def test_a_penalty_changes_the_output(http: httpx.Client) -> None:
    wish = {"prompt": "Hello", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    plain, changed = complete(http, **wish), complete(http, **wish, frequency_penalty=2)
    assert texts(plain) != texts(changed)


def test_usage_comes_last_in_a_chunk_without_choices(http: httpx.Client) -> None:
    wish = {"prompt": ["Hello", "you"], "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    silent = chunks_of(http, PATH, **wish, stream_options={})
    assert all(chunk["choices"] and "usage" not in chunk for chunk in silent)
    *content, last = chunks_of(http, PATH, **wish, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == {**complete(http, **wish)["usage"], "prompt_tokens_details": {"cached_tokens": 0}}
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in content)
    both = {"include_usage": True, "continuous_usage_stats": True}
    *content, last = chunks_of(http, PATH, prompt="Hello", temperature=0, max_tokens=6, stream_options=both)
    counts = [chunk["usage"]["completion_tokens"] for chunk in content]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"]


# Echo and scores: what lm-eval sums up


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 65, 150])
def test_echo_scores_every_token_of_the_prompt(http: httpx.Client, offline: LLM, num_tokens: int) -> None:
    prompt = [4 + (5 * i) % 300 for i in range(num_tokens)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=1)
    [expected] = offline.generate([prompt], params)
    assert expected.prompt_logprobs is not None
    assert expected.outputs[0].logprobs is not None
    rows = [*expected.prompt_logprobs, *expected.outputs[0].logprobs]
    ids = [*prompt, *expected.outputs[0].token_ids]
    body = {"prompt": [prompt], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    for _ in range(2):  # the second time its blocks are in the cache
        scores = complete(http, **body)["choices"][0]["logprobs"]
        assert {len(scores[name]) for name in scores} == {num_tokens + 1}
        assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
        for i in range(1, num_tokens + 1):
            row = rows[i]
            assert row is not None
            assert scores["token_logprobs"][i] == pytest.approx(row[ids[i]].logprob, abs=1e-4)
            best = max(scores["top_logprobs"][i].values())
            assert best == pytest.approx(max(each.logprob for each in row.values()), abs=1e-4)
            assert len(scores["top_logprobs"][i]) == len(row)
            if row[ids[i]].rank == 1:
                assert scores["token_logprobs"][i] == best  # the same float: clients compare so
            else:
                assert scores["token_logprobs"][i] < best
        alone = complete(http, **{**body, "max_tokens": 0})
        assert alone["choices"][0]["finish_reason"] == "length"
        assert alone["usage"]["completion_tokens"] == 0
        assert len(alone["choices"][0]["logprobs"]["tokens"]) == num_tokens
        assert alone["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(
            scores["token_logprobs"][1:-1], abs=1e-4
        )


def test_an_end_of_sequence_is_counted_and_scored(http: httpx.Client) -> None:
    bias = {"logit_bias": {"1": 100}}
    choice = complete(http, prompt="Hello", max_tokens=1, logprobs=1, echo=True, temperature=0, **bias)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == "Hello"
    assert choice["logprobs"]["tokens"] == ["H", "e", "l", "l", "o", "</s>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5]


def test_scores_are_of_the_model_itself(http: httpx.Client) -> None:
    fields = {"prompt": "Hello", "max_tokens": 1, "logprobs": 20, "seed": 1}
    plain = complete(http, **fields, temperature=0)["choices"][0]["logprobs"]["top_logprobs"]
    changed = complete(http, **fields, temperature=5, frequency_penalty=2)["choices"][0]["logprobs"]["top_logprobs"]
    assert len(plain[0]) == 20
    assert {name: changed[0][name] for name in plain[0]} == pytest.approx(plain[0])


def test_without_alternatives_the_token_itself_is_scored(http: httpx.Client) -> None:
    choice = complete(http, prompt="Hello", max_tokens=4, logprobs=0, temperature=0)["choices"][0]
    scores = choice["logprobs"]
    assert [len(best) for best in scores["top_logprobs"]] == [1] * 4
    assert [next(iter(best.values())) for best in scores["top_logprobs"]] == scores["token_logprobs"]
    by_id = complete(http, prompt="Hello", max_tokens=4, logprobs=0, temperature=0, return_tokens_as_token_ids=True)
    assert all(token.startswith("token_id:") for token in by_id["choices"][0]["logprobs"]["tokens"])


def test_prompt_scores_by_id(http: httpx.Client, offline: LLM) -> None:
    [expected] = offline.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2))
    found = complete(http, prompt=PROMPTS[1], temperature=0, max_tokens=1, prompt_logprobs=2)
    rows = found["choices"][0]["prompt_logprobs"]
    assert expected.prompt_logprobs is not None
    assert rows[0] is None
    for row, other in zip(rows[1:], expected.prompt_logprobs[1:], strict=True):
        assert other is not None
        assert {int(i): each["logprob"] for i, each in row.items()} == pytest.approx(
            {i: each.logprob for i, each in other.items()}, abs=1e-4
        )
        assert [each["decoded_token"] for each in row.values()] == [each.decoded_token for each in other.values()]


def test_a_prompt_is_cut_to_what_is_asked_for(http: httpx.Client) -> None:
    prompt = [4 + i % 300 for i in range(600)]
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "return_token_ids": True}
    left = complete(http, prompt=prompt, truncate_prompt_tokens=10, **fields)
    assert left["choices"][0]["prompt_token_ids"] == prompt[-10:]
    right = complete(http, prompt=prompt, truncate_prompt_tokens=10, truncation_side="right", **fields)
    assert right["choices"][0]["prompt_token_ids"] == prompt[:10]
    all_that_fits = complete(http, prompt=prompt, truncate_prompt_tokens=-1, **fields)
    assert all_that_fits["choices"][0]["prompt_token_ids"] == prompt[-508:]
    assert len(all_that_fits["choices"][0]["token_ids"]) == 4


def test_the_openai_client(openai: OpenAI, served: Served) -> None:
    assert [model.id for model in openai.models.list()] == ["tiny", "second-name"]
    assert openai.models.retrieve("second-name").object == "model"
    whole = openai.completions.create(model="tiny", prompt="Hello", max_tokens=12, temperature=0, logprobs=1)
    stream = openai.completions.create(
        model="tiny", prompt="Hello", max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    named = openai.completions.with_raw_response.create(
        model="tiny", prompt="Hello", max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert named.headers["x-request-id"] == "mine"
    assert named.parse().id.startswith("cmpl-mine-")
    assert served.engine.num_live == 0


def test_embeddings_are_those_of_an_offline_run(openai: OpenAI, offline: LLM) -> None:
    inputs = ["Hello", "you there"]
    expected = [output.embedding for output in offline.embed(inputs)]
    for encoding in ("float", "base64"):
        found = openai.embeddings.create(model="tiny", input=inputs, encoding_format=encoding)  # type: ignore[arg-type]
        if encoding == "float":
            assert [each.embedding for each in found.data] == [pytest.approx(each, abs=1e-5) for each in expected]
        assert found.usage.prompt_tokens == sum(len(offline.tokenizer.encode(text)) for text in inputs)
    default = openai.embeddings.create(model="tiny", input="Hello")  # its client asks for base64 by itself
    assert default.data[0].embedding == pytest.approx(expected[0], abs=1e-5)
