"""Which platform serves: the named one, else the best available one, and never another in silence."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from doubles.platforms import ToyPlatform
from doubles.plugins import platform_source, write_distribution

from octavo.contract import Capabilities, Platform, PlatformInfo
from octavo.errors import PlatformError
from octavo.hardware.choose import choose, choose_platform, create_platform, portable_ops
from octavo.hardware.registry import Registry, discover

Discover = Callable[[], Registry]


@pytest.fixture
def install(tmp_path: Path, discover_in: Discover) -> Callable[..., Registry]:
    """Installs platforms, `name=dict(distribution=..., available=..., priority=...)`, and modules that break."""

    def run(platforms: Mapping[str, Mapping[str, Any]], broken: Mapping[str, str] | None = None) -> Registry:
        by_distribution: dict[str, dict[str, str]] = {}
        for name, facts in platforms.items():
            options = {key: value for key, value in facts.items() if key != "distribution"}
            distribution = facts.get("distribution", f"octavo-{name}")
            by_distribution.setdefault(distribution, {})[name] = platform_source(name, **options)
        for distribution, sources in by_distribution.items():
            modules = {f"{name}_plugin": source for name, source in sources.items()}
            write_distribution(tmp_path, distribution, {name: f"{name}_plugin" for name in sources}, modules)
        for name, source in (broken or {}).items():
            write_distribution(tmp_path, name, {name: f"{name}_broken"}, {f"{name}_broken": source}, version="3.1")
        return discover_in()

    return run


def refused(registry: Registry, name: str | None = None) -> str:
    with pytest.raises(PlatformError) as caught:
        choose(registry, name)
    return str(caught.value)


def test_the_only_one(install: Callable[..., Registry]) -> None:
    choice = choose(install({"host": {"distribution": "octavo"}}))
    assert (choice.info.name, choice.reason) == ("host", "the only one available")


def test_the_only_one_beside_those_that_wait_to_be_named(install: Callable[..., Registry]) -> None:
    choice = choose(install({"host": {"distribution": "octavo"}, "shy": {"priority": -1}}))
    assert (choice.info.name, choice.reason) == ("host", "the only one that serves without being named")


def test_the_highest_priority_that_is_available(install: Callable[..., Registry]) -> None:
    registry = install(
        {
            "host": {"distribution": "octavo"},
            "fast": {"distribution": "octavo", "priority": 10},
            "faster": {"priority": 20, "available": False},
        }
    )
    choice = choose(registry)
    assert (choice.info.name, choice.reason) == ("fast", "highest priority (10) of those available")


def test_at_equal_priority_what_the_user_installed_goes_first(install: Callable[..., Registry]) -> None:
    registry = install({"host": {"distribution": "octavo"}, "vendor": {}})
    choice = choose(registry)
    assert choice.info.name == "vendor"
    assert choice.reason == "highest priority (0), and vendor (octavo-vendor 1.0) goes before what is built in"


def test_a_tie_lists_the_choices(install: Callable[..., Registry]) -> None:
    registry = install({"host": {"distribution": "octavo"}, "a": {"priority": 5}, "b": {"priority": 5}})
    said = refused(registry)
    assert said == (
        "several platforms have priority 5, set platform to one of them: "
        "a from a (octavo-a 1.0), b from b (octavo-b 1.0)"
    )
    assert choose_platform(registry, "b").name == "b"


def test_a_negative_priority_serves_only_who_names_it(install: Callable[..., Registry]) -> None:
    registry = install({"fake": {"priority": -1}})
    assert refused(registry) == "no platform can serve here: fake (available: it is a toy)"
    choice = choose(registry, "fake")
    assert (choice.info.name, choice.reason) == ("fake", "it was named")


def test_no_platform_lists_each_one_probed(install: Callable[..., Registry]) -> None:
    said = refused(install({"a": {"available": False}, "b": {"available": False}}))
    assert said == ("no platform can serve here: a (not available: it is a toy); b (not available: it is a toy)")
    assert refused(discover([])) == ("no platform can serve here: no installed distribution brings a platform plugin")


def test_a_named_one_that_is_unknown_or_cannot_serve(install: Callable[..., Registry]) -> None:
    registry = install({"host": {"distribution": "octavo"}, "vendor": {"available": False}})
    assert refused(registry, "vendor") == "platform 'vendor' cannot serve here: it is a toy"
    said = refused(registry, "vendr")
    assert said.startswith("unknown platform 'vendr'; did you mean 'vendor'? probed were: ")
    assert "host (available: it is a toy)" in said


def test_a_broken_plugin_stops_the_start(install: Callable[..., Registry]) -> None:
    registry = install({"host": {"distribution": "octavo"}}, {"chip": "raise OSError('libchip.so: cannot open')"})
    said = refused(registry)
    assert "plugin 'chip' (chip 3.1) failed in load: OSError: libchip.so: cannot open" in said
    assert "set platform to one that serves (host)" in said
    with pytest.raises(PlatformError) as caught:
        choose(registry)
    assert 'chip_broken.py", line 1' in "".join(caught.value.__notes__), "the traceback comes along"


def test_who_names_another_platform_goes_on_and_is_told(
    install: Callable[..., Registry], caplog: pytest.LogCaptureFixture
) -> None:
    registry = install({"host": {"distribution": "octavo"}}, {"chip": "raise OSError('libchip.so: cannot open')"})
    with caplog.at_level(logging.WARNING):
        assert choose_platform(registry, "host").name == "host"
    assert "plugin 'chip' (chip 3.1) failed in load" in caplog.text


def test_a_plugin_that_fails_to_offer_its_ops_stops_the_start(install: Callable[..., Registry]) -> None:
    source = (
        "from octavo.contract import hookimpl\n"
        "@hookimpl\ndef octavo_ops(capabilities): raise ImportError('compiler is gone')\n"
    )
    registry = install({"host": {"distribution": "octavo"}}, {"kernels": source})
    platform = create_platform(choose_platform(registry))
    with pytest.raises(PlatformError, match=r"'kernels' \(kernels 3.1\) failed in octavo_ops: ImportError: compiler"):
        portable_ops(registry, platform)
    assert portable_ops(registry, platform, "host") == []


def info(create: Callable[[int], Any]) -> PlatformInfo:
    return PlatformInfo("chip", (0, 9), True, "driver found", create)


def test_create_gets_the_device_index() -> None:
    asked = []

    def create(device: int) -> Platform:
        asked.append(device)
        return ToyPlatform()

    assert create_platform(info(create), 3).capabilities() == Capabilities()
    assert asked == [3]


def test_a_platform_that_cannot_be_made_is_named() -> None:
    def create(device: int) -> Platform:
        raise RuntimeError("out of\nmemory")

    with pytest.raises(PlatformError, match="platform 'chip' failed to start on device 1: RuntimeError: out of memory"):
        create_platform(info(create), 1)
    with pytest.raises(PlatformError, match=r"create\(\) returned NoneType, a Platform is needed"):
        create_platform(info(lambda device: None))


def test_a_platform_without_capabilities_is_named() -> None:
    class Vague(ToyPlatform):
        def capabilities(self) -> Any:
            return {}

    with pytest.raises(PlatformError, match=r"platform 'chip' failed to start: capabilities\(\) returned dict"):
        create_platform(info(lambda device: Vague()))


def test_a_platform_may_say_no_in_its_own_words() -> None:
    def create(device: int) -> Platform:
        raise PlatformError("chip 0 is in use by process 12")

    with pytest.raises(PlatformError, match="platform 'chip' failed to start on device 0: chip 0 is in use"):
        create_platform(info(create))
