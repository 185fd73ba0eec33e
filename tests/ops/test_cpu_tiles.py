"""Kernels on tiles (AMX), run by an emulator of the tile instructions: the compiled library on any x86-64 processor.

What else of AVX-512 the set has must be the processor's own; the emulator is checked without it.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ops.cpu_cases import CASES_FILE, ROOT

from octavo_cpu.native import NativeLibrary, find_native

SELFCHECK = ROOT / "csrc_cpu" / "selfcheck"
EMULATOR_OF = ("Linux", "x86_64")
NUM_DECODER_TESTS = 4
COMPILE = ["-std=c++20", "-O3", "-Wall", "-Wextra", "-Werror"]


def emulated() -> list[str]:
    """The sets that this processor would run if it had tiles."""
    library = find_native().library
    if library is None or not {"avx512bf16", "amx"} <= {*library.isas_built, *library.isas_usable}:
        return []
    return ["amx"] if "avx512bf16" in library.isas_usable else []


def compile_to(program: Path, *arguments: str | Path) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "no C++ compiler: run ci/install"
    subprocess.run([compiler, *COMPILE, *arguments, "-o", program, "-ldl", "-pthread"], check=True)
    return program


def run(command: list[str | Path], emulator: Path | None = None, timeout: float = 300) -> list[str]:
    preload = {} if emulator is None else {"LD_PRELOAD": str(emulator)}
    environment = {name: value for name, value in os.environ.items() if name != "OCTAVO_CPU_ISA"} | preload
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library to preload."""
    to = tmp_path_factory.mktemp("emulator") / "libtile_emulator.so"
    return compile_to(to, "-shared", "-fPIC", SELFCHECK / "tile_emulator.cpp")


@pytest.mark.parametrize("check", ["tilecheck.cpp"] if (platform.system(), platform.machine()) == EMULATOR_OF else [])
def test_the_emulator_is_what_the_manual_says(check: str, tmp_path: Path) -> None:
    sources = (SELFCHECK / check, SELFCHECK / "tile_emulator.cpp")
    program = compile_to(tmp_path / "octavo_tilecheck", "-mamx-tile", *sources)
    assert run([program])[-1].startswith("0 of ")


def test_tiles_are_not_chosen_where_there_are_none(library: NativeLibrary) -> None:
    flags = Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
    if "amx_tile" not in flags:
        assert library.isa != "amx"
        assert "amx" not in library.isas_usable


@pytest.mark.parametrize("isa", emulated())
def test_the_library_passes_its_own_check_on_tiles(
    isa: str, emulator: Path, library: NativeLibrary, tmp_path: Path
) -> None:
    program = compile_to(tmp_path / "octavo_selfcheck", SELFCHECK / "selfcheck.cpp")
    checked, summary = run([program, library.path, CASES_FILE, isa, "3"], emulator)
    assert checked.startswith(f"{isa}: ")
    assert summary.startswith("0 of ")


@pytest.mark.parametrize("isa", emulated())
def test_the_decoder_keeps_rows_apart_on_tiles(isa: str, emulator: Path) -> None:
    tests = ROOT / "tests" / "ops" / "test_cpu_rows.py"
    lines = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests], emulator)
    assert f"{NUM_DECODER_TESTS} passed" in lines[-1], f"{isa}: {lines[-1]}"


@pytest.mark.parametrize("isa", emulated())
def test_products_of_every_number_of_rows_on_tiles(isa: str, emulator: Path) -> None:
    tests = ROOT / "tests" / "ops" / "test_cpu_linear.py"
    lines = run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            tests,
            "-k",
            f"{isa} and right_and_a_row and bfloat16",
        ],
        emulator,
    )
    assert " passed" in lines[-1]


@pytest.mark.parametrize("isa", emulated())
def test_attention_on_tiles_is_the_reference(isa: str, emulator: Path) -> None:
    """The tests of attention as they are, in a process that has the set."""
    tests = Path(__file__).with_name("test_cpu_attention.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    lines = run([*command, "-k", f"{isa} and (bfloat16-bfloat16 or int8 or numbers)"], emulator)
    assert " passed" in lines[-1]
