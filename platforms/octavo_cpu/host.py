"""What this process may use of the machine: threads and memory, with affinity and cgroups (v1, v2) counted."""

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["huge_pages", "memory", "processor_name", "usable_threads"]

ROOT = Path("/")
_UNLIMITED = 1 << 62  # v1 writes a number near 2^63 where there is no limit
# AArch64's /proc/cpuinfo has the numbers of the core's maker and design, and no name.
_CORES = {
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse N1",
    (0x41, 0xD40): "Neoverse V1",
    (0x41, 0xD49): "Neoverse N2",
    (0x41, 0xD4F): "Neoverse V2",
    (0x41, 0xD84): "Neoverse V3",
    (0x41, 0xD8E): "Neoverse N3",
    (0xC0, 0xAC3): "AmpereOne",
    (0xC0, 0xAC4): "AmpereOne",
}


def processor_name(root: Path = ROOT) -> str:
    """The processor as its maker calls it, or the architecture where that is not told."""
    pairs = (line.partition(":") for line in _lines(root / "proc/cpuinfo"))
    facts = {key.strip(): value.strip() for key, _, value in pairs}
    named = facts.get("model name") or _core_name(facts) or facts.get("Model") or _sysctl("machdep.cpu.brand_string")
    return named or platform.processor() or platform.machine() or "unknown processor"


def usable_threads(root: Path = ROOT) -> tuple[int, str]:
    """How many threads can run at once, and which limit says so."""
    if hasattr(os, "sched_getaffinity"):
        allowed, source = len(os.sched_getaffinity(0)), "affinity"
    elif fast := _sysctl("hw.perflevel0.logicalcpu"):  # the others would be waited for
        allowed, source = int(fast), "number of performance cores"
    else:
        allowed, source = os.cpu_count() or 1, "number of processors"
    quotas = [quota for quota in map(_cpu_quota, _cgroups(root, "cpu")) if quota is not None]
    if quotas and min(quotas) < allowed:
        # More threads than the quota pays for are stopped together, in the middle of a step.
        return max(1, int(min(quotas))), f"cgroup quota of {min(quotas):g} processors"
    return allowed, source


def memory(root: Path = ROOT) -> tuple[int, int]:
    """Bytes (free, total) for this process: what the machine has, and what its cgroups still allow."""
    facts = dict(line.split(":", 1) for line in _lines(root / "proc/meminfo") if ":" in line)
    if "MemTotal" not in facts:
        return _memory_by_sysconf()
    total = _kibibytes(facts["MemTotal"])
    free = _kibibytes(facts.get("MemAvailable", facts.get("MemFree", "0 kB")))
    for folder in _cgroups(root, "memory"):
        limit = _first_number(folder / "memory.max", folder / "memory.limit_in_bytes")
        if limit is None or limit >= _UNLIMITED:
            continue
        used = _first_number(folder / "memory.current", folder / "memory.usage_in_bytes") or 0
        stat = dict(line.split(None, 1) for line in _lines(folder / "memory.stat") if " " in line)
        cached = int(stat.get("inactive_file", stat.get("total_inactive_file", "0")))  # given back when asked for
        total = min(total, limit)
        free = min(free, max(0, limit - used + cached))
    return free, total


def huge_pages(root: Path = ROOT) -> str:
    """The kernel's mode of transparent huge pages: always, madvise, never, or unknown."""
    for line in _lines(root / "sys/kernel/mm/transparent_hugepage/enabled"):
        if "[" in line:
            return line.split("[", 1)[1].split("]", 1)[0]
    return "unknown"


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup for a controller and of the groups above it, innermost first.

    A container often sees its own group as the root of the mount, while /proc/self/cgroup names its place on
    the host; the mount's root comes last, so that it is read in either case.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")  # "number:controllers:name"
        controllers, _, name = rest.partition(":")
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mounts = (root / "sys/fs/cgroup" / controllers, root / "sys/fs/cgroup" / controller)
            mount = next((m for m in mounts if m.is_dir()), mounts[1])
        else:
            continue
        folder = mount / name.lstrip("/")
        while folder != mount and mount in folder.parents:
            if folder.is_dir():
                yield folder
            folder = folder.parent
        if mount.is_dir():
            yield mount


def _cpu_quota(folder: Path) -> float | None:
    words = " ".join(_lines(folder / "cpu.max")).split()  # v2: "quota period" or "max period"
    if not words:
        quota = _first_number(folder / "cpu.cfs_quota_us")
        period = _first_number(folder / "cpu.cfs_period_us")
        words = [str(quota), str(period)] if quota and period else []
    with contextlib.suppress(ValueError, ZeroDivisionError, IndexError):
        quota_of_period = float(words[0]) / float(words[1])
        return quota_of_period if quota_of_period > 0 else None
    return None


def _core_name(facts: dict[str, str]) -> str:
    maker, design = facts.get("CPU implementer", ""), facts.get("CPU part", "")
    with contextlib.suppress(ValueError):
        return _CORES.get((int(maker, 16), int(design, 16)), f"{platform.machine()} core {design} of maker {maker}")
    return ""


def _sysctl(name: str) -> str:
    """A fact that macOS tells so; empty elsewhere."""
    if sys.platform != "darwin":
        return ""
    command = ["/usr/sbin/sysctl", "-n", name]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _first_number(*paths: Path) -> int | None:
    for path in paths:
        for line in _lines(path)[:1]:
            with contextlib.suppress(ValueError):
                return int(line)
    return None


def _kibibytes(text: str) -> int:
    return int(text.split()[0]) * 1024


def _memory_by_sysconf() -> tuple[int, int]:
    """For systems without /proc: all of it, of which half is taken to be free."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total // 2, total
