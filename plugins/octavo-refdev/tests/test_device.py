"""The double behaves as an accelerator with memory of its own does."""

import ctypes
import gc
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from octavo_refdev.device import CAPACITY, NAME, Device

Run = Callable[[str], "subprocess.CompletedProcess[str]"]
PLACE = f"{NAME}:0"
OPEN = "import torch\nfrom octavo_refdev.device import open_device\nopen_device()\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool], ids=str)
def test_bytes_cross_and_come_back(device: Device, dtype: torch.dtype) -> None:
    host = torch.arange(24).view(2, 3, 4).to(dtype)
    assert torch.equal(host.to(PLACE).cpu(), host)
    assert device.counts == {"to_device": 1, "to_host": 1}


def test_a_part_crosses_alone(device: Device) -> None:
    host = torch.zeros(4, 5)
    there = torch.zeros(4, 5, device=PLACE)
    there[1:3, ::2].copy_(torch.ones(2, 3))
    host[1:3, ::2] = 1
    assert torch.equal(there.cpu(), host)
    assert device.counts == {"to_device": 1, "to_host": 1}


OPERATORS = {
    "linear": lambda x: torch.nn.functional.linear(x, x.flip(0)),
    "softmax": lambda x: x.softmax(-1),
    "index": lambda x: x[(x[:, 0] > 0).long()],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "topk": lambda x: x.topk(2, -1).values,
    "cat": lambda x: torch.cat((x, x * 2), 1),
    "split": lambda x: torch.split(x, 2, 1)[1] + 1,
    "permute": lambda x: x.view(3, 2, 2).permute(2, 0, 1).reshape(4, 3),
    "to": lambda x: x.to(torch.bfloat16).float(),
    "bits": lambda x: x.view(torch.int32) >> 3,
    "max": lambda x: x.max(-1).indices,
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2)),
    "expand": lambda x: x[:, None].expand(3, 5, 4).sum(1),
    "arange": lambda x: x * torch.arange(4, device=x.device),
    "pow": lambda x: x**2 + 2**x,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_equal_the_hosts_bit_by_bit(device: Device, name: str) -> None:
    host = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    found = OPERATORS[name](host.to(PLACE))
    assert str(found.device) == PLACE
    assert torch.equal(found.cpu(), OPERATORS[name](host))


def test_views_share_memory(device: Device) -> None:
    there = torch.zeros(3, 4, device=PLACE)
    used = device.used()
    there.view(2, 6)[1, 2:] += 1
    there.t()[0].fill_(7)
    expected = torch.zeros(3, 4)
    expected.view(2, 6)[1, 2:] += 1
    expected.t()[0].fill_(7)
    assert torch.equal(there.cpu(), expected)
    assert device.used() == used


def test_an_out_tensor_grows(device: Device) -> None:
    out = torch.empty(0, device=PLACE)
    ones = torch.ones(3, 4, device=PLACE)
    assert torch.add(ones, ones, out=out) is out
    assert torch.equal(out.cpu(), torch.full((3, 4), 2.0))


def test_memory_is_counted_and_given_back(device: Device) -> None:
    gc.collect()
    before = device.used()
    there = torch.zeros(1000, device=PLACE)
    view = there[10:]
    assert device.used() == before + 4000
    del there
    assert device.used() == before + 4000
    del view
    assert device.used() == before


def test_threads_may_allocate_and_free(device: Device) -> None:
    before = device.used()

    def work(value: int) -> bool:
        return all(torch.full((32,), value, device=PLACE).cpu().tolist() == [value] * 32 for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert device.used() == before


def test_more_than_there_is_is_refused(device: Device) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=f"of {CAPACITY} are free"):
        torch.empty(CAPACITY + 1, dtype=torch.uint8, device=PLACE)


def test_waits_of_the_host_are_counted(device: Device) -> None:
    there = torch.ones(3, device=PLACE)
    assert there.sum().item() == 3
    assert bool((there > 0).all())
    assert len(there.nonzero()) == 3
    assert len(there.unique()) == 1
    assert device.counts["sync"] == 4


def test_strict_makes_a_wait_an_error(device: Device) -> None:
    there = torch.ones(3, device=PLACE)
    device.strict = True
    for wait in (there.sum().item, there.nonzero, there.unique):
        with pytest.raises(RuntimeError, match="makes the host wait for a value of refdev"):
            wait()
    assert there.cpu().tolist() == [1, 1, 1]  # a copy that is asked for is none


def test_host_tensors_do_not_mix_in(device: Device) -> None:
    there = torch.ones(3, device=PLACE)
    with pytest.raises(RuntimeError, match="refdev"):
        there + torch.ones(3)
    with pytest.raises(RuntimeError, match="refdev"):
        there[torch.tensor([0, 1])]
    assert (there + torch.tensor(1.0)).cpu().tolist() == [2, 2, 2]  # scalars do, as on any device


def test_there_is_no_numpy_view(device: Device) -> None:
    with pytest.raises(TypeError, match="refdev"):
        torch.ones(3, device=PLACE).numpy()


def test_an_address_read_on_the_host_ends_the_process(run: Run) -> None:
    done = run(f"{OPEN}import ctypes\nctypes.string_at(torch.ones(3, device='refdev').data_ptr(), 1)")
    assert done.returncode == -signal.SIGSEGV
    assert ctypes.string_at(torch.ones(3).data_ptr(), 1) == b"\0"


def test_looking_registers_nothing(run: Run) -> None:
    done = run(
        "import torch\nfrom octavo_refdev import platform\nfound = platform.octavo_platforms()[0]\n"
        "assert found.available, found\nassert torch._C._get_privateuse1_backend_name() == 'privateuseone'"
    )
    assert done.returncode == 0, done.stderr


def test_a_backend_that_came_before_is_named(run: Run) -> None:
    done = run(
        "import torch\ntorch.utils.rename_privateuse1_backend('other')\n"
        "from octavo_refdev.platform import octavo_platforms\n(info,) = octavo_platforms()\n"
        "try:\n    info.create(0)\nexcept RuntimeError as error:\n    print(error)"
    )
    assert done.stdout == "torch has room for one backend of another make in a process, and 'other' has it\n", (
        done.stderr
    )


def test_a_backend_that_comes_later_is_refused(run: Run) -> None:
    done = run(f"{OPEN}torch.utils.rename_privateuse1_backend('other')")
    assert done.returncode == 1
    assert "refdev" in done.stderr
