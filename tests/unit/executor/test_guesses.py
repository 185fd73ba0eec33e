"""Guessed tokens in the runner: taken while they are what is chosen, forgotten otherwise."""

from collections.abc import Sequence

import pytest
from doubles.fake_executor import FakeExecutor
from doubles.fake_program import ALL_MODES, fake_greedy, fake_logits

from octavo.contract import RowMode
from octavo.executor.logits import LogitsProcessor
from octavo.executor.logprobs import from_logits
from octavo.executor.sampler import Draw, Sampler
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import ModelRunnerOutput, NewSequence, ScheduledSequence, SchedulerOutput

VOCAB = 61
PROMPT = [5, 3, 8, 1, 40, 22, 9]
GREEDY = SamplingParams(temperature=0)
KINDS = [
    GREEDY,
    SamplingParams(seed=3, temperature=1.3, top_p=0.9),
    SamplingParams(seed=4, repetition_penalty=1.7, frequency_penalty=0.4, min_tokens=6),
    SamplingParams(temperature=0, presence_penalty=0.6, bad_words_token_ids=((7,), (1, 2))),
]


def right(params: SamplingParams, num: int) -> list[int]:
    """The tokens that must come, one at a time, without any engine."""
    processor = LogitsProcessor(params, (0,), PROMPT, (), VOCAB) if params.changes_logits else None
    ids = list(PROMPT)
    for position in range(num):
        token = Sampler(VOCAB).sample([Draw(fake_logits(ids, VOCAB), params, 0, position, processor)])[0]
        assert isinstance(token, int)
        if processor is not None:
            processor.append(token)
        ids.append(token)
    return ids[len(PROMPT) :]


def begin(
    executor: FakeExecutor, params: SamplingParams, seq_id: int = 1, blocks: Sequence[int] = (4, 2, 9, 7, 6)
) -> None:
    new = NewSequence(seq_id, 0, PROMPT, len(PROMPT), params, frozenset((0,)), list(blocks))
    executor.execute_model(SchedulerOutput(0, (), (new,)))


def step(executor: FakeExecutor, *pieces: ScheduledSequence) -> ModelRunnerOutput:
    return executor.execute_model(SchedulerOutput(0, pieces))


@pytest.mark.parametrize("modes", [ALL_MODES, frozenset((RowMode.LOGITS,))], ids=["all_modes", "logits_only"])
@pytest.mark.parametrize("params", KINDS)
@pytest.mark.parametrize("num_right", [0, 1, 3, 4])
def test_as_many_guesses_are_taken_as_are_right(
    params: SamplingParams, num_right: int, modes: frozenset[RowMode]
) -> None:
    """Behind a prompt and behind a decoded token; whatever was wrong leaves nothing behind."""
    executor = FakeExecutor(modes=modes)
    begin(executor, params)
    tokens, done = right(params, 12), 0
    known = 0  # tokens in the cache
    while done < 7:
        guesses = tokens[done : done + 4]
        if num_right < 4:
            guesses[num_right] = (guesses[num_right] + 1) % VOCAB
        num_known = len(PROMPT) + done
        piece = ScheduledSequence(1, known, num_known - known, (), (), (1,), tuple(guesses))
        found = step(executor, piece).token_ids[1]
        assert found == tokens[done : done + num_right + 1]
        known, done = num_known + num_right, done + num_right + 1
    assert executor.runner._store.known(1).tolist() == PROMPT + tokens[:done]


def test_those_who_guess_stand_beside_those_who_do_not() -> None:
    executor = FakeExecutor()
    for seq_id, params in enumerate(KINDS):
        begin(executor, params, seq_id, range(5 * seq_id, 5 * seq_id + 5))
    wanted = [right(params, 3) for params in KINDS]
    pieces = [
        ScheduledSequence(seq_id, 0, len(PROMPT), (), (), (seq_id,), tuple(wanted[seq_id][:2]) if seq_id % 2 else ())
        for seq_id in range(len(KINDS))
    ]
    found = step(executor, *pieces).token_ids
    assert found == {seq_id: tokens[: 3 if seq_id % 2 else 1] for seq_id, tokens in enumerate(wanted)}
    assert executor.program.step_tokens[-1] == len(KINDS) * len(PROMPT) + 4


def test_each_new_token_has_its_logprobs() -> None:
    executor, params = FakeExecutor(), SamplingParams(temperature=0, logprobs=2)
    begin(executor, params)
    tokens = fake_greedy(PROMPT, 3, VOCAB)
    result = step(executor, ScheduledSequence(1, 0, len(PROMPT), (), (), (1,), tuple(tokens[:2])))
    assert result.token_ids[1] == tokens
    rows = [fake_logits(PROMPT + tokens[:i], VOCAB) for i in range(3)]
    assert result.logprobs[1] == [from_logits(row, token, 2) for row, token in zip(rows, tokens, strict=True)]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3), SamplingParams(temperature=0, logprobs=1)])
def test_a_row_of_nan_behind_right_guesses_costs_no_token(params: SamplingParams) -> None:
    """What was right before it is kept, and the sequence fails in the step in which it would without guesses."""
    tokens = right(params, 3)
    executor = FakeExecutor(nan_token=tokens[1])
    begin(executor, params)
    result = step(executor, ScheduledSequence(1, 0, len(PROMPT), (), (), (1,), tuple(tokens)))
    assert not result.failures and result.token_ids[1] == tokens[:2]
    result = step(executor, ScheduledSequence(1, len(PROMPT) + 1, 1, sample_for=(1,)))
    assert [failure.seq_id for failure in result.failures] == [1] and not result.token_ids


def test_a_guess_past_the_blocks_is_refused() -> None:
    executor = FakeExecutor()
    begin(executor, GREEDY, blocks=[4, 2])
    with pytest.raises(ValueError, match="2 blocks of 4"):
        step(executor, ScheduledSequence(1, 0, len(PROMPT), (), (), (1,), (1, 2)))
