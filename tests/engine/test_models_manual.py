"""docs/models.md, tried as a new user would: its family is added to a copy of the core, listed, tested and served."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from statistics import median

import pytest
from doubles.tiny_models import Tiny, base
from doubles.vocabularies import byte_level, write_folder
from repo.sources import ROOT, text_of

import octavo
from octavo.model.families import FAMILIES

MANUAL = Path("docs/models.md")
TESTS = Path(__file__).parents[1]
CHECK = """
import sys
from pathlib import Path
from doubles.tiny_models import Tiny, base
from unit.model.harness import check_parity

(case,) = eval("{" + sys.argv[1] + "}").values()
description = check_parity(case, Path(sys.argv[2]))
print(description.architecture, len(description.spec.layers))
"""


def block(kind: str, holds: str) -> str:
    """The one block of the manual with such text in it."""
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", text_of(MANUAL), re.MULTILINE | re.DOTALL)
    (found,) = [text for text in blocks if holds in text]
    return found


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the core, the first two steps done in it; a source root."""
    root = tmp_path_factory.mktemp("core")
    shutil.copytree(Path(octavo.__file__).parent, root / "octavo", ignore=shutil.ignore_patterns("__pycache__"))
    (path,) = re.findall(r"Write `core/(octavo/\S+)`", text_of(MANUAL))
    (root / path).write_text(block("python", "FAMILIES = ("))
    (changed,) = re.findall(r"Name the module in `core/(octavo/\S+)`", text_of(MANUAL))
    source = (root / changed).read_text()
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", block("diff", "families"), re.MULTILINE):
        gone, come = (re.sub(r"^[-+]", "", text, flags=re.MULTILINE) for text in (old, new))
        assert source.count(gone) == 1
        source = source.replace(gone, come)
    (root / changed).write_text(source)
    return root


def run(core: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(core), str(TESTS), *sys.path])}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, cwd=core, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_family_is_listed(core: Path) -> None:
    (line,) = [line for line in run(core, "-m", "octavo.cli.main", "models").splitlines() if "vaultgemma" in line]
    assert re.split(r"  +", line) == ["vaultgemma", "full, sliding, soft cap", "gated", "rope"]


def test_its_case_holds(core: Path, tmp_path: Path) -> None:
    case = block("python", '"vaultgemma": Tiny(')
    assert run(core, "-c", CHECK, case, str(tmp_path)).split() == ["vaultgemma", "4"]


def test_it_is_served(core: Path, tmp_path: Path) -> None:
    tokenizer = byte_level()
    Tiny("VaultGemma", base(head_dim=32, sliding_window=8, vocab_size=tokenizer.get_vocab_size())).save(tmp_path)
    write_folder(tmp_path, tokenizer, {"bos_token": "<s>", "eos_token": "</s>"})
    arguments = ("--model-impl", "native", "--max-tokens", "3", "--ignore-eos", "--num-threads", "1", "--json")
    printed = run(core, "-m", "octavo.cli.main", "generate", str(tmp_path), "Hello", *arguments)
    assert '"num_generated_tokens": 3' in printed


def test_the_lines_a_family_are_counted_and_few() -> None:
    script = run_path(str(ROOT / "docs" / "lines_a_family.py"))
    counts = script["lines_a_family"]()
    assert script["table"]() in text_of(MANUAL)  # to make it anew: python docs/lines_a_family.py
    assert set(counts) == set(FAMILIES)
    assert all(count > 0 for count in counts.values())
    assert median(counts.values()) < 15


def test_the_count_itself() -> None:
    count = run_path(str(ROOT / "docs" / "lines_a_family.py"))["_of_module"]
    source = '''"""A module."""

SHARED = {
    "a": 1,
}


def build(c, n):
    """Says what it does.

    At length.
    """
    # why
    return helper(c)


def helper(c):
    return SHARED


FAMILIES = (
    Family("one", build),
    Family("two", build, SHARED, {
        "b": 2,
    }),
)
'''
    assert count(source) == {"one": 1 + 2 + 2 + 3, "two": 3}
