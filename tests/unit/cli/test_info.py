"""`octavo info` in a process of its own, beside plugins that are as broken as plugins get."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles.plugins import platform_source, write_distribution

from octavo.cli import info_text

BEST = 1000  # above whatever is installed where the tests run

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def octavo(tmp_path: Path) -> Run:
    """Runs `octavo ...` with the distributions in `tmp_path` on the import path."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        return subprocess.run(
            [sys.executable, "-m", "octavo.cli.main", *arguments],
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def install_toy(folder: Path, **options: Any) -> None:
    source = platform_source("toy", **{"priority": BEST, **options})
    write_distribution(folder, "octavo-toy", {"toy": "toy_plugin"}, {"toy_plugin": source}, version="0.3")


def install_broken(folder: Path, source: str = "raise OSError('libchip.so: undefined symbol: f')") -> None:
    write_distribution(folder, "vendor-chip", {"chip": "chip_plugin"}, {"chip_plugin": source}, version="1.2")


def test_the_report_as_data(tmp_path: Path, octavo: Run) -> None:
    install_toy(tmp_path)
    done = octavo("info", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    (toy,) = [platform for platform in report["platforms"] if platform["name"] == "toy"]
    assert toy == {
        "name": "toy",
        "plugin": "toy",
        "distribution": "octavo-toy",
        "version": "0.3",
        "available": True,
        "reason": "it is a toy",
        "priority": BEST,
        "devices": ["toy 0"],
    }
    assert report["chosen"]["name"] == "toy"
    assert (report["problems"], report["error"], report["model"]) == ([], None, None)
    assert report["memory"] == {"free": 2**30, "total": 2**31}
    assert report["diagnostics"] == {"threads": "2 of 4"}
    assert report["capabilities"]["dtypes"] == ["float32"]
    calls = {row["call"].partition("(")[0]: row for row in report["ops"]["rows"]}
    assert {"rms_norm", "linear", "embedding", "attention"} < set(calls)
    assert (calls["linear"]["provider"], calls["linear"]["tier"]) == ("torch", "reference")
    assert not calls["linear"]["row_invariant"]["ok"]
    assert not report["ops"]["row_invariant"]["ok"]


def test_the_report_for_readers(tmp_path: Path, octavo: Run) -> None:
    install_toy(tmp_path)
    done = octavo("info")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert f"toy octavo-toy 0.3 yes {BEST} it is a toy toy 0" in lines
    assert "threads 2 of 4" in lines
    assert "total 2.00 GiB" in lines
    assert "rms_norm(float32, hidden_size=4096) torch reference yes" in lines
    assert "\x1b" not in done.stdout, "no colours where it is piped"


def test_a_broken_plugin_is_named_and_stops_the_start(tmp_path: Path, octavo: Run) -> None:
    install_toy(tmp_path)
    install_broken(tmp_path)
    done = octavo("info")
    assert done.returncode == 1
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "chip vendor-chip 1.2 load OSError: libchip.so: undefined symbol: f" in lines
    assert "a plugin is installed but broken, and no platform was named" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert 'chip_plugin.py", line 1' in octavo("info", "--debug").stdout

    done = octavo("generate", "demo", "Hello")
    assert (done.returncode, done.stdout) == (1, "")
    assert "plugin 'chip' (vendor-chip 1.2) failed in load: OSError: libchip.so: undefined symbol: f" in done.stderr
    assert "Traceback" not in done.stderr


def test_beside_a_broken_plugin_a_named_platform_is_shown(tmp_path: Path, octavo: Run) -> None:
    install_toy(tmp_path)
    install_broken(tmp_path)
    done = octavo("info", "--json", OCTAVO_PLATFORM="toy")
    assert done.returncode == 1, "something is broken, whoever serves"
    report = json.loads(done.stdout)
    (problem,) = report["problems"]
    assert (problem["plugin"], problem["origin"], problem["stage"]) == ("chip", "vendor-chip 1.2", "load")
    assert report["chosen"] == {"name": "toy", "reason": "it was named"}
    assert report["error"] is None
    assert report["ops"]["rows"]


HANGS = {
    "load": "import time\ntime.sleep(100)",
    "octavo_platforms": (
        "import time\nfrom octavo.contract import hookimpl\n@hookimpl\ndef octavo_platforms():\n    time.sleep(100)\n"
    ),
}


@pytest.mark.parametrize("stage", HANGS)
def test_a_plugin_that_hangs_is_named_and_ends_the_command(stage: str, tmp_path: Path, octavo: Run) -> None:
    install_broken(tmp_path, HANGS[stage])
    done = octavo("info", "--timeout", "1.5")
    assert done.returncode == 1
    assert (
        f"octavo: plugin chip (vendor-chip 1.2) in {stage} hangs, it has not come back for 1.5 seconds" in done.stderr
    )
    assert "chip_plugin.py" in done.stderr, "the stack says where"


def test_a_platform_that_cannot_be_made(tmp_path: Path, octavo: Run) -> None:
    source = platform_source("toy", priority=BEST).replace("lambda device: Toy()", "lambda device: 1 / 0")
    write_distribution(tmp_path, "octavo-toy", {"toy": "toy_plugin"}, {"toy_plugin": source})
    done = octavo("info")
    assert done.returncode == 1
    assert "platform 'toy' failed to start on device 0: ZeroDivisionError: division by zero" in done.stderr
    assert "toy: highest priority" in done.stdout or "toy: the only one available" in done.stdout


def test_a_platform_that_is_not_there_or_cannot_serve(tmp_path: Path, octavo: Run) -> None:
    install_toy(tmp_path, available=False)
    done = octavo("info", "--platform", "toy")
    assert done.returncode == 1
    assert "octavo info: error: platform 'toy' cannot serve here: it is a toy" in done.stderr
    done = octavo("info", "--platform", "tox")
    assert "unknown platform 'tox'; did you mean 'toy'?" in done.stderr
    assert done.returncode == 1


def test_tables_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    report: dict[str, Any] = {
        "contract": "0.9",
        "plugins": [{"name": "toy", "distribution": "octavo-toy", "version": "0.3", "value": "toy_plugin"}],
        "platforms": [],
        "problems": [
            {"plugin": "chip", "origin": "vendor-chip 1.2", "stage": "load", "reason": "OSError: [x]", "detail": ""}
        ],
        **dict.fromkeys(("chosen", "capabilities", "diagnostics", "memory", "model", "ops")),
        "error": "no platform can serve here",
    }
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    info_text.print_report(report)
    shown = capsys.readouterr()
    assert "vendor-chip 1.2" in shown.out
    assert "OSError: [x]" in shown.out, "brackets are text, not markup"
    assert "plugins: toy (octavo-toy 0.3)" in shown.out
    assert shown.err == "octavo info: error: no platform can serve here\n"


def test_what_a_model_takes(tmp_path: Path, octavo: Run, demo_file: Path) -> None:
    install_toy(tmp_path)
    model = ("--model", str(demo_file), "--max-num-seqs", "4")
    done = octavo("info", *model, "--max-model-len", "512", "--max-num-batched-tokens", "256", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    memory = report["memory"]
    assert memory["reserved"] == memory["weights"] + memory["workspace"] + memory["num_blocks"] * memory["block_bytes"]
    assert memory["left"] == memory["free"] - memory["reserved"]
    assert memory["max_tokens"] == memory["num_blocks"] * memory["block_size"] >= 512
    assert memory["weights"] > 4 * 134_000_000, "float32, all parameters"
    assert report["model"]["settings"]["max_model_len"] == 512
    calls = [row["call"] for row in report["ops"]["rows"]]
    assert "rms_norm(float32, hidden_size=576)" in calls
    assert "attention(float32, kv=float32, 9/3 heads, head_size=64, block_size=16)" in calls

    done = octavo("info", *model, "--max-num-batched-tokens", "256", "--memory-utilization", "0.35")
    assert done.returncode == 1
    assert "toy: " in done.stdout, "what was found out before is shown"
    assert "max_model_len 8192 needs" in done.stderr
    assert "lower max_model_len" in done.stderr


def test_a_model_that_is_not_there(tmp_path: Path, octavo: Run) -> None:
    install_toy(tmp_path)
    done = octavo("info", "--model", str(tmp_path / "nothing.gguf"))
    assert done.returncode == 1
    assert "nothing.gguf" in done.stderr
    assert "Traceback" not in done.stderr
