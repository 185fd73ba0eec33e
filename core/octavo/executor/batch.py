"""What the executor keeps of each sequence, and the batch it makes of them, in buffers that outlive the step.

A sequence has a row in `SequenceStore` from its addition to its removal; a step gathers from these rows with a
few array operations, whatever the number of sequences. Nothing here allocates while requests run.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.contract import AttentionBatch, StepBatch
from octavo.scheduler.messages import ScheduledSequence

__all__ = ["BatchBuilder", "SequenceStore"]

Ints = npt.NDArray[np.int64]

# What unwritten memory holds in test mode: no token id, position, block or length that anything could serve.
POISON = -0x5EADBEEF

MAX_KEPT_SHAPES = 64  # numbers of rows and tokens whose batch is kept: decoding comes back to a few


class SequenceStore:
    """Token ids and block tables of the sequences that the executor holds, one row each.

    Attributes:
        token_ids: [rows, max_model_len] int64.
        block_tables: [rows, max_blocks] int32.
        num_tokens, num_blocks: [rows] int64, how much of a row counts.
        stamps: [rows] int64, another number after each change of the row's block table.

    """

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, poison: bool) -> None:
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.token_ids = _array((num_rows, max_model_len), np.int64, poison)
        self.block_tables = _array((num_rows, self.max_blocks), np.int32, poison)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.stamps = np.zeros(num_rows, np.int64)
        self._poison = poison
        self._num_changes = 0
        self._rows: dict[int, int] = {}
        self._asked: list[int] = []  # whose rows were last asked for, and these
        self._found = np.zeros(0, np.int64)
        self._free = list(range(num_rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._rows

    def add(self, seq_id: int, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Take in a sequence with the tokens and blocks that it has."""
        if seq_id in self._rows:
            raise ValueError(f"sequence {seq_id} is added twice")
        if not self._free:
            self._grow()
        row = self._rows[seq_id] = self._free.pop()
        self._asked = []
        self.num_tokens[row] = self.num_blocks[row] = 0
        self.append_tokens(seq_id, token_ids)
        self.append_blocks(seq_id, block_ids)

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; one that is not there is none of our business."""
        row = self._rows.pop(seq_id, None)
        if row is None:
            return
        self._asked = []
        self._free.append(row)
        if self._poison:
            self.token_ids[row] = self.block_tables[row] = POISON

    def append_tokens(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Add tokens that are known from now on."""
        self.guess_tokens(seq_id, token_ids)
        self.num_tokens[self._rows[seq_id]] += len(token_ids)

    def guess_tokens(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Put tokens behind the known ones without knowing them: what is known later overwrites them."""
        row = self._rows[seq_id]
        start = int(self.num_tokens[row])
        self.token_ids[row, start : start + len(token_ids)] = token_ids

    def append_new(self, token_ids: Mapping[int, Sequence[int]]) -> None:
        """Add the tokens that a step gave, by sequence: most have one."""
        if sum(map(len, token_ids.values())) == len(token_ids):
            rows = self.rows_of(list(token_ids))
            self.token_ids[rows, self.num_tokens[rows]] = [new[0] for new in token_ids.values()]
            self.num_tokens[rows] += 1
        else:
            for seq_id, new in token_ids.items():
                self.append_tokens(seq_id, new)

    def append_blocks(self, seq_id: int, block_ids: Sequence[int]) -> None:
        """Add blocks to the end of the sequence's table."""
        if not block_ids:
            return
        row = self._rows[seq_id]
        start = int(self.num_blocks[row])
        self.block_tables[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] += len(block_ids)
        self._stamp(row)

    def replace_blocks(self, seq_id: int, replaced: Iterable[tuple[int, int]]) -> None:
        """Put other blocks at some indices of the sequence's table."""
        row = self._rows[seq_id]
        for index, block_id in replaced:
            self.block_tables[row, index] = block_id
            self._stamp(row)

    def known(self, seq_id: int) -> Ints:
        """[n] the sequence's tokens, a view that holds until the sequence changes."""
        row = self._rows[seq_id]
        return self.token_ids[row, : self.num_tokens[row]]

    def num_known(self, seq_id: int) -> int:
        """How many tokens of the sequence are known."""
        return int(self.num_tokens[self._rows[seq_id]])

    def rows_of(self, seq_ids: list[int]) -> Ints:
        """[n] the rows of some sequences, which is mostly asked of the same ones as before."""
        if seq_ids != self._asked:
            self._asked, self._found = seq_ids, np.array([self._rows[seq_id] for seq_id in seq_ids], np.int64)
        return self._found

    def _stamp(self, row: int) -> None:
        self._num_changes += 1
        self.stamps[row] = self._num_changes

    def _grow(self) -> None:
        """Twice as many rows: samples beyond the expected number were forked."""
        num_rows = len(self.num_tokens)
        for name in ("token_ids", "block_tables", "num_tokens", "num_blocks", "stamps"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate((old, _array(old.shape, old.dtype, self._poison))))
        self._free.extend(range(2 * num_rows - 1, num_rows - 1, -1))


class BatchBuilder:
    """Makes a step's `StepBatch` from pieces of stored sequences.

    Where the platform computes in host memory, device tensors are the host buffers themselves; elsewhere each
    buffer has a twin on the device, and what changed is copied once a step. The batch holds until the next one
    is built. Tables keep their place from step to step: a row is written anew only if another sequence stands
    there now, or its table changed.
    """

    def __init__(
        self,
        store: SequenceStore,
        *,
        num_groups: int,
        max_rows: int,
        max_tokens: int,
        device: torch.device,
        pinned: bool,
        poison: bool,
    ) -> None:
        def buffer(shape: tuple[int, ...], dtype: torch.dtype) -> "_Buffer":
            return _Buffer(shape, dtype, device, pinned, poison)

        self._store = store
        self._num_groups = num_groups
        self._make = buffer
        self._make_row_buffers(max_rows)
        self._make_token_buffers(max_tokens)
        self._batches: dict[tuple[int, int], StepBatch] = {}

    def _make_row_buffers(self, num_rows: int) -> None:
        self._starts = self._make((num_rows + 1,), torch.int32)
        self._starts.host[0] = 0
        self._seq_lens = self._make((num_rows,), torch.int32)
        self._tables = self._make((num_rows, self._store.max_blocks), torch.int32)
        self._placed = np.full(num_rows, -1, np.int64)  # stamp of the table that stands in each row
        self._counting = np.arange(1, num_rows + 1)

    def _make_token_buffers(self, num_tokens: int) -> None:
        self._token_ids, self._positions, self._slots = (self._make((num_tokens,), torch.int64) for _ in "123")

    def build(self, pieces: Sequence[ScheduledSequence]) -> StepBatch:
        """The batch whose row r is piece r: its known tokens, and its guesses behind them.

        Raises:
            ValueError: a piece reaches past what is known of its sequence, or past its blocks.

        """
        store, num_rows = self._store, len(pieces)
        rows = store.rows_of([piece.seq_id for piece in pieces])
        starts = np.array([piece.num_computed for piece in pieces], np.int64)
        counts = np.array([piece.num_tokens + len(piece.draft_token_ids) for piece in pieces], np.int64)
        seq_lens = starts + counts
        self._check(pieces, rows, seq_lens)
        num_tokens = int(counts.sum())
        self._reserve(num_rows, num_tokens)

        if num_tokens == num_rows:  # one token each: the work below comes to this
            ends, positions, row_of = self._counting[:num_rows], starts, rows
        else:
            ends = np.cumsum(counts)
            positions = np.arange(num_tokens) + np.repeat(seq_lens - ends, counts)
            row_of = np.repeat(rows, counts)
        self._starts.host[1 : num_rows + 1] = ends
        self._seq_lens.host[:num_rows] = seq_lens
        self._positions.host[:num_tokens] = positions
        self._token_ids.host[:num_tokens] = store.token_ids[row_of, positions]
        blocks = positions // store.block_size
        # The block's first slot less its first position, and then the position.
        self._slots.host[:num_tokens] = (store.block_tables[row_of, blocks] - blocks) * store.block_size + positions
        self._place_tables(rows)
        for buffer, num in (
            (self._starts, num_rows + 1),
            (self._seq_lens, num_rows),
            (self._positions, num_tokens),
            (self._token_ids, num_tokens),
            (self._slots, num_tokens),
        ):
            buffer.upload(0, num)
        return self._batch(num_rows, num_tokens)

    def _batch(self, num_rows: int, num_tokens: int) -> StepBatch:
        """The first so many rows and tokens of the buffers."""
        batch = self._batches.get((num_rows, num_tokens))
        if batch is None:
            attention = AttentionBatch(
                query_start_loc=self._starts.tensor(num_rows + 1),
                seq_lens=self._seq_lens.tensor(num_rows),
                block_table=self._tables.tensor(num_rows),
                slot_mapping=self._slots.tensor(num_tokens),
                query_start_loc_host=self._starts.host[: num_rows + 1],
                seq_lens_host=self._seq_lens.host[:num_rows],
                block_table_host=self._tables.host[:num_rows],
                slot_mapping_host=self._slots.host[:num_tokens],
            )
            # Blocks are counted for all layers at once, so every group has the same tables.
            groups = [attention] * self._num_groups
            batch = StepBatch(self._token_ids.tensor(num_tokens), self._positions.tensor(num_tokens), groups)
            if len(self._batches) >= MAX_KEPT_SHAPES:
                self._batches.clear()
            self._batches[num_rows, num_tokens] = batch
        return batch

    def _check(self, pieces: Sequence[ScheduledSequence], rows: Ints, seq_lens: Ints) -> None:
        known, blocks = self._store.num_tokens[rows], self._store.num_blocks[rows]
        wrong = (seq_lens > known) | (seq_lens > blocks * self._store.block_size)
        if wrong.any():
            for at in np.flatnonzero(wrong).tolist():
                guesses = len(pieces[at].draft_token_ids)
                if seq_lens[at] > min(known[at] + guesses, blocks[at] * self._store.block_size):
                    raise ValueError(
                        f"sequence {pieces[at].seq_id} is to compute up to {seq_lens[at]} tokens,"
                        f" {known[at] + guesses} are known and {blocks[at]} blocks of {self._store.block_size} are"
                        " its own"
                    )

    def _reserve(self, num_rows: int, num_tokens: int) -> None:
        if num_rows > len(self._seq_lens.host):
            self._make_row_buffers(2 * num_rows)
            self._batches.clear()
        if num_tokens > len(self._positions.host):
            self._make_token_buffers(2 * num_tokens)
            self._batches.clear()

    def _place_tables(self, rows: Ints) -> None:
        """Put the tables in the order of the batch; what lies past a row's blocks is left as it was."""
        stamps = self._store.stamps[rows]
        changed = (self._placed[: len(rows)] != stamps).nonzero()[0]
        if changed.size:
            for at in changed:
                num_blocks = int(self._store.num_blocks[rows[at]])
                self._tables.host[at, :num_blocks] = self._store.block_tables[rows[at], :num_blocks]
            self._placed[changed] = stamps[changed]
            self._tables.upload(int(changed[0]), int(changed[-1]) + 1)


class _Buffer:
    """A host array and its twin on the device, one memory where the device computes in the host's."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pinned: bool, poison: bool
    ) -> None:
        staging = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        if poison:
            staging.fill_(POISON)
        self.host: npt.NDArray[Any] = staging.numpy()
        self._staging = staging
        self._tensor = staging if staging.device.type == device.type else staging.to(device)

    def tensor(self, num: int) -> torch.Tensor:
        """The first `num` rows on the device."""
        return self._tensor[:num]

    def upload(self, first: int, last: int) -> None:
        """Copy rows `first` to `last` - 1 to the device, where it has a memory of its own."""
        if self._tensor is not self._staging:
            changed = slice(first, last)
            self._tensor[changed].copy_(self._staging[changed], non_blocking=self._staging.is_pinned())


def _array(shape: tuple[int, ...], dtype: npt.DTypeLike, poison: bool) -> npt.NDArray[Any]:
    return np.full(shape, POISON, dtype) if poison else np.zeros(shape, dtype)
