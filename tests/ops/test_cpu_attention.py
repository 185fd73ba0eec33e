"""Native paged attention through the contract: right, blind to what is not its own, the same bits in any company."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from ops.cpu_cases import ATTENTION_CASES, AttentionCase, assert_close, block_tables, step

from octavo.contract import AttentionSpec
from octavo.contract.reference_attention import ReferenceAttention
from octavo.testing.cases_attention import as_stored
from octavo_cpu.attention import NativeAttention
from octavo_cpu.native import NativeLibrary

LAYER = 1
SPEC = AttentionSpec(2, 6, 2, 64, 64, 16, torch.float32, torch.float32, 0.125)


class Sequences:
    """The rows of a case, their keys and values written, every other slot NaN."""

    def __init__(self, case: AttentionCase, library: NativeLibrary) -> None:
        self.case, self.spec = case, case.spec
        self.backend = NativeAttention(library)
        assert self.backend.supports(self.spec)
        generator = torch.Generator().manual_seed(7)
        self.table, num_blocks = block_tables(case, generator)
        self.cache = self.backend.allocate(self.spec, num_blocks)
        for tensor in self.cache.tensors:
            assert not tensor.any()
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)  # scales are NaN then
        self.written = step(case, self.table, [(row, 0, length) for row, (_, length) in enumerate(case.rows)])
        # As a model has them: views of one product. A latent key is its own value.
        spec = self.spec
        sizes = (spec.num_kv_heads * spec.head_size, spec.num_kv_heads * spec.value_size, 5)
        product = torch.randn(self.written.num_tokens, sum(sizes), generator=generator).to(spec.dtype)
        key, value, _ = product.split(sizes, -1)
        self.key = key.unflatten(-1, (spec.num_kv_heads, spec.head_size))
        self.value = value.unflatten(-1, (spec.num_kv_heads, spec.value_size))
        self.backend.write(self.backend.plan(self.cache, self.written), LAYER, self.key, self.value)
        self.queries = [
            (2 * torch.randn(num, spec.num_heads * spec.head_size + 5, generator=generator)).to(spec.dtype)
            for num, _ in case.rows
        ]
        self.sinks = torch.randn(spec.num_heads, generator=generator) if spec.sinks else None

    def query(self, row: int) -> torch.Tensor:
        """A strided view [T, num_heads, head_size]."""
        return self.queries[row][:, :-5].unflatten(-1, (self.spec.num_heads, self.spec.head_size))

    def attend(self, parts: list[tuple[int, int, int]]) -> torch.Tensor:
        """Of parts (row, first query token, query token after the last)."""
        starts = [length - num for num, length in self.case.rows]
        batch = step(self.case, self.table, [(r, starts[r] + first, starts[r] + last) for r, first, last in parts])
        query = torch.cat([self.queries[r][first:last] for r, first, last in parts])[:, :-5]
        width = self.spec.num_heads * self.spec.value_size
        guarded = torch.full((batch.num_tokens + 2, width + 3), 77.0, dtype=self.spec.dtype)
        self.backend.attend(
            self.backend.plan(self.cache, batch),
            LAYER,
            query.unflatten(-1, (self.spec.num_heads, self.spec.head_size)),
            guarded[1:-1, :-3].unflatten(-1, (self.spec.num_heads, self.spec.value_size)),
            self.sinks,
        )
        out = guarded[1:-1, :-3].clone()
        guarded[1:-1, :-3] = 77.0
        assert (guarded == 77.0).all(), "wrote outside of the output"
        return out

    def rounding(self, isa: str) -> torch.Tensor | float:
        """Errors beyond float32's where products are packed: weights are bfloat16, or queries have fifteen bits."""
        spec = self.spec
        if isa not in ("avx512bf16", "amx") or spec.latent:
            return 0.0
        if spec.kv_dtype == torch.int8:
            return 1e-3 * self.expected(torch.abs)
        return 2**-8 * self.expected(torch.abs) if spec.dtype == spec.kv_dtype == torch.bfloat16 else 0.0

    def expected(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda value: value) -> torch.Tensor:
        """The reference in float64, from what the cache holds, of values that are changed first."""
        spec = replace(self.spec, dtype=torch.float64, kv_dtype=torch.float64)
        reference = ReferenceAttention(torch.device("cpu"))
        cache = reference.allocate(spec, self.cache.num_blocks)
        key, value = (as_stored(x, self.spec.kv_dtype).double() for x in (self.key, self.value))
        if not spec.latent:
            value = change(value)
        reference.write(reference.plan(cache, self.written), LAYER, key, value)
        parts = [(row, length - num, length) for row, (num, length) in enumerate(self.case.rows)]
        plan = reference.plan(cache, step(self.case, self.table, parts))
        query = torch.cat([self.query(row) for row in range(len(self.case.rows))]).double()
        out = torch.empty(len(query), spec.num_heads, spec.value_size, dtype=torch.float64)
        reference.attend(plan, LAYER, query, out, self.sinks)
        return out.flatten(1)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_matches_float64_and_keeps_rows_apart(case: AttentionCase, isa_library: NativeLibrary) -> None:
    sequences = Sequences(case, isa_library)
    parts = [(row, 0, num) for row, (num, _) in enumerate(case.rows)]
    together = sequences.attend(parts)
    assert_close(together, sequences.expected(), sequences.rounding(isa_library.isa))

    isa_library.set_num_threads(1)
    assert torch.equal(sequences.attend(parts), together), "one thread differs from two"
    ends = np.cumsum([num for num, _ in case.rows])
    for row, (num, _) in enumerate(case.rows):
        mine = together[ends[row] - num : ends[row]]
        assert torch.equal(sequences.attend([(row, 0, num)]), mine), "alone differs from in a batch"
        cuts = sorted({0, 1, min(18, num), num // 2, num - 1, num})
        chunks = [sequences.attend([(row, first, last)]) for first, last in pairwise(cuts) if first < last]
        assert torch.equal(torch.cat(chunks), mine), "chunks differ from the whole"


def test_the_other_layer_is_untouched(library: NativeLibrary) -> None:
    sequences = Sequences(ATTENTION_CASES[0], library)
    assert sequences.cache.tensors[1 - LAYER].isnan().all()


def test_slot_minus_one_writes_nowhere(library: NativeLibrary) -> None:
    sequences = Sequences(ATTENTION_CASES[0], library)
    before = sequences.cache.tensors[LAYER].clone()
    sequences.written.slot_mapping_host[::2] = -1
    plan = sequences.backend.plan(sequences.cache, sequences.written)
    sequences.backend.write(plan, LAYER, sequences.key, sequences.value)
    assert torch.equal(sequences.cache.tensors[LAYER].nan_to_num(), before.nan_to_num())
    sequences.written.slot_mapping_host[:] = -1
    plan = sequences.backend.plan(sequences.cache, sequences.written)
    sequences.backend.write(plan, LAYER, sequences.key + 1, sequences.value)
    assert torch.equal(sequences.cache.tensors[LAYER].nan_to_num(), before.nan_to_num())


def test_an_empty_batch_is_no_work(library: NativeLibrary) -> None:
    sequences = Sequences(ATTENTION_CASES[0], library)
    spec = sequences.spec
    arrays = (np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros((0, 4), np.int32), np.zeros(0, np.int64))
    batch = type(sequences.written)(*map(torch.from_numpy, arrays), *arrays)
    plan = sequences.backend.plan(sequences.cache, batch)
    nothing = torch.empty(0, spec.num_heads, spec.head_size, dtype=spec.dtype)
    sequences.backend.attend(plan, LAYER, nothing, nothing)
    sequences.backend.write(plan, LAYER, nothing[:, : spec.num_kv_heads], nothing[:, : spec.num_kv_heads])


def test_blocks_are_copied_and_swapped_whole(isa_library: NativeLibrary) -> None:
    backend = NativeAttention(isa_library)
    device, host = backend.allocate(SPEC, 9), backend.allocate_host(SPEC, 4)
    for tensor in device.tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in device.tensors]
    backend.copy_blocks(device, [(0, 7), (3, 8)])
    backend.swap_blocks(device, host, [(7, 1), (2, 3)])
    backend.swap_blocks(host, device, [(3, 5)])
    backend.copy_blocks(device, [])
    for old, new, swapped in zip(before, device.tensors, host.tensors, strict=True):
        assert torch.equal(new, old[[0, 1, 2, 3, 4, 2, 6, 0, 3]])
        assert torch.equal(swapped[[1, 3]], old[[0, 2]])
        assert not swapped[[0, 2]].any()
    with pytest.raises(ValueError, match=r"copy of 1 blocks: .* out of range"):
        backend.copy_blocks(device, [(0, 9)])


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_numbers_that_are_none_stay_where_they_are(kv_dtype: torch.dtype, isa_library: NativeLibrary) -> None:
    """A NaN among keys or values is in the outputs of the tokens that see it, and no other's."""
    base = next(case for case in ATTENTION_CASES if case.spec.kv_dtype == kv_dtype and case.spec.window is None)
    case = replace(base, rows=((40, 40), (7, 131)))
    clean, sequences = Sequences(case, isa_library), Sequences(case, isa_library)
    sequences.key[25, 0, 0] = torch.nan
    sequences.value[40 + 130, 0, 0] = torch.nan
    sequences.backend.write(
        sequences.backend.plan(sequences.cache, sequences.written), LAYER, sequences.key, sequences.value
    )
    parts = [(0, 0, 25), (1, 0, 6)]
    assert torch.equal(sequences.attend(parts), clean.attend(parts))
    group = slice(0, case.spec.num_heads // case.spec.num_kv_heads)
    for part in ((0, 25, 26), (1, 6, 7)):
        heads = sequences.attend([part]).unflatten(-1, (case.spec.num_heads, case.spec.value_size))
        assert heads[:, group].isnan().any(-1).all()


def test_memory_is_what_block_bytes_says(library: NativeLibrary) -> None:
    backend = NativeAttention(library)
    for case in ATTENTION_CASES:
        cache = backend.allocate(case.spec, 5)
        assert sum(tensor.nbytes for tensor in cache.tensors) == 5 * backend.block_bytes(case.spec)
    spec = replace(SPEC, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    assert backend.block_bytes(spec) == 2 * 2 * (64 + 64) * 16 * 2  # layers, heads, dims, tokens, bytes
    spec = replace(spec, kv_dtype=torch.int8)
    assert backend.block_bytes(spec) == 2 * 2 * (64 + 64 + 8) * 16  # two scales of four bytes
    assert backend.allocate(SPEC, 0).tensors[0].shape[0] == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "dtype torch.float64, built for"),
        ({"kv_dtype": torch.int16}, "KV dtype torch.int16, built for"),
        (
            {"num_heads": 2, "num_kv_heads": 1, "latent": True, "kv_dtype": torch.int8},
            "a latent cache is not stored in",
        ),
        ({"block_size": 12}, "block size 12, built for 8, 16"),
        ({"block_size": 4}, "block size 4, built for 8, 16"),
        ({"head_size": 2048}, "head size 2048, built for up to 1024"),
        ({"num_heads": 5}, "5 heads are no multiple of 2"),
        ({"latent": True}, "a latent cache has one KV head"),
    ],
)
def test_what_it_cannot_serve_it_says(change: dict[str, object], reason: str, library: NativeLibrary) -> None:
    support = NativeAttention(library).supports(replace(SPEC, **change))
    assert not support
    assert any(reason in text for text in support.reasons)


