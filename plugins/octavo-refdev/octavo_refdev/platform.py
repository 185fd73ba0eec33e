"""The platform: what the contract requires of a device that torch can address, and no more."""

from collections.abc import Mapping

import torch

from octavo.contract import Capabilities, MemoryInfo, Platform, PlatformError, PlatformInfo, hookimpl
from octavo_refdev import device


class RefdevPlatform(Platform):
    """One device; ops and attention are Octavo's references."""

    name = device.NAME

    def __init__(self, index: int) -> None:
        if index != 0:
            raise PlatformError(f"device {index} of platform {self.name}; it has one, 0 (setting: device)")
        self._device = device.open_device()

    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=(torch.float32, torch.bfloat16), block_sizes=(16, 8, 32))

    @property
    def device(self) -> torch.device:
        return torch.device(self.name, 0)

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(device.CAPACITY - self._device.used(), device.CAPACITY)

    def diagnostics(self) -> Mapping[str, str]:
        return {"copies and waits": ", ".join(f"{n} {what}" for what, n in (+self._device.counts).items()) or "none"}


@hookimpl
def octavo_platforms() -> list[PlatformInfo]:
    missing = device.missing()
    return [
        PlatformInfo(
            name=device.NAME,
            api_version=(0, 9),  # of the contract that this was written for
            available=not missing,
            reason=f"this torch lacks {missing}" if missing else "made of Python alone",
            create=RefdevPlatform,
            priority=-1,  # serves only who names it
            devices=("a device that does not exist, 4 GiB",),
        )
    ]
