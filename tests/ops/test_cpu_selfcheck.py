"""The library's own check, on this processor and on emulated older ones that lack the wider instruction sets."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from ops.cpu_cases import CASES_FILE, ROOT

from octavo_cpu.native import NativeLibrary

# What each emulated processor has at most. On other architectures there is one generic build, checked as it is.
EVERY_NTH_CASE = "3"  # the emulator is slow; the kernels see every case outside of it
EMULATED = {"Haswell": "avx2", "Nehalem": "base"} if platform.machine() == "x86_64" else {}


@pytest.fixture(scope="module")
def selfcheck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, compiled for any processor of the architecture."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "no C++ compiler: run ci/install"
    program = tmp_path_factory.mktemp("selfcheck") / "octavo_selfcheck"
    source = ROOT / "csrc_cpu" / "selfcheck" / "selfcheck.cpp"
    subprocess.run([compiler, "-std=c++20", "-O2", "-Werror", source, "-o", program, "-ldl"], check=True)
    return program


def run(command: list[str | Path], library: NativeLibrary, *options: str) -> list[str]:
    result = subprocess.run(
        [*command, library.path, CASES_FILE, *options], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def test_passes_in_each_instruction_set_of_this_processor(selfcheck: Path, library: NativeLibrary) -> None:
    *checked, summary = run([selfcheck], library)
    assert [line.partition(":")[0] for line in checked] == list(library.isas_usable)
    assert summary.startswith("0 of ")


@pytest.mark.parametrize(("processor", "isa"), EMULATED.items())
def test_passes_on_an_older_processor(processor: str, isa: str, selfcheck: Path, library: NativeLibrary) -> None:
    emulator = shutil.which("qemu-x86_64")
    assert emulator is not None, "qemu-x86_64 is not installed (package qemu-user): run ci/install"
    checked, summary = run([emulator, "-cpu", processor, selfcheck], library, isa, EVERY_NTH_CASE)
    assert checked.startswith(f"{isa}: ")
    assert summary.startswith("0 of ")


@pytest.mark.parametrize(("processor", "isa"), EMULATED.items())
def test_an_older_processor_is_given_no_wider_set(
    processor: str, isa: str, selfcheck: Path, library: NativeLibrary
) -> None:
    emulator = shutil.which("qemu-x86_64")
    assert emulator is not None, "qemu-x86_64 is not installed (package qemu-user): run ci/install"
    wider = library.isas_built[library.isas_built.index(isa) + 1]
    command = [emulator, "-cpu", processor, selfcheck, library.path, CASES_FILE, wider]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert f"this processor or library has no {wider}" in result.stderr
