import sys
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from octavo.hardware.registry import Registry, discover, installed_entry_points


@pytest.fixture
def discover_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Registry]]:
    """Discovers what distributions in `tmp_path` bring; their modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def run() -> Registry:
        entry_points, problems = installed_entry_points(distributions(path=[str(tmp_path)]))
        registry = discover(entry_points)
        registry.problems[:0] = problems
        return registry

    yield run
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