def test_a_plan_refuses_what_lies_outside(library: NativeLibrary) -> None:
    sequences = Sequences(ATTENTION_CASES[1], library)
    backend, cache = sequences.backend, sequences.cache

    def plan_with(**changes: np.ndarray) -> None:
        backend.plan(cache, replace(sequences.written, **changes))

    table = sequences.table.copy()
    table[0, 0] = cache.num_blocks
    lengths = sequences.written.seq_lens_host
    for changes in (
        {"block_table_host": table},
        {"slot_mapping_host": sequences.written.slot_mapping_host + cache.num_blocks * sequences.spec.block_size},
        {"seq_lens_host": lengths - 1},
        {"seq_lens_host": lengths + 10_000},
    ):
        with pytest.raises(ValueError, match=r"attention batch of 4 rows over .* blocks: .* out of range"):
            plan_with(**changes)


def test_tensors_that_do_not_fit_the_plan_are_refused(library: NativeLibrary) -> None:
    sequences = Sequences(ATTENTION_CASES[0], library)
    backend, spec = sequences.backend, sequences.spec
    plan = backend.plan(sequences.cache, sequences.written)
    out = torch.empty(sequences.written.num_tokens, spec.num_heads, spec.value_size)
    with pytest.raises(ValueError, match=r"query \[1, 3, 64\] torch.float32.* the plan has 537 tokens"):
        backend.attend(plan, LAYER, out[:1], out)
    with pytest.raises(ValueError, match=r"key .* torch.bfloat16"):
        backend.write(plan, LAYER, sequences.key.bfloat16(), sequences.value)
