"""The sampler against a slow float64 one, its ties, its independence of batch mates and its distribution."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.contract import Sample
from octavo.contract.reference import sample as reference_op
from octavo.executor.logits import LogitsProcessor
from octavo.executor.philox import uniforms
from octavo.executor.sampler import CHUNK, Draw, RowError, Sampler
from octavo.sampling_params import SamplingParams

Floats = np.ndarray


def draw(logits: Floats, position: int = 0, sample_index: int = 0, **params: object) -> Draw:
    return Draw(np.asarray(logits, np.float32), SamplingParams(**{"seed": 0, **params}), sample_index, position)


def choose(logits: Floats, **arguments: object) -> int | RowError:
    return Sampler(len(logits)).sample([draw(logits, **arguments)])[0]


def reference_set(logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Ids that stay, ascending, by plain sorting in float64."""
    wide = logits.astype(np.float64) / temperature
    weights = np.exp(wide - wide.max())
    order = sorted((i for i in range(len(logits)) if weights[i] > 0), key=lambda i: (-logits[i], i))
    order = [i for i in order if weights[i] >= min_p]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        total, running, kept = sum(weights[i] for i in order), 0.0, []
        for i in order:
            kept.append(i)
            running += weights[i]
            if running >= top_p * total:
                break
        order = kept
    return sorted(order)


# Steps of 1/16 make many equals; all sums of the float32 sampler are near enough to float64's to pick the same set
# unless a probability falls on a limit, which odd limits avoid.
rows = st.lists(st.integers(-160, 160), min_size=2, max_size=80).map(lambda r: np.asarray(r, np.float32) / 16)


