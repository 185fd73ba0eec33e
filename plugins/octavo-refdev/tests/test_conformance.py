"""The platform does what the contract asks, and what it says of itself."""

from collections.abc import Iterator

import pytest

from octavo.testing import Bench, Check, checks

LEVEL = 0


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench("refdev") as bench:
        yield bench


@pytest.mark.parametrize("check", checks(LEVEL), ids=str)
def test_conformance(check: Check, bench: Bench) -> None:
    check.test(bench)
