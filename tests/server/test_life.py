"""Clients that leave, an engine that dies, a server that is told to end."""

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.command import Command
from server.events import chunks_of, joined
from server.served import Served

from octavo.server.options import ServerOptions

PATH = "/v1/completions"
LONG = {"prompt": [5 + i % 200 for i in range(20)], "temperature": 0, "max_tokens": 480, "ignore_eos": True}


def num_generated(served: Served) -> int:
    return served.engine.stats.counts.get("num_generated_tokens", 0)


def request_of(url: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which the request was sent, and from which nothing was read."""
    host, port = url.removeprefix("http://").split(":")
    opened = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    opened.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (PATH.encode(), len(data)) + data)
    return opened


# A prompt in chunks is left before it has a token: each of its steps takes 64 of 480 tokens.
IN_CHUNKS = {"prompt": [5 + i % 200 for i in range(480)], "max_tokens": 30, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wish", [LONG, {**LONG, "n": 4, "temperature": 1}, {**LONG, "prompt": [LONG["prompt"]] * 3}])
def test_a_client_that_leaves_frees_all(served: Served, wish: dict[str, Any], stream: bool) -> None:
    before = num_generated(served)
    connection = request_of(served.url, {**wish, "stream": stream})
    served.wait_until(lambda: num_generated(served) > before)
    connection.close()
    served.wait_until(served.is_idle)
    assert num_generated(served) - before < wish["max_tokens"] * 0.9


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_within_its_prompt_frees_all(served: Served, stream: bool) -> None:
    connection = request_of(served.url, {**IN_CHUNKS, "stream": stream})
    served.wait_until(lambda: served.engine.num_live == 1)
    connection.close()
    served.wait_until(lambda: served.engine.num_live == 0)
    with httpx.Client(base_url=served.url, timeout=60) as http:
        assert http.post(PATH, json={"prompt": "Hello", "max_tokens": 1}).status_code == 200
    served.wait_until(served.is_idle)


def test_an_engine_that_dies_changes_no_answer(tiny_folder: Path) -> None:
    served = Served(tiny_folder)
    try:
        with httpx.Client(base_url=served.url, timeout=60) as http:
            loading = http.post(PATH, json=LONG)
            if served.engine.state == "loading":  # it listens before the engine is there
                assert loading.status_code == 503
                assert loading.headers["retry-after"] == "2"
                assert http.get("/health").status_code == 503
            served.ready()
            assert http.get("/health").json() == {"status": "ready"}
            _check_that_answers_survive(served, http)
    finally:
        served.close()


def _check_that_answers_survive(served: Served, http: httpx.Client) -> None:
    wishes: list[dict[str, Any]] = [
        LONG,
        {**LONG, "temperature": 1, "seed": 3, "n": 2, "max_tokens": 300},
        {**LONG, "temperature": 1, "seed": 4, "max_tokens": 300, "logprobs": 1, "echo": True},
        {**LONG, "temperature": 1, "seed": 5, "max_tokens": 300, "frequency_penalty": 1, "stop": ["no such text"]},
    ]
    expected = [http.post(PATH, json=wish).json() for wish in wishes]
    before = num_generated(served)
    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(chunks_of, http, PATH, **wish) for wish in wishes]
        wholes = [threads.submit(http.post, PATH, json=wish) for wish in wishes]
        served.wait_until(lambda: num_generated(served) > before + 100)
        os.kill(served.engine.pid, signal.SIGKILL)
        served.wait_until(lambda: http.get("/health").status_code == 503)
        assert http.get("/health").json() == {"status": "restarting"}
        refused = http.post(PATH, json=LONG)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "2"
        for answer, stream, whole in zip(expected, streams, wholes, strict=True):
            found = whole.result().json()
            for choice, again in zip(answer["choices"], found["choices"], strict=True):
                assert again["text"] == choice["text"]
                assert again["finish_reason"] == choice["finish_reason"]
            pieces = joined(stream.result())
            for choice in answer["choices"]:
                assert pieces[choice["index"]]["text"] == choice["text"]
                assert pieces[choice["index"]]["finish_reason"] == choice["finish_reason"]
            if answer["choices"][0]["logprobs"]:
                assert len(pieces[0]["logprobs"]["tokens"]) == len(answer["choices"][0]["logprobs"]["tokens"])
    assert served.engine.num_restarts == 1
    assert http.get("/health").status_code == 200
    served.wait_until(served.is_idle)


def test_a_fault_within_a_stream_is_an_event_and_its_end(served: Served) -> None:
    with (
        httpx.Client(base_url=served.url, timeout=60) as http,
        http.stream("POST", PATH, json={**LONG, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        [live] = served.engine._requests
        served.call(_fail(served, live))
        *_, last = [line for line in lines if line]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == 503
    assert error["message"] == "as planned"
    served.wait_until(served.is_idle)


async def _fail(served: Served, live: Any) -> None:
    from octavo.errors import EngineDeadError

    served.engine._requests.fail(live, EngineDeadError("as planned"))
    await served.engine.abort([live.message.request_id])


@pytest.fixture
def command(tiny_folder: Path, tmp_path: Path) -> Iterator[Command]:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nkey-1\n\nkey-2\n")
    command = Command(tiny_folder, f"--api-key-file={keys}", "--served-model-name=mine", "--drain-seconds=20")
    try:
        yield command
    finally:
        command.close()


def test_the_command_serves_and_drains(command: Command) -> None:
    url = command.wait_for(r"ready on (http://\S+)")
    for said in ("platform:", "KV cache:", "prefix caching:.* on, blocks of 8 tokens", "threads:", "max_model_len 512"):
        assert re.search(said, command.text), command.text
    with httpx.Client(base_url=url, headers={"authorization": "Bearer key-2"}, timeout=60) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["mine"]
        with http.stream("POST", PATH, json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            command.process.send_signal(signal.SIGTERM)
            command.wait_for("ending: 1 requests under way")
            *_, last = [line for line in lines if line]
            assert last == "data: [DONE]"
    assert command.process.wait(30) == 0, command.text


def test_requests_that_outlast_the_drain_are_told_so(tiny_folder: Path) -> None:
    command = Command(tiny_folder, "--drain-seconds=0")
    try:
        url = command.wait_for(r"ready on (http://\S+)")
        with httpx.Client(base_url=url, timeout=60) as http:
            with http.stream("POST", PATH, json={**LONG, "n": 4, "temperature": 1, "stream": True}) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: {")
                command.process.send_signal(signal.SIGTERM)
                *_, last = [line for line in lines if line]
            error = json.loads(last.removeprefix("data: "))["error"]
            assert (error["code"], error["message"]) == (503, "the engine was stopped")
        assert command.process.wait(30) == 0, command.text
        assert "ending: 1 requests are cut off" in command.text
    finally:
        command.close()


def test_the_command_ends_when_the_engine_is_gone_for_good(command: Command) -> None:
    url = command.wait_for(r"ready on (http://\S+)")
    headers = {"authorization": "Bearer key-1"}
    children = Path(f"/proc/{command.process.pid}/task/{command.process.pid}/children")
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http, ThreadPoolExecutor(1) as threads:
        waiting = None
        for num_deaths in range(1, 4):
            Served.wait_until(lambda: http.get("/health").status_code == 200)
            if waiting is None:
                waiting = threads.submit(http.post, PATH, json=LONG)
            os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
            command.wait_for("(?s)" + "the engine process died.*?" * num_deaths)
        answer = waiting.result()
        assert answer.status_code in (200, 500, 503)
    assert command.process.wait(30) == 1, command.text
    assert "no request explains it" in command.text


def test_a_model_that_is_not_there_ends_the_command(tmp_path: Path) -> None:
    command = Command(tmp_path / "nothing")
    try:
        assert command.process.wait(60) == 1
    finally:
        command.close()
    assert "octavo serve: error: " in command.lines[-1]
    assert "Traceback" not in command.text


def test_a_unix_socket(served: Served, tmp_path: Path) -> None:
    from octavo.server.run import Address

    path = str(tmp_path / "octavo.sock")
    address = Address(uds=path)
    opened = address.open()
    assert address.url(opened) == f"unix:{path}"
    opened.close()
    served.listen(ServerOptions(), address.open())
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://octavo", timeout=60) as http:
        assert http.get("/health").status_code == 200
