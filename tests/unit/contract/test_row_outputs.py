"""Row modes: what the requested rows yield, ties, duplicates and chunks."""

import numpy as np
import pytest
import torch
from doubles.paged_program import Paged
from doubles.tiny_models import Tiny, base, folder_files

from octavo.contract import RowMode, Rows, StepOutput
from octavo.contract import row_outputs as rows_module
from octavo.contract.row_outputs import best, row_outputs
from octavo.errors import UnsupportedError
from octavo.model.describe import describe_model

L, G, T, S, H = RowMode.LOGITS, RowMode.GREEDY, RowMode.TOPK, RowMode.SCORE, RowMode.HIDDEN


def run(
    hidden: torch.Tensor, index: list[int], modes: list[RowMode], k: int = 0, target: list[int] | None = None
) -> StepOutput:
    """The identity for a head: hidden states are logits."""
    distinct, inverse = np.unique(np.array(index), return_inverse=True)
    rows = Rows(np.array(index), np.array(modes, np.uint8), k, np.array(target or [0] * len(index)))
    return row_outputs(hidden[distinct], inverse, rows, lambda h: h.float(), hidden.shape[1]).fetch()


def test_every_mode_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 11)
    logprobs = logits.log_softmax(-1)
    index, modes = [6, 2, 2, 0, 5, 2, 6, 1, 2], [L, G, T, S, H, S, G, T, L]
    target = [0, 0, 0, 4, 0, 9, 0, 0, 0]
    for chunk in (1 << 22, 22, 11, 1):  # all tokens at once, two at a time, one at a time
        monkeypatch.setattr(rows_module, "CHUNK_ELEMENTS", chunk)
        out = run(logits, index, modes, 3, target)
        assert out.logits is not None
        assert out.greedy_ids is not None
        assert out.topk_ids is not None
        assert out.topk_logprobs is not None
        assert out.target_logprobs is not None
        assert out.target_ranks is not None
        assert out.hidden is not None
        assert torch.equal(out.logits, logits[[6, 2]])
        assert out.greedy_ids.tolist() == logits[[2, 6]].argmax(-1).tolist()
        ordered = logits.argsort(-1, descending=True)
        assert out.topk_ids.tolist() == ordered[[2, 1], :3].tolist()
        np.testing.assert_allclose(out.topk_logprobs, logprobs[[2, 1]].gather(-1, ordered[[2, 1], :3]), rtol=1e-5)
        np.testing.assert_allclose(out.target_logprobs, [logprobs[0, 4], logprobs[2, 9]], rtol=1e-5)
        ranks = [ordered[0].tolist().index(4) + 1, ordered[2].tolist().index(9) + 1]
        assert out.target_ranks.tolist() == ranks
        assert torch.equal(out.hidden, logits[[5]])


def test_dtypes_are_those_of_the_contract() -> None:
    out = run(torch.randn(2, 5).bfloat16(), [0, 0, 1, 1, 1], [L, G, T, S, H], 2)
    assert out.logits is not None
    assert out.logits.dtype == torch.float32
    assert out.hidden is not None
    assert out.hidden.dtype == torch.float32
    found = (out.greedy_ids, out.topk_ids, out.topk_logprobs, out.target_logprobs, out.target_ranks)
    assert [a.dtype for a in found if a is not None] == [np.int64, np.int64, np.float32, np.float32, np.int64]


def test_the_lowest_id_of_equals_comes_first() -> None:
    logits = torch.zeros(3, 1000)
    logits[0, [7, 400, 999]] = 1.0
    logits[1] = -0.0
    logits[1, 3] = 0.0  # the two zeros are equal
    logits[2] = -5.0
    logits[2, [800, 20]] = -1.0
    out = run(logits, [0, 1, 2, 0, 1, 2], [G, G, G, T, T, T], 5)
    assert out.greedy_ids is not None
    assert out.greedy_ids.tolist() == [7, 0, 20]
    assert out.topk_ids is not None
    assert out.topk_ids.tolist() == [[7, 400, 999, 0, 1], [0, 1, 2, 3, 4], [20, 800, 0, 1, 2]]
    out = run(logits, [0, 0, 0, 0], [S, S, S, S], target=[7, 999, 0, 998])
    assert out.target_ranks is not None
    assert out.target_ranks.tolist() == [1, 3, 4, 1000]


