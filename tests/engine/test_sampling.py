"""Seeds, penalties, biases, masks and stops of one request, which its batch mates never feel."""

import math
import re
from pathlib import Path

import pytest
import torch
from doubles.tiny_llm import EOS_IDS, Oracle, greedy, write_tiny_llm

from octavo import LLM, SamplingParams
from octavo_cpu.platform import CpuPlatform

PROMPT = {"prompt_token_ids": [40, 41, 42, 43, 44, 45, 40, 41]}
OTHERS = [{"prompt_token_ids": [50 + i, 51, 52]} for i in range(4)]


def ids(llm: LLM, params: SamplingParams, prompt: dict[str, list[int]] = PROMPT) -> list[list[int]]:
    (output,) = llm.generate(prompt, params)
    assert output.error is None
    return [sample.token_ids for sample in output.outputs]


def run(**params: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **params})  # type: ignore[arg-type]


# Seeds


def test_a_seeded_request_is_constant_whoever_runs_beside_it(tiny: LLM) -> None:
    seeded = run(seed=7, temperature=1.5)
    (alone,) = ids(tiny, seeded)
    for others in (0, 1, 4):
        params = [run(temperature=1.5)] * others + [seeded] + [run(temperature=0.9)] * (4 - others)
        prompts = [*OTHERS[:others], PROMPT, *OTHERS[others:]]
        assert tiny.generate(prompts, params)[others].outputs[0].token_ids == alone
    assert ids(tiny, seeded.but(seed=8)) != [alone]


