"""Steps of paged attention: odd sizes, every head ratio, chunks, poisoned blocks, garbage in table tails."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from octavo.contract import AttentionBackend, AttentionBatch, AttentionSpec, KVCache

__all__ = ["SPECS", "Sequences", "make_spec"]


def make_spec(
    heads: tuple[int, int] = (4, 2), head_size: int = 16, block_size: int = 8, dtype: torch.dtype = torch.float32
) -> AttentionSpec:
    """A plain spec of one layer."""
    return AttentionSpec(1, *heads, head_size, head_size, block_size, dtype, dtype, head_size**-0.5)


SPECS: dict[str, AttentionSpec] = {
    "plain": make_spec(),
    "one-head": make_spec((1, 1), 8, 1),
    "ratio-3": make_spec((9, 3), 64, 16),
    "ratio-8": make_spec((8, 1), 24, 32),
    "odd-block": make_spec((6, 2), 19, 7),
    "window": replace(make_spec(), window=11),
    "window-1": replace(make_spec(), window=1),
    "window-block": replace(make_spec((4, 4)), window=8),
    "softcap": replace(make_spec(), softcap=3.0),
    "sinks": replace(make_spec(), sinks=True),
    "all-at-once": replace(make_spec((6, 2)), window=13, softcap=5.0, sinks=True),
    "wide-value": replace(make_spec(), value_size=24),
    "latent": replace(make_spec((5, 1), 40), value_size=32, latent=True),
    "latent-window": replace(make_spec((4, 1), 40), value_size=32, latent=True, window=9),
}


@dataclass
class _Row:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    blocks: np.ndarray
    done: int = 0


class Sequences:
    """Sequences of random tokens, each with scattered blocks, that are fed to a backend in steps.

    Blocks that nobody owns, and slots that nobody has written, hold NaN; table entries past a row's blocks hold
    ids far outside the cache.
    """

    def __init__(self, spec: AttentionSpec, lengths: Sequence[int], seed: int = 0) -> None:
        self.spec = spec
        draw = torch.Generator().manual_seed(seed)
        shuffled = np.random.default_rng(seed)
        counts = [-(-length // spec.block_size) for length in lengths]
        self.num_blocks = sum(counts) + 3
        ids = shuffled.permutation(self.num_blocks).astype(np.int32)
        starts = np.cumsum([0, *counts])

        def random(length: int, heads: int, size: int) -> torch.Tensor:
            return torch.randn(length, heads, size, generator=draw).to(spec.dtype)

        self.rows = [
            _Row(
                random(length, spec.num_heads, spec.head_size),
                random(length, spec.num_kv_heads, spec.head_size),
                random(length, spec.num_kv_heads, spec.value_size),
                ids[starts[i] : starts[i + 1]],
            )
            for i, length in enumerate(lengths)
        ]
        if spec.latent:
            for row in self.rows:
                row.value = row.key[..., : spec.value_size]
        self.sinks = torch.randn(spec.num_heads, generator=draw) if spec.sinks else None

    def poisoned(self, backend: AttentionBackend) -> KVCache:
        """A cache full of NaN."""
        cache = backend.allocate(self.spec, self.num_blocks)
        for tensor in cache.tensors:
            tensor.fill_(float("nan"))
        return cache

    def step(
        self, backend: AttentionBackend, cache: KVCache, chunks: Sequence[tuple[int, int]], *, fused: bool = False
    ) -> list[torch.Tensor]:
        """Feed each (row, number of tokens) its next tokens; their outputs, a chunk each [n, Hq, Dv]."""
        spec = self.spec
        width = max((len(row.blocks) for row in self.rows), default=0) + 2
        table = np.full((len(chunks), width), 2**30, np.int32)
        slots, pieces = [], []
        for r, (i, count) in enumerate(chunks):
            row = self.rows[i]
            positions = np.arange(row.done, row.done + count)
            table[r, : len(row.blocks)] = row.blocks
            table[r, -(-(row.done + count) // spec.block_size) :] = -(2**30)
            block = row.blocks[positions // spec.block_size].astype(np.int64)
            slots.append(block * spec.block_size + positions % spec.block_size)
            pieces.append(slice(row.done, row.done + count))
            row.done += count
        start = np.cumsum([0, *(count for _, count in chunks)]).astype(np.int32)
        seq_lens = np.array([self.rows[i].done for i, _ in chunks], np.int32)
        mapping = np.concatenate([*slots, np.zeros(0, np.int64)])
        batch = _batch(start, seq_lens, table, mapping)
        fed = [(self.rows[i], piece) for (i, _), piece in zip(chunks, pieces, strict=True)]
        query, key, value = (
            _strided(torch.cat([getattr(self.rows[0], name)[:0], *(getattr(row, name)[piece] for row, piece in fed)]))
            for name in ("query", "key", "value")
        )
        # A guard row on either side shows writes outside of the output.
        guarded = torch.full((len(mapping) + 2, spec.num_heads, spec.value_size), 7.0, dtype=spec.dtype)
        out = guarded[1:-1]
        out.fill_(float("nan"))
        plan = backend.plan(cache, batch)
        if fused:
            backend.write_attend(plan, 0, query, key, value, out, self.sinks)
        else:
            backend.write(plan, 0, key, value)
            backend.attend(plan, 0, query, out, self.sinks)
        assert bool((guarded[0] == 7).all() and (guarded[-1] == 7).all()), "written outside of the output"
        return list(out.split([count for _, count in chunks]))


def _batch(start: np.ndarray, seq_lens: np.ndarray, table: np.ndarray, slots: np.ndarray) -> AttentionBatch:
    return AttentionBatch(*map(torch.from_numpy, (start, seq_lens, table, slots)), start, seq_lens, table, slots)


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, cut out of wider rows, as a fused projection leaves them."""
    if not len(x):
        return x
    flat = x.flatten(1)
    wide = torch.full((len(x), flat.shape[1] + 5), float("nan"), dtype=x.dtype)
    wide[:, 2 : 2 + flat.shape[1]] = flat
    return wide[:, 2 : 2 + flat.shape[1]].unflatten(1, x.shape[1:])
