"""What the platform says of devices and memory."""

import pyopencl as cl
import pytest
import torch

from octavo.contract import PlatformError
from octavo_opencl import platform
from octavo_opencl.platform import OpenCLPlatform, octavo_platforms


def test_it_serves_only_who_names_it() -> None:
    (info,) = octavo_platforms()
    assert (info.name, info.available, info.priority) == ("opencl", True, -1)
    assert info.devices
    assert all("OpenCL" in line for line in info.devices)


def test_a_machine_without_drivers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise cl.LogicError("clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR")

    monkeypatch.setattr(platform.cl, "get_platforms", none)
    (info,) = octavo_platforms()
    assert (info.available, info.reason, info.devices) == (False, "no OpenCL driver with a device is installed", ())


def test_devices_are_chosen_by_index() -> None:
    num_devices = len(platform.devices())
    with pytest.raises(PlatformError, match=f"device {num_devices} of platform opencl; it has 0 "):
        OpenCLPlatform(num_devices)


def test_memory_is_what_the_device_has() -> None:
    memory = OpenCLPlatform(0).memory_info()
    assert 0 < memory.free <= memory.total == platform.devices()[0].global_mem_size


def test_torch_keeps_to_the_threads_it_is_given() -> None:
    before = torch.get_num_threads()
    OpenCLPlatform(0).set_num_threads(1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


def test_diagnostics_name_the_device() -> None:
    one = OpenCLPlatform(0)
    assert one.diagnostics() == {"OpenCL device": octavo_platforms()[0].devices[0]}
    assert one.device == torch.device("cpu")