@settings(max_examples=300, deadline=None)
@given(
    rows,
    st.sampled_from([0.3, 0.8, 1.0, 3.7]),
    st.sampled_from([0, 1, 2, 5, 40, 1000]),
    st.sampled_from([0.0137, 0.513, 0.9071, 0.99937, 1.0]),
    st.sampled_from([0.0, 0.0531, 0.737, 1.0]),
    st.integers(0, 2**32),
)
def test_equals_the_slow_reference(
    logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    kept = reference_set(logits, temperature, top_k, top_p, min_p)
    token = choose(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert isinstance(token, int) and token in kept
    if top_k != 1:
        number = uniforms(*(np.asarray([v], np.uint64) for v in (seed, 0, 0)))[0]
        weights = np.exp((logits[kept].astype(np.float64) - logits.max()) / temperature)
        ends = np.concatenate(([0.0], np.cumsum(weights / weights.sum())))
        place = kept.index(token)
        assert ends[place] - 1e-6 <= number <= ends[place + 1] + 1e-6


def test_equals_go_to_the_lower_id() -> None:
    logits = np.asarray([1, 3, 3, 2, 3, 2, -0.0, 0.0], np.float32)
    assert choose(logits, temperature=0) == 1
    assert choose(logits, top_k=1, temperature=0.7) == 1
    assert {choose(logits, top_k=2, temperature=0.7, seed=seed) for seed in range(40)} == {1, 2}


@settings(deadline=None)
@given(rows, st.integers(0, 99))
def test_top_k_of_1_is_temperature_0(logits: Floats, seed: int) -> None:
    assert choose(logits, top_k=1, temperature=1.3, seed=seed) == choose(logits, temperature=0) == logits.argmax()


def batch(seed: int, num: int = 9) -> list[Draw]:
    rng = np.random.default_rng(seed)
    kinds = [
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.0},
        {"top_k": 20},
        {"min_p": 0.1},
        {"temperature": 0},
        {"top_k": 50, "top_p": 0.5, "temperature": 2.0},
    ]
    return [draw(rng.standard_normal(1003) * 3, position=i, seed=seed + i, **kinds[i % len(kinds)]) for i in range(num)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.randoms(use_true_random=False))
def test_a_row_is_the_same_alone_and_in_any_batch_order(seed: int, random: object) -> None:
    draws, sampler = batch(seed), Sampler(1003)
    together = sampler.sample(draws)
    assert [Sampler(1003).sample([d])[0] for d in draws] == together
    order = list(range(len(draws)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert [sampler.sample([draws[i] for i in order])[order.index(i)] for i in range(len(draws))] == together


def test_where_a_row_lies_in_memory_does_not_matter() -> None:
    row = (np.random.default_rng(5).standard_normal(1003) * 3).astype(np.float32)
    store = np.zeros(5000, np.float32)
    tokens = set()
    for offset in (0, 1, 3, 16, 501):
        store[offset : offset + 1003] = row
        views = [draw(row, position=p, temperature=1.5, top_p=0.99) for p in range(40)]
        moved = [Draw(store[offset : offset + 1003], d.params, 0, d.position) for d in views]
        tokens.add(tuple(Sampler(1003).sample(moved)))
    assert len(tokens) == 1


def test_a_seeded_row_is_a_function_of_seed_position_and_sample_index() -> None:
    flat = np.zeros(1000, np.float32)
    one = choose(flat, seed=3, position=4, sample_index=1)
    assert one == choose(flat, seed=3, position=4, sample_index=1)
    others = {choose(flat, seed=3, position=4), choose(flat, seed=3, position=5, sample_index=1)}
    assert one not in others | {choose(flat, seed=4, position=4, sample_index=1)}
    assert choose(flat, seed=-1) == choose(flat, seed=2**64 - 1)


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 6}, {"min_p": 0.2, "temperature": 1.4}]
)
def test_the_distribution_is_right(params: dict[str, float]) -> None:
    logits = np.asarray([0, 1, 2, 0.5, -1, 1.5, 2, -3, 0, 1], np.float32)
    filters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    kept = reference_set(logits, **filters)
    weights = np.exp(logits[kept].astype(np.float64) / filters["temperature"])
    num = 6000
    tokens = Sampler(10).sample([draw(logits, position=p, seed=11, **params) for p in range(num)])
    counts = np.bincount(np.asarray(tokens, np.int64), minlength=10)
    expected = num * weights / weights.sum()
    assert counts.sum() == counts[kept].sum()
    # The limit stands far in the distribution's tail: the mean and over 5 standard deviations.
    freedom = len(kept) - 1
    assert ((counts[kept] - expected) ** 2 / expected).sum() < freedom + 5.5 * math.sqrt(2 * freedom)


def test_a_broken_row_fails_alone() -> None:
    good = np.asarray([0, 5, 1], np.float32)
    broken = [np.asarray(r, np.float32) for r in ([0, np.nan, 1], [-np.inf] * 3, [0, np.inf, 0])]
    sampler = Sampler(3)
    for temperature in (0.0, 1e-9):
        draws = [draw(r, temperature=temperature) for r in (good, *broken, good)]
        first, nan, masked, infinite, last = sampler.sample(draws)
        assert first == last == 1
        assert isinstance(nan, RowError) and "not numbers" in str(nan)
        assert isinstance(masked, RowError) and "masks leave no token" in str(masked)
        assert isinstance(infinite, RowError)


def test_an_error_inside_a_row_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def apply(self, logits: Floats, out: Floats) -> None:
            raise ZeroDivisionError("asked for")

    row = np.asarray([0, 5, 1], np.float32)
    failing = Draw(row, SamplingParams(temperature=0), 0, 0, Broken())  # type: ignore[arg-type]
    failed, fine = Sampler(3).sample([failing, draw(row, temperature=0)])
    assert isinstance(failed, RowError) and "asked for" in str(failed)
    assert fine == 1
    assert "sampling failed" in caplog.text


def test_a_request_without_seed_is_refused_unless_greedy() -> None:
    row = np.asarray([0, 5, 1], np.float32)
    assert isinstance(choose(row, seed=None), RowError)
    assert choose(row, seed=None, temperature=0) == 1


