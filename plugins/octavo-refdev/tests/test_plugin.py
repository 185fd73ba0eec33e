"""A plugin imports the contract alone, and stays small enough to copy."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

import octavo_refdev

PACKAGE = Path(octavo_refdev.__file__).parent


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


@pytest.mark.parametrize(("name", "most"), [("platform.py", 50), ("device.py", 130)])
def test_it_is_small(name: str, most: int) -> None:
    assert num_lines((PACKAGE / name).read_text()) <= most


def test_lines_are_counted_as_they_should_be() -> None:
    assert num_lines('"""One.\n\nThree."""\n\n# none\nx = 1  # one\ny = (\n    2\n)\n') == 3 + 1 + 3
