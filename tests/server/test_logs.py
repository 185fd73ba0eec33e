"""The log alone tells what is served on what, and what became of a request."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server.command import Command

BODY = {"prompt": [4 + 7 * i % 250 for i in range(100)], "max_tokens": 4, "ignore_eos": True}  # two chunks


@pytest.fixture(scope="module")
def command(tiny_folder: Path) -> Iterator[Command]:
    command = Command(tiny_folder, "--served-model-name=tiny", "--log-level=debug")
    try:
        yield command
    finally:
        command.close()


def test_the_first_lines_say_what_the_memory_goes_to(command: Command) -> None:
    command.wait_for(r"ready on (http://\S+)")
    text = command.text[: command.text.index("ready on")]
    for pattern in (
        r"prefix caching: +on, blocks of 8 tokens",
        r"memory: +\d+\.\d\d GiB",
        r"in use before: +\d+\.\d\d \wiB",
        r"KV cache: +\S+ \wiB: 256 blocks of 8 tokens, \d+ KiB each, 2048 tokens in all",
        r"reserved: +\S+ \wiB: weights, workspace and KV cache",
        r"available: +\S+ \wiB left",
    ):
        assert len(re.findall(pattern, text)) == 1, f"{pattern}: {text}"


def test_one_request_can_be_followed_from_its_arrival_to_its_end(command: Command) -> None:
    url = command.wait_for(r"ready on (http://\S+)")
    answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()
    own = re.escape(answer["id"])
    command.wait_for(rf"request {own} ended")
    lines = [line for line in command.text.splitlines() if answer["id"] in line]
    told = {process: [] for process in ("server", "engine")}
    for line in lines:
        found = re.search(rf"^\S+ \S+ (server|engine) (\w+) \S+: request {own}:? (.*)$", line)
        assert found, line
        told[found[1]].append((found[2], found[3]))
    for level, _ in told["server"][:-1] + told["engine"][:-1]:
        assert level == "DEBUG"
    expected = {
        "server": [
            r"received: /v1/completions",
            r"tokenised: 100 tokens",
            r"ended: length; 100 prompt tokens, .* s in all",
        ],
        "engine": [
            r"queued: 0 run and 0 wait before it",
            r"admitted: prefix hit 0 tokens, then differs at 0",
            r"chunk: 64 tokens, 64 of 100 computed",
            r"chunk: 36 tokens, 100 of 100 computed",
            r"first token",
            r"finished: length",
            r"ended: length; 100 prompt tokens, 0 of them cached; 4 generated; preempted 0 times; \S+ s",
        ],
    }
    for process, patterns in expected.items():
        said = [text for _, text in told[process]]
        assert len(said) == len(patterns), said
        for pattern, text in zip(patterns, said, strict=True):
            assert re.fullmatch(pattern, text), text


def test_usually_a_request_is_one_line(tiny_folder: Path) -> None:
    command = Command(tiny_folder, "--served-model-name=tiny")
    try:
        url = command.wait_for(r"ready on (http://\S+)")
        ids = [httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()["id"] for _ in range(2)]
        for name in ids:
            command.wait_for(rf"request {re.escape(name)} ended")
            [line] = [line for line in command.text.splitlines() if name in line]
            assert " INFO " in line
            assert re.search(r"ended: length; 100 prompt tokens, (0|96) of them cached; 4 generated; preempted 0", line)
            assert re.search(r"queued \d+\.\d+ s, first token after \d+\.\d+ s, \d+\.\d+ s in all$", line)
    finally:
        command.close()


def test_a_refusal_is_a_line_without_what_was_sent(command: Command) -> None:
    url = command.wait_for(r"ready on (http://\S+)")
    bad = {"prompt": "a secret\nprompt", "temperature": -1}
    assert httpx.post(f"{url}/v1/completions", json=bad, timeout=60).status_code == 400
    command.wait_for(r"POST /v1/completions: refused \(400\): temperature must be .*, got -1")
    assert httpx.get(f"{url}/v1/models/none%20such", timeout=60).status_code == 404
    command.wait_for(r"GET /v1/models/none%20such: refused \(404\): ")
    assert httpx.post(f"{url}/v2/completions?a=secret", timeout=60).status_code == 404
    command.wait_for(r"POST /v2/completions: refused \(404\): no such path")
    assert httpx.get(f"{url}/v1/completions", timeout=60).status_code == 405
    command.wait_for(r"GET /v1/completions: refused \(405\): Method Not Allowed")
    assert "secret" not in command.text
