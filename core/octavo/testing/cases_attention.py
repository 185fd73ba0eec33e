"""One list of the geometries of paged attention, and sequences whose steps are fed to a backend.

Odd sizes, every head ratio, chunks; blocks that nobody owns hold NaN, table entries past a row's blocks nonsense.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from octavo.contract import AttentionBackend, AttentionBatch, AttentionSpec, KVCache
from octavo.contract.reference_attention import quantize_kv
from octavo.testing import formulas
from octavo.testing.outcome import require

__all__ = [
    "LENGTHS",
    "MIXED",
    "SPECS",
    "TOLERANCE",
    "WHOLE",
    "Sequences",
    "as_stored",
    "make_batch",
    "make_spec",
    "tolerance",
    "truth",
]

# Largest difference over the largest true value.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
INT8_TOLERANCE = 2e-3  # where int8 is stored, beyond its own rounding: products may be of whole numbers too

LENGTHS = (1, 19, 50, 33)

# (row, number of tokens) of each step. Whole prompts; then chunks that are no multiple of anything, decode beside
# prefill, rows that sit a step out.
WHOLE = [[(0, 1), (1, 19), (2, 50), (3, 33)]]
MIXED = [
    [(3, 5), (1, 19)],
    [(2, 17), (0, 1), (3, 1)],
    [(3, 1), (2, 1)],
    [(2, 31), (3, 26)],
    [(2, 1)],
]

HOST = torch.device(torch.empty(0).device)


def make_spec(
    heads: tuple[int, int] = (4, 2), head_size: int = 16, block_size: int = 8, dtype: torch.dtype = torch.float32
) -> AttentionSpec:
    """A plain spec of one layer."""
    return AttentionSpec(1, *heads, head_size, head_size, block_size, dtype, dtype, head_size**-0.5)


SPECS: dict[str, AttentionSpec] = {
    "plain": make_spec(),
    "one-head": make_spec((1, 1), 8, 1),
    "ratio-1": make_spec((3, 3), 64, 16),
    "ratio-3": make_spec((9, 3), 64, 16),
    "ratio-4": make_spec((8, 2), 128, 16),
    "ratio-5": make_spec((5, 1), 32, 16),
    "ratio-6": make_spec((6, 1), 64, 8),
    "ratio-7": make_spec((7, 1), 80, 16),
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

    Attributes:
        rows: what each sequence is made of, in host memory, and how much of it was fed.
        num_blocks: that a cache needs for all of them; three stay free.

    """

    def __init__(self, spec: AttentionSpec, lengths: Sequence[int], seed: int = 0, device: torch.device = HOST) -> None:
        self.spec = spec
        self.device = device
        draw = torch.Generator().manual_seed(seed)
        shuffled = np.random.default_rng(seed)
        counts = [-(-length // spec.block_size) for length in lengths]
        self.num_blocks = sum(counts) + 3
        ids = shuffled.permutation(self.num_blocks).astype(np.int32)
        starts = np.cumsum([0, *counts])
        self.free_blocks = ids[starts[-1] :]

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
        """A cache full of NaN: its tensors, or all slots of one that is no tensors."""
        cache = backend.allocate(self.spec, self.num_blocks)
        for tensor in cache.tensors:  # bytes of ones are NaN where they are read as floats
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        if not cache.tensors:
            spec, num_slots = self.spec, self.num_blocks * self.spec.block_size
            blocks = np.arange(self.num_blocks, dtype=np.int32)[None]
            batch = make_batch([0, num_slots], [num_slots], blocks, np.arange(num_slots), self.device)
            plan = backend.plan(cache, batch)
            shape = (num_slots, spec.num_kv_heads)
            nothing = torch.full((*shape, spec.head_size), float("nan"), dtype=spec.dtype, device=self.device)
            value = torch.full((*shape, spec.value_size), float("nan"), dtype=spec.dtype, device=self.device)
            for layer in range(spec.num_layers):
                backend.write(plan, layer, nothing, value)
        return cache

    def step(
        self, backend: AttentionBackend, cache: KVCache, chunks: Sequence[tuple[int, int]], *, fused: bool = False
    ) -> list[torch.Tensor]:
        """Feed each (row, number of tokens) its next tokens; their outputs on the host, a chunk each [n, Hq, Dv]."""
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
        start = np.cumsum([0, *(count for _, count in chunks)])
        seq_lens = [self.rows[i].done for i, _ in chunks]
        mapping = np.concatenate([*slots, np.zeros(0, np.int64)])
        batch = make_batch(start, seq_lens, table, mapping, self.device)
        fed = [(self.rows[i], piece) for (i, _), piece in zip(chunks, pieces, strict=True)]
        query, key, value = (
            _strided(
                torch.cat([getattr(self.rows[0], name)[:0], *(getattr(row, name)[piece] for row, piece in fed)]),
                self.device,
            )
            for name in ("query", "key", "value")
        )
        # A guard row on either side shows writes outside of the output.
        guarded = torch.full((len(mapping) + 2, spec.num_heads, spec.value_size), 7.0, dtype=spec.dtype)
        guarded[1:-1] = float("nan")
        guarded = guarded.to(self.device)
        out = guarded[1:-1]
        sinks = None if self.sinks is None else self.sinks.to(self.device)
        plan = backend.plan(cache, batch)
        if fused:
            backend.write_attend(plan, 0, query, key, value, out, sinks)
        else:
            backend.write(plan, 0, key, value)
            backend.attend(plan, 0, query, out, sinks)
        found = guarded.cpu()
        require(bool((found[0] == 7).all() and (found[-1] == 7).all()), "attend writes outside of its output")
        return list(torch.split(found[1:-1], [count for _, count in chunks]))


def truth(sequences: Sequences, row: int) -> torch.Tensor:
    """All positions of a row in float64, with keys and values as the cache rounds them."""
    one, spec = sequences.rows[row], sequences.spec
    key, value = (as_stored(x, spec.kv_dtype) for x in (one.key, one.value))
    return torch.from_numpy(
        formulas.attention(
            one.query, key, value, scale=spec.scale, window=spec.window, softcap=spec.softcap, sinks=sequences.sinks
        )
    )


def tolerance(spec: AttentionSpec) -> float:
    """The largest difference allowed, over the largest true value."""
    return max(TOLERANCE[spec.dtype], INT8_TOLERANCE if spec.kv_dtype == torch.int8 else 0.0)


def as_stored(x: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """Keys or values as a cache rounds them."""
    if kv_dtype != torch.int8:
        return x.to(kv_dtype)
    codes, scales = quantize_kv(x)
    return codes.double() * scales.double()


def make_batch(
    start: Sequence[int] | np.ndarray,
    seq_lens: Sequence[int] | np.ndarray,
    table: np.ndarray,
    slots: np.ndarray,
    device: torch.device = HOST,
) -> AttentionBatch:
    """The geometry of a step, on the device and mirrored on the host."""
    starts, lengths, blocks = (np.ascontiguousarray(x, np.int32) for x in (start, seq_lens, table))
    mapping = np.ascontiguousarray(slots, np.int64)

    def there(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).clone().to(device)

    on_device = (there(starts), there(lengths), there(blocks), there(mapping))
    return AttentionBatch(*on_device, starts, lengths, blocks, mapping)


def _strided(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same numbers, cut out of wider rows, as a fused projection leaves them."""
    if not len(x):
        return x.to(device)
    flat = x.flatten(1)
    wide = torch.full((len(x), flat.shape[1] + 5), float("nan"), dtype=x.dtype)
    wide[:, 2 : 2 + flat.shape[1]] = flat
    return wide.to(device)[:, 2 : 2 + flat.shape[1]].view(x.shape)
