"""The native library, in each instruction set that this machine has."""

from collections.abc import Iterator

import pytest

from octavo_cpu.native import NativeLibrary, find_native


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `isa_library` once an instruction set."""
    if "isa_library" in metafunc.fixturenames:
        library = find_native().library
        isas = ["none"] if library is None else library.isas_usable
        metafunc.parametrize("isa_library", isas, indirect=True)


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    """The library of the installed package; without it these tests fail, they are not skipped."""
    lookup = find_native()
    assert lookup.library is not None, lookup.reason
    return lookup.library


@pytest.fixture
def isa_library(library: NativeLibrary, request: pytest.FixtureRequest) -> Iterator[NativeLibrary]:
    """The library, told to use one instruction set and two threads."""
    before = library.num_threads
    library.set_isa(request.param)
    library.set_num_threads(2)
    assert library.isa == request.param
    yield library
    library.set_isa(library.isas_usable[-1])
    library.set_num_threads(before)
