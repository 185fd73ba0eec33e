"""Scheduler and runner together over the fake program: whatever the schedule, each request's tokens are its own."""

from dataclasses import dataclass

import pytest
from doubles.fake_executor import FakeExecutor
from doubles.fake_program import ALL_MODES, fake_greedy, fake_logits
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.contract import RowMode
from octavo.engine.loop import EngineCore
from octavo.errors import RequestError
from octavo.executor.logits import LogitsProcessor
from octavo.executor.logprobs import from_logits
from octavo.executor.sampler import Draw, Sampler
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import TokenLogprobs
from octavo.scheduler.request import Request

VOCAB = 61
BLOCK = 4

PARAMS = st.sampled_from(
    [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(seed=3, max_tokens=17, temperature=1.2),
        SamplingParams(seed=4, max_tokens=12, n=3, top_p=0.9),
        SamplingParams(temperature=0, max_tokens=16, prompt_logprobs=2, logprobs=1),
        SamplingParams(seed=5, max_tokens=10, repetition_penalty=1.5, presence_penalty=0.5, n=2, logprobs=0),
        SamplingParams(seed=6, max_tokens=14, bad_words_token_ids=((7,), (1, 2)), min_tokens=3, top_k=5),
    ]
)
PROMPTS = st.one_of(
    st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=20),
    st.integers(1, 18).map(lambda n: list(range(1, n + 1))),  # these share prefixes
)


@dataclass
class Gained:
    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    prompt_logprobs: list[TokenLogprobs]


def alone(prompt: list[int], params: SamplingParams, sample: int, vocab: int) -> tuple[list[int], list[TokenLogprobs]]:
    """What the sample must give, without engine, cache or batch."""
    processor = LogitsProcessor(params, (0,), prompt, (), vocab) if params.changes_logits else None
    ids, logprobs = list(prompt), []
    for position in range(params.max_tokens or 0):
        logits = fake_logits(ids, vocab)
        token = Sampler(vocab).sample([Draw(logits, params, sample, position, processor)])[0]
        assert isinstance(token, int)
        if params.logprobs is not None:
            logprobs.append(from_logits(logits, token, params.logprobs))
        if processor is not None:
            processor.append(token)
        ids.append(token)
        if token == 0:
            break
    return ids[len(prompt) :], logprobs


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(PROMPTS, PARAMS, st.integers(0, 9)), min_size=1, max_size=7),
    num_blocks=st.sampled_from([9, 12, 16, 20, 64]),
    mode=st.sampled_from(["recompute", "swap"]),
    budget=st.sampled_from([8, 16, 64]),
    prefix_caching=st.booleans(),
    modes=st.sampled_from([ALL_MODES, frozenset((RowMode.LOGITS,))]),
    cancelled=st.sets(st.integers(0, 6), max_size=2),
    vocab=st.sampled_from([VOCAB, 5]),  # of few tokens many are guessed right
    num_guesses=st.sampled_from([0, 1, 4]),
)
def test_tokens_do_not_depend_on_the_schedule(
    requests: list[tuple[list[int], SamplingParams, int]],
    num_blocks: int,
    mode: str,
    budget: int,
    prefix_caching: bool,
    modes: frozenset[RowMode],
    cancelled: set[int],
    vocab: int,
    num_guesses: int,
) -> None:
    requests = [([1 + token % (vocab - 1) for token in prompt], *rest) for prompt, *rest in requests]
    config = EngineConfig.of(
        max_model_len=48,
        block_size=BLOCK,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        preemption_mode=mode,
        swap_space=1.0,
        enable_prefix_caching=prefix_caching,
        speculative_method="ngram" if num_guesses else "none",
        num_speculative_tokens=num_guesses or 1,
        prompt_lookup_min=1,
    )
    executor = FakeExecutor(
        num_blocks=num_blocks,
        num_host_blocks=num_blocks,
        block_size=BLOCK,
        vocab_size=vocab,
        max_model_len=48,
        max_num_batched_tokens=budget,
        modes=modes,
    )
    engine = EngineCore(config, executor)
    gained = [Gained([[] for _ in range(p.n)], [[] for _ in range(p.n)], []) for _, p, _ in requests]
    waiting = sorted(enumerate(requests), key=lambda item: item[1][2])
    refused: set[int] = set()
    step = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][1][2] <= step:
            number, (prompt, params, _) = waiting.pop(0)
            try:
                engine.add_request(Request(str(number), prompt, params, eos_token_ids=frozenset((0,))))
            except RequestError:  # it could never fit into so few blocks
                refused.add(number)
        if step == 6:
            engine.abort(str(number) for number in cancelled)
        for update in engine.step():
            assert update.error is None, update.error
            one = gained[int(update.request_id)]
            one.prompt_logprobs.extend(update.prompt_logprobs)
            for sample in update.samples:
                one.tokens[sample.index].extend(sample.token_ids)
                one.logprobs[sample.index].extend(sample.logprobs)
        engine.scheduler.check()
        step += 1
        assert step < 2000
    assert executor.runner.num_sequences == 0
    for number, (prompt, params, _) in enumerate(requests):
        if number in refused:
            continue
        for sample in range(params.n):
            tokens, logprobs = alone(prompt, params, sample, vocab)
            num = len(gained[number].tokens[sample]) if number in cancelled else len(tokens)
            assert gained[number].tokens[sample] == tokens[:num]
            assert gained[number].logprobs[sample] == logprobs[:num]
        if params.prompt_logprobs is not None and number not in cancelled:
            expected = [from_logits(fake_logits(prompt[:i], vocab), prompt[i], 2) for i in range(1, len(prompt))]
            found = gained[number].prompt_logprobs
            assert [(f.token_id, f.rank, f.top_ids) for f in found] == [
                (e.token_id, e.rank, e.top_ids) for e in expected
            ]


@pytest.mark.parametrize("failing", [1, 3, 5])
def test_a_failed_step_costs_no_token(failing: int) -> None:
    config = EngineConfig.of(max_model_len=48, block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=16)
    executor = FakeExecutor(num_blocks=40, block_size=BLOCK, vocab_size=VOCAB, max_model_len=48)
    engine = EngineCore(config, executor)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 10]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(Request(str(number), prompt, params))
    tokens: list[list[int]] = [[] for _ in prompts]
    for step in range(100):
        if step == failing:
            executor.program.fail_next = RuntimeError("asked for")
        for update in engine.step():
            assert update.error is None
            tokens[int(update.request_id)] += [t for sample in update.samples for t in sample.token_ids]
        if not engine.has_work:
            break
    assert tokens == [fake_greedy(prompt, 8, VOCAB) for prompt in prompts]
    assert executor.runner.num_sequences == 0
