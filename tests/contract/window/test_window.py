"""Plugins of other versions: a wheel of 0.9 as it was built once, one of the major before, one of a newer minor."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.plugins import platform_source, write_distribution

from octavo.contract import API_VERSION, OPS, AddedField, Capabilities, OpDefinition, OpSignature, RMSNorm
from octavo.contract import version as contract_version
from octavo.hardware import registry as registry_module
from octavo.hardware import resolve
from octavo.hardware.choose import create_platform
from octavo.hardware.registry import Registry, discover, installed_entry_points

WHEEL = Path(__file__).with_name("octavo_frozen-0.1.0-py3-none-any.whl")
SHA256 = "62a6dcbbb11eeafb4a3e80579696a65f648049f6c53e759226dacded041a469a"  # it is never built again


@pytest.fixture(scope="session")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the wheel."""
    assert hashlib.sha256(WHEEL.read_bytes()).hexdigest() == SHA256
    target = tmp_path_factory.mktemp("frozen")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    done = subprocess.run([*pip, str(WHEEL)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def octavo(site: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_the_frozen_wheel_passes_level_0(frozen: Path) -> None:
    done = octavo(frozen, "conformance", "--platform", "frozen", "--level", "0", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["plugin"], report["reached"]) == ("frozen (octavo-frozen 0.1.0)", 0)
    details = {result["name"]: result["detail"] for result in report["results"]}
    assert details["ops/rms_norm/float32"].startswith("frozen (native): 14 cases")
    outcomes = {result["outcome"] for result in report["results"] if result["name"].startswith("behaviour/")}
    assert outcomes == {"pass", "not offered"}


def test_the_frozen_wheel_is_shown_and_serves_only_who_names_it(frozen: Path) -> None:
    done = octavo(frozen, "info", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (shown,) = [platform for platform in report["platforms"] if platform["name"] == "frozen"]
    assert (shown["distribution"], shown["version"], shown["available"]) == ("octavo-frozen", "0.1.0", True)
    assert report["chosen"]["name"] != "frozen"


Discover = Callable[[Path], Registry]


@pytest.fixture
def discover_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Discovers what is installed in a folder, whose modules are forgotten afterwards."""
    before = set(sys.modules)

    def run(folder: Path) -> Registry:
        monkeypatch.syspath_prepend(folder)
        entry_points, problems = installed_entry_points(distributions(path=[str(folder)]))
        assert problems == []
        return discover(entry_points)

    yield run
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("octavo_frozen", "newer_plugin", "older_plugin"):
            del sys.modules[name]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes this the core of another version of the contract."""

    def run(major: int, minor: int) -> None:
        for module in (contract_version, registry_module, resolve):
            monkeypatch.setattr(module, "API_VERSION", (major, minor))

    return run


def test_a_core_of_the_next_major_serves_it_and_offers_it_nothing_newer(
    frozen: Path, discover_in: Discover, become: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was added since is default, or goes to the next implementation with the reason."""
    become(1, 1)
    clamped = OpDefinition("rms_norm", RMSNorm, ("hidden_size", "clamp"), (AddedField("clamp", (1, 1), 0.0),))
    monkeypatch.setitem(OPS, "rms_norm", clamped)
    registry = discover_in(frozen)
    assert registry.problems == []
    platform = create_platform(registry.platforms["frozen"])
    (own,) = platform.ops()
    assert own.api_version == (0, 9)

    def signature(**traits: float) -> OpSignature:
        return OpSignature("rms_norm", torch.float32, "cpu", (("hidden_size", 64), *traits.items()))

    resolver = resolve.OpResolver(platform)
    assert resolver.resolve(signature()).impl.provider == "frozen"
    assert resolver.resolve(signature(clamp=0.0)).impl.provider == "frozen"
    reference = next(impl for impl in resolver._ops["rms_norm"] if impl.tier == "reference")
    monkeypatch.setitem(vars(reference), "api_version", (1, 1))  # core's own always knows what core asks
    newer = resolver.resolve(signature(clamp=3.0))
    assert newer.impl.provider == "torch"
    assert newer.skipped[0].reasons == ("written for contract 0.9, the call uses what 1.1 added",)


@pytest.mark.parametrize("version", [(2, 0), (7, 3)])
def test_a_core_two_majors_on_refuses_it_in_one_sentence(
    version: tuple[int, int], frozen: Path, discover_in: Discover, become: Callable[[int, int], None]
) -> None:
    become(*version)
    registry = discover_in(frozen)
    assert registry.platforms == {}
    (problem,) = registry.problems
    ours = f"{version[0]}.{version[1]}"
    assert str(problem) == (
        f"plugin 'frozen' (octavo-frozen 0.1.0) failed in octavo_platforms: platform 'frozen' was written for contract"
        f" 0.9; this Octavo has {ours} and serves majors {version[0] - 1} and {version[0]}"
    )


def test_a_plugin_of_the_major_before_serves(
    tmp_path: Path, discover_in: Discover, become: Callable[[int, int], None]
) -> None:
    become(3, 0)
    source = platform_source("older").replace("(0, 9)", "(2, 17)")
    write_distribution(tmp_path, "older", {"older": "older_plugin"}, {"older_plugin": source})
    registry = discover_in(tmp_path)
    assert registry.problems == []
    assert registry.platforms["older"].api_version == (2, 17)
    assert create_platform(registry.platforms["older"]).memory_info().free > 0


NEXT_MINOR = (API_VERSION[0], API_VERSION[1] + 1)
NEWER = f"""
import torch
from octavo.contract import OpImpl, hookimpl
from octavo.contract.reference import rms_norm

@hookimpl
def octavo_ops(capabilities):
    return [
        OpImpl("rms_norm", "newer", "portable", rms_norm, api_version={NEXT_MINOR}),
        OpImpl("mixture_of_experts", "newer", "portable", lambda args: args, api_version={NEXT_MINOR}),
    ]

@hookimpl(optionalhook=True)
def octavo_collectives(ranks):
    raise AssertionError("nobody here knows this hook")
"""


def test_a_plugin_of_a_newer_minor_serves_with_what_is_known_here(tmp_path: Path, discover_in: Discover) -> None:
    source = platform_source("newer").replace("(0, 9)", str(NEXT_MINOR)) + NEWER
    write_distribution(tmp_path, "newer", {"newer": "newer_plugin"}, {"newer_plugin": source})
    registry = discover_in(tmp_path)
    offered = registry.ops(Capabilities())
    assert registry.problems == []
    assert [impl.op for impl in offered] == ["rms_norm"]
    platform = create_platform(registry.platforms["newer"])
    signature = OpSignature("rms_norm", torch.float32, "cpu", (("hidden_size", 64),))
    assert resolve.OpResolver(platform, offered).resolve(signature).impl.provider == "newer"


def test_a_hook_that_is_new_and_not_marked_so_is_named(tmp_path: Path, discover_in: Discover) -> None:
    source = platform_source("newer") + NEWER.replace("(optionalhook=True)", "")
    write_distribution(tmp_path, "newer", {"newer": "newer_plugin"}, {"newer_plugin": source})
    (problem,) = discover_in(tmp_path).problems
    assert (problem.stage, problem.plugin) == ("register", "newer")
    assert "unknown hook 'octavo_collectives'" in problem.reason