def test_tokens_are_the_same_with_the_platforms_sampler_and_without(make_llm, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ({}, {"top_p": 0.95}, {"top_k": 7}, {"min_p": 0.02}, {"top_p": 0.9, "frequency_penalty": 0.5})
    params = [run(seed=i, temperature=0.8 + 0.2 * i, n=1 + i % 2, **kinds[i % 5]) for i in range(10)]
    prompts = [{"prompt_token_ids": [50 + i, 51, 52]} for i in range(10)]

    def tokens() -> list[list[int]]:
        llm = make_llm()
        return [sample.token_ids for output in llm.generate(prompts, params) for sample in output.outputs]

    with_op = tokens()
    monkeypatch.setattr(CpuPlatform, "ops", lambda self: [])
    assert tokens() == with_op


def test_unseeded_requests_differ_and_follow_the_engines_seed(make_llm) -> None:
    params = run(temperature=2.0, n=2)
    first, second, third = make_llm(seed=1), make_llm(seed=1), make_llm(seed=2)
    one = [ids(first, params), ids(first, params)]
    assert one[0] != one[1] and one[0][0] != one[0][1]
    assert [ids(second, params), ids(second, params)] == one
    assert ids(third, params) != one[0]


def test_samples_of_one_seed_differ_and_do_not_depend_on_their_number(tiny: LLM) -> None:
    five = ids(tiny, run(seed=3, n=5, temperature=1.5))
    assert len({tuple(sample) for sample in five}) == 5
    assert ids(tiny, run(seed=3, n=2, temperature=1.5)) == five[:2]


def test_seeds_of_any_size_are_taken(tiny: LLM) -> None:
    found = [ids(tiny, run(seed=seed, temperature=2.0))[0] for seed in (0, -1, 2**64 - 1, 2**63, -(2**63))]
    assert found[1] == found[2] and found[3] == found[4]  # the same 64 bits
    assert len({tuple(tokens) for tokens in found}) == 3


def test_tokens_come_as_often_as_their_probability_says(tiny: LLM, oracle: Oracle) -> None:
    prompt = [40, 41, 42]
    num = 2000
    probabilities = (oracle.logits(prompt)[-1] / 0.7).softmax(-1)
    outputs = tiny.generate(
        [{"prompt_token_ids": prompt}] * (num // 100),
        [SamplingParams(n=50, max_tokens=1, temperature=0.7, seed=seed) for seed in range(num // 100)],
    )
    found = torch.zeros(len(probabilities))
    for output in outputs:
        for sample in output.outputs:
            found[sample.token_ids[0]] += 1
    share = found / found.sum()
    sigma = (probabilities * (1 - probabilities) / found.sum()).sqrt()
    assert ((share - probabilities).abs() < 5 * sigma + 2 / found.sum()).all()


@pytest.mark.parametrize(
    ("filters", "allowed"),
    [
        ({"top_k": 3}, lambda p: p >= p.topk(3).values[-1]),
        ({"min_p": 0.5}, lambda p: p >= 0.5 * p.max()),
        (
            {"top_p": 0.1},
            lambda p: p >= p.sort(descending=True).values[(p.sort(descending=True).values.cumsum(0) < 0.1).sum()],
        ),
    ],
)
def test_filters_keep_to_what_they_allow(tiny: LLM, oracle: Oracle, filters: dict[str, float], allowed) -> None:
    prompt = {"prompt_token_ids": [60, 61, 62]}
    kept = torch.nonzero(allowed(oracle.logits(prompt["prompt_token_ids"])[-1].softmax(-1)))[:, 0].tolist()
    found = ids(tiny, SamplingParams(n=60, max_tokens=1, seed=1, **filters), prompt)
    assert {sample[0] for sample in found} <= set(kept)
    assert len({sample[0] for sample in found}) > 1 or len(kept) == 1


# Penalties, biases, masks


def penalised(oracle: Oracle, prompt: list[int], num_tokens: int, params: SamplingParams) -> list[int]:
    """Greedy with penalties, worked out on the oracle's logits."""
    output: list[int] = []
    for _ in range(num_tokens):
        logits = oracle.logits([*prompt, *output])[-1].clone()
        for token in {*prompt, *output}:
            value, count = logits[token], output.count(token)
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
            logits[token] = value - params.presence_penalty * (count > 0) - params.frequency_penalty * count
        output.append(int(logits.argmax()))
    return output


PENALTIES = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"repetition_penalty": 0.6},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
]


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties_count_what_they_should(tiny: LLM, oracle: Oracle, penalties: dict[str, float]) -> None:
    params = greedy(24, **penalties)
    assert ids(tiny, params) == [penalised(oracle, PROMPT["prompt_token_ids"], 24, params)]


@pytest.mark.parametrize("place", [0, 2, 4])
def test_penalties_never_touch_batch_mates(tiny: LLM, oracle: Oracle, place: int) -> None:
    harsh = greedy(20, repetition_penalty=2.0, presence_penalty=2.0, frequency_penalty=2.0, logit_bias={77: 50.0})
    params = [greedy(20)] * 4
    params.insert(place, harsh)
    prompts = list(OTHERS)
    prompts.insert(place, PROMPT)
    outputs = tiny.generate(prompts, params)
    for index, output in enumerate(outputs):
        if index != place:
            oracle.check_greedy(output.prompt_token_ids, output.outputs[0].token_ids)
    assert outputs[place].outputs[0].token_ids == ids(tiny, harsh)[0]


def test_a_penalty_of_two_changes_the_output(tiny: LLM) -> None:
    repeating = {"prompt_token_ids": [90] * 10}
    bias = {"logit_bias": {90: 6.0}}
    (plain,) = ids(tiny, greedy(12, **bias), repeating)
    (less,) = ids(tiny, greedy(12, frequency_penalty=2.0, **bias), repeating)
    assert plain.count(90) > less.count(90)


def test_biases_masks_and_bad_words_hold(tiny: LLM) -> None:
    assert ids(tiny, greedy(5, logit_bias={123: 100})) == [[123] * 5]
    assert set(ids(tiny, run(seed=1, allowed_token_ids=[9, 10, 11]))[0]) <= {9, 10, 11}
    best = ids(tiny, greedy(1))[0][0]
    assert ids(tiny, greedy(1, logit_bias={best: -100}))[0][0] != best
    word = next(
        tiny.tokenizer.decode([token]) for token in ids(tiny, greedy(40))[0] if tiny.tokenizer.decode([token]).isalpha()
    )
    (output,) = tiny.generate(PROMPT, greedy(40, bad_words=[word]))
    (before,) = tiny.generate(PROMPT, greedy(40))
    assert word in before.outputs[0].text
    banned = {sequence[0] for sequence in tiny.tokenizer.encode_bad_words([word]) if len(sequence) == 1}
    assert banned and not banned & set(output.outputs[0].token_ids)


def test_masks_that_leave_nothing_end_the_request_alone(tiny: LLM, oracle: Oracle) -> None:
    impossible = SamplingParams(allowed_token_ids=list(EOS_IDS), min_tokens=3, max_tokens=5, seed=1)
    bad, good = tiny.generate([PROMPT, OTHERS[0]], [impossible, greedy(8)])
    assert bad.error is not None and "allowed_token_ids" in bad.error
    assert (bad.outputs[0].finish_reason, bad.outputs[0].token_ids) == ("error", [])
    oracle.check_greedy(good.prompt_token_ids, good.outputs[0].token_ids)


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    """A head of 512 rows over a tokenizer of 401 ids."""
    folder = tmp_path_factory.mktemp("padded")
    return folder, write_tiny_llm(folder, vocab_size=512)


def test_ids_beyond_the_tokenizer_are_never_sampled(make_llm, padded: tuple[Path, Oracle]) -> None:
    folder, oracle = padded
    llm = make_llm(folder)
    prompt = {"prompt_token_ids": [40, 41, 42]}
    outputs = llm.generate(
        [prompt] * 4,
        [
            greedy(40),
            greedy(40, logprobs=20, prompt_logprobs=20),
            run(seed=1, n=20, temperature=50.0, max_tokens=40),
            run(seed=1, top_k=3, max_tokens=40),
        ],
    )
    found = {token for output in outputs for sample in output.outputs for token in sample.token_ids}
    assert max(found) < 401
    logits = oracle.logits([40, 41, 42, *outputs[0].outputs[0].token_ids])[2:-1]
    assert (logits.argmax(-1) >= 401).any(), "the padding was never the best"
    assert logits[:, :401].argmax(-1).tolist() == outputs[0].outputs[0].token_ids
    for entries in (*outputs[1].outputs[0].logprobs, *outputs[1].prompt_logprobs[1:]):
        assert all(math.isfinite(entry.logprob) and entry.decoded_token for entry in entries.values())
        assert len({entry.decoded_token for entry in entries.values()}) == len(entries)
    for name in ("prompt", "logit_bias", "allowed_token_ids", "stop_token_ids"):
        value = {450: 1.0} if name == "logit_bias" else [450]
        given = {"prompt_token_ids": [450]} if name == "prompt" else prompt
        (refused,) = llm.generate(given, SamplingParams() if name == "prompt" else SamplingParams(**{name: value}))
        assert refused.error is not None and re.match(
            rf"{name} holds 450; token ids are integers from 0 to 400", refused.error
        )


# Ends


@pytest.mark.parametrize("eos", EOS_IDS)
def test_every_end_of_the_generation_config_ends_and_ignore_eos_ignores_it(tiny: LLM, eos: int) -> None:
    lifted = SamplingParams(temperature=0, max_tokens=6, logit_bias={eos: 100.0})
    (output,) = tiny.generate(PROMPT, lifted)
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([eos], "")
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    (ignored,) = tiny.generate(PROMPT, lifted.but(ignore_eos=True))
    assert (ignored.outputs[0].token_ids, ignored.outputs[0].finish_reason) == ([eos] * 6, "length")


@pytest.mark.parametrize("min_tokens", [1, 4, 6])
def test_min_tokens_holds_against_every_end(tiny: LLM, min_tokens: int) -> None:
    bias = dict.fromkeys(EOS_IDS, 100.0) | {200: 99.0}
    params = SamplingParams(temperature=0, max_tokens=6, min_tokens=min_tokens, logit_bias=bias, stop_token_ids=[200])
    (output,) = tiny.generate(PROMPT, params)
    tokens = output.outputs[0].token_ids
    assert not {*EOS_IDS, 200} & set(tokens[:min_tokens])
    assert (len(tokens), output.outputs[0].finish_reason) == (
        (min_tokens + 1, "stop") if min_tokens < 6 else (6, "length")
    )


def test_a_stop_id_ends_is_named_and_stays_out_of_the_text(tiny: LLM) -> None:
    (plain,) = tiny.generate(PROMPT, greedy(12))
    tokens = plain.outputs[0].token_ids
    at = next(i for i in range(4, 12) if tokens[i] not in tokens[:i])
    for include in (False, True):
        params = greedy(12, stop_token_ids=[tokens[at]], include_stop_str_in_output=include)
        (output,) = tiny.generate(PROMPT, params)
        assert output.outputs[0].token_ids == tokens[: at + 1]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", tokens[at])
        assert output.outputs[0].text == tiny.tokenizer.decode(tokens[: at + include])


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_max_tokens_is_kept_to(tiny: LLM, max_tokens: int) -> None:
    (output,) = tiny.generate(PROMPT, greedy(max_tokens))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (max_tokens, "length")


def test_no_max_tokens_goes_on_to_the_models_length(make_llm) -> None:
    llm = make_llm(max_model_len=40)
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (32, "length")
    (cut,) = llm.generate(PROMPT, greedy(1000))
    assert cut.outputs[0].token_ids == output.outputs[0].token_ids


def test_samples_end_each_for_its_own_reason(tiny: LLM) -> None:
    params = SamplingParams(n=24, seed=5, temperature=3.0, max_tokens=60, logit_bias={1: 4.0})
    (output,) = tiny.generate(PROMPT, params)
    reasons = {sample.finish_reason for sample in output.outputs}
    assert reasons == {"stop", "length"}
    for sample in output.outputs:
        assert (sample.finish_reason == "stop") == (sample.token_ids[-1] in EOS_IDS)
        assert not set(EOS_IDS) & set(sample.token_ids[:-1])
        assert len(sample.token_ids) <= 60
