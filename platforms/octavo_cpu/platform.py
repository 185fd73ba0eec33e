"""The host processor: its capabilities, memory, threads, and what serves on it."""

from collections.abc import Mapping

import torch

from octavo.contract import (
    AttentionBackend,
    Capabilities,
    CompileRequest,
    MemoryInfo,
    OpImpl,
    Platform,
    PlatformError,
    Probe,
    Program,
    ProgramCosts,
)
from octavo_cpu import host
from octavo_cpu.attention import NativeAttention
from octavo_cpu.matrix import PRODUCTS, WEIGHT_FORMATS
from octavo_cpu.memory import zeros
from octavo_cpu.native import NativeLookup, find_native
from octavo_cpu.ops import native_ops
from octavo_cpu.program import NativeProgram, can_compile

__all__ = ["CpuPlatform"]


class CpuPlatform(Platform):
    """One device, all threads that affinity and cgroup allow, memory shared with everything else."""

    name = "cpu"

    def __init__(self, index: int = 0, native: NativeLookup | None = None) -> None:
        """`native` stands in for the library that is found beside this package.

        Raises:
            PlatformError: there is one device, index 0; or OCTAVO_CPU_ISA names no instruction set.

        """
        if index != 0:
            raise PlatformError(f"device {index} of platform cpu; it has one, 0 (setting: device)")
        try:
            self._native = find_native() if native is None else native
        except ValueError as error:
            raise PlatformError(str(error)) from None
        self._generic_because = ""
        num_threads, source = host.usable_threads()
        self.set_num_threads(num_threads)
        self._thread_source = source

    def capabilities(self) -> Capabilities:
        """Any head size; blocks of 32 tokens read best."""
        dtypes = (torch.bfloat16, torch.float32, torch.float16)
        return Capabilities(
            dtypes=dtypes,
            kv_cache_dtypes=(*dtypes, torch.int8),
            block_sizes=(32, 16, 64, 8, 128),
            unified_memory=True,
            distributed_backend="gloo",
        )

    @property
    def device(self) -> torch.device:
        """Weights and activations are torch's CPU tensors."""
        return torch.device("cpu")

    def memory_info(self) -> MemoryInfo:
        """Of the machine, or of the innermost cgroup that limits it."""
        free, total = host.memory()
        return MemoryInfo(free, total)

    def ops(self) -> list[OpImpl]:
        """Native ops, where the library is there."""
        return [] if self._native.library is None else native_ops(self._native.library)

    def weight_formats(self) -> tuple[str, ...]:
        """Those of the native products."""
        return () if self._native.library is None else WEIGHT_FORMATS

    def attention_backends(self) -> list[AttentionBackend]:
        """Native attention, where the library is there."""
        return [] if self._native.library is None else [NativeAttention(self._native.library)]

    def compile(self, request: CompileRequest) -> Program | None:
        """Dense decoders, in float32 and bfloat16 and quantised."""
        library = self._native.library
        if library is None:
            return None
        covered = can_compile(library, request)
        self._generic_because = "; ".join(covered.reasons) if not covered else ""
        return NativeProgram(library, request) if covered else None

    def probe(self, num_bytes: int) -> Probe | None:
        """Reads huge pages as weights lie in them; products in registers."""
        library = self._native.library
        if library is None:
            return None
        memory = zeros(num_bytes, torch.uint8).fill_(1)
        bandwidth = library.probe_bandwidth(memory.data_ptr(), num_bytes)
        return Probe(bandwidth, {dtype: library.probe_operations(i) for dtype, i in PRODUCTS.items()})

    def costs(self, program: Program) -> ProgramCosts | None:
        """Of the packed weights."""
        return program.costs if isinstance(program, NativeProgram) else None

    def set_num_threads(self, num_threads: int) -> None:
        """Of the native kernels and of torch's, which run in turn."""
        if num_threads < 1:
            raise PlatformError(f"num_threads is {num_threads}; at least 1")
        if self._native.library is not None:
            self._native.library.set_num_threads(num_threads)
        torch.set_num_threads(num_threads)
        self._num_threads, self._thread_source = num_threads, "setting num_threads"

    def diagnostics(self) -> Mapping[str, str]:
        """Processor, instruction sets, threads, huge pages, the library or what is slower without it."""
        library = self._native.library
        if library is None:
            isa = f"{torch.backends.cpu.get_cpu_capability()} in torch"
            kernels = f"none: {self._native.reason}; attention, norms, rope and activations run in torch, slower"
        else:
            built, usable = ", ".join(library.isas_built), ", ".join(library.isas_usable)
            isa = f"{library.isa} in use; built: {built}; this processor runs: {usable}"
            kernels = str(library.path)
        because = (
            {"generic program": f"{self._generic_because}: not in the native one"} if self._generic_because else {}
        )
        pages = host.huge_pages()
        uses = {"always": "KV blocks lie in them", "madvise": "KV blocks ask for them"}
        return {
            "processor": host.processor_name(),
            "instruction sets": isa,
            "threads": f"{self._num_threads} ({self._thread_source})",
            "huge pages": f"{pages}; {uses.get(pages, 'KV blocks lie in small pages, which read slower')}",
            "native kernels": kernels,
            **({"generic program": f"{because}: not in the native one"} if because else {}),
        }
