"""What is ready in one step leaves in one write."""

import json
import os
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from doubles.echo_child import STEP_VARIABLE
from server.served import Served

from octavo.engine import supervisor

TESTS = Path(__file__).resolve().parent.parent
NUM_TOKENS = 30
TEXT = "The quick brown fox jumps over the lazy dog"


@pytest.fixture
def echo(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server whose engine gives every request a token at every step, its own prompt's."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv(STEP_VARIABLE, "0.05")
    monkeypatch.setattr(supervisor, "CHILD_MODULE", "doubles.echo_child")
    served = Served(tiny_folder)
    try:
        yield served.ready()
    finally:
        served.close()


def writes_of(url: str, path: str, body: dict[str, Any]) -> list[bytes]:
    """The pieces in which a stream came, as HTTP's chunks have them."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("POST", path, json.dumps({**body, "stream": True, "max_tokens": NUM_TOKENS}))
    answer = connection.getresponse()
    assert answer.status == 200
    found, file = [], answer.fp
    assert file is not None
    while size := int(file.readline(), 16):
        found.append(file.read(size))
        file.readline()
    connection.close()
    return found


def test_choices_that_gain_in_one_step_are_told_in_one_write(echo: Served) -> None:
    messages = [{"role": "user", "content": TEXT}]
    for path, body, num_choices in (
        ("/v1/completions", {"prompt": TEXT, "n": 4}, 4),
        ("/v1/completions", {"prompt": [TEXT, TEXT, TEXT], "n": 2}, 6),
        ("/v1/chat/completions", {"messages": messages, "n": 4}, 4),
    ):
        writes = writes_of(echo.url, path, body)
        num_events = [write.count(b"data: {") for write in writes]
        assert sum(num_events) >= NUM_TOKENS * num_choices * 0.8  # some tokens show no text
        assert max(num_events) >= num_choices
        assert len(writes) <= NUM_TOKENS + 8  # the prompts of one request may begin a step apart
        assert all(write.startswith(b"data: ") and write.endswith(b"\n\n") for write in writes)
