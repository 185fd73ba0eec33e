"""Log-probabilities from whole rows and from a program's scores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.executor.logprobs import from_logits, from_scores

rows = st.lists(st.integers(-80, 80), min_size=1, max_size=60).map(lambda r: np.asarray(r, np.float32) / 8)


@given(rows, st.integers(0, 10**6), st.integers(0, 20))
def test_equals_a_plain_log_softmax(logits: np.ndarray, pick: int, num_top: int) -> None:
    token = pick % len(logits)
    found = from_logits(logits, token, num_top)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum())
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert found.token_id == token
    assert found.logprob == pytest.approx(expected[token], abs=1e-6)
    assert found.rank == order.index(token) + 1
    assert list(found.top_ids) == order[:num_top]
    np.testing.assert_allclose(found.top_logprobs, expected[order[:num_top]], atol=1e-6)
    if found.rank <= num_top:
        assert found.top_ids[found.rank - 1] == token
        assert found.top_logprobs[found.rank - 1] == found.logprob


def test_whole_vocabulary() -> None:
    logits = (np.random.default_rng(0).standard_normal(49_152) * 4).astype(np.float32)
    found, wide = from_logits(logits, 77, 5), logits.astype(np.float64)
    assert found.logprob == pytest.approx(wide[77] - np.log(np.exp(wide - 20).sum()) - 20, abs=1e-6)
    assert list(found.top_ids) == np.argsort(-logits)[:5].tolist()
    assert found.rank == 1 + (logits > logits[77]).sum()


def test_far_from_zero_stays_finite() -> None:
    found = from_logits(np.asarray([-3e4, 3e4, -np.inf], np.float32), 0, 2)
    assert (found.logprob, found.top_logprobs) == (-6e4, (0.0, -6e4))


def test_scores_are_cut_to_what_was_asked() -> None:
    ids, values = np.asarray([4, 2, 9]), np.asarray([-0.5, -1.5, -2.5], np.float32)
    found = from_scores(2, -1.5, 2, ids, values, 2)
    assert (found.token_id, found.logprob, found.rank) == (2, -1.5, 2)
    assert (found.top_ids, found.top_logprobs) == ((4, 2), (-0.5, -1.5))
    assert from_scores(2, -1.5, 2, ids, values, 0).top_ids == ()


def test_rows_that_are_no_numbers() -> None:
    with pytest.raises(ValueError, match="not numbers"):
        from_logits(np.asarray([0, np.nan], np.float32), 0, 1)
    with pytest.raises(ValueError, match="not numbers"):
        from_scores(0, float("nan"), 1, np.zeros(0, np.int64), np.zeros(0, np.float32), 0)
