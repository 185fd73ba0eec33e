"""What got installed is what the repository holds."""

import importlib.util
import tomllib
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest
from repo.sources import ROOT, text_of, tracked

PROJECT = tomllib.loads(text_of(Path("pyproject.toml")))


def test_version_is_the_same_everywhere() -> None:
    import octavo

    assert octavo.__version__ == PROJECT["project"]["version"] == distribution("octavo").version


def test_platforms_come_through_their_entry_points() -> None:
    declared = PROJECT["project"]["entry-points"]["octavo.platforms"]
    installed = {entry.name: entry.value for entry in entry_points(group="octavo.platforms")}
    assert declared.items() <= installed.items()
    assert set(declared) == {"cpu", "triton"}


@pytest.mark.parametrize("root", ["core", "platforms"])
def test_every_module_is_installed(root: str) -> None:
    for path in tracked((".py", ".typed"), root):
        package, *rest = path.relative_to(root).parts
        spec = importlib.util.find_spec(package)
        assert spec is not None
        places = [Path(folder).joinpath(*rest) for folder in spec.submodule_search_locations or ()]
        installed = next((place for place in places if place.exists()), None)
        assert installed is not None, f"{path} is not installed"
        assert installed.read_bytes() == (ROOT / path).read_bytes(), f"{path} is not what is installed: install again"


def test_constraints_pin_torch() -> None:
    assert "torch==2.13.0" in text_of(Path("ci/constraints.txt")).splitlines()


def test_scripts_can_be_run() -> None:
    for path in tracked(under="ci"):
        if not path.suffix:
            assert text_of(path).startswith("#!/usr/bin/env bash\n# "), f"{path}: say in one line what it is for"
            assert (ROOT / path).stat().st_mode & 0o111, f"{path} is not executable"
