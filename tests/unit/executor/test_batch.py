"""The store and the batches made of it: geometry, persistence, poison, and a device that is not the host."""

import numpy as np
import pytest
import torch

from octavo.contract import StepBatch
from octavo.executor.batch import POISON, BatchBuilder, SequenceStore, _Buffer
from octavo.scheduler.messages import ScheduledSequence as Piece

BLOCK = 4


def make(num_rows: int = 4, max_tokens: int = 16, device: str = "cpu") -> tuple[SequenceStore, BatchBuilder]:
    store = SequenceStore(num_rows, 32, BLOCK, poison=True)
    builder = BatchBuilder(
        store,
        num_groups=2,
        max_rows=num_rows,
        max_tokens=max_tokens,
        device=torch.device(device),
        pinned=False,
        poison=True,
    )
    return store, builder


def tables(batch: StepBatch) -> list[list[int]]:
    """Each row's blocks, as far as its tokens reach."""
    attention = batch.attention[0]
    return [
        attention.block_table_host[row, : -(-int(n) // BLOCK)].tolist() for row, n in enumerate(attention.seq_lens_host)
    ]


def test_geometry_of_a_mixed_batch() -> None:
    store, builder = make()
    store.add(7, [10, 11, 12, 13, 14, 15], [5, 2])
    store.add(3, [20, 21], [9])
    store.add(8, list(range(30, 39)), [1, 0, 4])
    batch = builder.build([Piece(8, 3, 4), Piece(3, 1, 1), Piece(7, 0, 6)])
    assert batch.token_ids.tolist() == [33, 34, 35, 36, 21, 10, 11, 12, 13, 14, 15]
    assert batch.positions.tolist() == [3, 4, 5, 6, 1, 0, 1, 2, 3, 4, 5]
    attention = batch.attention[0]
    assert batch.attention[1] is attention
    assert attention.query_start_loc.tolist() == [0, 4, 5, 11]
    assert attention.seq_lens.tolist() == [7, 2, 6]
    assert tables(batch) == [[1, 0], [9], [5, 2]]
    assert attention.slot_mapping.tolist() == [7, 0, 1, 2, 37, 20, 21, 22, 23, 8, 9]
    assert (attention.num_rows, attention.num_tokens) == (3, 11)
    dtypes = [attention.query_start_loc.dtype, attention.seq_lens.dtype, attention.block_table.dtype]
    assert dtypes == [torch.int32] * 3
    assert [attention.slot_mapping.dtype, batch.token_ids.dtype, batch.positions.dtype] == [torch.int64] * 3


def test_host_and_device_are_one_memory_where_they_can_be() -> None:
    store, builder = make()
    store.add(1, [1, 2], [3])
    attention = builder.build([Piece(1, 0, 2)]).attention[0]
    for tensor, mirror in (
        (attention.block_table, attention.block_table_host),
        (attention.slot_mapping, attention.slot_mapping_host),
        (attention.seq_lens, attention.seq_lens_host),
        (attention.query_start_loc, attention.query_start_loc_host),
    ):
        assert tensor.data_ptr() == mirror.ctypes.data
        assert tensor.is_contiguous()


def test_a_device_of_its_own_gets_copies() -> None:
    store, builder = make(device="meta")
    store.add(1, [1, 2], [3])
    batch = builder.build([Piece(1, 0, 2)])
    attention = batch.attention[0]
    assert {t.device.type for t in (batch.token_ids, batch.positions, attention.block_table)} == {"meta"}
    assert attention.block_table.shape == (1, 8)
    assert attention.slot_mapping_host.tolist() == [12, 13]


def test_what_a_device_gets_is_what_the_host_has() -> None:
    """The tensors of a device apart, here clones in host memory, follow every change of the mirrors."""
    store, builder = make()
    for buffer in vars(builder).values():
        if isinstance(buffer, _Buffer):
            buffer._tensor = buffer._staging.clone()
    rng = np.random.default_rng(0)
    for seq_id in range(4):
        store.add(seq_id, [seq_id] * 6, [seq_id, seq_id + 10])
    for _ in range(60):
        order = rng.permutation(4)[: rng.integers(1, 5)]
        seq_id = int(order[0])
        if rng.random() < 0.5:
            store.replace_blocks(seq_id, [(int(rng.integers(2)), int(rng.integers(20, 99)))])
        batch = builder.build([Piece(int(s), 5, 1) for s in order])
        attention = batch.attention[0]
        assert attention.block_table.data_ptr() != attention.block_table_host.ctypes.data
        assert attention.block_table[:, :2].tolist() == attention.block_table_host[:, :2].tolist()
        assert attention.block_table[:, :2].tolist() == [
            store.block_tables[r, :2].tolist() for r in store.rows_of(order.tolist())
        ]
        assert attention.slot_mapping.tolist() == attention.slot_mapping_host.tolist()
        assert attention.seq_lens.tolist() == attention.seq_lens_host.tolist()
        assert batch.token_ids.tolist() == order.tolist()


def test_only_changed_tables_are_written() -> None:
    store, builder = make()
    store.add(1, [1] * 9, [3, 4, 5])
    store.add(2, [2] * 5, [6, 7])
    first = builder.build([Piece(1, 0, 9), Piece(2, 0, 5)])
    written = first.attention[0].block_table_host
    written[:] = 77  # what nobody touches stays
    store.append_tokens(2, [2] * 4)
    store.append_blocks(2, [8])
    builder.build([Piece(1, 8, 1), Piece(2, 8, 1)])
    assert written[0].tolist() == [77] * 8
    assert written[1, :3].tolist() == [6, 7, 8]


def test_tables_follow_changes_of_place_and_content() -> None:
    store, builder = make()
    store.add(1, [1] * 9, [3, 4, 5])
    store.add(2, [2] * 5, [6, 7])
    assert tables(builder.build([Piece(1, 0, 9), Piece(2, 0, 5)])) == [[3, 4, 5], [6, 7]]
    assert tables(builder.build([Piece(2, 4, 1), Piece(1, 8, 1)])) == [[6, 7], [3, 4, 5]]
    store.replace_blocks(1, [(2, 11), (0, 12)])
    assert tables(builder.build([Piece(2, 4, 1), Piece(1, 8, 1)])) == [[6, 7], [12, 4, 11]]
    store.remove(2)
    store.add(2, [2] * 5, [13, 14])  # resumed under its old name, in other blocks
    assert tables(builder.build([Piece(2, 0, 5), Piece(1, 8, 1)])) == [[13, 14], [12, 4, 11]]


def test_more_sequences_and_tokens_than_foreseen() -> None:
    store, builder = make(num_rows=2, max_tokens=4)
    for seq_id in range(9):
        store.add(seq_id, [seq_id] * 8, [2 * seq_id, 2 * seq_id + 1])
    batch = builder.build([Piece(seq_id, 0, 8) for seq_id in range(9)])
    assert batch.token_ids.tolist() == [seq_id for seq_id in range(9) for _ in range(8)]
    assert tables(batch) == [[2 * i, 2 * i + 1] for i in range(9)]
    assert len(store) == 9


def test_what_nobody_wrote_is_poison() -> None:
    store, builder = make()
    store.add(1, [1, 2], [3])
    attention = builder.build([Piece(1, 0, 2)]).attention[0]
    assert (attention.block_table_host[0, 1:] == POISON).all()
    store.remove(1)
    assert (store.token_ids == POISON).all() and (store.block_tables == POISON).all()


@pytest.mark.parametrize(("piece", "message"), [(Piece(1, 0, 7), "6 are known"), (Piece(2, 0, 5), "1 blocks of 4")])
def test_a_piece_past_its_sequence_is_refused(piece: Piece, message: str) -> None:
    store, builder = make()
    store.add(1, [1] * 6, [3, 4])
    store.add(2, [1] * 6, [5])
    with pytest.raises(ValueError, match=message):
        builder.build([piece])


def test_names_come_once_and_go_at_will() -> None:
    store, _ = make()
    store.add(1, [1], [0])
    with pytest.raises(ValueError, match="added twice"):
        store.add(1, [1], [0])
    store.remove(1)
    store.remove(1)
    assert 1 not in store and len(store) == 0


def test_rows_are_used_again() -> None:
    store, _ = make(num_rows=2)
    for seq_id in range(100):
        store.add(seq_id, [seq_id], [seq_id])
        store.remove(seq_id)
    assert len(store.num_tokens) == 2
    assert np.array_equal(np.sort(store._free), [0, 1])


def test_decoding_makes_no_new_batch() -> None:
    """Steps of one shape are the same object, with other contents."""
    store, builder = make()
    for seq_id in range(3):
        store.add(seq_id, [seq_id] * 4, [seq_id, seq_id + 5])
    first = builder.build([Piece(seq_id, 3, 1) for seq_id in range(3)])
    store.append_new({seq_id: [seq_id + 10] for seq_id in range(3)})
    second = builder.build([Piece(seq_id, 4, 1) for seq_id in range(3)])
    assert second is first
    assert second.token_ids.tolist() == [10, 11, 12]
    assert second.attention[0].slot_mapping.tolist() == [4 * (seq_id + 5) for seq_id in range(3)]


def test_guesses_stand_behind_the_known_tokens_and_are_overwritten() -> None:
    store, builder = make()
    store.add(1, [10, 11, 12, 13], [3, 6])
    store.guess_tokens(1, (50, 51))
    batch = builder.build([Piece(1, 3, 1, draft_token_ids=(50, 51))])
    assert batch.token_ids.tolist() == [13, 50, 51]
    assert batch.attention[0].seq_lens.tolist() == [6]
    assert store.known(1).tolist() == [10, 11, 12, 13]
    store.append_new({1: [50, 60]})
    assert store.known(1).tolist() == [10, 11, 12, 13, 50, 60]
