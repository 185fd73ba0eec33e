"""Masks, biases and penalties of one sequence."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.executor.logits import LogitsProcessor, TokenCounts
from octavo.executor.sampler import Draw, RowError, Sampler
from octavo.sampling_params import SamplingParams

VOCAB = 12
NEVER = -np.inf


def processed(
    logits: list[float] | None = None,
    prompt: list[int] = [],  # noqa: B006
    output: list[int] = [],  # noqa: B006
    eos: tuple[int, ...] = (),
    **params: object,
) -> list[float]:
    row = np.zeros(VOCAB, np.float32) if logits is None else np.asarray(logits, np.float32)
    processor = LogitsProcessor(SamplingParams(**params), eos, prompt, output, VOCAB)
    out = np.full(VOCAB, np.nan, np.float32)
    processor.apply(row, out)
    return out.tolist()


def masked(values: list[float]) -> list[int]:
    return [i for i, v in enumerate(values) if v == NEVER]


def test_repetition_counts_prompt_and_output_and_the_others_output_alone() -> None:
    logits = [2.0, -2.0, 3.0, -3.0, 1.0] + [0.0] * 7
    out = processed(logits, prompt=[0, 1, 1], output=[2, 3, 3], repetition_penalty=2.0)
    assert out[:5] == [1.0, -4.0, 1.5, -6.0, 1.0]
    assert processed(logits, [0, 1], [2, 3, 3], presence_penalty=0.5)[:5] == [2.0, -2.0, 2.5, -3.5, 1.0]
    assert processed(logits, [0, 1], [2, 3, 3], frequency_penalty=0.5)[:5] == [2.0, -2.0, 2.5, -4.0, 1.0]
    every = processed(logits, [0, 3], [2, 3, 3], repetition_penalty=2.0, presence_penalty=1, frequency_penalty=-0.5)
    assert every[:5] == [1.0, -2.0, 1.5 - 1 + 0.5, -6.0 - 1 + 1, 1.0]


def test_min_tokens_holds_off_every_end() -> None:
    params = {"min_tokens": 2, "stop_token_ids": (4,)}
    assert masked(processed(output=[1], eos=(0, 7), **params)) == [0, 4, 7]
    assert masked(processed(output=[1, 1], eos=(0, 7), **params)) == []
    assert masked(processed(eos=(0, 99), ignore_eos=True, **params)) == [0, 4]


def test_allowed_ids_and_bias() -> None:
    out = processed([1.0] * VOCAB, allowed_token_ids=(2, 3, 99), logit_bias={2: 5, 4: 100, 98: 1.5})
    assert masked(out) == [i for i in range(VOCAB) if i not in (2, 3)]
    assert out[2:4] == [6.0, 1.0]
    assert processed(logit_bias={1: -100, 3: 0.5})[1:4] == [-100.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ([], [], [9]),
        ([1, 2], [], [3, 9]),
        ([1], [2], [3, 9]),
        ([5], [1, 2], [3, 9]),
        ([2, 1], [], [6, 9]),
        ([1, 2, 3], [], [9]),
        ([2], [], [9]),
        ([7], [7], [7, 9]),
        ([7], [7, 7], [7, 9]),
        ([7], [], [9]),
    ],
)
def test_bad_words_ban_the_last_id_where_the_others_match(
    prompt: list[int], output: list[int], expected: list[int]
) -> None:
    words = ((9,), (1, 2, 3), (2, 1, 6), (7, 7, 7), (1, 99))
    assert masked(processed(prompt=prompt, output=output, bad_words_token_ids=words)) == expected


def test_two_bad_words_of_one_beginning() -> None:
    assert masked(processed(prompt=[1], bad_words_token_ids=((1, 2), (1, 3), (4, 5)))) == [2, 3]


@given(st.lists(st.integers(0, VOCAB - 1)), st.lists(st.integers(0, VOCAB - 1), max_size=200))
def test_counts_are_kept_from_step_to_step(prompt: list[int], output: list[int]) -> None:
    counts = TokenCounts(prompt)
    for token in output:
        counts.add(token)
    expected = {i: Counter(output)[i] for i in {*prompt, *output}}
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == expected


def test_counts_grow_past_their_first_room() -> None:
    counts = TokenCounts([])
    for token in range(1000):
        counts.add(token % 500)
    assert sorted(counts.ids.tolist()) == list(range(500))
    assert set(counts.counts.tolist()) == {2}


@settings(deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), st.integers(0, 20))
def test_resumed_state_equals_state_kept(tokens: list[int], cut: int) -> None:
    params = SamplingParams(
        repetition_penalty=1.3,
        frequency_penalty=0.7,
        presence_penalty=-0.2,
        min_tokens=3,
        bad_words_token_ids=((1, 2), (3, 4, 5)),
    )
    prompt, output = tokens[:cut], tokens[cut:]
    kept = LogitsProcessor(params, (0,), prompt, (), VOCAB)
    for token in output:
        kept.append(token)
    resumed = LogitsProcessor(params, (0,), prompt, output, VOCAB)
    row = np.linspace(-2, 2, VOCAB, dtype=np.float32)
    first, second = np.empty_like(row), np.empty_like(row)
    kept.apply(row, first)
    resumed.apply(row, second)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_penalties_touch_no_batch_mate(order: tuple[int, ...]) -> None:
    row = np.asarray([0.0, 4.0, 3.9, 0, 0, 0, 0, 0, 0, 0, 0, 0], np.float32)
    kinds = [{}, {"repetition_penalty": 2.0}, {"logit_bias": {5: 50}}]
    draws = []
    for which in order:
        params = SamplingParams(temperature=0, **kinds[which])
        processor = LogitsProcessor(params, (), [1], [], VOCAB) if params.changes_logits else None
        draws.append(Draw(row, params, 0, 0, processor))
    tokens = Sampler(VOCAB).sample(draws)
    assert {which: tokens[i] for i, which in enumerate(order)} == {0: 1, 1: 2, 2: 5}
    assert row[1] == 4.0 and row[5] == 0.0


def test_masks_that_leave_nothing_fail_the_sequence() -> None:
    params = SamplingParams(temperature=0, allowed_token_ids=(3,), bad_words_token_ids=((3,),))
    processor = LogitsProcessor(params, (), [], [], VOCAB)
    result = Sampler(VOCAB).sample([Draw(np.zeros(VOCAB, np.float32), params, 0, 0, processor)])[0]
    assert isinstance(result, RowError)
    assert "masks leave no token that may be sampled (allowed_token_ids, bad_words)" in str(result)
    assert result.param == "allowed_token_ids"
