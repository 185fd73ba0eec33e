"""Resident memory of this process, where the system tells it."""

import os
from pathlib import Path

__all__ = ["peak_resident_bytes", "resident_bytes"]

STATUS = Path("/proc/self/statm")


def resident_bytes() -> int | None:
    """Pages of this process that are in memory now."""
    try:
        return int(STATUS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def peak_resident_bytes() -> int | None:
    """The most there ever were."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
