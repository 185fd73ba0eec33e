"""What a model's matrices multiply: mean squares of their inputs over a text, found a layer at a time.

A layer is read, all tokens go through it on the platform's own ops, and it is dropped: beside what loading takes
anyway there are one layer in floats and the text's activations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from tqdm import tqdm

from octavo.contract import AttentionBackend, AttentionBatch, AttentionSpec, KVCache, StepBatch
from octavo.hardware.resolve import OpResolver
from octavo.model.blocks import Blocks, LinearBlock
from octavo.model.checkpoint import Checkpoint
from octavo.model.description import NativeModel
from octavo.model.generic import InputBlock, LayerBlock, Step
from octavo.model.kv_groups import kv_groups
from octavo.model.weights import Filling, read_weights

__all__ = ["input_squares"]

Note = Callable[[str, torch.Tensor], None]


def input_squares(
    description: NativeModel,
    plan: Sequence[Filling],
    checkpoint: Checkpoint,
    pieces: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    resolver: OpResolver,
    block_size: int,
    progress: bool,
) -> dict[str, torch.Tensor]:
    """The mean square of each input [K] of every matrix of the layers, float32 on the host, by slot name.

    Args:
        description: of the model.
        plan: what fills its slots.
        checkpoint: from which they are filled.
        pieces: token ids, sequences of one length.
        dtype: to compute in.
        device: to compute on.
        resolver: of the platform; what it resolves here is not what serves later.
        block_size: tokens a KV block.
        progress: show a bar on stderr.

    Raises:
        OctavoError: no op or attention backend serves the model.

    """
    spec, length = description.spec, len(pieces[0])
    squares: dict[str, _Squares] = {}

    def blocks_of(*prefixes: str) -> "_Watched":
        fillings = [filling for filling in plan if filling.name.startswith(prefixes)]
        weights = read_weights(fillings, checkpoint, dtype=dtype, device=device, progress=False)
        weights.setdefault("embedding", torch.empty(0, spec.hidden_size))  # whoever asks wants the width alone
        watch = _Watched(weights, resolver, dtype=dtype, device=device, max_model_len=length)
        watch.note = lambda slot, x: squares.setdefault(slot, _Squares()).add(x)
        return watch

    token_ids = torch.tensor(pieces, device=device).flatten()
    positions = torch.arange(length, device=device).repeat(len(pieces))
    rooms: dict[AttentionSpec, _Room] = {}
    with torch.no_grad():
        embed = InputBlock(blocks_of("embedding", "positions"), spec)
        x, delta = embed(StepBatch(token_ids=token_ids, positions=positions, attention=())), None
        del embed
        for i, layer in enumerate(tqdm(spec.layers, desc="Calibrating", unit="layer", disable=not progress)):
            alone = replace(spec, layers=(layer,))
            (group,) = kv_groups(alone, block_size=block_size, dtype=dtype, kv_dtype=dtype)
            if group.spec not in rooms:
                rooms[group.spec] = _Room(resolver.resolve_attention(group.spec), group.spec, pieces, device)
            room = rooms[group.spec]
            block = LayerBlock(blocks_of(f"layers.{i}."), f"layers.{i}", layer, room.backend, 0, 0)
            x, delta = block(x, delta, Step(positions, [room.backend.plan(room.cache, room.batch)]))
    return {slot: found.mean() for slot, found in squares.items()}


class _Squares:
    """Sums of squares of columns."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._num_rows = 0

    def add(self, x: torch.Tensor) -> None:
        """Rows [T, K]."""
        found = x.float().square().sum(0).double().cpu()
        self._sum = found if self._sum is None else self._sum + found
        self._num_rows += len(x)

    def mean(self) -> torch.Tensor:
        """Float32 [K]."""
        assert self._sum is not None
        return (self._sum / self._num_rows).float()


class _Watched(Blocks):
    """Blocks whose matrices tell what they multiply."""

    note: Note

    def linear(self, slot: str) -> LinearBlock:
        return _WatchedLinear(super().linear(slot), partial(self.note, slot))

    def experts(self, slot: str, num_experts: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """All experts of a slot share what is found: by themselves most would see a few tokens only."""
        product = super().experts(slot, num_experts)

        def watched(expert: int, x: torch.Tensor) -> torch.Tensor:
            self.note(slot, x)
            return product(expert, x)

        return watched


class _WatchedLinear(LinearBlock):
    def __init__(self, block: LinearBlock, note: Callable[[torch.Tensor], None]) -> None:
        self._block, self._note = block, note

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._note(x)
        return self._block(x)


class _Room:
    """Where layers of one geometry keep keys and values, one layer after the other: each sequence in blocks of its
    own.
    """

    def __init__(
        self, backend: AttentionBackend, spec: AttentionSpec, pieces: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        num, length = len(pieces), len(pieces[0])
        per_piece = -(-length // spec.block_size)
        self.backend = backend
        self.cache: KVCache = backend.allocate(spec, num * per_piece)
        starts = np.arange(0, num * length + 1, length, dtype=np.int32)
        lengths = np.full(num, length, np.int32)
        tables = np.arange(num * per_piece, dtype=np.int32).reshape(num, per_piece)
        slots = (np.arange(num)[:, None] * per_piece * spec.block_size + np.arange(length)).astype(np.int64).ravel()
        on_device: Mapping[str, torch.Tensor] = {
            name: torch.from_numpy(array).to(device)
            for name, array in (("starts", starts), ("lengths", lengths), ("tables", tables), ("slots", slots))
        }
        self.batch = AttentionBatch(
            query_start_loc=on_device["starts"],
            seq_lens=on_device["lengths"],
            block_table=on_device["tables"],
            slot_mapping=on_device["slots"],
            query_start_loc_host=starts,
            seq_lens_host=lengths,
            block_table_host=tables,
            slot_mapping_host=slots,
        )
