"""What the host platform believes about the machine, read from pictures of /proc and /sys."""

import os
import subprocess
from pathlib import Path

import pytest

from octavo_cpu.host import huge_pages, memory, processor_name, usable_threads

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 processors and 16 GiB, 10 of them free, without cgroups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    put(tmp_path, "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {10 << 20} kB\n")
    put(tmp_path, "proc/cpuinfo", "processor : 0\nmodel name : Fast 9000\n")
    return tmp_path


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_cgroups_the_machine_and_affinity_decide(root: Path) -> None:
    assert usable_threads(root) == (8, "affinity")
    assert memory(root) == (10 * GIB, 16 * GIB)
    assert processor_name(root) == "Fast 9000"
    assert huge_pages(root) == "unknown"


def test_an_arm_core_is_known_by_its_numbers(root: Path) -> None:
    put(root, "proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n")
    assert processor_name(root) == "Neoverse N1"
    put(root, "proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x99\nCPU part\t: 0x123\n")
    assert processor_name(root).endswith("core 0x123 of maker 0x99")


def test_macos_is_asked_by_sysctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"machdep.cpu.brand_string": "Apple M9", "hw.perflevel0.logicalcpu": "6"}
    monkeypatch.setattr("octavo_cpu.host.sys.platform", "darwin")
    monkeypatch.setattr(
        "octavo_cpu.host.subprocess.run",
        lambda command, **_: subprocess.CompletedProcess(command, 0, stdout=facts[command[-1]] + "\n"),
    )
    monkeypatch.delattr(os, "sched_getaffinity")
    assert processor_name(tmp_path) == "Apple M9"
    assert usable_threads(tmp_path) == (6, "number of performance cores")


@pytest.mark.parametrize(
    ("quota", "threads"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("900000 100000", 8)]
)
def test_a_v2_quota_caps_threads(root: Path, quota: str, threads: int) -> None:
    put(root, "proc/self/cgroup", "0::/box/inner\n")
    put(root, "sys/fs/cgroup/box/cpu.max", quota)
    put(root, "sys/fs/cgroup/box/inner/cpu.max", "max 100000")
    num_threads, source = usable_threads(root)
    assert num_threads == threads
    assert source == ("affinity" if threads == 8 else f"cgroup quota of {int(quota.split()[0]) / 1e5:g} processors")


def test_a_v1_quota_caps_threads(root: Path) -> None:
    put(root, "proc/self/cgroup", "4:cpu,cpuacct:/box\n3:memory:/box\n")
    put(root, "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "300000")
    put(root, "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us", "100000")
    assert usable_threads(root) == (3, "cgroup quota of 3 processors")
    put(root, "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "-1")
    assert usable_threads(root) == (8, "affinity")


def test_v2_memory_is_what_the_innermost_limit_leaves(root: Path) -> None:
    put(root, "proc/self/cgroup", "0::/box/inner\n")
    put(root, "sys/fs/cgroup/box/memory.max", str(4 * GIB))
    put(root, "sys/fs/cgroup/box/memory.current", str(3 * GIB))
    put(root, "sys/fs/cgroup/box/memory.stat", f"anon 5\ninactive_file {GIB}\n")  # cache is given back when needed
    put(root, "sys/fs/cgroup/box/inner/memory.max", "max")
    assert memory(root) == (2 * GIB, 4 * GIB)
    put(root, "sys/fs/cgroup/box/memory.current", str(9 * GIB))
    assert memory(root) == (0, 4 * GIB)


def test_v1_memory_counts_the_limit_and_its_absence(root: Path) -> None:
    put(root, "proc/self/cgroup", "4:memory:/box\n0::/\n")
    folder = "sys/fs/cgroup/memory/box"
    put(root, f"{folder}/memory.limit_in_bytes", "9223372036854771712")
    put(root, f"{folder}/memory.usage_in_bytes", str(GIB))
    assert memory(root) == (10 * GIB, 16 * GIB)
    put(root, f"{folder}/memory.limit_in_bytes", str(6 * GIB))
    assert memory(root) == (5 * GIB, 6 * GIB)


def test_a_container_sees_its_own_group_at_the_root_of_the_mount(root: Path) -> None:
    put(root, "proc/self/cgroup", "0::/a/path/on/the/host\n")
    put(root, "sys/fs/cgroup/memory.max", str(2 * GIB))
    put(root, "sys/fs/cgroup/memory.current", str(GIB))
    put(root, "sys/fs/cgroup/cpu.max", "100000 100000")
    assert memory(root) == (GIB, 2 * GIB)
    assert usable_threads(root) == (1, "cgroup quota of 1 processors")


def test_huge_pages_mode_is_the_one_in_brackets(root: Path) -> None:
    put(root, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    assert huge_pages(root) == "madvise"
