"""The manual's scripts do what it says."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_lines_are_counted_without_blank_ones_and_comments(tmp_path: Path) -> None:
    count_lines = runpy.run_path(str(DOCS / "count_lines.py"))["count_lines"]
    python, kernel = tmp_path / "a.py", tmp_path / "b.cl"
    python.write_text('"""One.\n\nThree."""\n\n# none\nx = 1  # one\ny = (\n    2\n)\n')
    kernel.write_text("// none\n\nkernel void f() {  // one\n}\n")
    assert (count_lines(python), count_lines(kernel)) == (3 + 1 + 3, 2)


def test_the_table_of_support_is_written_into_the_manual(tmp_path: Path) -> None:
    for name in ("support_table.py", "platforms.md"):
        shutil.copy(DOCS / name, tmp_path / name)
    results = [{"name": "ops/linear/float32", "outcome": "pass"}, {"name": "ranks/two", "outcome": "not offered"}]
    (tmp_path / "toy.json").write_text(json.dumps({"platform": "toy", "reached": 0, "results": results}))
    before = (tmp_path / "platforms.md").read_text()
    script = runpy.run_path(str(tmp_path / "support_table.py"))
    assert script["main"]([str(tmp_path / "toy.json")]) == 0
    after = (tmp_path / "platforms.md").read_text()
    head, _, table = after.partition("## Support\n")
    assert before.startswith(head)
    assert table.splitlines()[4:] == [
        "| --- | --- |",
        "| **level reached** | **0** |",
        "| ops/linear | yes |",
        "| ranks/two | not offered |",
    ]
    assert script["main"]([]) == 2


def test_the_cost_of_dispatch_is_printed() -> None:
    """With few calls: what they take is nobody's business here."""
    script = (
        "import runpy\n"
        f"main = runpy.run_path({str(DOCS / 'dispatch_cost.py')!r})['main']\n"
        "main.__globals__['NUM_CALLS'] = 10\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "the same object: True"