def test_ids_beyond_the_tokenizer_are_never_sampled() -> None:
    logits = np.asarray([0, 1, 2, 90, 95], np.float32)
    tokens = Sampler(3).sample(
        [draw(logits, position=p, **k) for p in range(50) for k in ({}, {"temperature": 0}, {"top_p": 0.9})]
    )
    assert set(tokens) == {0, 1, 2}


def test_extreme_temperatures() -> None:
    logits = np.asarray([-3e38, 1, 3, 3e38], np.float32)
    assert choose(logits, temperature=1e-300) == 3
    assert {choose(np.asarray([0, 1], np.float32), temperature=100, position=p) for p in range(40)} == {0, 1}


def test_no_sequences_no_tokens() -> None:
    assert Sampler(5).sample([]) == []


def test_many_rows_that_are_masked_are_drawn_from_as_each_alone() -> None:
    rng, num = np.random.default_rng(6), 2 * CHUNK + 3
    draws = []
    for i in range(num):
        params = SamplingParams(seed=i, temperature=0.9, top_p=0.9, logit_bias={i: 5.0}, frequency_penalty=0.5)
        processor = LogitsProcessor(params, [], [], [], 300)
        row = (rng.standard_normal(300) * 2).astype(np.float32)
        draws.append(Draw(row, params if i % 3 else replace(params, temperature=0), 0, i, processor))
    together = Sampler(300).sample(draws)
    assert together == [Sampler(300).sample([one])[0] for one in draws]


# A platform's op

STEP = np.random.default_rng(9).standard_normal((6, 1010)).astype(np.float32) * 3  # rows of a padded head


def step_draws() -> list[Draw]:
    """All kinds of rows of one step, two of them of the same row."""
    draws = [draw(STEP[d.position % 6], position=d.position, **vars(d.params)) for d in batch(2, 24)]
    masked = SamplingParams(seed=4, temperature=0.8, top_p=0.95, bad_words_token_ids=[[int(STEP[1].argmax())]])
    draws.append(Draw(STEP[1], masked, 0, 1, LogitsProcessor(masked, [], [], [], 1003)))
    return [replace(d, row=d.position % 6) for d in draws]


def test_an_op_draws_all_rows_of_a_step_at_once() -> None:
    asked: list[int] = []

    def op(args: Sample) -> torch.Tensor:
        assert args.logits.shape[1] == 1003
        asked.append(len(args.rows))
        return reference_op(args)

    expected = Sampler(1003).sample(step_draws())
    assert Sampler(1003, op).sample(step_draws(), torch.from_numpy(STEP)) == expected
    num_plain = sum(d.processor is None and not d.params.greedy for d in step_draws())
    assert asked == [num_plain, 1]  # those as they are, then the one that was masked


def test_an_op_that_fails_is_asked_no_more(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def op(args: Sample) -> torch.Tensor:
        asked.append(len(args.rows))
        raise OSError("the kernel is gone")

    sampler, expected = Sampler(1003, op), Sampler(1003).sample(step_draws())
    for _ in range(2):
        assert sampler.sample(step_draws(), torch.from_numpy(STEP)) == expected
    assert len(asked) == 1
    assert "core's own draws from now on" in caplog.text


def test_rows_that_no_op_may_draw_from_are_told_as_before() -> None:
    rows = torch.tensor([[torch.nan, 1, 2], [1, 2, 3]])
    draws = [
        Draw(rows[0].numpy(), SamplingParams(seed=1), 0, 0, row=0),
        Draw(rows[1].numpy(), SamplingParams(), 0, 0, row=1),
        Draw(rows[1].numpy(), SamplingParams(temperature=0), 0, 0, row=1),
    ]
    not_numbers, no_seed, best = Sampler(3, reference_op).sample(draws, rows)
    assert "not numbers" in str(not_numbers)
    assert "no seed" in str(no_seed)
    assert best == 2
