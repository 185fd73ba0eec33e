"""The contract's version, and what follows from it for implementations that were written before it.

A minor version only adds: hooks, optional methods, and fields with defaults. An implementation states the version
it was written for, and is never offered a call that uses a newer field at other than its default; so one that was
written for the major before serves on, and takes part in nothing that came since.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["API_VERSION", "FIRST_VERSION", "AddedField", "version_for"]

FIRST_VERSION: tuple[int, int] = (0, 9)
# (major, minor); 0.10 brought weight formats beside dense, 0.11 the op sample, 0.12 defined it to the bit
API_VERSION: tuple[int, int] = (0, 12)


@dataclass(frozen=True)
class AddedField:
    """A field or trait that came after the first version.

    Attributes:
        name: of the field.
        version: (major, minor) that brought it.
        default: the value at which it is as if it were not there.

    """

    name: str
    version: tuple[int, int]
    default: Any


def version_for(added: Iterable[AddedField], value_of: Callable[[AddedField], Any]) -> tuple[int, int]:
    """The first version that knows everything a call uses; `value_of` reads a field of the call."""
    return max((field.version for field in added if value_of(field) != field.default), default=FIRST_VERSION)
