"""The conformance kit: what a platform promises, checked. `octavo conformance --platform NAME` runs it.

In a plugin's own tests:

    import pytest
    from octavo.testing import Bench, Check, checks

    @pytest.fixture(scope="session")
    def bench():
        with Bench("NAME") as bench:
            yield bench

    @pytest.mark.parametrize("check", checks(level=0), ids=str)
    def test_conformance(check: Check, bench: Bench) -> None:
        check.test(bench)

or, without a line of code, `pytest --octavo-platform=NAME`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.testing.bench import Bench
    from octavo.testing.catalog import Check, checks
    from octavo.testing.outcome import CheckError, NotOfferedError
    from octavo.testing.runner import Report, conformance

__all__ = ["Bench", "Check", "CheckError", "NotOfferedError", "Report", "checks", "conformance"]

# Resolved on first use: pytest loads the kit's plugin in every run, also in those that have nothing to do with it.
_HOMES = {
    "Bench": "octavo.testing.bench",
    "Check": "octavo.testing.catalog",
    "CheckError": "octavo.testing.outcome",
    "NotOfferedError": "octavo.testing.outcome",
    "Report": "octavo.testing.runner",
    "checks": "octavo.testing.catalog",
    "conformance": "octavo.testing.runner",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
