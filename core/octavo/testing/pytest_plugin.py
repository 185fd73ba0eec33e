"""`pytest --octavo-platform=NAME`: each check of the kit is a test. Without the flag nothing happens."""

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from octavo.testing.bench import Bench
    from octavo.testing.catalog import Check
    from octavo.testing.expectations import Expectation

__all__ = ["ConformanceItem"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flags."""
    group = parser.getgroup("octavo", "conformance of an Octavo platform")
    group.addoption("--octavo-platform", metavar="NAME", help="check this platform")
    group.addoption("--octavo-level", type=int, default=2, metavar="N", help="the highest level to check (default: 2)")
    group.addoption("--octavo-expectations", metavar="FILE", help="YAML file of checks that fail or are skipped")


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose among the items
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the kit's checks before the tests that were collected."""
    platform = config.getoption("octavo_platform")
    if platform is None:
        return
    from octavo.errors import OctavoError
    from octavo.testing.bench import Bench
    from octavo.testing.catalog import checks
    from octavo.testing.expectations import Expectations

    path = config.getoption("octavo_expectations")
    try:
        expectations = Expectations() if path is None else Expectations.read(path)
        bench = Bench(platform)
        assert bench.platform  # an unknown name is the command line's fault, and no test's
    except OctavoError as error:
        raise pytest.UsageError(str(error)) from error
    config.add_cleanup(lambda: bench.__exit__(None, None, None))
    items[:0] = [
        ConformanceItem.from_parent(
            session, name=f"{platform}::{check}", check=check, bench=bench, expected=expectations.of_check(check)
        )
        for check in checks(config.getoption("octavo_level"))
    ]


class ConformanceItem(pytest.Item):
    """One check."""

    def __init__(self, *, check: "Check", bench: "Bench", expected: "Expectation", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._check = check
        self._bench = bench
        self._expected = expected

    def runtest(self) -> None:
        """Run it; outcomes that pytest has words for become those."""
        from octavo.testing.runner import run_check

        result = run_check(self._check, self._bench, self._expected)
        if result.outcome in ("skip", "not offered"):
            pytest.skip(f"{result.outcome}: {result.detail}")
        if result.outcome == "xfail":
            pytest.xfail(result.detail)
        if not result.ok:
            pytest.fail("\n".join(filter(None, (result.trace, result.detail))), pytrace=False)

    def reportinfo(self) -> tuple[str, None, str]:
        """Where it stands: nowhere, so its name is all."""
        return "octavo.testing", None, self.name

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """The verdict alone: how the kit came to it is of no use to a platform's author."""
        return str(excinfo.value)
