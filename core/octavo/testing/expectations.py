"""What is known of a platform before it is checked, from a YAML file.

    # check, or a shell-like pattern of checks: what to expect
    ops/linear/float16: {xfail: sums are rounded to half}
    behaviour/memory: {skip: no memory is told here}
    "ops/*": pass

A check that no line names is expected to pass; where several do, the last one counts. Xfail: it must fail, and when
it passes the line has to go. Skip: it is not run.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from octavo.errors import ConfigError
from octavo.testing.catalog import Check, checks, matching

__all__ = ["Expectation", "Expectations"]

Kind = Literal["pass", "xfail", "skip"]


@dataclass(frozen=True)
class Expectation:
    """What is expected of a check, and why where it is not to pass."""

    kind: Kind = "pass"
    reason: str = ""


class Expectations:
    """Patterns and what is expected of the checks that they name."""

    def __init__(self, lines: Mapping[str, Expectation] | None = None) -> None:
        self._lines = dict(lines or {})

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Expectations":
        """From a file.

        Raises:
            ConfigError: it cannot be read, is no such mapping, or names no check of the kit.

        """
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the expectations {os.fspath(path)}: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ConfigError(
                f"the expectations {os.fspath(path)} are no YAML: {' '.join(str(error).split())}"
            ) from error
        if not isinstance(content or {}, dict):
            raise ConfigError(f"the expectations {os.fspath(path)} must map checks to pass, xfail or skip")
        return cls.of(content or {}, os.fspath(path))

    @classmethod
    def of(cls, content: Mapping[Any, Any], source: str = "given") -> "Expectations":
        """From plain data.

        Raises:
            ConfigError: as `read`.

        """
        lines = {}
        for pattern, given in content.items():
            lines[str(pattern)] = _parse(str(pattern), given, source)
            if not any(matching(check.name, [str(pattern)]) for check in checks()):
                raise ConfigError(f"expectations ({source}): no check is named {pattern}; --list shows them all")
        return cls(lines)

    def of_check(self, check: Check) -> Expectation:
        """What is expected of one check."""
        found = [line for pattern, line in self._lines.items() if matching(check.name, [pattern])]
        return found[-1] if found else Expectation()


def _parse(pattern: str, given: Any, source: str) -> Expectation:
    if given == "pass":
        return Expectation()
    if isinstance(given, dict) and len(given) == 1:
        [(kind, reason)] = given.items()
        if kind in ("xfail", "skip") and isinstance(reason, str) and reason.strip():
            return Expectation(cast(Kind, kind), reason.strip())
    allowed: Sequence[str] = ("pass", "{xfail: reason}", "{skip: reason}")
    raise ConfigError(f"expectations ({source}): {pattern} is {given!r}; allowed are {', '.join(allowed)}")
