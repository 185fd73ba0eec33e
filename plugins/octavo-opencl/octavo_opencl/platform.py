"""The platform and its plugin: any OpenCL device holds keys and values; weights and other ops stay on the host."""

from collections.abc import Mapping

import psutil
import pyopencl as cl
import torch

from octavo.contract import AttentionBackend, Capabilities, MemoryInfo, Platform, PlatformError, PlatformInfo, hookimpl
from octavo_opencl.attention import DTYPES, OpenCLAttention


class OpenCLPlatform(Platform):
    """One OpenCL device beside the host processor."""

    name = "opencl"

    def __init__(self, index: int) -> None:
        found = devices()
        if index not in range(len(found)):
            known = ", ".join(f"{i} ({describe(device)})" for i, device in enumerate(found))
            raise PlatformError(f"device {index} of platform opencl; it has {known} (setting: device)")
        self._opencl = found[index]
        self._attention = OpenCLAttention(cl.Context([self._opencl]))

    def capabilities(self) -> Capabilities:
        unified = bool(self._opencl.host_unified_memory)
        return Capabilities(dtypes=DTYPES, kv_cache_dtypes=DTYPES, block_sizes=(32, 16, 64, 8), unified_memory=unified)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def memory_info(self) -> MemoryInfo:
        total, free = self._opencl.global_mem_size, psutil.virtual_memory().available
        return MemoryInfo(min(free, total) if self._opencl.host_unified_memory else total, total)

    def attention_backends(self) -> list[AttentionBackend]:
        return [self._attention]

    def set_num_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # an OpenCL driver settles its own when it starts

    def diagnostics(self) -> Mapping[str, str]:
        return {"OpenCL device": describe(self._opencl)}


def devices() -> list[cl.Device]:
    """Those of all drivers, accelerators before processors; none where there is no driver."""
    try:
        found = [device for driver in cl.get_platforms() for device in driver.get_devices()]
    except cl.Error:
        return []
    return sorted(found, key=lambda device: bool(device.type & cl.device_type.CPU))


def describe(device: cl.Device) -> str:
    return f"{device.name.strip()}, {device.platform.version.strip()}"


@hookimpl
def octavo_platforms() -> list[PlatformInfo]:
    found = devices()
    return [
        PlatformInfo(
            name="opencl",
            api_version=(0, 9),  # of the contract that this was written for
            available=bool(found),
            reason=f"OpenCL devices found: {len(found)}" if found else "no OpenCL driver with a device is installed",
            create=OpenCLPlatform,
            priority=-1,  # the host's own kernels are faster: serves who names it
            devices=tuple(describe(device) for device in found),
        )
    ]
