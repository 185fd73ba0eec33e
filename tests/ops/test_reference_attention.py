"""The reference of paged attention against dense float64 attention, and its claim about rows, bit by bit."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from octavo.contract import AttentionBatch, AttentionSpec, KVCache
from octavo.contract.reference_attention import ReferenceAttention
from octavo.testing.attention import check_rows_alone, check_truth, run
from octavo.testing.cases_attention import LENGTHS, MIXED, SPECS, TOLERANCE, WHOLE, Sequences, make_spec, truth

BACKEND = ReferenceAttention(torch.device("cpu"))
INT8 = replace(SPECS["ratio-3"], kv_dtype=torch.int8)


@pytest.mark.parametrize("name", SPECS)
def test_equals_dense_attention(name: str) -> None:
    check_truth(*run(BACKEND, SPECS[name], LENGTHS, WHOLE))


@pytest.mark.parametrize("spec", [*SPECS.values(), INT8], ids=[*SPECS, "int8"])
def test_a_tokens_bits_depend_on_its_own_sequence_alone(spec: AttentionSpec) -> None:
    check_rows_alone(BACKEND, spec)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    spec = replace(make_spec((6, 2), 32, dtype=dtype), kv_dtype=kv_dtype)
    assert BACKEND.supports(spec)
    check_truth(*run(BACKEND, spec, LENGTHS, MIXED))


@settings(max_examples=25)
@given(
    block_size=st.integers(1, 20),
    ratio=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    head_size=st.integers(1, 33),
    window=st.one_of(st.none(), st.integers(1, 40)),
    lengths=st.lists(st.integers(1, 45), min_size=1, max_size=4),
    data=st.data(),
)
def test_any_geometry_in_any_chunks(
    block_size: int,
    ratio: int,
    kv_heads: int,
    head_size: int,
    window: int | None,
    lengths: list[int],
    data: st.DataObject,
) -> None:
    spec = replace(make_spec((ratio * kv_heads, kv_heads), head_size, block_size), window=window)
    left, steps = list(lengths), []
    while any(left):
        rows = data.draw(st.lists(st.sampled_from([i for i, n in enumerate(left) if n]), min_size=1, unique=True))
        step = [(row, data.draw(st.integers(1, left[row]))) for row in rows]
        for row, count in step:
            left[row] -= count
        steps.append(step)
    check_truth(*run(BACKEND, spec, lengths, steps))


def test_blocks_that_left_the_window_are_not_read() -> None:
    """Whoever frees them may hand them on: their table entries name any block, whose contents mean nothing."""
    spec = replace(make_spec(block_size=8), window=6)
    sequences = Sequences(spec, [30])
    cache = sequences.poisoned(BACKEND)
    sequences.step(BACKEND, cache, [(0, 29)])
    gone = sequences.rows[0].blocks[:3].copy()  # positions 0 to 23; the last query sees 24 to 29
    for tensor in cache.tensors:
        tensor[gone] = float("nan")
    sequences.rows[0].blocks[:3] = gone[0]
    (out,) = sequences.step(BACKEND, cache, [(0, 1)])
    assert torch.allclose(out.double(), truth(sequences, 0)[-1:], atol=1e-6)


def test_slot_minus_one_writes_nowhere() -> None:
    spec = make_spec(block_size=4)
    cache = BACKEND.allocate(spec, 2)
    slots = np.array([5, -1, 2], np.int64)
    start, seq_lens, table = np.array([0, 3], np.int32), np.array([3], np.int32), np.array([[0, 1]], np.int32)
    batch = AttentionBatch(*map(torch.from_numpy, (start, seq_lens, table, slots)), start, seq_lens, table, slots)
    key, value = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    BACKEND.write(BACKEND.plan(cache, batch), 0, key, value)
    for tensor, new in zip(cache.tensors, (key, value), strict=True):
        flat = tensor.flatten(0, 1)
        assert torch.equal(flat[[5, 2]], new[[0, 2]])
        assert not flat[[0, 1, 3, 4, 6, 7]].any()


def test_an_empty_step() -> None:
    sequences = Sequences(make_spec(), [3])
    cache = sequences.poisoned(BACKEND)
    assert sequences.step(BACKEND, cache, []) == []
    (none,) = sequences.step(BACKEND, cache, [(0, 0)])
    assert none.shape == (0, 4, 16)


def test_layers_do_not_touch_each_other() -> None:
    spec = replace(make_spec(), num_layers=3)
    sequences = Sequences(spec, [9])
    cache = BACKEND.allocate(spec, sequences.num_blocks)
    sequences.step(BACKEND, cache, [(0, 9)])  # layer 0
    assert [bool(tensor.any()) for tensor in cache.tensors] == [True, True, False, False, False, False]


def test_bytes_are_what_the_blocks_take() -> None:
    for spec in (*SPECS.values(), replace(SPECS["ratio-3"], num_layers=5, kv_dtype=torch.bfloat16), INT8):
        cache = BACKEND.allocate(spec, 3)
        assert sum(t.nbytes for t in cache.tensors) == 3 * BACKEND.block_bytes(spec)
        assert not any(tensor.any() for tensor in cache.tensors)


def same_contents(a: KVCache, block: int, b: KVCache, other: int) -> bool:
    return all(torch.equal(x[block], y[other]) for x, y in zip(a.tensors, b.tensors, strict=True))


@pytest.mark.parametrize("spec", [SPECS["plain"], SPECS["latent"], INT8], ids=["plain", "latent", "int8"])
def test_blocks_move_whole(spec: AttentionSpec) -> None:
    spec = replace(spec, num_layers=2)
    cache, host = BACKEND.allocate(spec, 6), BACKEND.allocate_host(spec, 4)
    for tensor in cache.tensors:
        tensor.copy_(20 * torch.randn(tensor.shape))
    before = KVCache(spec, 6, tuple(tensor.clone() for tensor in cache.tensors))
    BACKEND.copy_blocks(cache, [(0, 3), (1, 4)])
    for source, target in ((0, 3), (1, 4), (0, 0), (1, 1), (2, 2), (5, 5)):
        assert same_contents(before, source, cache, target)
    BACKEND.swap_blocks(cache, host, [(2, 0), (5, 3)])
    BACKEND.swap_blocks(host, cache, [(3, 1)])
    assert same_contents(before, 2, host, 0)
    assert same_contents(before, 5, cache, 1)
    BACKEND.copy_blocks(cache, [])


def test_what_is_not_supported_says_why() -> None:
    spec = make_spec()
    int16 = BACKEND.supports(replace(spec, kv_dtype=torch.int16))
    assert int16.reasons == ("KV dtype int16, computed are float64, float32, bfloat16, float16 and int8",)
    latent = BACKEND.supports(replace(SPECS["latent"], kv_dtype=torch.int8))
    assert latent.reasons == ("a latent cache is not stored in int8 (setting: kv_cache_dtype)",)
    assert BACKEND.supports(replace(spec, num_heads=5)).reasons == ("5 heads cannot share 2 KV heads evenly",)
    assert not BACKEND.supports(replace(spec, latent=True))
