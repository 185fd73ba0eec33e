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
from octavo.executor.sampler import Draw, RowError, Sampler, best_ids, draw_index, filtered, sum_bounds
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
    scaled = (logits - logits.max()) / np.float32(temperature)
    if (top_k and top_k < len(logits)) or top_p < 1 or min_p:
        limited = top_k if top_k < len(logits) else 0
        assert filtered(scaled, limited, top_p, min_p, np.empty_like(scaled)).tolist() == kept

    token = choose(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert isinstance(token, int) and token in kept
    if top_k != 1:
        number = uniforms(*(np.asarray([v], np.uint64) for v in (seed, 0, 0)))[0]
        weights = np.exp((logits[kept].astype(np.float64) - logits.max()) / temperature)
        ends = np.concatenate(([0.0], np.cumsum(weights / weights.sum())))
        place = kept.index(token)
        assert ends[place] - 1e-6 <= number <= ends[place + 1] + 1e-6


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("limits", [(0, 0.95, 0.0), (50, 1.0, 0.0), (300, 0.9, 0.0), (0, 0.9, 0.01), (0, 1.0, 0.2)])
def test_a_whole_vocabulary_equals_the_slow_reference(spread: float, limits: tuple[int, float, float]) -> None:
    logits = (np.random.default_rng(1).standard_normal(49_152) * spread).astype(np.float32)
    scaled = (logits - logits.max()) / np.float32(0.8)
    kept = filtered(scaled, *limits, np.empty_like(scaled))
    expected = reference_set(logits, 0.8, *limits)
    # Where tens of thousands of tiny probabilities add up, float32 may stop a few tokens earlier or later.
    assert len(set(kept.tolist()) ^ set(expected)) <= 2e-4 * len(expected)
    assert kept.tolist() == sorted(kept.tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    scaled = np.zeros(4, np.float32)  # a quarter each
    for top_p, expected in ((0.25, [0]), (0.26, [0, 1]), (0.5, [0, 1]), (0.51, [0, 1, 2]), (0.99, [0, 1, 2, 3])):
        assert filtered(scaled, 0, top_p, 0.0, np.empty_like(scaled)).tolist() == expected


def test_equals_go_to_the_lower_id() -> None:
    logits = np.asarray([1, 3, 3, 2, 3, 2, -0.0, 0.0], np.float32)
    assert choose(logits, temperature=0) == 1
    assert choose(logits, top_k=1, temperature=0.7) == 1
    assert filtered(logits - 3, 2, 1.0, 0.0, np.empty_like(logits)).tolist() == [1, 2]
    assert filtered(logits - 3, 4, 1.0, 0.0, np.empty_like(logits)).tolist() == [1, 2, 3, 4]
    assert best_ids(logits, 8).tolist() == [1, 2, 4, 3, 5, 0, 6, 7]
    assert best_ids(logits, 3).tolist() == [1, 2, 4]


@settings(deadline=None)
@given(rows, st.integers(0, 99))
def test_top_k_of_1_is_temperature_0(logits: Floats, seed: int) -> None:
    assert choose(logits, top_k=1, temperature=1.3, seed=seed) == choose(logits, temperature=0) == logits.argmax()


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 3.0]), min_size=1, max_size=700).filter(any), st.floats(0, 1))
def test_draw_index_is_the_inverse_of_the_running_sum(weights: list[float], number: float) -> None:
    number = min(number, 1 - 2**-53)
    index, ends = draw_index(np.asarray(weights, np.float32), number), np.cumsum(weights)
    assert weights[index] > 0
    assert ends[index] - weights[index] <= number * ends[-1] * (1 + 1e-12)
    assert number * ends[-1] <= ends[index] * (1 + 1e-12)


def test_draw_index_at_the_ends() -> None:
    weights = np.zeros(600, np.float32)
    weights[[3, 300]] = 1
    assert draw_index(weights, 0.0) == 3
    assert draw_index(weights, 0.5) == 300
    assert draw_index(weights, 1 - 2**-53) == 300
    tiny = np.full(600, 1e-38, np.float32)
    assert draw_index(tiny, 1 - 2**-53) == 599


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


def plain_choice(logits: Floats, temperature: float, top_p: float, number: float) -> int:
    """What the sampler must choose: everything sorted, everything summed, one token after the other."""
    scaled = (logits - logits.max()) * np.float32(1 / temperature)
    weights = np.exp(scaled)
    order = sorted(range(len(logits)), key=lambda i: (-scaled[i], i))
    wanted, running, kept = top_p * float(weights.sum(dtype=np.float64)), 0.0, []
    for i in order:
        kept.append(i)
        running += float(weights[i])
        if running >= wanted:
            break
    kept.sort()
    target, running = number * sum(float(weights[i]) for i in kept), 0.0
    for i in kept:
        running += float(weights[i])
        if running > target:
            return i
    return kept[-1]


