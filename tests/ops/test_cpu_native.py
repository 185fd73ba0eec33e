"""The host platform with its library, without it, and with a wrong one; threads, forks and instruction sets."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from octavo.contract import ActAndMul, PlatformError
from octavo_cpu.native import NativeLibrary, NativeLookup, find_native
from octavo_cpu.ops import native_ops
from octavo_cpu.platform import CpuPlatform
from octavo_cpu.plugin import octavo_platforms


@pytest.fixture(autouse=True)
def torch_threads() -> object:
    """A platform sets torch's threads when it is made; put them back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_platform_is_there_at_priority_zero() -> None:
    (info,) = octavo_platforms()
    assert (info.name, info.available, info.priority) == ("cpu", True, 0)
    platform = info.create(0)
    assert platform.device == torch.device("cpu")
    free, total = platform.memory_info().free, platform.memory_info().total
    assert 0 < free <= total
    assert platform.capabilities().unified_memory
    with pytest.raises(PlatformError, match=r"device 1 of platform cpu; it has one, 0 \(setting: device\)"):
        info.create(1)


def test_without_the_library_nothing_native_is_offered_and_info_says_so(tmp_path: Path) -> None:
    lookup = find_native([tmp_path])
    assert lookup.library is None
    platform = CpuPlatform(native=lookup)
    assert platform.ops() == []
    assert platform.attention_backends() == []
    told = platform.diagnostics()["native kernels"]
    assert "no C++ compiler worked when Octavo was installed" in told
    assert "attention, norms, rope and activations run in torch, slower" in told


def test_a_library_that_is_none_is_passed_over_with_its_reason(tmp_path: Path, library: NativeLibrary) -> None:
    (tmp_path / library.path.name).write_bytes(b"not a library")
    assert f"{tmp_path / library.path.name} cannot be used: " in find_native([tmp_path]).reason


def test_threads_are_set_for_kernels_and_torch(library: NativeLibrary) -> None:
    before = library.num_threads
    platform = CpuPlatform(native=NativeLookup(library, "given"))
    platform.set_num_threads(3)
    assert (library.num_threads, torch.get_num_threads()) == (3, 3)
    assert platform.diagnostics()["threads"] == "3 (setting num_threads)"
    with pytest.raises(PlatformError, match="num_threads is 0; at least 1"):
        platform.set_num_threads(0)
    library.set_num_threads(before)


def _child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_the_variable_caps_the_instruction_set(library: NativeLibrary) -> None:
    code = "from octavo_cpu.native import find_native; print(find_native().library.isa)"
    for isa in library.isas_usable:
        assert _child(code, OCTAVO_CPU_ISA=isa).stdout == f"{isa}\n"
    failed = _child("from octavo_cpu.platform import CpuPlatform; CpuPlatform()", OCTAVO_CPU_ISA="sse9")
    allowed = ", ".join(library.isas_built)
    assert f"PlatformError: OCTAVO_CPU_ISA is 'sse9'; allowed: {allowed}, or unset" in failed.stderr


def test_many_callers_at_once_each_get_their_own(library: NativeLibrary) -> None:
    before = library.num_threads
    library.set_num_threads(4)
    (fn,) = [impl.fn for impl in native_ops(library) if impl.op == "act_and_mul"]
    inputs = [torch.randn(200, 1000) for _ in range(6)]
    expected = [fn(ActAndMul(x, "silu")) for x in inputs]

    def call(i: int) -> bool:
        return all(torch.equal(fn(ActAndMul(inputs[i], "silu")), expected[i]) for _ in range(30))

    with ThreadPoolExecutor(len(inputs)) as callers:
        right = list(callers.map(call, range(len(inputs))))
    library.set_num_threads(before)
    assert all(right)


def test_a_forked_child_computes_without_its_parents_workers() -> None:
    code = """
import os, torch
from octavo.contract import ActAndMul
from octavo_cpu.native import find_native
from octavo_cpu.ops import native_ops
library = find_native().library
library.set_num_threads(4)
(fn,) = [impl.fn for impl in native_ops(library) if impl.op == "act_and_mul"]
x = torch.randn(500, 1000)
y = fn(ActAndMul(x, "silu"))
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(fn(ActAndMul(x, "silu")), y) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    done = _child(code)
    assert done.returncode == 0, done.stderr
