"""A model's program over paged reference attention, driven by hand: who computes how many tokens in a step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.contract import AttentionBatch, CompileRequest, Platform, Program, RowMode, Rows, StepBatch
from octavo.hardware.resolve import OpResolver
from octavo.model.describe import load_weights
from octavo.model.description import HfModel, ModelDescription, NativeModel
from octavo.model.generic import GenericProgram
from octavo.model.hf import HfProgram, load_hf
from octavo.model.kv_groups import group_layers, kv_groups

from .platforms import ToyPlatform

__all__ = ["Paged", "Running"]

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 40


@dataclass
class Running:
    """A sequence being computed: its tokens, its blocks in each group, how many tokens are in the cache."""

    token_ids: list[int]
    tables: list[list[int]]
    num_computed: int = 0


class Paged:
    """A description's program, with caches of scattered blocks filled with NaN where nobody wrote."""

    def __init__(
        self,
        description: ModelDescription,
        *,
        max_model_len: int = 64,
        weights: dict[str, torch.Tensor] | None = None,
        platform: Platform | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.description = description
        resolver = OpResolver(platform or ToyPlatform())
        sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "dtype": dtype, "kv_dtype": dtype}
        self.program: Program
        if isinstance(description, HfModel):
            self.groups = group_layers([layer.attention for layer in description.layers], **sizes)
            model = load_hf(description, dtype=dtype, device=CPU, max_model_len=max_model_len, progress=False)
            backends = [resolver.resolve_attention(group.spec) for group in self.groups]
            self.program = HfProgram(description, model, dtype=dtype, device=CPU, groups=self.groups, backends=backends)
        else:
            assert isinstance(description, NativeModel)
            if weights is None:
                weights = load_weights(description, dtype=dtype, device=CPU, progress=False)
            self.weights = weights
            self.groups = kv_groups(description.spec, **sizes)
            request = CompileRequest(
                description.spec,
                weights,
                dtype,
                [group.spec for group in self.groups],
                max_tokens=64,
                max_rows=64,
                max_model_len=max_model_len,
            )
            self.program = (platform and platform.compile(request)) or GenericProgram(
                description.spec,
                weights,
                dtype=dtype,
                device=CPU,
                groups=self.groups,
                resolver=resolver,
                max_model_len=max_model_len,
            )
        caches = [resolver.resolve_attention(g.spec).allocate(g.spec, NUM_BLOCKS) for g in self.groups]
        for cache in caches:
            for tensor in cache.tensors:
                tensor.fill_(torch.nan)
        self.program.bind(caches)
        order = np.random.default_rng(0)
        self._free = [list(order.permutation(NUM_BLOCKS)) for _ in self.groups]

    def begin(self, token_ids: Iterable[int]) -> Running:
        return Running(list(token_ids), [[] for _ in self.groups])

    def end(self, *sequences: Running) -> None:
        for sequence in sequences:
            for free, table in zip(self._free, sequence.tables, strict=True):
                free.extend(table)
                table.clear()

    def step(self, work: Sequence[tuple[Running, int]]) -> list[torch.Tensor]:
        """Compute so many next tokens of each sequence; the logits [n, V] of each."""
        ends = np.cumsum([n for _, n in work])
        rows = Rows(np.arange(ends[-1]), np.full(ends[-1], RowMode.LOGITS, np.uint8))
        logits = self.program.submit(self.batch(work), rows).result().logits
        assert logits is not None
        return list(torch.split(logits.clone(), [n for _, n in work]))  # the program's own hold for a step

    def batch(self, work: Sequence[tuple[Running, int]]) -> StepBatch:
        """The step's batch; afterwards the sequences count their tokens as computed."""
        spans = [(s, s.num_computed, s.num_computed + n) for s, n in work]
        starts = np.concatenate([[0], np.cumsum([n for _, n in work])]).astype(np.int32)
        lens = np.array([last for _, _, last in spans], np.int32)
        attention = []
        for g in range(len(self.groups)):
            for sequence, _, last in spans:
                table = sequence.tables[g]
                while len(table) * BLOCK_SIZE < last:
                    table.append(int(self._free[g].pop()))
            width = max(len(s.tables[g]) for s, _, _ in spans)
            tables = np.full((len(spans), width), 10**6, np.int32)  # what lies past a row's blocks is never read
            for r, (sequence, _, _) in enumerate(spans):
                tables[r, : len(sequence.tables[g])] = sequence.tables[g]
            slots = np.concatenate(
                [
                    np.array([s.tables[g][i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(first, last)])
                    for s, first, last in spans
                ]
            ).astype(np.int64)
            host = (starts, lens, tables, slots)
            attention.append(AttentionBatch(*(torch.from_numpy(a) for a in host), *host))
        ids = [i for s, first, last in spans for i in s.token_ids[first:last]]
        positions = [i for _, first, last in spans for i in range(first, last)]
        for sequence, _, last in spans:
            sequence.num_computed = last
        return StepBatch(torch.tensor(ids), torch.tensor(positions), attention)

    def whole(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits of all tokens in one step."""
        return self.chunked(token_ids, len(token_ids))

    def chunked(self, token_ids: Sequence[int], chunk: int) -> torch.Tensor:
        sequence, found = self.begin(token_ids), []
        while left := len(token_ids) - sequence.num_computed:
            found += self.step([(sequence, min(chunk, left))])
        self.end(sequence)
        return torch.cat(found)
