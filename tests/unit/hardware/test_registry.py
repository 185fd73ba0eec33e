"""Each way in which a plugin can be broken is named, with package, hook and cause, and the others load."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from doubles.plugins import platform_source, write_distribution

from octavo.contract import Capabilities, OpSignature
from octavo.hardware.registry import Registry

Discover = Callable[[], Registry]

IMPORTS = "from octavo.contract import Capabilities, OpImpl, PlatformInfo, Support, hookimpl\n"


def hook(body: str, signature: str = "octavo_platforms()") -> str:
    return f"{IMPORTS}@hookimpl\ndef {signature}:\n    {body}\n"


def info(fields: str) -> str:
    return hook(f"return [PlatformInfo({fields})]")


@dataclass(frozen=True)
class Fault:
    """A broken plugin module, and what must be said of it."""

    id: str
    source: str
    stage: str
    said: str
    value: str = "broken_plugin"


FAULTS = (
    Fault("import-error", "import octavo_missing_dependency", "load", "No module named 'octavo_missing_dependency'"),
    Fault("no-module", "", "load", "No module named 'not_there'", value="not_there"),
    Fault("no-attribute", "", "load", "has no attribute 'plugin'", value="broken_plugin:plugin"),
    Fault("os-error", "raise OSError('libx.so: undefined symbol: f')", "load", "OSError: libx.so: undefined symbol: f"),
    Fault("syntax", "def (:", "load", "SyntaxError"),
    Fault("exit", "import sys; sys.exit(3)", "load", "SystemExit: 3"),
    Fault("panic", "class Panic(BaseException): pass\nraise Panic('index out of range')", "load", "Panic: index out"),
    Fault("class", f"{IMPORTS}class Plugin: pass", "register", "names a class", value="broken_plugin:Plugin"),
    Fault("misspelt", hook("return []", "octavo_platform()"), "register", "did you mean 'octavo_platforms'?"),
    Fault("extra-argument", hook("return []", "octavo_platforms(x)"), "register", "'x'"),
    Fault("unmarked", "def octavo_platforms(): return []", "register", "octavo_platforms is not marked"),
    Fault("empty", "", "register", "no function is marked"),
    Fault(
        "wrapper",
        f"{IMPORTS}@hookimpl(wrapper=True)\ndef octavo_platforms():\n    return (yield)\n",
        "register",
        "is a wrapper",
    ),
    Fault("raises", hook("raise RuntimeError('driver 1 is too old')"), "octavo_platforms", "driver 1 is too old"),
    Fault("exits-in-hook", hook("raise SystemExit('no licence')"), "octavo_platforms", "SystemExit: no licence"),
    Fault("none", hook("return None"), "octavo_platforms", "returned NoneType, a list is needed"),
    Fault("not-a-list", hook("return 7"), "octavo_platforms", "returned int, a list is needed"),
    Fault("wrong-item", hook("return ['gpu']"), "octavo_platforms", "the list holds a str, all must be PlatformInfo"),
    Fault("next-major", info("'x', (1, 0), True, 'r', print"), "octavo_platforms", "written for contract 1.0; this"),
    Fault("bad-name", info("'My GPU', (0, 9), True, 'r', print"), "octavo_platforms", "name must be lower-case"),
    Fault(
        "bad-version", info("'x', '0.9', True, 'r', print"), "octavo_platforms", "api_version must be (major, minor)"
    ),
    Fault(
        "bad-available", info("'x', (0, 9), None, 'r', print"), "octavo_platforms", "available must be True or False"
    ),
    Fault("bad-create", info("'x', (0, 9), True, 'r', None"), "octavo_platforms", "create must take a device index"),
    Fault(
        "twice-in-one",
        hook("return [PlatformInfo('x', (0, 9), True, 'r', print)] * 2"),
        "octavo_platforms",
        "platform 'x' is given 2 times",
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_broken_plugin_is_named_and_the_others_load(fault: Fault, tmp_path: Path, discover_in: Discover) -> None:
    write_distribution(tmp_path, "vendor-bad", {"bad": fault.value}, {"broken_plugin": fault.source}, version="2.3")
    write_distribution(tmp_path, "a-good", {"a_good": "a_good_plugin"}, {"a_good_plugin": platform_source("first")})
    write_distribution(tmp_path, "z-good", {"z_good": "z_good_plugin"}, {"z_good_plugin": platform_source("last")})
    registry = discover_in()
    assert sorted(registry.platforms) == ["first", "last"]
    (problem,) = registry.problems
    assert (problem.plugin, problem.origin, problem.stage) == ("bad", "vendor-bad 2.3", fault.stage)
    assert fault.said in problem.reason
    assert "\n" not in str(problem)
    assert [plugin.name for plugin in registry.plugins] == ["a_good", "bad", "z_good"]


def test_the_traceback_of_a_raise_is_kept(tmp_path: Path, discover_in: Discover) -> None:
    write_distribution(tmp_path, "bad", {"bad": "bad_plugin"}, {"bad_plugin": "def f():\n    1 / 0\nf()"})
    (problem,) = discover_in().problems
    assert problem.reason == "ZeroDivisionError: division by zero"
    assert 'bad_plugin.py", line 2, in f' in problem.detail


def test_an_interrupt_stays_the_users(tmp_path: Path, discover_in: Discover) -> None:
    write_distribution(tmp_path, "bad", {"bad": "bad_plugin"}, {"bad_plugin": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        discover_in()


def test_two_distributions_with_one_plugin_name(tmp_path: Path, discover_in: Discover) -> None:
    write_distribution(tmp_path, "one", {"same": "one_plugin"}, {"one_plugin": platform_source("one")})
    write_distribution(tmp_path, "two", {"same": "two_plugin"}, {"two_plugin": platform_source("two")}, version="2.0")
    registry = discover_in()
    assert registry.platforms == {}
    (problem,) = registry.problems
    assert problem.plugin == "same"
    assert sorted(problem.origin.split(", ")) == ["one 1.0", "two 2.0"]
    assert "none of them is loaded" in problem.reason


def test_two_names_for_one_object(tmp_path: Path, discover_in: Discover) -> None:
    plugins = {"main": "alias_plugin", "other": "alias_plugin"}
    write_distribution(tmp_path, "alias", plugins, {"alias_plugin": platform_source("only")})
    registry = discover_in()
    assert list(registry.platforms) == ["only"]
    assert [str(problem) for problem in registry.problems] == [
        "plugin 'other' (alias 1.0) failed in register: the entry point names the same object as plugin 'main'"
    ]


def test_one_platform_from_two_plugins_is_taken_from_neither(tmp_path: Path, discover_in: Discover) -> None:
    for name in ("one", "two"):
        write_distribution(tmp_path, name, {name: f"{name}_plugin"}, {f"{name}_plugin": platform_source("chip")})
    registry = discover_in()
    assert registry.platforms == {}
    assert [problem.plugin for problem in registry.problems] == ["one", "two"]
    assert all("by one (one 1.0), two (two 1.0)" in problem.reason for problem in registry.problems)


def test_broken_metadata_of_one_distribution(tmp_path: Path, discover_in: Discover) -> None:
    write_distribution(tmp_path, "bad", {}, {}, entry_points="[octavo.platforms]\nno equals sign here\n")
    write_distribution(tmp_path, "good", {"good": "good_plugin"}, {"good_plugin": platform_source("good")})
    registry = discover_in()
    assert list(registry.platforms) == ["good"]
    (problem,) = registry.problems
    assert (problem.plugin, problem.stage) == ("bad", "metadata")


def test_of_two_distributions_of_one_name_the_first_on_the_path_counts(tmp_path: Path) -> None:
    from importlib.metadata import distributions

    from octavo.hardware.registry import installed_entry_points

    for folder, version in (("first", "2.0"), ("second", "1.0")):
        write_distribution(tmp_path / folder, "pack", {"p": f"{folder}_plugin"}, {}, version=version)
    path = [str(tmp_path / "first"), str(tmp_path / "second")]
    entry_points, problems = installed_entry_points(distributions(path=path))
    assert [entry_point.value for entry_point in entry_points] == ["first_plugin"]
    assert problems == []


def test_a_plugin_of_a_later_minor_may_bring_more(tmp_path: Path, discover_in: Discover) -> None:
    later = platform_source("later").replace("(0, 9)", "(0, 99)") + (
        "@hookimpl(optionalhook=True)\ndef octavo_of_a_later_minor(): return []\n"
    )
    write_distribution(tmp_path, "later", {"later": "later_plugin"}, {"later_plugin": later})
    registry = discover_in()
    assert registry.problems == []
    assert list(registry.platforms) == ["later"]


def test_hooks_may_take_fewer_arguments(tmp_path: Path, discover_in: Discover) -> None:
    write_distribution(tmp_path, "few", {"few": "few_plugin"}, {"few_plugin": hook("return []", "octavo_ops()")})
    registry = discover_in()
    assert registry.ops(Capabilities()) == []
    assert registry.problems == []


OPS_SOURCE = """
@hookimpl
def octavo_ops(capabilities):
    if "spells" not in capabilities.kernel_languages:
        return []
    return [OpImpl("rms_norm", "spells", "portable", lambda args: args.x)]
