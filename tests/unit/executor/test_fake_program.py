"""The double itself: it must catch the faults that it is there for."""

import numpy as np
import pytest
import torch
from doubles.fake_program import FakeAttention, FakeProgram, PoisonError, fake_greedy, fake_logits, fake_spec

from octavo.contract import AttentionBatch, RowMode, Rows, StepBatch, StepOutput

BLOCK, VOCAB = 4, 31


def make_program(num_blocks: int = 8) -> FakeProgram:
    backend, spec = FakeAttention(nan_token=30), fake_spec(BLOCK, num_layers=2)
    program = FakeProgram([(backend, spec)], VOCAB)
    program.bind([backend.allocate(spec, num_blocks)])
    return program


def run(
    program: FakeProgram, ids: list[int], start: int, table: list[int], mode: RowMode = RowMode.LOGITS
) -> StepOutput:
    """One row that computes ids[start:]."""
    positions = np.arange(start, len(ids))
    tables = np.asarray([table], np.int32)
    slots = tables[0, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    hosts = np.asarray([0, len(positions)], np.int32), np.asarray([len(ids)], np.int32), tables, slots
    attention = AttentionBatch(*(torch.from_numpy(h) for h in hosts), *hosts)
    batch = StepBatch(torch.tensor(ids[start:]), torch.from_numpy(positions), [attention])
    index = np.asarray([len(positions) - 1])
    return program.submit(batch, Rows(index, np.asarray([mode], np.uint8), 3, np.asarray([5]))).result()


def test_tokens_follow_from_the_ids_alone() -> None:
    program, ids = make_program(), [3, 1, 4, 1, 5, 9, 2]
    whole = run(program, ids, 0, [5, 2]).logits
    run(program, ids[:3], 0, [0, 1])
    chunked = run(program, ids, 3, [0, 1]).logits
    assert whole is not None and chunked is not None
    np.testing.assert_array_equal(whole[0], fake_logits(ids, VOCAB))
    np.testing.assert_array_equal(chunked[0], fake_logits(ids, VOCAB))
    assert fake_greedy(ids, 2, VOCAB)[0] == int(whole[0].argmax())


def test_order_of_the_ids_counts() -> None:
    assert not np.array_equal(fake_logits([1, 2], VOCAB), fake_logits([2, 1], VOCAB))
    assert not np.array_equal(fake_logits([1], VOCAB), fake_logits([1, 1], VOCAB))


@pytest.mark.parametrize(("start", "table"), [(4, [6, 1]), (3, [1, 0]), (3, [0, 99])])
def test_a_wrong_table_is_poison(start: int, table: list[int]) -> None:
    program, ids = make_program(), [3, 1, 4, 1, 5, 9]
    run(program, ids[:5], 0, [0, 1])
    with pytest.raises(PoisonError):
        run(program, ids, start, table)


def test_a_missing_write_is_poison() -> None:
    program = make_program()
    run(program, [1, 2, 3], 0, [0, 1])
    with pytest.raises(PoisonError, match="position 3 of 5"):
        run(program, [1, 2, 3, 4, 5], 4, [0, 1])


def test_modes_agree_with_the_logits() -> None:
    program, ids = make_program(), [7, 7, 8]
    logits = torch.from_numpy(fake_logits(ids, VOCAB)).double()
    logprobs = logits.log_softmax(-1)
    greedy, top, score = (run(program, ids, 0, [3], m) for m in (RowMode.GREEDY, RowMode.TOPK, RowMode.SCORE))
    assert greedy.greedy_ids is not None and top.topk_ids is not None and top.topk_logprobs is not None
    assert score.target_logprobs is not None and score.target_ranks is not None
    assert greedy.greedy_ids.tolist() == [int(logits.argmax())]
    assert top.topk_ids.tolist() == [logits.topk(3).indices.tolist()]
    np.testing.assert_allclose(top.topk_logprobs[0], logprobs.topk(3).values, atol=1e-6)
    np.testing.assert_allclose(score.target_logprobs, logprobs[5], atol=1e-6)
    assert score.target_ranks.tolist() == [1 + int((logits > logits[5]).sum())]


def test_faults_on_demand() -> None:
    program = make_program()
    logits = run(program, [1, 30, 2], 0, [0]).logits
    assert logits is not None and torch.isnan(logits).all()
    program.fail_next = RuntimeError("asked for")
    with pytest.raises(RuntimeError, match="asked for"):
        run(program, [1, 2], 0, [1])
    assert run(program, [1, 2], 0, [1]).logits is not None