def shapes_of_rows(rng: np.random.Generator, num: int) -> dict[str, Floats]:
    """Rows as models give them, and as they should not."""
    peaks = rng.standard_normal(num) * 2
    peaks[rng.integers(0, num, 5)] += 14
    masked = rng.standard_normal(num) * 3
    masked[rng.random(num) < 0.9] = -np.inf
    rows = {
        "narrow": rng.standard_normal(num) * 0.1,
        "wide": rng.standard_normal(num) * 4,
        "peaks": peaks,
        "one": np.where(np.arange(num) == num // 3, 30.0, 0.0),
        "flat": np.zeros(num),
        "two heights": rng.integers(0, 2, num) * 3.0,
        "many equals": np.round(rng.standard_normal(num) * 2),
        "masked": masked,
        "far below": np.where(rng.random(num) < 0.5, -1e38, 1.0),
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


@pytest.mark.parametrize("num", [1, 2, 63, 64, 65, 700, 5003])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 0.9999])
def test_top_p_chooses_what_the_plain_definition_does(num: int, top_p: float) -> None:
    for name, logits in shapes_of_rows(np.random.default_rng(num), num).items():
        for position in range(4):
            if not np.isfinite(logits.max()):
                continue
            number = float(uniforms(*(np.asarray([v], np.uint64) for v in (9, position, 0)))[0])
            found = choose(logits, position=position, seed=9, temperature=0.8, top_p=top_p)
            assert found == plain_choice(logits, 0.8, top_p, number), name


def test_a_cut_between_the_bounds_is_made_by_the_exact_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float32 does not know the total well enough, float64 decides."""
    monkeypatch.setattr("octavo.executor.sampler.SUM_ERROR", 0.4)
    for name, logits in shapes_of_rows(np.random.default_rng(3), 900).items():
        for position in range(12):
            number = float(uniforms(*(np.asarray([v], np.uint64) for v in (9, position, 0)))[0])
            found = choose(logits, position=position, seed=9, temperature=0.8, top_p=0.6)
            assert found == plain_choice(logits, 0.8, 0.6, number), name


@pytest.mark.parametrize("num", [1, 63, 64, 1000, 49_152])
def test_the_bounds_hold_the_sum(num: int) -> None:
    rng = np.random.default_rng(num)
    for row in (rng.random(num), np.exp(rng.standard_normal(num) * 5), np.full(num, 0.1), rng.random(num) ** 40):
        weights = row.astype(np.float32)
        exact = math.fsum(weights.tolist())
        low, high = sum_bounds(weights)
        assert low <= exact <= high
        assert high - low <= 3e-5 * exact


# A platform's op

STEP = np.random.default_rng(9).standard_normal((6, 1010)).astype(np.float32) * 3  # rows of a padded head


def step_draws() -> list[Draw]:
    """All kinds of rows of one step, two of them of the same row."""
    draws = [draw(STEP[d.position % 6], position=d.position, **vars(d.params)) for d in batch(2, 24)]
    masked = SamplingParams(seed=4, temperature=0.8, top_p=0.95, bad_words_token_ids=[[int(STEP[1].argmax())]])
    draws.append(Draw(STEP[1], masked, 0, 1, LogitsProcessor(masked, [], [], [], 1003)))
    return [replace(d, row=d.position % 6) for d in draws]


def test_an_op_draws_the_same_tokens() -> None:
    asked: list[int] = []

    def op(args: Sample) -> torch.Tensor:
        """Leaves every third row undecided."""
        assert args.logits.shape[1] == 1003
        asked.append(len(args.rows))
        ids = reference_op(args)
        ids[::3] = -1
        return ids

    expected = Sampler(1003).sample(step_draws())
    assert Sampler(1003, op).sample(step_draws(), torch.from_numpy(STEP)) == expected
    num_plain = sum(d.processor is None and not d.params.greedy for d in step_draws())
    assert asked == [num_plain, 1]  # all rows as they are at once, then the one that was masked


def test_an_op_that_fails_is_asked_no_more(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def op(args: Sample) -> torch.Tensor:
        asked.append(len(args.rows))
        raise OSError("the kernel is gone")

    sampler, expected = Sampler(1003, op), Sampler(1003).sample(step_draws())
    for _ in range(2):
        assert sampler.sample(step_draws(), torch.from_numpy(STEP)) == expected
    assert len(asked) == 1
    assert "tokens are drawn without it" in caplog.text


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
