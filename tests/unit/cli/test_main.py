"""The command line itself: help, errors, exit codes, flags to settings."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import COMMANDS, main
from octavo.config import EngineConfig, settings
from octavo.errors import ModelError


def exit_code(*argv: str) -> object:
    with pytest.raises(SystemExit) as end:
        main(argv)
    return end.value.code


def test_help_lists_commands_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)
    assert 'octavo generate demo "The capital of France is"' in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*command.split(), "--help") == 0
    assert f"usage: octavo {command}" in capsys.readouterr().out


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "examples:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import octavo

    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"


def test_unknown_command_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("sing") == 2
    assert "'generate', 'serve', 'chat', 'models', 'info'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", ["--stall-timeout=nan", "--stall-timeout=0", "--drain-seconds=nan", "--max-body-bytes=0"]
)
def test_a_server_flag_out_of_range_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "demo", flag]) == 1
    assert f"{flag[2:].split('=')[0].replace('-', '_')} must be at least" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_setting_is_a_flag_with_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(command, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for setting in settings():
        if setting.name != "model":
            for name in setting.names:
                assert f"--{name.replace('_', '-')}" in text
        assert setting.help in text
    assert "examples:" in text


def config_of(echo: Any, *argv: str) -> EngineConfig:
    assert main(["generate", "demo", "x", *argv]) == 0
    config = echo.made[-1].config
    assert isinstance(config, EngineConfig)
    return config


def test_flags_become_settings(echo: Any) -> None:
    flags = ["--max-num-seqs", "3", "--dtype", "float32", "--no-enable-prefix-caching", "--swap-space", "1.5"]
    config = config_of(echo, *flags, "--strict-ops", "--platform", "somewhere")
    expected = EngineConfig.of(
        model="demo",
        max_num_seqs=3,
        dtype="float32",
        enable_prefix_caching=False,
        swap_space=1.5,
        strict_ops=True,
        platform="somewhere",
    )
    assert config == expected


def test_an_alias_sets_the_same(echo: Any) -> None:
    assert config_of(echo, "--gpu-memory-utilization", "0.5").cache.memory_utilization == 0.5


def test_flags_win_over_environment_over_file(echo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_num_seqs: 1\nblock_size: 8\nmax-model-len: 128\n")
    monkeypatch.setenv("OCTAVO_BLOCK_SIZE", "32")
    monkeypatch.setenv("OCTAVO_MAX_MODEL_LEN", "256")
    config = config_of(echo, "--config", str(file), "--max-model-len", "512")
    assert (config.scheduler.max_num_seqs, config.cache.block_size, config.model.max_model_len) == (1, 32, 512)


@pytest.mark.parametrize(
    "content",
    [
        b"max_num_seqs: [1\nblock_size: 8\n",
        b"\tx: 1",
        b"model: \xff\xfe",
        b"[" * 5000,
        b"x: !!python/object:os.x {}",
        b"swap_space: 2020-99-99\n",
        b"- 1\n",
        b"3: 4\n",
        b"max_num_seqs: {}\n",
        b"max_num_seqs: '8'\n",
        b"max_num_seqs: ~\n",
        b"swap_space: 1" + b"0" * 400,
        b"dtype: " + b"x" * 9000,
    ],
    ids=lambda content: str(content)[:24],
)
def test_settings_files_that_are_none(
    content: bytes, echo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(content)
    assert main(["generate", "demo", "x", "--config", str(file)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("octavo generate: error: ") and len(said) < 600
    assert not echo.made


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--max-num-seqs", "0"], 1, "max_num_seqs must be at least 1, got 0"),
        (["--max-num-seqs", "65537"], 1, "max_num_seqs must be at most 65536, got 65537"),
        (["--max-num-batched-tokens", "1" + "0" * 12], 1, "max_num_batched_tokens must be at most 16777216, got 1000"),
        (["--num-blocks-override", "9999999999"], 1, "num_blocks_override must be at most 2147483647, got 9999999999"),
        (["--num-threads", "1000000"], 1, "num_threads must be at most 1024, got 1000000"),
        (["--swap-space", "inf"], 1, "swap_space must be at most 1048576, got inf"),
        (["--swap-space", "nan"], 1, "swap_space must be at least 0, got nan"),
        (["--memory-utilization", "nan"], 1, "memory_utilization must be over 0 and at most 1, got nan"),
        (["--seed", "1" + "0" * 30], 1, "seed must be at most 9223372036854775807, got 1000"),
        (["--block-size", "9" * 5000], 2, "block_size must be of type int, got '9999"),
        (["--max-num-seqs", "many"], 2, "max_num_seqs must be of type int, got 'many'"),
        (["--dtype", "int3"], 2, "invalid choice: 'int3'"),
        (["--top-p", "2"], 1, "top_p must be a number over 0 and at most 1, got 2.0"),
        (["--config", "/no/such.yaml"], 1, "cannot read the settings file /no/such.yaml"),
        (["--max-num-seq", "1"], 2, "unrecognized arguments: --max-num-seq"),
    ],
)
def test_bad_flags(argv: list[str], code: int, said: str, echo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        got: object = main(["generate", "demo", "x", *argv])
    except SystemExit as end:
        got = end.code
    assert got == code
    captured = capsys.readouterr()
    assert said in captured.err.splitlines()[-1]
    assert captured.out == ""
    assert echo.made == [], "no model is loaded for it"


def test_an_error_is_one_line(echo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(echo, "__init__", raiser(ModelError("no such thing")))
    assert main(["generate", "thing", "x"]) == 1
    assert capsys.readouterr() == ("", "octavo generate: error: no such thing\n")


def test_debug_shows_the_traceback(echo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo, "__init__", raiser(ModelError("no such thing")))
    with pytest.raises(ModelError, match="no such thing"):
        main(["generate", "thing", "x", "--debug"])


def test_a_fault_of_ours_keeps_its_traceback(echo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo, "__init__", raiser(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["generate", "thing", "x"])


def test_interrupt(echo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo, "stream", raiser(KeyboardInterrupt()))
    assert main(["generate", "demo", "x"]) == 130
    assert echo.made[0].closed


def test_a_reader_that_leaves_is_no_error() -> None:
    """The other end of the pipe is closed before anything is written."""
    read, write = os.pipe()
    os.close(read)
    script = (
        "import sys; from octavo.cli import generate, main\n"
        "generate.run = lambda args: print('text')\n"
        "sys.exit(main.main(['generate', 'demo', 'x']))"
    )
    with os.fdopen(write, "w") as out:
        done = subprocess.run([sys.executable, "-c", script], stdout=out, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 141
    assert done.stderr == b""


SCRIPT = """
import logging, sys
from octavo.cli import generate, main
def run(args):
    logging.getLogger("octavo.engine.llm").warning("request 0 refused: said twice")
    print(generate._read_stdin(), "\u65e5", chr(0xd800))
    return 0
generate.run = run
sys.exit(main.main(["generate", "demo"]))
"""


@pytest.mark.parametrize(
    ("shell", "code", "out", "err"),
    [
        ("printf hello | {}", 0, "hello \u65e5 ?\n", ""),
        ("printf 'a\\377b' | {}", 0, "a\ufffdb \u65e5 ?\n", ""),
        ("printf hello | PYTHONIOENCODING=ascii:strict {}", 0, "hello ? ?\n", ""),
        ("{} <&-", 0, " \u65e5 ?\n", ""),
        ("{} </dev/null >&-", 0, "", ""),
        ("{} </dev/null 2>&-", 0, " \u65e5 ?\n", ""),
        ("{} </dev/null >/dev/full", 1, "", "octavo generate: error: [Errno 28] No space left on device\n"),
    ],
)
def test_streams_of_all_kinds(shell: str, code: int, out: str, err: str, tmp_path: Path) -> None:
    """Nothing but the answer is printed: no traceback, and no refusal once by the log and once as the error."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        ["sh", "-c", shell.format(f"{sys.executable} {script}")],
        env={**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout.decode(), done.stderr.decode()) == (code, out, err)


def raiser(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail
