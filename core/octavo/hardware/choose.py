"""Which platform serves, and why. Running elsewhere than the user expects is a fault, so doubt stops the start."""

import difflib
import logging
from dataclasses import dataclass

from octavo.contract import Capabilities, OpImpl, Platform, PlatformInfo
from octavo.errors import OctavoError, PlatformError
from octavo.hardware.registry import Registry
from octavo.hardware.text import one_line

__all__ = ["Choice", "choose", "choose_platform", "create_platform", "portable_ops"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """A platform and, in one clause, why it was taken."""

    info: PlatformInfo
    reason: str


def choose_platform(registry: Registry, name: str | None = None) -> PlatformInfo:
    """See `choose`."""
    return choose(registry, name).info


def choose(registry: Registry, name: str | None = None) -> Choice:
    """The platform that `name` says, or the available one of highest priority.

    Args:
        registry: what was discovered.
        name: the `platform` setting (a flag, OCTAVO_PLATFORM or a settings file); None: left to the rules.

    Raises:
        PlatformError: the named one is unknown or cannot serve here; a plugin is broken and no platform was
            named; none is available; several stand first.

    """
    if name is not None:
        info = _named(registry, name)
        _refuse_problems(registry, name)
        return Choice(info, "it was named")
    _refuse_problems(registry, None)
    # A platform of negative priority serves only who names it.
    able = [info for info in registry.platforms.values() if info.available and info.priority >= 0]
    if not able:
        raise PlatformError(f"no platform can serve here: {_probed(registry)}")
    ranks = {info.name: (info.priority, not registry.plugin_of(info.name).in_tree) for info in able}
    best = max(ranks.values())
    first = [info for info in able if ranks[info.name] == best]
    if len(first) > 1:
        choices = ", ".join(f"{info.name} from {registry.plugin_of(info.name)}" for info in first)
        raise PlatformError(f"several platforms have priority {best[0]}, set platform to one of them: {choices}")
    return Choice(first[0], _why(first[0], able, registry))


def create_platform(info: PlatformInfo, device: int = 0) -> Platform:
    """The platform itself, for a device index; the first moment that touches a device.

    Raises:
        PlatformError: it could not be made; the cause is chained.

    """
    try:
        platform = info.create(device)
        can = platform.capabilities() if isinstance(platform, Platform) else None
    except Exception as error:
        cause = str(error) if isinstance(error, OctavoError) else one_line(error)
        raise PlatformError(f"platform {info.name!r} failed to start on device {device}: {cause}") from error
    if not isinstance(platform, Platform):
        given = type(platform).__name__
        raise PlatformError(f"platform {info.name!r} failed to start: create() returned {given}, a Platform is needed")
    if not isinstance(can, Capabilities):
        given = type(can).__name__
        raise PlatformError(f"platform {info.name!r} failed to start: capabilities() returned {given}")
    return platform


def portable_ops(registry: Registry, platform: Platform, name: str | None = None) -> list[OpImpl]:
    """Portable implementations for `platform`: the `shared_ops` of an `OpResolver`.

    Args:
        registry: what was discovered.
        platform: from `create_platform`.
        name: as `choose` got it.

    Raises:
        PlatformError: a plugin failed to answer, and no platform was named.

    """
    num_known = len(registry.problems)
    offered = registry.ops(platform.capabilities())
    _refuse_problems(registry, name, num_known)
    return offered


def _refuse_problems(registry: Registry, name: str | None, num_known: int = 0) -> None:
    """Stop where no platform was named; else warn of those that are new."""
    if not registry.problems:
        return
    if name is not None:
        for problem in registry.problems[num_known:]:
            logger.warning("%s; going on, since platform %r was named", problem, name)
        return
    broken = "; ".join(map(str, registry.problems))
    error = PlatformError(
        f"a plugin is installed but broken, and no platform was named: {broken}. "
        f"Mend or uninstall it, or set platform to one that serves ({_names(registry)}); `octavo info --debug` has more"
    )
    for problem in registry.problems:
        if problem.detail:
            error.add_note(f"{problem.plugin}: {problem.detail}")  # shown where the error's own traceback is
    raise error


def _named(registry: Registry, name: str) -> PlatformInfo:
    info = registry.platforms.get(name)
    if info is None:
        close = difflib.get_close_matches(name, registry.platforms, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise PlatformError(f"unknown platform {name!r}; {hint}probed were: {_probed(registry)}")
    if not info.available:
        raise PlatformError(f"platform {name!r} cannot serve here: {info.reason}")
    return info


def _why(info: PlatformInfo, able: list[PlatformInfo], registry: Registry) -> str:
    if len(able) == 1:
        others = any(other.available and other is not info for other in registry.platforms.values())
        return "the only one that serves without being named" if others else "the only one available"
    if sum(other.priority == info.priority for other in able) > 1:
        return f"highest priority ({info.priority}), and {registry.plugin_of(info.name)} goes before what is built in"
    return f"highest priority ({info.priority}) of those available"


def _names(registry: Registry) -> str:
    return ", ".join(name for name, info in registry.platforms.items() if info.available) or "none is available"


def _probed(registry: Registry) -> str:
    """Each platform and broken plugin, and what is the matter with it."""
    found = [
        f"{info.name} ({'available' if info.available else 'not available'}: {info.reason})"
        for info in registry.platforms.values()
    ]
    return "; ".join([*found, *map(str, registry.problems)]) or "no installed distribution brings a platform plugin"
