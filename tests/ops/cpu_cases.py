"""The cases of the CPU kernels, from the list that their self-check reads too, and steps built from them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from octavo.contract import AttentionBatch, AttentionSpec

ROOT = Path(__file__).parents[2]
CASES_FILE = ROOT / "csrc_cpu" / "selfcheck" / "cases.txt"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Errors of one rounding to the dtype, relative, and of float32 sums, absolute.
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
ABSOLUTE = 1e-5


def _lines(kind: str) -> list[list[str]]:
    lines = (line.split() for line in CASES_FILE.read_text().splitlines())
    return [words[1:] for words in lines if words and words[0] == kind]


SIZES = [int(word) for words in _lines("sizes") for word in words]


@dataclass(frozen=True)
class AttentionCase:
    """A spec, and rows as (query tokens, tokens in the cache after the step)."""

    spec: AttentionSpec
    rows: tuple[tuple[int, int], ...]
    name: str


def _attention_case(words: list[str]) -> AttentionCase:
    dtype, kv_dtype, *numbers, rows = words
    block_size, num_heads, num_kv_heads, head_size, value_size, window, softcap, sinks, latent = map(int, numbers)
    spec = AttentionSpec(
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_size=value_size,
        block_size=block_size,
        dtype=getattr(torch, dtype),
        kv_dtype=getattr(torch, kv_dtype),
        scale=head_size**-0.5,
        window=window or None,
        softcap=float(softcap) or None,
        sinks=bool(sinks),
        latent=bool(latent),
    )
    pairs = tuple(tuple(map(int, row.split("/"))) for row in rows.split(","))
    return AttentionCase(spec, pairs, "-".join(words))  # type: ignore[arg-type]


ATTENTION_CASES = [_attention_case(words) for words in _lines("attention")]


def block_tables(case: AttentionCase, generator: torch.Generator) -> tuple[np.ndarray, int]:
    """Tables [R, M] over scattered blocks with garbage past each row's own, and the number of blocks."""
    block_size = case.spec.block_size
    counts = [-(-length // block_size) for _, length in case.rows]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    table = np.full((len(case.rows), max(counts) + 2), 2**31 - 1, np.int32)
    for row, count in enumerate(counts):
        table[row, :count] = [order.pop() for _ in range(count)]
    return table, num_blocks


def step(case: AttentionCase, table: np.ndarray, parts: list[tuple[int, int, int]]) -> AttentionBatch:
    """A step of parts (row, position of its first token, position after its last)."""
    block_size = case.spec.block_size
    query_start_loc = np.cumsum([0] + [end - begin for _, begin, end in parts]).astype(np.int32)
    seq_lens = np.array([end for _, _, end in parts], np.int32)
    rows = table[[row for row, _, _ in parts]]
    slots = [
        rows[i, position // block_size].astype(np.int64) * block_size + position % block_size
        for i, (_, begin, end) in enumerate(parts)
        for position in range(begin, end)
    ]
    arrays = (query_start_loc, seq_lens, rows, np.array(slots, np.int64))
    return AttentionBatch(*map(torch.from_numpy, arrays), *arrays)


def assert_close(got: torch.Tensor, want: torch.Tensor, more: torch.Tensor | float = 0.0) -> None:
    """Within one rounding of the dtype, the errors of float32, and `more`."""
    allowed = RELATIVE[got.dtype] * want.double().abs() + ABSOLUTE + more
    excess = (got.double() - want.double()).abs() - allowed
    assert (excess <= 0).all(), (
        f"{int((excess > 0).sum())} of {got.numel()} elements differ by up to {excess.max()} too much"
    )
