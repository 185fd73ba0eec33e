"""Installed where no compiler works: it serves all the same, and says what that costs. Run by tox -e no-compiler."""

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

OCTAVO = Path(sys.executable).parent / "octavo"


def octavo(*argv: str) -> str:
    """What the installed command prints."""
    done = subprocess.run([OCTAVO, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_library_was_built() -> None:
    names = [file.name for file in distribution("octavo").files or ()]
    assert "py.typed" in names
    assert [name for name in names if Path(name).suffix == ".so"] == []


def test_it_generates(demo_file: Path) -> None:
    text = octavo("generate", "demo", "The capital of France is", "--max-tokens", "8", "--max-model-len", "64")
    assert text.startswith(" Paris")


def test_info_says_what_is_slower_and_why() -> None:
    report = " ".join(octavo("info").split())
    assert "native kernels none: " in report
    assert "no C++ compiler" in report
    assert "attention, norms, rope and activations run in torch, slower" in report
