"""What the README says is so."""

import re
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from repo.sources import ROOT, text_of, tracked

from octavo.contract import API_VERSION, Platform

README = Path("README.md")
INSTALL_AND_GENERATE = (
    "python3 -m venv .venv && . .venv/bin/activate && pip install . -c ci/constraints.txt "
    '&& octavo generate demo "The capital of France is"'
)
TEST = "pip install tox && tox -e cpu"


def tree_of(readme: str) -> list[str]:
    """Paths in the annotated tree, folders with a slash at the end.

    A line is a path and, after two blanks, what it is for; what lies in a folder is indented by two more.
    """
    block = re.search(r"^## The tree\n.*?^```\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert block, "README.md has no tree"
    paths: list[str] = []
    folders: list[tuple[int, str]] = [(-1, "")]
    for line in block[1].splitlines():
        name, indent = line.split()[0], len(line) - len(line.lstrip())
        while folders[-1][0] >= indent:
            folders.pop()
        paths.append(folders[-1][1] + name)
        if name.endswith("/"):
            folders.append((indent, paths[-1]))
    return paths


def faults_of(tree: list[str], files: list[str]) -> list[str]:
    """Where tree and files differ. A folder with nothing listed in it stands for all that it holds.

    __init__.py and .gitignore need no line: that of their folder says all there is to say.
    """
    faults = [f"{path} is listed twice" for path in sorted({path for path in tree if tree.count(path) > 1})]
    on_disk = {*files, *(f"{parent}/" for file in files for parent in PurePosixPath(file).parents)}
    faults += [f"{path} is listed and is not there" for path in tree if path not in on_disk]
    whole = {path for path in tree if path.endswith("/") and not any(p != path and p.startswith(path) for p in tree)}
    for file in files:
        if PurePosixPath(file).name in ("__init__.py", ".gitignore"):
            continue
        if file not in tree and not any(file.startswith(folder) for folder in whole):
            faults.append(f"{file} is there and is not listed")
    return faults


def test_tree_equals_the_disk() -> None:
    assert faults_of(tree_of(text_of(README)), [path.as_posix() for path in tracked()]) == []


def test_the_rule_itself() -> None:
    readme = "## The tree\n\n```\nREADME.md   this\ncore/octavo/\n  a.py\n  b/        all of it\nci/\n  test\n```\n"
    tree = tree_of(readme)
    assert tree == ["README.md", "core/octavo/", "core/octavo/a.py", "core/octavo/b/", "ci/", "ci/test"]
    files = ["README.md", "core/octavo/a.py", "core/octavo/b/c.py", "ci/test"]
    assert faults_of(tree, files) == []
    assert faults_of(tree, [*files, "core/octavo/d.py"]) == ["core/octavo/d.py is there and is not listed"]
    assert faults_of([*tree, "x.py"], files) == ["x.py is listed and is not there"]
    assert faults_of([*tree, "ci/test"], files) == ["ci/test is listed twice"]


def test_commands_stand_as_one_line_each() -> None:
    lines = [line.strip() for line in text_of(README).splitlines()]
    assert INSTALL_AND_GENERATE in lines
    assert TEST in lines


def test_paths_named_in_the_text_are_there() -> None:
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(README))
    assert linked
    assert [path for path in linked if not (ROOT / path).exists()] == []


def code_of(readme: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)


def test_the_example_runs(capsys: pytest.CaptureFixture[str], demo_file: Path) -> None:
    example = code_of(text_of(README))[0]
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert printed.startswith("The capital of France is  Paris")


def test_the_platform_is_one() -> None:
    names: dict[str, Any] = {"__name__": "readme"}
    [example] = [code for code in code_of(text_of(README)) if "(Platform)" in code]
    exec(compile(example, "README.md", "exec"), names)
    [info] = names["octavo_platforms"]()
    platform = info.create(0)
    assert isinstance(platform, Platform)
    assert info.api_version[0] == API_VERSION[0]
    assert platform.memory_info().free <= platform.memory_info().total
    assert platform.capabilities().dtypes
    assert platform.device.type == "cpu"
