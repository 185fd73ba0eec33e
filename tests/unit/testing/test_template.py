"""What `octavo new-platform` writes installs, is clean, and passes the conformance test that it brings, untouched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.main import main


def install(folder: Path, target: Path) -> None:
    """Install a package's folder as pip does, without asking an index for anything."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [*pip, "--target", str(target), str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_it_passes_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "octavo-my-chip"
    assert main(["new-platform", "my-chip", "--folder", str(folder)]) == 0
    assert f"pip install --editable {folder}" in capsys.readouterr().out
    install(folder, tmp_path / "site")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests"],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
    reasons = {line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("SKIPPED")}
    assert reasons == {
        "core counts what a step reads",
        "float16 is none of the platform's dtypes (float32, bfloat16)",
        "the platform measures no limits",
        "the platform's tensors are host memory: there is nothing to count",
    }


@pytest.mark.parametrize("name", ["chip", "my_chip-2"])
def test_every_name_becomes_a_package(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    assert main(["new-platform", name, "--folder", str(folder)]) == 0
    package = f"octavo_{name.replace('-', '_')}"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "pyproject.toml",
        f"{package}/__init__.py",
        f"{package}/platform.py",
        f"{package}/ops.py",
        "tests/test_conformance.py",
    }
    for path in folder.rglob("*.py"):
        compile(path.read_text(), str(path), "exec")
        assert not {"PACKAGE", "CLASS", "NAME"} & set(path.read_text().split())


@pytest.mark.parametrize("name", ["My-Chip", "_chip", "a b", ""])
def test_a_bad_name_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-platform", "--folder", str(tmp_path / "x"), name]) == 1
    assert "a platform's name is lower-case letters" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n")
    assert main(["new-platform", "chip", "--folder", str(tmp_path)]) == 1
    assert "is there and not an empty folder; name another with --folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
