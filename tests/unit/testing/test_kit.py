"""Checks, expectations, reports, and both ways to run them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.contract import API_VERSION, OPS
from octavo.errors import ConfigError
from octavo.testing import Bench, Check, CheckError, NotOfferedError, checks
from octavo.testing.cases_attention import SPECS
from octavo.testing.expectations import Expectation, Expectations
from octavo.testing.report import line, summary, support_table
from octavo.testing.runner import Outcome, Report, Result, run_check

CONTRACT = ".".join(map(str, API_VERSION))


def test_every_check_has_a_name_of_its_own_and_says_what_holds() -> None:
    names = [check.name for check in checks()]
    assert len(set(names)) == len(names)
    assert all(check.says and "\n" not in check.says for check in checks())
    assert {check.level for check in checks()} == {0, 1, 2}
    assert all(check.level == 0 for check in checks(0))


def test_every_op_and_geometry_has_checks() -> None:
    names = {check.name for check in checks()}
    assert {f"ops/{op}/float32" for op in OPS} <= names
    assert {f"{group}/{spec}" for group in ("attention", "kernels") for spec in SPECS} <= names


def test_head_ratios_are_covered() -> None:
    ratios = {spec.num_heads // spec.num_kv_heads for spec in SPECS.values()}
    assert ratios >= set(range(1, 9))


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["ops/linear/float32"], {"ops/linear/float32"}),
        (["ops/linear"], {"ops/linear/float32", "ops/linear/bfloat16", "ops/linear/float16"}),
        (["*/swap*"], {"attention/swaps", "kernels/swaps", "behaviour/swap"}),
        (["nothing"], set()),
    ],
)
def test_checks_are_chosen_by_name(patterns: list[str], names: set[str]) -> None:
    assert {check.name for check in checks(patterns=patterns)} == names


def ending(outcome: Exception | str) -> Check:
    def run(bench: Bench) -> str:
        if isinstance(outcome, str):
            return outcome
        raise outcome

    return Check("toy/one", 0, "it holds", run)


PASS, FAIL = "all of it", CheckError("off by one")
NOT_THERE, BROKEN = NotOfferedError("no such kernel"), ZeroDivisionError("division\nby zero")


@pytest.mark.parametrize(
    ("end", "expected", "outcome", "detail"),
    [
        (PASS, Expectation(), "pass", "all of it"),
        (FAIL, Expectation(), "fail", "off by one"),
        (BROKEN, Expectation(), "fail", "ZeroDivisionError: division by zero"),
        (NOT_THERE, Expectation(), "not offered", "no such kernel"),
        (FAIL, Expectation("xfail", "known"), "xfail", "expected to fail (known): off by one"),
        (PASS, Expectation("xfail", "known"), "xpass", "expected to fail (known): all of it"),
        (NOT_THERE, Expectation("xfail", "known"), "not offered", "no such kernel"),
        (FAIL, Expectation("skip", "too slow"), "skip", "too slow"),
    ],
)
def test_outcomes(end: Exception | str, expected: Expectation, outcome: Outcome, detail: str) -> None:
    result = run_check(ending(end), Bench("toy"), expected)
    assert (result.outcome, result.detail) == (outcome, detail)
    assert result.ok == (outcome not in ("fail", "xpass"))
    assert bool(result.trace) == (end is BROKEN)


def report_of(*outcomes: tuple[int, Outcome], level: int = 2) -> Report:
    results = [Result(f"g/{i}", level, "", outcome, "") for i, (level, outcome) in enumerate(outcomes)]
    return Report("toy", "toy (octavo-toy 1.0)", level, results=results)


@pytest.mark.parametrize(
    ("outcomes", "reached"),
    [
        ([(0, "pass"), (1, "pass"), (2, "not offered")], 1),
        ([(0, "pass"), (0, "not offered"), (1, "not offered")], 0),
        ([(0, "pass"), (0, "fail"), (1, "pass")], None),
        ([(0, "xfail"), (0, "pass")], None),
        ([(0, "pass"), (1, "pass"), (1, "xfail")], 0),
        ([(0, "pass"), (0, "skip")], 0),
    ],
)
def test_the_level_reached_is_never_flattered(outcomes: list[tuple[int, Outcome]], reached: int | None) -> None:
    assert report_of(*outcomes).reached == reached


def test_a_report_reads_as_lines_and_as_data() -> None:
    report = report_of((0, "pass"), (0, "fail"), (1, "not offered"))
    assert not report.ok
    assert summary(report) == (
        "toy of toy (octavo-toy 1.0), contract 0.12: 1 pass, 1 fail, 1 not offered; no level is reached"
    )
    assert line(Result("ops/x/float32", 0, "", "not offered", "no")).split() == ["none", "0", "ops/x/float32", "no"]
    data = json.loads(json.dumps(report.as_data()))
    assert (data["platform"], data["reached"], data["ok"], data["contract"]) == ("toy", None, False, CONTRACT)
    assert data["results"][1]["outcome"] == "fail"


def test_platforms_stand_side_by_side_in_a_table() -> None:
    def data(name: str, **outcomes: str) -> dict[str, Any]:
        results = [{"name": check.replace("__", "/"), "outcome": outcome} for check, outcome in outcomes.items()]
        return {"platform": name, "reached": 0 if name == "a" else None, "results": results}

    one = data("a", ops__x__float32="pass", ops__x__float16="not offered", kernels__p="not offered", g__y="skip")
    two = data("b", ops__x__float32="pass", ops__x__float16="fail", kernels__p="pass", g__y="pass")
    assert support_table([one, two]).splitlines() == [
        "|  | a | b |",
        "| --- | --- | --- |",
        "| **level reached** | **0** | none |",
        "| ops/x | yes | 1 of 2 |",
        "| kernels | not offered | yes |",
        "| g/y | skipped | yes |",
    ]


def test_expectations_are_read_and_the_last_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "known.yaml"
    path.write_text(
        '"ops/linear": {xfail: sums are rounded}\nops/linear/float32: pass\nbehaviour/memory: {skip: none is told}\n'
    )
    known = Expectations.read(path)
    by_name = {check.name: known.of_check(check) for check in checks()}
    assert by_name["ops/linear/float16"] == Expectation("xfail", "sums are rounded")
    assert by_name["ops/linear/float32"] == by_name["ops/embedding/float32"] == Expectation()
    assert by_name["behaviour/memory"] == Expectation("skip", "none is told")
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert Expectations.read(tmp_path / "empty.yaml").of_check(checks()[0]) == Expectation()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ops/linear: xfail", "ops/linear is 'xfail'; allowed are pass, {xfail: reason}, {skip: reason}"),
        ("ops/linear: {xfail: ''}", "allowed are"),
        ("ops/linear: {fail: no}", "allowed are"),
        ("ops/linaer: pass", "no check is named ops/linaer"),
        ("[ops]", "must map checks"),
        ("a: b: c", "are no YAML"),
    ],
)
def test_expectations_that_say_nothing_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "known.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="expectations") as caught:
        Expectations.read(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_expectations_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the expectations nowhere\.yaml: No such file"):
        Expectations.read("nowhere.yaml")


def test_the_command_lists_its_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--list", "--level", "0", "platform"]) == 0
    listed = [text.split()[1] for text in capsys.readouterr().out.splitlines()]
    assert listed == [f"platform/{name}" for name in ("facts", "memory", "settings", "attributes", "answers", "probe")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "which platform? give --platform NAME"),
        (["--platform", "cpu", "opps"], "no check up to level 2 is named opps"),
        (["--platform", "cqu", "platform/facts"], "did you mean 'cpu'?"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", *arguments]) == 1
    assert said in capsys.readouterr().err


def run_python(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "OMP_NUM_THREADS": "1",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_command_checks_a_platform(tmp_path: Path) -> None:
    (tmp_path / "known.yaml").write_text("platform/memory: {skip: not today}\nplatform/facts: {xfail: it is odd}\n")
    conformance = ("-m", "octavo.cli.main", "conformance", "--platform", "cpu")
    done = run_python(*conformance, "--json", "platform", "ops/embedding", "ranks", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert (data["platform"], data["ok"], data["reached"]) == ("cpu", True, 0)
    outcomes = {result["name"]: result["outcome"] for result in data["results"]}
    assert outcomes["ops/embedding/bfloat16"] == "pass"
    assert outcomes["ranks/two"] == "not offered"
    done = run_python(*conformance, "--expectations", "known.yaml", "platform", folder=tmp_path)
    assert done.returncode == 1, "a fault that was expected and did not come is to be struck off"
    words = [text.split()[:3] for text in done.stdout.splitlines()]
    assert ["xpass", "0", "platform/facts"] in words
    assert ["skip", "0", "platform/memory"] in words
    assert done.stdout.splitlines()[-1].endswith("no level is reached")


@pytest.fixture
def run_pytest(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        plugin = ("-p", "octavo.testing.pytest_plugin", "-p", "no:cacheprovider")
        return run_python("-m", "pytest", *plugin, "-v", "-rs", *arguments, folder=tmp_path)

    return run


def test_pytest_checks_a_platform(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "known.yaml").write_text("ops/embedding/float16: {xfail: it is odd}\nplatform/facts: {skip: later}\n")
    flags = ("--octavo-platform=cpu", "--octavo-expectations=known.yaml")
    done = run_pytest(*flags, "-k", "embedding or facts or ranks or test_own")
    assert done.returncode == 1, done.stdout
    assert "cpu::ops/embedding/float32 PASSED" in done.stdout
    assert "cpu::ops/embedding/float16 FAILED" in done.stdout
    assert "expected to fail (it is odd)" in done.stdout
    assert "skip: later" in done.stdout
    assert "not offered: the platform says distributed_backend 'gloo'" in done.stdout
    assert "test_own.py::test_own PASSED" in done.stdout
    assert "1 failed, 6 passed, 2 skipped" in done.stdout


def test_pytest_without_the_flag_is_left_alone(run_pytest: Callable[..., Any]) -> None:
    done = run_pytest()
    assert done.returncode == 0
    assert "1 passed" in done.stdout


def test_pytest_names_a_platform_that_is_not_there(run_pytest: Callable[..., Any]) -> None:
    done = run_pytest("--octavo-platform=cqu")
    assert done.returncode == 4
    assert "did you mean 'cpu'?" in done.stderr
    assert "Traceback" not in done.stderr
