"""docs/platforms.md says what the code says: each hook and method with its signature, each op with its arguments."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

from octavo.contract import (
    API_VERSION,
    OPS,
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capabilities,
    CompileRequest,
    HookSpecs,
    KVCache,
    MemoryInfo,
    OpImpl,
    Platform,
    PlatformInfo,
    Probe,
    Program,
    ProgramCosts,
    QuantizedWeight,
    Rows,
    Shard,
    StepBatch,
    StepOutput,
)
from octavo.testing import checks
from octavo.testing.report import support_table

MANUAL = (Path(__file__).parents[2] / "docs" / "platforms.md").read_text(encoding="utf-8")
CLASSES = (Platform, AttentionBackend, Program, HookSpecs)
DATA = (
    PlatformInfo,
    Capabilities,
    MemoryInfo,
    QuantizedWeight,
    OpImpl,
    AttentionSpec,
    AttentionBatch,
    KVCache,
    CompileRequest,
    Shard,
    Probe,
    ProgramCosts,
    StepBatch,
    Rows,
    StepOutput,
)


def signatures(owner: type) -> Iterator[str]:
    """`name(arguments) -> result` of each public method and `name: type` of each property, as the source has them."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        returns = ast.unparse(node.returns) if node.returns else "None"
        if any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list):
            yield f"{node.name}: {returns}"
            continue
        arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
        yield f"{node.name}({arguments}) -> {returns}"


def section(title: str) -> str:
    """The text under a heading."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", MANUAL, re.MULTILINE | re.DOTALL)
    assert found, f"the manual has no section {title}"
    return found[1]


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("owner", CLASSES, ids=lambda owner: owner.__name__)
def test_every_signature_stands_in_the_manual(owner: type) -> None:
    told = [span for span in code_spans(section(owner.__name__)) if "->" in span or re.match(r"\w+: ", span)]
    assert told == list(signatures(owner))


@pytest.mark.parametrize("owner", DATA, ids=lambda owner: owner.__name__)
def test_every_field_stands_in_the_manual(owner: type) -> None:
    (told,) = [span for span in code_spans(section("Data")) if span.startswith(f"{owner.__name__}(")]
    assert told == f"{owner.__name__}({', '.join(field.name for field in fields(owner))})"


def test_every_op_stands_in_the_manual() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)\((.*?)\)` \| (.*?) \|$", section("Ops"), re.MULTILINE)
    expected = []
    for name, op in OPS.items():
        given = [f.name if f.required else f"{f.name}={f.default!r}" for f in msgspec.structs.fields(op.args)]
        expected.append((name, op.args.__name__, ", ".join(given), ", ".join(op.traits)))
    assert rows == expected


def test_the_version_is_todays() -> None:
    assert f"version {API_VERSION[0]}.{API_VERSION[1]}" in MANUAL


def test_the_table_of_support_has_a_line_for_each_subject() -> None:
    results = [{"name": check.name, "outcome": "pass"} for check in checks()]
    expected = support_table([{"platform": "x", "reached": 0, "results": results}]).splitlines()
    told = [line for line in section("Support").splitlines() if line.startswith("|")]
    assert [line.split("|")[1] for line in told] == [line.split("|")[1] for line in expected]


def test_the_manual_fits_a_page_or_two() -> None:
    assert MANUAL.count("\n") < 220
