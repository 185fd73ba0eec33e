"""Paged attention on the native library, and the memory its blocks lie in."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.contract import AttentionBackend, AttentionBatch, AttentionSpec, KVCache, Support
from octavo_cpu.memory import zeros
from octavo_cpu.native import DTYPES, NativeLibrary
from octavo_cpu.structures import AttentionGeometry

__all__ = ["NativeAttention", "NativeCache", "geometry_of"]

KV_DTYPES = DTYPES | {torch.int8: 3}
CHUNK = 128  # KV positions that the kernel reduces as one (kChunk)
MAX_HEAD_SIZE = 1024
_PAGE = 4096


@dataclass
class NativeCache(KVCache):
    """Blocks of `block_bytes` each; `pointers` holds each layer's address."""

    block_bytes: int = 0
    pointers: tuple[int, ...] = ()


@dataclass(frozen=True)
class NativePlan:
    """One step's geometry as the library reads it. `address` points into `geometry`, which points into `arrays`."""

    cache: NativeCache
    geometry: AttentionGeometry
    address: int
    num_tokens: int
    arrays: tuple[Any, ...]


class NativeAttention(AttentionBackend):
    """Prefill, decode and any mixture in one kernel; splits of the KV lie at multiples of 128 positions."""

    name = "cpu"

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._write_kv = library.write_kv
        self._attend = library.attend

    def supports(self, spec: AttentionSpec) -> Support:
        """Whatever the head ratio, window, soft cap and sinks."""
        reasons = []
        if spec.dtype not in DTYPES:
            reasons.append(f"dtype {spec.dtype}, built for float32, bfloat16, float16")
        if spec.kv_dtype not in KV_DTYPES:
            reasons.append(f"KV dtype {spec.kv_dtype}, built for float32, bfloat16, float16, int8")
        if spec.latent and spec.kv_dtype == torch.int8:
            reasons.append("a latent cache is not stored in int8 (setting: kv_cache_dtype)")
        if max(spec.head_size, spec.value_size) > MAX_HEAD_SIZE:
            reasons.append(f"head size {max(spec.head_size, spec.value_size)}, built for up to {MAX_HEAD_SIZE}")
        if spec.block_size < 8 or (CHUNK % spec.block_size and spec.block_size % CHUNK):
            reasons.append(f"block size {spec.block_size}, built for 8, 16, 32, 64 and multiples of {CHUNK}")
        if spec.num_heads % spec.num_kv_heads:
            reasons.append(f"{spec.num_heads} heads are no multiple of {spec.num_kv_heads} KV heads")
        if spec.latent and (spec.num_kv_heads != 1 or spec.value_size > spec.head_size):
            reasons.append("a latent cache has one KV head, and values no longer than keys")
        return Support.no(*reasons) if reasons else Support.yes()

    @property
    def row_invariant(self) -> Support:
        """Bitwise, whatever the batch, the chunks and the number of threads."""
        return Support.yes("KV chunks lie at absolute positions and are folded in order")

    def block_bytes(self, spec: AttentionSpec) -> int:
        """Bytes that one block takes over all layers of the group."""
        return spec.num_layers * self._layer_block_bytes(spec)

    def allocate(self, spec: AttentionSpec, num_blocks: int) -> KVCache:
        """Zeroed blocks, in huge pages where the system gives them; memory is taken when a block is first written."""
        elements = self._library.block_elements(geometry_of(spec))
        layer_elements = -(-num_blocks * elements // _PAGE) * _PAGE
        memory = zeros(spec.num_layers * layer_elements, spec.kv_dtype)
        tensors = tuple(
            layer[: num_blocks * elements].view(num_blocks, elements)
            for layer in memory.view(spec.num_layers, layer_elements)
        )
        pointers = tuple(tensor.data_ptr() for tensor in tensors)
        return NativeCache(spec, num_blocks, tensors, self._layer_block_bytes(spec), pointers)

    def allocate_host(self, spec: AttentionSpec, num_blocks: int) -> KVCache:
        """The device is the host."""
        return self.allocate(spec, num_blocks)

    def plan(self, cache: KVCache, batch: AttentionBatch) -> NativePlan:
        """Check the batch against the cache.

        Raises:
            ValueError: a block, slot or length is out of range.

        """
        assert isinstance(cache, NativeCache)
        query_start_loc = np.ascontiguousarray(batch.query_start_loc_host, np.int32)
        seq_lens = np.ascontiguousarray(batch.seq_lens_host, np.int32)
        slots = np.ascontiguousarray(batch.slot_mapping_host, np.int64)
        table = batch.block_table_host
        if table.dtype != np.int32 or table.strides[1] != table.itemsize:
            table = np.ascontiguousarray(table, np.int32)

        geometry = geometry_of(cache.spec)
        geometry.num_blocks = cache.num_blocks
        geometry.num_rows = len(seq_lens)
        geometry.num_tokens = len(slots)
        geometry.query_start_loc = query_start_loc.ctypes.data
        geometry.seq_lens = seq_lens.ctypes.data
        geometry.block_table = table.ctypes.data
        geometry.block_table_stride = table.strides[0] // table.itemsize if len(table) > 1 else table.shape[1]
        geometry.slots = slots.ctypes.data
        address = ctypes.addressof(geometry)
        status = self._library.check_batch(address)
        if status:
            self._library.check(status, f"attention batch of {geometry.num_rows} rows over {cache.num_blocks} blocks")
        return NativePlan(cache, geometry, address, len(slots), (query_start_loc, seq_lens, slots, table))

    def write(self, plan: NativePlan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values at their slots, converted to the cache's dtype."""
        spec = plan.cache.spec
        key_strides, value_strides = key.stride(), value.stride()
        if len(key) != plan.num_tokens or key.dtype != spec.dtype or key_strides[2] != 1 or value_strides[2] != 1:
            raise ValueError(_mismatch("key", key, plan))
        status = self._write_kv(
            plan.address,
            plan.cache.pointers[layer],
            key.data_ptr(),
            key_strides[0],
            key_strides[1],
            value.data_ptr(),
            value_strides[0],
            value_strides[1],
        )
        if status:
            self._library.check(status, "write")

    def attend(
        self, plan: NativePlan, layer: int, query: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        """Attend causally to the cache."""
        spec = plan.cache.spec
        query_strides, out_strides = query.stride(), out.stride()
        if len(query) != plan.num_tokens or query.dtype != spec.dtype or query_strides[2] != 1:
            raise ValueError(_mismatch("query", query, plan))
        if len(out) != plan.num_tokens or out.dtype != spec.dtype or out_strides[2] != 1:
            raise ValueError(_mismatch("out", out, plan))
        if sinks is not None:
            sinks = sinks.float().contiguous()
        status = self._attend(
            plan.address,
            out.data_ptr(),
            out_strides[0],
            out_strides[1],
            query.data_ptr(),
            query_strides[0],
            query_strides[1],
            plan.cache.pointers[layer],
            None if sinks is None else sinks.data_ptr(),
        )
        if status:
            self._library.check(status, "attend")

    def copy_blocks(self, cache: KVCache, mapping: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks within the cache."""
        self.swap_blocks(cache, cache, mapping)

    def swap_blocks(self, source: KVCache, target: KVCache, mapping: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks from one cache to another of the same spec.

        Raises:
            ValueError: a block is out of range.

        """
        if not mapping:
            return
        assert isinstance(source, NativeCache)
        assert isinstance(target, NativeCache)
        assert source.block_bytes == target.block_bytes
        num_layers = len(source.pointers)
        pairs = np.array(mapping, np.int64)
        status = self._library.copy_blocks(
            (ctypes.c_void_p * num_layers)(*target.pointers),
            (ctypes.c_void_p * num_layers)(*source.pointers),
            num_layers,
            pairs.ctypes.data,
            len(pairs),
            source.block_bytes,
            target.num_blocks,
            source.num_blocks,
        )
        if status:
            self._library.check(status, f"copy of {len(pairs)} blocks")

    def _layer_block_bytes(self, spec: AttentionSpec) -> int:
        return self._library.block_elements(geometry_of(spec)) * spec.kv_dtype.itemsize


def geometry_of(spec: AttentionSpec) -> AttentionGeometry:
    """What the library reads of a spec; the fields of a step are left open."""
    return AttentionGeometry(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        value_size=spec.value_size,
        block_size=spec.block_size,
        dtype=DTYPES[spec.dtype],
        kv_dtype=KV_DTYPES[spec.kv_dtype],
        latent=int(spec.latent),
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
        window=spec.window or 0,
    )


def _mismatch(what: str, tensor: torch.Tensor, plan: NativePlan) -> str:
    given = f"{what} {list(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}"
    return f"{given}; the plan has {plan.num_tokens} tokens of {plan.cache.spec.dtype}, last axis contiguous"
