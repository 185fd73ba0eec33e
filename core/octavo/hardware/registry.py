"""Finds platform plugins: each entry point under its own guard, and nothing is skipped in silence.

Whatever a plugin does wrong becomes a `Problem` that names it, its distribution, the hook and the cause; the
others load. Finding and asking plugins touches no device: that begins with `PlatformInfo.create`.
"""

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, TypeVar

import pluggy

from octavo.contract import ENTRY_POINT_GROUP, OPS, Capabilities, HookSpecs, OpImpl, PlatformInfo
from octavo.contract.version import API_VERSION
from octavo.hardware.text import nearest, one_line
from octavo.hardware.watchdog import Watchdog

__all__ = ["Plugin", "Problem", "Registry", "discover", "installed_entry_points"]

IN_TREE_DISTRIBUTION = "octavo"
HOOKS = tuple(sorted(name for name in vars(HookSpecs) if name.startswith("octavo_")))

T = TypeVar("T")


@dataclass(frozen=True)
class Plugin:
    """An entry point of the group, loaded or not.

    Attributes:
        name: of the entry point.
        distribution, version: the package that declares it; "unknown" where nothing says so.
        value: what the entry point refers to ("package.module").

    """

    name: str
    distribution: str
    version: str
    value: str

    @property
    def in_tree(self) -> bool:
        """Whether it comes with Octavo itself."""
        return self.distribution == IN_TREE_DISTRIBUTION

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


@dataclass(frozen=True)
class Problem:
    """What a plugin did wrong.

    Attributes:
        plugin: entry point's name, or the distribution's where its metadata cannot be read.
        origin: distribution and version, of each one where several are at fault.
        stage: metadata, load, register, or the hook.
        reason: the cause in one line.
        detail: traceback, where there is one.

    """

    plugin: str
    origin: str
    stage: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"plugin {self.plugin!r} ({self.origin}) failed in {self.stage}: {self.reason}"


