"""What the README shows of serving works as it stands there, but for the address and the model's name."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from repo.sources import text_of
from server.served import Served

SERVING = re.search(r"^### Serving\n.*?(?=^### )", text_of(Path("README.md")), re.M | re.S)
assert SERVING
BLOCKS = re.findall(r"^```(python|bash)\n(.*?)^```", SERVING[0], re.M | re.S)
PYTHON = {re.findall(r"from (\w+) import", code)[0]: code for kind, code in BLOCKS if kind == "python"}
COMMANDS = [code for kind, code in BLOCKS if kind == "bash"]


def test_the_examples_are_those() -> None:
    assert list(PYTHON) == ["openai", "anthropic", "octavo"]
    assert len(COMMANDS) == 2


@pytest.mark.parametrize("library", ["openai", "anthropic"])
def test_client_code(served: Served, capsys: pytest.CaptureFixture[str], library: str) -> None:
    code = PYTHON[library].replace("http://127.0.0.1:8000", served.url).replace('"demo"', '"tiny"')
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out


def test_the_engine_as_a_library(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = PYTHON["octavo"].replace('"demo", max_model_len=1024', repr(str(tiny_folder)))
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=["plain", "held to a form"])
def test_commands(served: Served, command: str) -> None:
    command = command.replace("http://127.0.0.1:8000", served.url).replace('"demo"', '"tiny"')
    command = command.replace('"max_tokens": 64', '"max_tokens": 400')  # random weights like white space
    done = subprocess.run(
        ["bash", "-c", command.replace("curl ", "curl --silent --fail ")], capture_output=True, check=True
    )
    [choice] = json.loads(done.stdout)["choices"]
    assert choice["message"]["role"] == "assistant"
    if "json_schema" in command:
        assert set(json.loads(choice["message"]["content"])) == {"name", "legs"}
