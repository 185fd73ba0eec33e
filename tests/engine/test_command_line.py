"""The command line on the demo model: what the README promises, and one clear line for each bad input."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.hardware.choose import choose_platform
from octavo.hardware.registry import discover

OCTAVO = Path(sys.executable).parent / "octavo"
SMALL = ["--max-model-len", "256", "--max-num-seqs", "2"]

Fails = Callable[..., str]


@pytest.fixture
def fails(capfd: pytest.CaptureFixture[str]) -> Fails:
    """Run a command line that must fail; its one line of error."""

    def run(*argv: str) -> str:
        assert main(argv) == 1
        captured = capfd.readouterr()
        assert captured.out == ""
        [line] = captured.err.splitlines()
        start = f"octavo {argv[0]}: error: "
        assert line.startswith(start)
        return line.removeprefix(start)

    return run


def test_the_first_command(demo_file: Path) -> None:
    """As a user runs it: the installed script, its output in a pipe. No bar and no log line gets in between."""
    command = [OCTAVO, "generate", "demo", "The capital of France is", "--max-tokens", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" Paris")


def test_json_counts_add_up(demo_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["The capital of France is", "The capital of France is the city of"]
    assert main(["generate", "demo", *prompts, "--json", "--max-tokens", "3", "--ignore-eos", *SMALL]) == 0
    outputs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [output["prompt"] for output in outputs] == prompts
    for output in outputs:
        assert output["num_prompt_tokens"] == len(output["prompt_token_ids"])
        assert output["num_generated_tokens"] == len(output["outputs"][0]["token_ids"]) == 3
        assert output["outputs"][0]["finish_reason"] == "length"


def test_streamed_and_whole_text_are_the_same(demo_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "demo", "Once upon a time", "--max-tokens", "12", "--dtype", "float32", *SMALL]
    assert main(argv) == 0
    streamed = capsys.readouterr().out
    assert main([*argv, "--json"]) == 0
    assert streamed == json.loads(capsys.readouterr().out)["outputs"][0]["text"] + "\n"


def test_chat_remembers(demo_file: Path) -> None:
    command = [OCTAVO, "chat", "demo", "--dtype", "float32", "--max-tokens", "16", *SMALL]
    said = "What is the capital of France?\n/reset\nWhat is the capital of France?\n"
    done = subprocess.run(command, input=said, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "The capital of France is Paris.\n" * 2


def test_unknown_model(fails: Fails) -> None:
    assert "unknown model 'blub'" in fails("generate", "blub", "x")


def test_folder_without_config(fails: Fails, tmp_path: Path) -> None:
    assert "has no config.json" in fails("generate", str(tmp_path), "x")


def test_unsupported_architecture(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["OctopusForCausalLM"], "model_type": "octopus"}')
    line = fails("generate", str(tmp_path), "x")
    assert "'octopus' is not supported" in line
    assert "llama" in line, "what is supported is listed"


@pytest.mark.parametrize("num_bytes", [4, 30, 100_000, 50_000_000])
def test_cut_gguf(fails: Fails, demo_file: Path, tmp_path: Path, num_bytes: int) -> None:
    file = tmp_path / "cut.gguf"
    with demo_file.open("rb") as whole:
        file.write_bytes(whole.read(num_bytes))
    assert "cut.gguf" in fails("generate", str(file), "x")


def test_corrupt_gguf(fails: Fails, demo_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "corrupt.gguf"
    with demo_file.open("rb") as whole:
        file.write_bytes(whole.read(24) + b"\xff" * 100_000)
    assert "corrupt.gguf" in fails("generate", str(file), "x")


def test_length_that_does_not_fit(fails: Fails, demo_file: Path) -> None:
    """The message gives the largest length that fits and both settings. Doing as it says helps."""
    argv = ["generate", "demo", "x", "--max-num-seqs", "1", "--max-tokens", "1", "--memory-utilization"]
    nothing = fails(*argv, "0.0001")
    found = re.findall(r"(\d+\.\d+) ([MG])iB of (?:weights|workspace)", nothing)
    taken = [float(amount) / (1 if unit == "G" else 1024) for amount, unit in found]
    total = choose_platform(discover(), "cpu").create(0).memory_info().total / 2**30
    share = str((sum(taken) + 0.1) / total)  # 0.1 GiB are left for KV blocks
    line = fails(*argv, share)
    assert line.startswith("max_model_len 8192 needs")
    assert "raise memory_utilization" in line
    largest = re.search(r"the largest that fits is (\d+)", line)
    assert largest
    assert main([*argv, share, "--max-model-len", largest[1]]) == 0


def test_prompt_that_is_too_long(fails: Fails, demo_file: Path) -> None:
    line = fails("generate", "demo", "word " * 100, "--max-model-len", "32", "--max-num-seqs", "1")
    assert "32" in line
    assert "max_model_len" in line


def test_unknown_platform(fails: Fails) -> None:
    line = fails("generate", "demo", "x", "--platform", "abacus")
    assert "unknown platform 'abacus'" in line
    assert "cpu (available" in line, "what was probed is listed"


def test_bad_prompt_fails_alone(demo_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "demo", "The capital of France is", "word " * 300, "--max-tokens", "2", *SMALL]
    assert main(argv) == 1
    captured = capfd.readouterr()
    assert captured.out.startswith(" Paris")
    [line] = captured.err.splitlines()
    assert line.startswith("octavo generate: error: prompt 2: ")


def test_debug_shows_the_traceback(demo_file: Path) -> None:
    command = [OCTAVO, "generate", "blub", "x", "--debug"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("octavo.errors.ModelError: unknown model 'blub'")