def test_best_agrees_with_a_stable_sort() -> None:
    torch.manual_seed(1)
    logits = torch.randint(-40, 40, (50, 333)).float() / 8
    logits[0, 5], logits[1, 6], logits[2, :] = torch.inf, -torch.inf, -torch.inf
    expected = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    for k in (1, 2, 20, 333):
        assert torch.equal(best(logits, k), expected[:, :k])


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Paged:
    folder = tmp_path_factory.mktemp("tiny")
    Tiny("Llama", base()).save(folder)
    return Paged(describe_model(folder_files(folder), 64))


def test_a_step_gives_what_its_rows_ask_for(paged: Paged) -> None:
    token_ids = [(7 * i) % 160 for i in range(30)]
    logits = paged.whole(token_ids)
    sequence = paged.begin(token_ids)
    batch = paged.batch([(sequence, 30)])
    rows = Rows(np.array([29, 3, 3, 29]), np.array([G, L, S, H], np.uint8), 0, np.array([0, 0, 11, 0]))
    out = paged.program.submit(batch, rows).result()
    assert out.greedy_ids is not None
    assert out.greedy_ids.tolist() == [logits[29].argmax().item()]
    assert out.logits is not None
    torch.testing.assert_close(out.logits, logits[[3]], atol=1e-5, rtol=1e-5)
    assert out.target_logprobs is not None
    np.testing.assert_allclose(out.target_logprobs, [logits[3].log_softmax(-1)[11]], rtol=1e-4)
    assert out.hidden is not None
    assert out.hidden.shape == (1, 64)
    paged.end(sequence)


def test_a_step_without_rows_only_fills_the_cache(paged: Paged) -> None:
    token_ids = [(11 * i) % 160 for i in range(30)]
    logits = paged.whole(token_ids)
    sequence = paged.begin(token_ids)
    nothing = Rows(np.zeros(0, np.int64), np.zeros(0, np.uint8))
    assert paged.program.submit(paged.batch([(sequence, 20)]), nothing).result() == StepOutput()
    torch.testing.assert_close(paged.step([(sequence, 10)])[0], logits[20:], atol=1e-5, rtol=1e-5)
    paged.end(sequence)


def test_embeddings_stand_in_for_tokens(paged: Paged) -> None:
    token_ids = [(13 * i) % 160 for i in range(12)]
    logits = paged.whole(token_ids)
    sequence = paged.begin([0] * 12)
    batch = paged.batch([(sequence, 12)])
    weights = {"embedding": paged.weights["embedding"]}
    embeds = weights["embedding"][torch.tensor(token_ids)]
    before = embeds.clone()
    given = type(batch)(batch.token_ids, batch.positions, batch.attention, input_embeds=embeds)
    rows = Rows(np.arange(12), np.zeros(12, np.uint8))
    out = paged.program.submit(given, rows).result()
    assert out.logits is not None
    torch.testing.assert_close(out.logits, logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(embeds, before)
    paged.end(sequence)


def test_adapters_are_refused(paged: Paged) -> None:
    sequence = paged.begin([1, 2])
    batch = paged.batch([(sequence, 2)])
    given = type(batch)(
        batch.token_ids, batch.positions, batch.attention, adapter_ids=torch.zeros(1, dtype=torch.int32)
    )
    with pytest.raises(UnsupportedError, match="without adapters"):
        paged.program.submit(given, Rows(np.zeros(0, np.int64), np.zeros(0, np.uint8)))
    paged.end(sequence)


def test_the_workspace_covers_activations_and_logits(paged: Paged) -> None:
    program = paged.program
    few, many = program.workspace_bytes(16, 4), program.workspace_bytes(2048, 4)
    assert many - few == (2048 - 16) * (3 * 96 + 3 * 64) * 4  # the MLP is the widest part
    assert program.workspace_bytes(16, 8) > few
    assert program.modes == frozenset(RowMode)


def test_row_invariance_is_that_of_all_links(paged: Paged) -> None:
    answer = paged.program.row_invariant
    assert not answer
    assert [reason.partition(":")[0] for reason in answer.reasons] == ["linear (torch)"]


def test_one_copy_brings_every_mode_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[torch.Tensor] = []
    to_host = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copies.append(x) or to_host(x))
    for modes in ([L, G, T, S, H], [H, L], [L, L], [G, G], [T, T], [S, H]):
        copies.clear()
        run(torch.randn(5, 7), list(range(len(modes))), modes, 3)
        assert len(copies) == 1
