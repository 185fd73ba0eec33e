"""The kernels against attention in float64; what must not be read is NaN."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.contract import AttentionBatch, AttentionSpec, KVCache
from octavo_opencl.attention import OpenCLAttention
from octavo_opencl.platform import OpenCLPlatform

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SPEC = AttentionSpec(2, 6, 2, 16, 16, 8, F32, F32, 0.25)
NUM_BLOCKS = 40


@pytest.fixture(scope="session")
def backend() -> OpenCLAttention:
    (backend,) = OpenCLPlatform(0).attention_backends()
    assert isinstance(backend, OpenCLAttention)
    return backend


@dataclass(frozen=True)
class Case:
    """Sequences in the cache, with their keys and values [n, HKV, D], and queries [n, HQ, D] of every position."""

    spec: AttentionSpec
    tables: list[np.ndarray]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]
    sinks: torch.Tensor | None

    @classmethod
    def make(cls, spec: AttentionSpec, lengths: Sequence[int]) -> "Case":
        generator = torch.Generator().manual_seed(0)

        def random(n: int, heads: int) -> torch.Tensor:
            return torch.randn(n, heads, spec.head_size, generator=generator).to(spec.dtype)

        blocks = iter(np.random.default_rng(0).permutation(NUM_BLOCKS))
        tables = [np.asarray([next(blocks) for _ in range(-(-n // spec.block_size))], np.int32) for n in lengths]
        keys, values = ([random(n, spec.num_kv_heads) for n in lengths] for _ in range(2))
        queries = [random(n, spec.num_heads) for n in lengths]
        sinks = torch.randn(spec.num_heads, generator=generator) if spec.sinks else None
        return cls(spec, tables, keys, values, queries, sinks)

    def batch(self, spans: dict[int, range]) -> AttentionBatch:
        """A step that computes some positions of some sequences; table tails are garbage."""
        width = max(len(table) for table in self.tables) + 2
        table = np.full((len(spans), width), 2**30, np.int32)
        slots: list[int] = []
        for row, (i, span) in enumerate(spans.items()):
            table[row, : len(self.tables[i])] = self.tables[i]
            size = self.spec.block_size
            slots += [int(self.tables[i][p // size]) * size + p % size for p in span]
        starts = np.cumsum([0, *(len(span) for span in spans.values())]).astype(np.int32)
        ends = np.asarray([span.stop for span in spans.values()], np.int32)
        host = starts, ends, table, np.asarray(slots, np.int64)
        return AttentionBatch(*map(torch.from_numpy, host), *host)

    def pick(self, tensors: list[torch.Tensor], spans: dict[int, range]) -> torch.Tensor:
        return torch.cat([tensors[i][span.start : span.stop] for i, span in spans.items()])

    def run(self, backend: OpenCLAttention, cache: KVCache, spans: dict[int, range], layer: int = 1) -> torch.Tensor:
        """Write and attend as a step does."""
        plan = backend.plan(cache, self.batch(spans))
        query = self.pick(self.queries, spans)
        out = torch.full_like(query, torch.nan)
        backend.write(plan, layer, self.pick(self.keys, spans), self.pick(self.values, spans))
        backend.attend(plan, layer, query, out, self.sinks)
        return out

    def expected(self, i: int) -> torch.Tensor:
        """[n, HQ, D] float64 for every position of a sequence."""
        spec, group = self.spec, self.spec.num_heads // self.spec.num_kv_heads
        key, value = (x[i].to(spec.kv_dtype).double().repeat_interleave(group, 1) for x in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", self.queries[i].double(), key) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        distance = torch.arange(len(key))[:, None] - torch.arange(len(key))
        seen = (distance >= 0) & (distance < (spec.window or 10**9))
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, len(key), 1)), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)


def poisoned(backend: OpenCLAttention, spec: AttentionSpec) -> KVCache:
    """A cache in which every slot holds NaN."""
    cache = backend.allocate(spec, NUM_BLOCKS)
    case = Case.make(spec, [NUM_BLOCKS * spec.block_size])
    nan = replace(case, keys=[case.keys[0] * torch.nan], values=[case.values[0] * torch.nan])
    for layer in range(spec.num_layers):
        nan.run(backend, cache, {0: range(len(case.keys[0]))}, layer)
    return cache


def whole(case: Case) -> dict[int, range]:
    return {i: range(len(key)) for i, key in enumerate(case.keys)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *({"num_heads": 3 * n, "num_kv_heads": 3} for n in (1, 2, 3, 5, 8)),
        {"num_heads": 8, "num_kv_heads": 1},
        {"head_size": 40, "value_size": 40},
        {"head_size": 128, "value_size": 128, "block_size": 16},
        {"block_size": 64},
        *({"window": n} for n in (1, 7, 8, 9, 1000)),
        {"softcap": 2.0},
        {"sinks": True},
        {"sinks": True, "window": 5, "softcap": 3.0, "kv_dtype": BF16},
        {"kv_dtype": BF16},
        {"kv_dtype": F16, "block_size": 32},
        {"dtype": BF16, "kv_dtype": BF16},
        {"scale": 3.0},
    ],
    ids=str,
)
def test_prefill_and_decode_equal_the_truth(backend: OpenCLAttention, changes: dict[str, Any]) -> None:
    spec = replace(SPEC, **changes)
    assert backend.supports(spec)
    case, cache = Case.make(spec, [61, 1, 19, 8]), poisoned(backend, spec)
    tolerance = 2e-2 if spec.dtype == BF16 else 3e-6
    parts = [
        {0: range(40), 2: range(18)},
        {0: range(40, 41), 1: range(1), 2: range(18, 19), 3: range(5)},
        {3: range(5, 8), 0: range(41, 61)},
    ]
    for spans in parts:
        expected = torch.cat([case.expected(i)[span.start : span.stop] for i, span in spans.items()])
        found = case.run(backend, cache, spans).double()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_row_has_the_same_bits_in_any_company_and_any_chunks(backend: OpenCLAttention) -> None:
    case = Case.make(SPEC, [45, 30, 7, 3])
    together = case.run(backend, poisoned(backend, SPEC), whole(case))
    first = 0
    for i, span in whole(case).items():
        alone = case.run(backend, poisoned(backend, SPEC), {i: span})
        assert torch.equal(alone, together[first : first + len(span)])
        cache = poisoned(backend, SPEC)
        by_one = torch.cat([case.run(backend, cache, {i: range(p, p + 1)}) for p in span])
        assert torch.equal(by_one, alone)
        first += len(span)
    assert backend.row_invariant


def test_what_left_the_window_may_hold_anything(backend: OpenCLAttention) -> None:
    spec = replace(SPEC, window=5)
    case, cache = Case.make(spec, [30]), poisoned(backend, spec)
    case.run(backend, cache, {0: range(20, 26)})  # the blocks before hold NaN, and half of the first one seen
    found = case.run(backend, cache, {0: range(26, 27)})
    torch.testing.assert_close(found.double(), case.expected(0)[26:27], rtol=3e-6, atol=3e-6)


def test_a_slot_of_minus_one_is_written_nowhere(backend: OpenCLAttention) -> None:
    case, cache = Case.make(SPEC, [20]), poisoned(backend, SPEC)
    expected = case.run(backend, cache, whole(case))
    batch = case.batch(whole(case))
    nowhere = replace(batch, slot_mapping_host=np.full_like(batch.slot_mapping_host, -1))
    plan = backend.plan(cache, nowhere)
    backend.write(plan, 1, case.keys[0] + 1, case.values[0] + 1)
    out = torch.empty_like(expected)
    backend.attend(plan, 1, case.queries[0], out)
    assert torch.equal(out, expected)


def test_layers_lie_apart(backend: OpenCLAttention) -> None:
    case, other = Case.make(SPEC, [20]), Case.make(SPEC, [20])
    other = replace(other, keys=[other.keys[0] + 1], values=[other.values[0] - 1])
    cache = poisoned(backend, SPEC)
    first, second = (one.run(backend, cache, whole(one), layer) for layer, one in enumerate((case, other)))
    assert torch.equal(case.run(backend, cache, {0: range(19, 20)}, 0), first[19:])
    assert torch.equal(other.run(backend, cache, {0: range(19, 20)}, 1), second[19:])


def test_views_serve_as_they_are(backend: OpenCLAttention) -> None:
    case, cache = Case.make(SPEC, [20]), poisoned(backend, SPEC)
    expected = case.run(backend, cache, whole(case))
    qkv = torch.cat((case.queries[0], case.keys[0], case.values[0]), 1)
    query, key, value = torch.split(qkv, [6, 2, 2], 1)
    out = torch.full((20, 12, 16), 7.0)
    plan = backend.plan(cache, case.batch(whole(case)))
    backend.write(plan, 1, key, value)
    backend.attend(plan, 1, query, out[:, 3:9])
    assert torch.equal(out[:, 3:9], expected)
    assert (out[:, :3] == 7).all()
    assert (out[:, 9:] == 7).all()


@pytest.mark.parametrize("kv_dtype", [F32, BF16], ids=str)
def test_blocks_are_copied_and_swapped_whole(backend: OpenCLAttention, kv_dtype: torch.dtype) -> None:
    spec = replace(SPEC, kv_dtype=kv_dtype)
    case, cache = Case.make(spec, [24, 16]), poisoned(backend, spec)
    for layer in range(2):
        case.run(backend, cache, whole(case), layer)
    last = {0: range(23, 24), 1: range(15, 16)}
    expected = [case.run(backend, cache, last, layer) for layer in range(2)]
    used = np.concatenate(case.tables).tolist()
    free = [block for block in range(NUM_BLOCKS) if block not in used]

    copied = replace(case, tables=[np.asarray(free[:3], np.int32), np.asarray(free[3:5], np.int32)])
    backend.copy_blocks(cache, list(zip(used, free, strict=False)))
    assert all(torch.equal(copied.run(backend, cache, last, layer), expected[layer]) for layer in range(2))

    host = backend.allocate_host(spec, 7)
    backend.swap_blocks(cache, host, list(zip(used, (6, 0, 3, 1, 2), strict=True)))
    fresh = poisoned(backend, spec)
    backend.swap_blocks(host, fresh, list(zip((6, 0, 3, 1, 2), free, strict=False)))
    assert all(torch.equal(copied.run(backend, fresh, last, layer), expected[layer]) for layer in range(2))
    backend.swap_blocks(fresh, host, [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 20, "value_size": 20}, "head size 20, built for multiples of 8"),
        ({"block_size": 12}, "block size 12, built for multiples of 8"),
        ({"dtype": torch.float64}, "dtype torch.float64, built for"),
        ({"kv_dtype": torch.float8_e4m3fn}, "KV dtype torch.float8_e4m3fn, built for"),
        ({"value_size": 8}, "values that are not as long as keys"),
        ({"num_kv_heads": 1, "latent": True}, "values that are not as long as keys"),
    ],
    ids=str,
)
def test_what_it_does_not_serve_it_says(backend: OpenCLAttention, changes: dict[str, Any], reason: str) -> None:
    answer = backend.supports(replace(SPEC, **changes))
    assert not answer
    assert len(answer.reasons) == 1
    assert answer.reasons[0].startswith(reason)


def test_a_block_has_the_bytes_that_are_said(backend: OpenCLAttention) -> None:
    cache = backend.allocate(SPEC, 10)
    assert sum(buffer.size for buffer in cache.buffers) == 10 * backend.block_bytes(SPEC)
    assert backend.block_bytes(replace(SPEC, kv_dtype=BF16)) == backend.block_bytes(SPEC) // 2


def test_more_than_the_device_has_is_a_memory_error(backend: OpenCLAttention) -> None:
    with pytest.raises(MemoryError, match="2 buffers of"):
        backend.allocate(SPEC, 1 << 40)
