"""Paged attention in OpenCL. Activations are torch's host tensors and cross with each call; keys and values stay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pyopencl as cl
import torch

from octavo.contract import AttentionBackend, AttentionBatch, AttentionSpec, KVCache, Support

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class OpenCLCache(KVCache):
    """A buffer of blocks a layer, and the kernels of their geometry."""

    buffers: tuple[cl.Buffer, ...] = ()
    kernels: Mapping[str, cl.Kernel] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A step's geometry on the device: tables [R, width] and, for each token, its row, position and slot."""

    cache: OpenCLCache
    num_tokens: int
    width: np.int32
    tables: cl.Buffer
    rows: cl.Buffer
    positions: cl.Buffer
    slots: cl.Buffer


class OpenCLAttention(AttentionBackend):
    """Prefill, decode and any mixture in one kernel; any head ratio, windows, soft caps, sinks."""

    name = "opencl"
    api_minor = 9

    def __init__(self, context: cl.Context) -> None:
        self._context = context
        self._queue = cl.CommandQueue(context)  # in order
        self._kernels = cache(self._build)

    def supports(self, spec: AttentionSpec) -> Support:
        answer = Support.yes()
        for what, dtype in (("dtype", spec.dtype), ("KV dtype", spec.kv_dtype)):
            if dtype not in DTYPES:
                answer &= Support.no(f"{what} {dtype}, built for float32, bfloat16, float16")
        for what, size in (("head size", spec.head_size), ("block size", spec.block_size)):
            if size % 8:
                answer &= Support.no(f"{what} {size}, built for multiples of 8")
        if spec.latent or spec.value_size != spec.head_size:
            answer &= Support.no("values that are not as long as keys")
        return answer

    @property
    def row_invariant(self) -> Support:
        return Support.yes("a work-item a token and KV head, block after block")

    def block_bytes(self, spec: AttentionSpec) -> int:
        return spec.num_layers * _layer_block_bytes(spec)

    def allocate(self, spec: AttentionSpec, num_blocks: int) -> OpenCLCache:
        return self._allocate(spec, num_blocks, cl.mem_flags.READ_WRITE)

    def allocate_host(self, spec: AttentionSpec, num_blocks: int) -> OpenCLCache:
        return self._allocate(spec, num_blocks, cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR)

    def plan(self, cache: KVCache, batch: AttentionBatch) -> Plan:
        assert isinstance(cache, OpenCLCache)
        counts = np.diff(batch.query_start_loc_host)
        rows = np.repeat(np.arange(batch.num_rows, dtype=np.int32), counts)
        ends = batch.seq_lens_host - batch.query_start_loc_host[1:]  # a token's position less its place in the step
        positions = np.arange(batch.num_tokens, dtype=np.int32) + ends[rows]
        width = -(-int(batch.seq_lens_host.max(initial=1)) // cache.spec.block_size)
        arrays = batch.block_table_host[:, :width], rows, positions, batch.slot_mapping_host
        return Plan(cache, batch.num_tokens, np.int32(width), *map(self._send, arrays))

    def write(self, plan: Plan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        size = key.shape[1] * key.shape[2]
        sent = self._send(key), self._send(value)
        kernel, grid = plan.cache.kernels["write"], (size, plan.num_tokens)
        if plan.num_tokens:
            kernel(self._queue, grid, (size, 1), *sent, plan.slots, plan.cache.buffers[layer])

    def attend(
        self, plan: Plan, layer: int, query: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        if not plan.num_tokens:
            return
        spec, kernel = plan.cache.spec, plan.cache.kernels["attend"]
        result = np.empty(out.shape, np.float32)
        there = cl.Buffer(self._context, cl.mem_flags.WRITE_ONLY, result.nbytes)
        geometry = plan.tables, plan.width, plan.rows, plan.positions
        all_sinks = None if sinks is None else self._send(sinks)
        settings = np.float32(spec.scale), np.int32(spec.window or 2**31 - 1), all_sinks  # no window: all there can be
        # Without a local size, the driver compiles the kernel anew for nearly each number of tokens.
        grid = (spec.num_kv_heads, plan.num_tokens)
        kernel(self._queue, grid, (1, 1), self._send(query), plan.cache.buffers[layer], *geometry, *settings, there)
        cl.enqueue_copy(self._queue, result, there)
        out.copy_(torch.from_numpy(result))

    def copy_blocks(self, cache: KVCache, mapping: Sequence[tuple[int, int]]) -> None:
        self.swap_blocks(cache, cache, mapping)

    def swap_blocks(self, source: KVCache, target: KVCache, mapping: Sequence[tuple[int, int]]) -> None:
        assert isinstance(source, OpenCLCache) and isinstance(target, OpenCLCache)
        if mapping:
            pairs = self._send(np.array(mapping, np.int64))
            grid = (_layer_block_bytes(source.spec) // 4, len(mapping))
            for from_, to in zip(source.buffers, target.buffers, strict=True):
                source.kernels["move"](self._queue, grid, (64, 1), from_, to, pairs)

    def _allocate(self, spec: AttentionSpec, num_blocks: int, flags: int) -> OpenCLCache:
        size = num_blocks * _layer_block_bytes(spec)
        try:
            buffers = tuple(cl.Buffer(self._context, flags, size) for _ in range(spec.num_layers))
        except cl.Error as error:
            raise MemoryError(f"{spec.num_layers} buffers of {size} bytes: {error}") from error
        return OpenCLCache(spec, num_blocks, buffers=buffers, kernels=self._kernels(spec))

    def _build(self, spec: AttentionSpec) -> Mapping[str, cl.Kernel]:
        source = Path(__file__).with_suffix(".cl").read_text()
        geometry = {"HQ": spec.num_heads, "HKV": spec.num_kv_heads, "D": spec.head_size, "BS": spec.block_size}
        stored = {"KV_BITS": spec.kv_dtype.itemsize * 8, "KV_BFLOAT": int(spec.kv_dtype == torch.bfloat16)}
        scores = {"SINKS": int(spec.sinks), "SOFTCAP": f"{float(spec.softcap or 0)!r}f"}
        options = [f"-D{name}={value}" for name, value in (geometry | stored | scores).items()]
        program = cl.Program(self._context, source).build(options)
        return {name: cl.Kernel(program, name) for name in ("write", "attend", "move")}

    def _send(self, values: torch.Tensor | np.ndarray) -> cl.Buffer:
        """A copy on the device: tensors as float32, arrays as they are."""
        array = values.float().numpy() if isinstance(values, torch.Tensor) else values
        flags = cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR
        return cl.Buffer(self._context, flags, hostbuf=np.ascontiguousarray(array) if array.size else np.zeros(1))


def _layer_block_bytes(spec: AttentionSpec) -> int:
    return 2 * spec.block_size * spec.num_kv_heads * spec.head_size * spec.kv_dtype.itemsize
