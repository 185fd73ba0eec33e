"""Memory for what is read through at every step: weights and KV blocks."""

import contextlib
import mmap

import torch

__all__ = ["zeros"]

_HUGE_PAGE = 2 << 20


def zeros(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory when first written, in huge pages where the system allows (4 KiB ones halve reads).

    The address is a multiple of 64 bytes at least.
    """
    num_bytes = max(1, num_elements) * dtype.itemsize
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        whole = torch.zeros(num_bytes + 64, dtype=torch.uint8)
        start = -whole.data_ptr() % 64
        return whole[start : start + num_bytes].view(dtype)[:num_elements]
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes].view(dtype)[:num_elements]
