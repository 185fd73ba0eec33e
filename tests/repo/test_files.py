"""Files are small enough to read, and finished."""

import re
import warnings
from pathlib import Path

import pytest
from repo.sources import text_of, tracked

CODE = (".py", ".cpp", ".cc", ".c", ".h", ".inl", ".cu", ".cuh", ".hip")
MANY_LINES = 500  # a signal to look
TOO_MANY_LINES = 600

# Spelt in two parts, so that this file holds none of them.
UNFINISHED = re.compile("|".join(a + b for a, b in [("TO", "DO"), ("FIX", "ME"), ("XX", "X"), ("Not", "Implemented")]))
SKIPPED = re.compile("|".join(a + b for a, b in [(r"\bsk", r"ip(if)?\("), (r"\.xf", "ail"), (r"\bimportor", "skip")]))


@pytest.mark.parametrize("path", tracked(CODE), ids=str)
def test_no_file_is_long(path: Path) -> None:
    num_lines = text_of(path).count("\n")
    if num_lines > MANY_LINES:
        warnings.warn(f"{path} has {num_lines} lines: can it be two?", stacklevel=1)
    assert num_lines <= TOO_MANY_LINES


@pytest.mark.parametrize("path", tracked(CODE), ids=str)
def test_nothing_is_left_unfinished(path: Path) -> None:
    assert UNFINISHED.findall(text_of(path)) == []


@pytest.mark.parametrize("path", tracked((".py",), "tests"), ids=str)
def test_no_test_is_skipped(path: Path) -> None:
    assert [match[0] for match in SKIPPED.finditer(text_of(path))] == []


@pytest.mark.parametrize("path", tracked((".py",), "tests"), ids=str)
def test_test_files_are_collected(path: Path) -> None:
    """A file of tests under another name would never run."""
    has_tests = re.search(r"^(async )?def test_|^class Test", text_of(path), re.MULTILINE)
    assert bool(has_tests) == path.name.startswith("test_")
