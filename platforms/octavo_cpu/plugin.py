"""The plugin that offers the host processor. Probing reads two small files and loads nothing."""

from octavo.contract import Platform, PlatformInfo, hookimpl
from octavo_cpu.host import processor_name, usable_threads

NAME = "cpu"
API_VERSION = (0, 9)  # of the contract that this plugin was written for


@hookimpl
def octavo_platforms() -> list[PlatformInfo]:
    """The one platform that is always there."""
    num_threads, source = usable_threads()
    return [
        PlatformInfo(
            name=NAME,
            api_version=API_VERSION,
            available=True,
            reason="the host processor is always there",
            create=_create,
            priority=0,
            devices=(f"{processor_name()}, {num_threads} threads ({source})",),
        )
    ]


def _create(index: int) -> Platform:
    from octavo_cpu.platform import CpuPlatform

    return CpuPlatform(index)
