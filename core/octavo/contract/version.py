"""The contract's version, and what follows from it for implementations that were written before it.

A minor version only adds: hooks, optional methods, and fields with defaults. An implementation states the minor
it was written for, and is never offered a call that uses a newer field at other than its default.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["API_VERSION", "AddedField", "minor_for"]

API_VERSION: tuple[int, int] = (0, 9)  # (major, minor)


@dataclass(frozen=True)
class AddedField:
    """A field or trait that came after the first minor version.

    Attributes:
        name: of the field.
        minor: the version that brought it.
        default: the value at which it is as if it were not there.

    """

    name: str
    minor: int
    default: Any


def minor_for(added: Iterable[AddedField], value_of: Callable[[AddedField], Any]) -> int:
    """The first minor version that knows everything a call uses; `value_of` reads a field of the call."""
    return max((field.minor for field in added if value_of(field) != field.default), default=0)
