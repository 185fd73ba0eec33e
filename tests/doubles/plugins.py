"""Plugins as packages on disk: what pip would leave of a distribution, without pip."""

from collections.abc import Mapping
from pathlib import Path

__all__ = ["PLATFORM", "write_distribution"]

# A plugin that brings one working platform; NAME, AVAILABLE, PRIORITY and VERSION may be replaced.
PLATFORM = """
import torch
from octavo.contract import Capabilities, MemoryInfo, Platform, PlatformInfo, hookimpl

class Toy(Platform):
    name = "NAME"
    def capabilities(self):
        return Capabilities(dtypes=(torch.float32,), kv_cache_dtypes=(torch.float32,))
    @property
    def device(self):
        return torch.device("cpu")
    def memory_info(self):
        return MemoryInfo(free=2**30, total=2**31)
    def diagnostics(self):
        return {"threads": "2 of 4"}

@hookimpl
def octavo_platforms():
    return [PlatformInfo("NAME", (0, 9), AVAILABLE, "it is a toy", lambda device: Toy(), PRIORITY, ("toy 0",))]
"""


def platform_source(name: str, *, available: bool = True, priority: int = 0) -> str:
    """A module with one platform."""
    return PLATFORM.replace("NAME", name).replace("AVAILABLE", str(available)).replace("PRIORITY", str(priority))


def write_distribution(
    folder: Path,
    name: str,
    plugins: Mapping[str, str],
    modules: Mapping[str, str],
    *,
    version: str = "1.0",
    entry_points: str | None = None,
) -> None:
    """Write a distribution to a folder of the import path.

    Args:
        folder: of the path.
        name: of the distribution.
        plugins: entry point's name to its value ("module" or "module:attribute").
        modules: module name to source.
        version: of the distribution.
        entry_points: the whole entry_points.txt, where it shall not be well formed.

    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "".join(f"{key} = {value}\n" for key, value in plugins.items())
    (info / "entry_points.txt").write_text(entry_points or f"[octavo.platforms]\n{lines}")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