class Registry:
    """The plugins that were found, what they offer, and what is wrong with them. Made by `discover`."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.plugins: list[Plugin] = []
        self.problems: list[Problem] = []
        self.platforms: dict[str, PlatformInfo] = {}
        self._plugin_of: dict[str, Plugin] = {}
        self._manager = pluggy.PluginManager("octavo")
        self._manager.add_hookspecs(HookSpecs)
        self._watchdog = watchdog

    def plugin_of(self, platform: str) -> Plugin:
        """The plugin that brought a platform."""
        return self._plugin_of[platform]

    def ops(self, capabilities: Capabilities) -> list[OpImpl]:
        """Portable implementations that plugins offer for `capabilities`.

        A plugin that fails to answer is added to `problems`, and the others serve.
        """
        offered: list[OpImpl] = []
        for plugin in self.plugins:
            for impl in self._ask(plugin, "octavo_ops", OpImpl, capabilities=capabilities):
                if impl.op in OPS:
                    offered.append(impl)
                elif impl.api_version <= API_VERSION:
                    reason = f"offers the unknown op {impl.op!r}{nearest(impl.op, OPS)}"
                    self._add_problem(plugin, "octavo_ops", reason)
        return offered

    def _load(self, entry_points: Iterable[EntryPoint]) -> None:
        by_name: dict[str, list[tuple[Plugin, EntryPoint]]] = {}
        for entry_point in entry_points:
            by_name.setdefault(entry_point.name, []).append((_describe(entry_point), entry_point))
        for name, same in sorted(by_name.items()):
            plugin, entry_point = same[0]
            self.plugins.append(plugin)
            distinct = dict.fromkeys(other for other, _ in same)
            if len(distinct) > 1:
                origin = ", ".join(f"{p.distribution} {p.version}" for p in distinct)
                reason = "several entry points have this name, so none of them is loaded; uninstall all but one"
                self.problems.append(Problem(name, origin, "load", reason))
                continue
            loaded, content = self._guard(plugin, "load", entry_point.load)
            if loaded:
                self._register(plugin, content)

    def _register(self, plugin: Plugin, content: Any) -> None:
        if isinstance(content, type):
            self._add_problem(plugin, "register", "the entry point names a class; name a module or an instance")
            return
        known_as = self._manager.get_name(content)
        if known_as is not None:
            self._add_problem(plugin, "register", f"the entry point names the same object as plugin {known_as!r}")
            return
        registered, _ = self._guard(plugin, "register", self._manager.register, content, plugin.name)
        fault = self._hook_fault(content) if registered else None
        if fault is not None:
            self._add_problem(plugin, "register", fault)
        if (fault is not None or not registered) and self._manager.has_plugin(plugin.name):
            self._manager.unregister(name=plugin.name)  # pluggy leaves a refused plugin half registered

    def _hook_fault(self, content: Any) -> str | None:
        callers = self._manager.get_hookcallers(content) or []
        for caller in callers:
            impl = next(impl for impl in caller.get_hookimpls() if impl.plugin is content)
            # A plugin of a later minor version marks a hook that we do not know yet as optional.
            if not caller.has_spec() and not impl.optionalhook:
                return f"unknown hook {caller.name!r}{nearest(caller.name, HOOKS)}"
            if impl.hookwrapper or impl.wrapper:
                return f"{caller.name} is a wrapper; a plugin answers for itself alone"
        if callers:
            return None
        unmarked = [hook for hook in HOOKS if hasattr(content, hook)]
        named = f"; {', '.join(unmarked)} is not marked" if unmarked else ""
        return f"no function is marked with octavo.contract.hookimpl{named}"

    def _ask(self, plugin: Plugin, hook: str, item_type: type[T], **arguments: Any) -> list[T]:
        """What one plugin answers to one hook. In a bulk call, the first that raises would hide the others."""
        content = self._manager.get_plugin(plugin.name)
        callers = self._manager.get_hookcallers(content) if content is not None else None
        if hook not in {caller.name for caller in callers or ()}:
            return []
        others = [other for other in self._manager.get_plugins() if other is not content]
        answered, results = self._guard(plugin, hook, self._manager.subset_hook_caller(hook, others), **arguments)
        if not answered:
            return []
        answer = results[0] if results else None  # pluggy drops None
        if not isinstance(answer, list | tuple):
            self._add_problem(plugin, hook, f"returned {type(answer).__name__}, a list is needed")
            return []
        good = [item for item in answer if isinstance(item, item_type)]
        for item in answer:
            if not isinstance(item, item_type):
                reason = f"the list holds a {type(item).__name__}, all must be {item_type.__name__}"
                self._add_problem(plugin, hook, reason)
        return good

    def _ask_for_platforms(self) -> None:
        hook = "octavo_platforms"
        found: dict[str, list[tuple[Plugin, PlatformInfo]]] = {}
        for plugin in self.plugins:
            for info in self._ask(plugin, hook, PlatformInfo):
                refusal = version_refusal(info.api_version)
                if refusal is not None:
                    self._add_problem(plugin, hook, f"platform {info.name!r} {refusal}")
                    continue
                found.setdefault(info.name, []).append((plugin, info))
        for name, same in found.items():
            if len(same) == 1:
                self._plugin_of[name], self.platforms[name] = same[0]
                continue
            givers = ", ".join(dict.fromkeys(str(plugin) for plugin, _ in same))
            for plugin in dict.fromkeys(plugin for plugin, _ in same):
                reason = f"platform {name!r} is given {len(same)} times, by {givers}; none of them is taken"
                self._add_problem(plugin, hook, reason)

    def _guard(self, plugin: Plugin, stage: str, fn: Callable[..., T], *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        """Whether the call came back, and with what."""
        try:
            return True, self._watchdog.call(f"plugin {plugin} in {stage}", fn, *args, **kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit, and panics of foreign runtimes
            self._add_problem(plugin, stage, one_line(error), traceback.format_exc())
            return False, None

    def _add_problem(self, plugin: Plugin, stage: str, reason: str, detail: str = "") -> None:
        origin = f"{plugin.distribution} {plugin.version}"
        problem = Problem(plugin.name, origin, stage, reason, detail)
        if problem not in self.problems:
            self.problems.append(problem)


def discover(
    entry_points: Sequence[EntryPoint] | None = None, *, timeout: float = 10.0, exit_on_hang: bool = False
) -> Registry:
    """Load every plugin and ask each for its platforms. Never raises for what a plugin does.

    Args:
        entry_points: the plugins; None: all of the group that installed distributions declare.
        timeout: seconds after which a plugin that does not answer is named on standard error, with all stacks.
        exit_on_hang: end the process then; for commands, which own theirs.

    """
    registry = Registry(Watchdog(timeout, exit_on_hang))
    if entry_points is None:
        entry_points, registry.problems = installed_entry_points(distributions())
    registry._load(entry_points)
    registry._ask_for_platforms()
    return registry


def installed_entry_points(installed: Iterable[Distribution]) -> tuple[list[EntryPoint], list[Problem]]:
    """Entry points of the group, distribution by distribution: one with broken metadata must not hide the rest.

    Of two distributions of the same name the first counts, as for Python's import.
    """
    found: list[EntryPoint] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    for distribution in installed:
        if ENTRY_POINT_GROUP not in (distribution.read_text("entry_points.txt") or ""):
            continue  # before anything is parsed: there may be hundreds
        name = str(distribution.metadata["Name"])
        key = name.lower().replace("_", "-")
        if key in seen:
            continue
        seen.add(key)
        try:
            found += [ep for ep in distribution.entry_points if ep.group == ENTRY_POINT_GROUP]
        except Exception as error:
            origin = f"{name} {distribution.metadata['Version']}"
            reason = f"its entry points cannot be read: {one_line(error)}"
            problems.append(Problem(name, origin, "metadata", reason, traceback.format_exc()))
    return found, problems


def version_refusal(version: tuple[int, int]) -> str | None:
    """Why a contract version is not served, or None: the core serves its own major and the one before."""
    major = API_VERSION[0]
    if major - 1 <= version[0] <= major:
        return None
    served = f"majors {major - 1} and {major}" if major else "major 0"
    given, ours = ".".join(map(str, version)), ".".join(map(str, API_VERSION))
    return f"was written for contract {given}; this Octavo has {ours} and serves {served}"


def _describe(entry_point: EntryPoint) -> Plugin:
    dist = entry_point.dist
    name, version = (dist.name, dist.version) if dist is not None else ("unknown", "unknown")
    return Plugin(entry_point.name, str(name), str(version), entry_point.value)
