"""The truth of the op `sample` against its definition in whole numbers and fractions, and what the definition holds."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.contract import Sample
from octavo.contract.drawing import best_ids, draw, top_set, weigh
from octavo.testing.formulas import FORMULAS

Floats = npt.NDArray[np.float32]

NEARLY_ONE = 1 - 2**-53


def plainly(logits: Floats, *wish: float) -> int:
    """What one row gives, by the kit's formula."""
    temperature, top_k, top_p, min_p, uniform = (torch.tensor([v], dtype=torch.float64) for v in wish)
    args = Sample(torch.from_numpy(logits)[None], torch.tensor([0]), temperature, top_k.long(), top_p, min_p, uniform)
    return int(FORMULAS["sample"](args)[0][0])


def shapes_of_rows(rng: np.random.Generator, num: int) -> dict[str, Floats]:
    """Rows as models give them, and as they should not."""
    peaks = rng.standard_normal(num) * 2
    peaks[rng.integers(0, num, 5)] += 14
    masked = rng.standard_normal(num) * 3
    masked[rng.random(num) < 0.9] = -np.inf
    masked[rng.integers(num)] = 1
    rows = {
        "narrow": rng.standard_normal(num) * 0.1,
        "wide": rng.standard_normal(num) * 4,
        "peaks": peaks,
        "one": np.where(np.arange(num) == num // 3, 30.0, 0.0),
        "flat": np.zeros(num),
        "two heights": rng.integers(0, 2, num) * 3.0,
        "many equals": np.round(rng.standard_normal(num) * 2),
        "zeros of both signs": np.where(rng.random(num) < 0.5, -0.0, 0.0),
        "subnormal": rng.standard_normal(num) * 1e-40,
        "masked": masked,
        "far below": np.where(rng.random(num) < 0.5, -1e38, 1.0),
        "extremes": np.where(rng.random(num) < 0.5, -3e38, 3e38),
        "fading": np.linspace(0, -45, num),
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


@pytest.mark.parametrize("num", [1, 2, 63, 256, 257, 1300])
def test_every_filter_gives_what_the_definition_does(num: int) -> None:
    rng = np.random.default_rng(num)
    for name, logits in shapes_of_rows(rng, num).items():
        for temperature in (0.3, 1.0, 2.7, 1e-6):
            for top_k, top_p, min_p in (
                (0, 1.0, 0.0),
                (0, 0.95, 0.0),
                (0, 0.05, 0.0),
                (0, 0.9999, 1e-9),
                (7, 1.0, 0.0),
                (num, 0.5, 0.0),
                (40, 0.9, 0.02),
                (0, 1.0, 0.05),
                (0, 1.0, 1.0),
                (num + 1, 1e-12, 1e-13),
            ):
                wish = (temperature, top_k, top_p, min_p, float(rng.choice([0.0, NEARLY_ONE, rng.random()])))
                assert draw(logits, *wish) == plainly(logits, *wish), (name, wish)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-50, 50, width=32) | st.sampled_from([0.0, -0.0, 1.0, -math.inf]), min_size=1, max_size=90),
    st.floats(1e-3, 1e3),
    st.integers(-1, 100),
    st.floats(1e-6, 1),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_any_row_gives_what_the_definition_does(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> None:
    wish = (temperature, top_k, top_p, min_p, uniform)
    logits = np.asarray(row, np.float32)
    assert draw(logits, *wish) == plainly(logits, *wish)


def test_weights_are_powers_of_two_to_a_quarter_of_a_millionth() -> None:
    scores = np.linspace(0, -41, 100_001).astype(np.float32)
    found, weights = weigh(scores / np.float32(math.log2(math.e)), np.float32(0), 1.0)
    exact = np.exp2(found.astype(np.float64) + 40)
    assert np.abs(weights - exact).max() <= 2.0**18  # of 2^40
    assert (np.abs(weights - exact) <= 2.0**-22 * exact + 0.5).all()
    assert weights[0] == 2**40
    assert (np.diff(weights) <= 0).all()  # whoever scores less weighs no more
    assert weigh(np.asarray([0, -30, -np.inf], np.float32), np.float32(0), 1.0)[1].tolist() == [2**40, 0, 0]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    flat = np.zeros(4, np.float32)  # a quarter each
    for top_p, last in ((0.25, 0), (0.26, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.99, 3), (1.0, 3)):
        assert draw(flat, 0.8, 0, top_p, 0.0, NEARLY_ONE) == last


def test_a_border_belongs_to_the_token_above_it() -> None:
    flat = np.zeros(2, np.float32)
    assert [draw(flat, 1.0, 0, 1.0, 0.0, u) for u in (0.0, 0.5 - 2**-53, 0.5, NEARLY_ONE)] == [0, 0, 1, 1]
    assert draw(np.asarray([-np.inf, 0], np.float32), 1.0, 0, 1.0, 0.0, 0.0) == 1


def test_rows_without_numbers_give_no_token() -> None:
    for row in ([0, np.nan], [np.inf, 0], [-np.inf, -np.inf]):
        assert draw(np.asarray(row, np.float32), 1.0, 0, 0.9, 0.0, 0.5) == -1


def test_the_best_come_in_order_of_id_where_they_are_equal() -> None:
    logits = np.asarray([1, 3, 3, 2, 3, 2, -0.0, 0.0], np.float32)
    assert best_ids(logits, 8).tolist() == [1, 2, 4, 3, 5, 0, 6, 7]
    assert best_ids(logits, 3).tolist() == [1, 2, 4]
    many = np.round(np.random.default_rng(0).standard_normal(5000) * 3).astype(np.float32)
    expected = sorted(range(5000), key=lambda i: (-many[i], i))
    assert best_ids(many, 700).tolist() == expected[:700]
    assert best_ids(many, 5000).tolist() == expected
    assert set(expected[:50]) <= set(top_set(many - many.max(), 50).tolist())