"""


def test_portable_ops_follow_the_capabilities(tmp_path: Path, discover_in: Discover) -> None:
    write_distribution(tmp_path, "spells", {"spells": "spells_plugin"}, {"spells_plugin": IMPORTS + OPS_SOURCE})
    registry = discover_in()
    assert registry.ops(Capabilities()) == []
    (impl,) = registry.ops(Capabilities(kernel_languages=("spells",)))
    assert (impl.op, impl.provider, impl.tier) == ("rms_norm", "spells", "portable")
    assert impl.supports(OpSignature("rms_norm", torch.float32, "cpu"))


OPS_FAULTS = {
    "raises": ("raise OSError('no compiler')", "OSError: no compiler"),
    "two-arguments": ("return [OpImpl('rms_norm', 'p', 'portable', lambda x, w: x)]", "fn of rms_norm must take one"),
    "unknown-tier": ("return [OpImpl('rms_norm', 'p', 'fast', print)]", "tier of rms_norm must be one of native"),
    "misspelt-op": ("return [OpImpl('rmsnorm', 'p', 'portable', print)]", "did you mean 'rms_norm'?"),
    "claim": ("return [OpImpl('rms_norm', 'p', 'portable', print, row_invariant=True)]", "must be a Support"),
    "none": ("return None", "a list is needed"),
}


@pytest.mark.parametrize("case", OPS_FAULTS)
def test_broken_offers_of_ops_are_named(case: str, tmp_path: Path, discover_in: Discover) -> None:
    body, said = OPS_FAULTS[case]
    source = hook(body, "octavo_ops(capabilities)")
    write_distribution(tmp_path, "bad", {"bad": "bad_plugin"}, {"bad_plugin": source})
    write_distribution(tmp_path, "spells", {"spells": "spells_plugin"}, {"spells_plugin": IMPORTS + OPS_SOURCE})
    registry = discover_in()
    assert len(registry.ops(Capabilities(kernel_languages=("spells",)))) == 1
    (problem,) = registry.problems
    assert (problem.plugin, problem.stage) == ("bad", "octavo_ops")
    assert said in problem.reason
    registry.ops(Capabilities())
    assert len(registry.problems) == 1, "asking twice must not say it twice"


def test_ops_of_a_later_minor_are_left_alone(tmp_path: Path, discover_in: Discover) -> None:
    source = hook("return [OpImpl('new_op', 'p', 'portable', print, api_version=(0, 99))]", "octavo_ops(capabilities)")
    write_distribution(tmp_path, "later", {"later": "later_plugin"}, {"later_plugin": source})
    registry = discover_in()
    assert registry.ops(Capabilities()) == []
    assert registry.problems == []
