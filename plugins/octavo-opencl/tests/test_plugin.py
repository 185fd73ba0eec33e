"""A plugin imports the contract alone, and stays small enough to read."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

import octavo_opencl

PACKAGE = Path(octavo_opencl.__file__).parent


def octavo_imports(source: str) -> set[str]:
    """Modules of octavo that a source imports, at the top or within a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and node.module, "imports are absolute"
            names.add(node.module)
    return {name for name in names if name.partition(".")[0] == "octavo"}


def num_lines(source: str) -> int:
    """Lines that hold something else than a comment."""
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_it_imports_the_contract_alone(path: Path) -> None:
    assert octavo_imports(path.read_text()) <= {"octavo.contract"}


def test_it_is_small() -> None:
    kernels = [line.strip() for path in PACKAGE.glob("*.cl") for line in path.read_text().splitlines()]
    num_kernel_lines = sum(not line.startswith("//") for line in kernels if line)
    assert num_kernel_lines > 50
    assert sum(num_lines(path.read_text()) for path in PACKAGE.glob("*.py")) + num_kernel_lines <= 250


def test_lines_are_counted_as_they_should_be() -> None:
    assert num_lines('"""One.\n\nThree."""\n\n# none\nx = 1  # one\ny = (\n    2\n)\n') == 3 + 1 + 3
