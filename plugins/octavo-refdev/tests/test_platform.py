"""What the platform says, and how the engine takes it."""

import pytest
import torch

from octavo.contract import PlatformError
from octavo_refdev.device import CAPACITY, Device, missing
from octavo_refdev.platform import RefdevPlatform, octavo_platforms


def test_it_serves_only_who_names_it() -> None:
    (info,) = octavo_platforms()
    assert (info.name, info.available, info.priority) == ("refdev", True, -1)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
        (torch._C._acc, "create_empty_tensor"),
        (torch.library.Library, "fallback"),
    ],
)
def test_a_torch_that_lacks_something_is_said(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    monkeypatch.delattr(owner, name)
    (info,) = octavo_platforms()
    assert not info.available
    assert info.reason == f"this torch lacks {name}"
    assert missing() == name


def test_there_is_one_device(device: Device) -> None:
    with pytest.raises(PlatformError, match="device 1 of platform refdev; it has one, 0"):
        RefdevPlatform(1)


def test_platforms_of_a_process_share_the_device(device: Device) -> None:
    one, other = RefdevPlatform(0), octavo_platforms()[0].create(0)
    assert one.device == other.device == torch.device("refdev:0")
    before = other.memory_info().free
    held = torch.zeros(1000, device=one.device)
    assert other.memory_info().free == before - held.nbytes
    assert other.memory_info().total == CAPACITY


def test_it_tells_of_copies_and_waits(device: Device) -> None:
    torch.ones(3).to("refdev").sum().item()
    assert RefdevPlatform(0).diagnostics() == {"copies and waits": "1 to_device, 1 sync"}
