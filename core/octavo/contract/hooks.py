"""The pluggy hooks. A plugin is a module or an instance named by an entry point in group `octavo.platforms`.

from octavo.contract import PlatformInfo, hookimpl

@hookimpl
def octavo_platforms() -> list[PlatformInfo]: ...
"""

import pluggy

from octavo.contract.ops import OpImpl
from octavo.contract.platform import Capabilities, PlatformInfo

__all__ = ["ENTRY_POINT_GROUP", "HookSpecs", "hookimpl"]

ENTRY_POINT_GROUP = "octavo.platforms"

hookspec = pluggy.HookspecMarker("octavo")
hookimpl = pluggy.HookimplMarker("octavo")


class HookSpecs:
    """Every hook; each implementation returns a list, and may take fewer arguments.

    A plugin written for a later minor version marks a hook that older cores lack with
    `@hookimpl(optionalhook=True)`; a core that does not know it passes it over.
    """

    @hookspec
    def octavo_platforms(self) -> list[PlatformInfo]:
        """The platforms this plugin brings, available or not. Creates no device context."""
        return []

    @hookspec
    def octavo_ops(self, capabilities: Capabilities) -> list[OpImpl]:
        """Kernels that serve any platform whose capabilities allow them (portable kernels)."""
        return []
