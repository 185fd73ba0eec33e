"""Known answers of Random123's kat_vectors, and what the draws promise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.executor.philox import philox4x32, uniforms

ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(*values: int) -> np.ndarray:
    return np.asarray(values, np.uint64)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert tuple(philox4x32(words(*counter)[None], words(*key)[None])[0].tolist()) == expected


def test_known_answers_side_by_side() -> None:
    counters, keys, expected = (np.asarray(column, np.uint64) for column in zip(*KNOWN, strict=True))
    np.testing.assert_array_equal(philox4x32(counters, keys), expected)


def test_seed_and_counter_words_land_where_the_documentation_says() -> None:
    seed, position, sample = 0x299F31D0A4093822, 0x85A308D3243F6A88, 0x13198A2E
    block = philox4x32(words(0x243F6A88, 0x85A308D3, sample, 0)[None], words(0xA4093822, 0x299F31D0)[None])[0]
    expected = (int(block[0]) << 21 | int(block[1]) >> 11) / 2**53
    assert uniforms(words(seed), words(position), words(sample))[0] == expected


seeds = st.integers(0, 2**64 - 1)


@given(st.lists(st.tuples(seeds, st.integers(0, 2**40), st.integers(0, 127)), min_size=1, max_size=20))
def test_a_draw_depends_on_its_own_row(rows: list[tuple[int, int, int]]) -> None:
    together = uniforms(*(words(*column) for column in zip(*rows, strict=True)))
    alone = [uniforms(words(s), words(p), words(i))[0] for s, p, i in rows]
    assert together.tolist() == alone
    assert all(0 <= u < 1 for u in alone)


def test_draws_are_spread_evenly() -> None:
    draws = uniforms(np.full(20_000, 7, np.uint64), np.arange(20_000, dtype=np.uint64), np.zeros(20_000, np.uint64))
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 86  # 49 degrees of freedom: one in a thousand
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
