"""Prints how many lines each model family has, as the table in docs/models.md.

    python docs/lines_a_family.py

A line of a family is one of its `Family(...)`, of its builder, or of anything else in its module that these call for:
tables of names, defaults, helpers. What several share counts for the first of them alone. Blank lines, comments and
docstrings are none. What all families stand on (families/base.py, families/rope.py) is not counted.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

FAMILIES = Path(__file__).parents[1] / "core" / "octavo" / "model" / "families"
SHARED = ("__init__.py", "base.py", "rope.py")


def lines_a_family() -> dict[str, int]:
    """Model type to number of lines, in the order of the files."""
    counts: dict[str, int] = {}
    for path in sorted(FAMILIES.glob("*.py")):
        if path.name not in SHARED:
            counts |= _of_module(path.read_text(encoding="utf-8"))
    return counts


def table() -> str:
    """The counts as a Markdown table, in columns of three families."""
    counts = lines_a_family()
    cells = [f"| {name} | {count} " for name, count in sorted(counts.items())]
    cells += ["| | "] * (-len(cells) % 3)
    rows = ["".join(cells[i : i + 3]) + "|" for i in range(0, len(cells), 3)]
    head = ["| family | lines " * 3 + "|", "| --- | ---: " * 3 + "|"]
    return "\n".join([*head, *rows, "", f"Median of {len(counts)} families: {median(counts.values()):g} lines."])


def _of_module(source: str) -> dict[str, int]:
    lines = source.splitlines()
    statements = {name: node for node in ast.parse(source).body for name in _defined(node)}
    taken: set[int] = set()
    counts: dict[str, int] = {}
    for call in (node for statement in ast.parse(source).body for node in ast.walk(statement)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Family"):
            continue
        assert isinstance(call.args[0], ast.Constant)
        needed = _needed(call, statements)
        own = set().union(*(_code_lines(node, lines) for node in (call, *needed))) - taken
        taken |= own
        counts[str(call.args[0].value)] = len(own)
    return counts


def _defined(node: ast.stmt) -> Iterator[str]:
    """What a top-level statement defines; `FAMILIES` only gathers, and what is imported is another module's."""
    if isinstance(node, ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (name.id for name in node.targets if isinstance(name, ast.Name) and name.id != "FAMILIES")


def _needed(node: ast.AST, statements: Mapping[str, ast.stmt]) -> list[ast.stmt]:
    """The statements that a node refers to, directly or through others."""
    found: dict[str, ast.stmt] = {}
    left = [node]
    while left:
        for part in ast.walk(left.pop()):
            if isinstance(part, ast.Name) and part.id in statements and part.id not in found:
                found[part.id] = statements[part.id]
                left.append(statements[part.id])
    return list(found.values())


def _code_lines(node: ast.AST, lines: list[str]) -> set[int]:
    """Numbers of the lines of a node that are neither blank, nor comments, nor of a docstring."""
    assert isinstance(node, ast.expr | ast.stmt)
    first, last = node.lineno, node.end_lineno or node.lineno
    numbers = {n for n in range(first, last + 1) if (text := lines[n - 1].strip()) and not text.startswith("#")}
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        numbers -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return numbers


if __name__ == "__main__":
    print(table())
