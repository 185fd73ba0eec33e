"""Hostile load: whatever is sent, and however much, /health is answered within a second.

It is asked for by a process of its own. A machine that does other things lets the server wait for a processor, as the
kernel counts, or stands still for both, as a clock in that process shows: that much is not the server's.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.command import Command
from server.served import Served

MAX_SECONDS = 1.0
NUM_REQUESTS = 10_000
PATH = "/v1/completions"

# Looks at /health until its input ends, then prints [seconds, seconds] of every look: what the answer took, and how
# much of that is the machine's. A connection each, as probes have it.
LOOK = """
import http.client, json, pathlib, sys, threading, time

port, tasks = int(sys.argv[1]), pathlib.Path("/proc", sys.argv[2], "task")

def delays():
    found = {}
    for task in tasks.iterdir():
        try:
            found[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
        except OSError:
            pass  # a thread that ended, or a kernel that does not count
    return found

lost = 0.0

def tick():
    global lost
    last = time.monotonic()
    while True:
        time.sleep(0.01)
        now = time.monotonic()
        if now - last > 0.2:
            lost += now - last
        last = now

threading.Thread(target=tick, daemon=True).start()
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
looks = []
print("looking", flush=True)
while not over.is_set():
    before, begun, lost_before = delays(), time.monotonic(), lost
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/health")
    status = connection.getresponse().status
    connection.close()
    assert status == 200, status
    seconds, after = time.monotonic() - begun, delays()
    time.sleep(0.03)  # for the clock to have seen a stand
    waited = sum(after[name] - before.get(name, 0.0) for name in after)
    looks.append((seconds, waited + lost - lost_before))
    over.wait(0.05)
print(json.dumps(looks))
"""


class Watch:
    """A process that looks at /health all the while."""

    def __init__(self, port: int, pid: int, script: Path) -> None:
        script.write_text(LOOK)
        command = [sys.executable, str(script), str(port), str(pid)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "looking\n"

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        printed, _ = self._process.communicate()
        assert self._process.returncode == 0
        looks = [(seconds, max(seconds - machines, 0.0)) for seconds, machines in json.loads(printed)]
        assert looks
        slowest, own = max(looks), max(own for _, own in looks)
        print(f"/health: {len(looks)} looks, {slowest[0]:.3f} s the slowest, {own:.3f} s of the server's own")
        assert own < MAX_SECONDS


@pytest.fixture(scope="module")
def command(tiny_folder: Path) -> Iterator[Command]:
    """The server as users start it, with a queue for all that comes."""
    command = Command(
        tiny_folder, "--max-num-seqs=32", "--stall-timeout=300", f"--max-waiting-requests={NUM_REQUESTS + 1}"
    )
    try:
        yield command
    finally:
        command.close()


@pytest.fixture(scope="module")
def url(command: Command) -> str:
    return command.wait_for(r"ready on (http://\S+)")


@pytest.fixture
def watch(url: str, command: Command, tmp_path: Path) -> Watch:
    return Watch(int(url.rsplit(":", 1)[1]), command.process.pid, tmp_path / "look.py")


def test_bodies_of_64_mb(url: str, watch: Watch) -> None:
    """Refused by the limit, also where their length was not told."""

    def parts() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(64):
            yield b"x" * (1 << 20)
        yield b'"}'

    with watch, httpx.Client(base_url=url, timeout=120) as http:
        for content in (b"".join(parts()), parts()):
            assert http.post(PATH, content=content).status_code == 413
        # As long as the limit allows, and of a form that is slow to read.
        slow = [
            (b'{"prompt": "' + b"word " * (6 << 20) + b'"}', 400),
            (b'{"prompt": [' + b"5," * (15 << 20) + b"5]}", 413),
            (b'{"prompt": [' + b"5," * (1 << 20) + b"5]}", 400),
            (b'{"messages": [' + b'{"role": "user", "content": ""},' * (1 << 19) + b"{}]}", 400),
        ]
        for content, status in slow:
            assert len(content) < 32 << 20
            answer = http.post("/v1/chat/completions" if b"messages" in content[:20] else PATH, content=content)
            assert answer.status_code == status, answer.text


def _enum_of_a_megabyte() -> dict[str, Any]:
    return {"enum": [f"value number {i:06}" for i in range(50_000)]}


def _properties_of_a_megabyte() -> dict[str, Any]:
    properties = {f"property_{i:05}": {"type": "string", "maxLength": 40} for i in range(20_000)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": {"anyOf": [schema, {"type": "null"}]}}}
        if len(json.dumps(schema)) > 1 << 20:
            break
    return schema


FORMS: dict[str, Callable[[], dict[str, Any]]] = {
    "regex of nested repeats": lambda: {"guided_regex": "(((a{1,100}){1,100}){1,100}){1,100}"},
    "regex that backtracks": lambda: {"guided_regex": "(a+)+(a|aa)*$"},
    "regex of wide classes": lambda: {"guided_regex": r"(\w{1,500}\s{1,500}){1,500}x"},
    "regex of alternatives": lambda: {"guided_regex": "(" + "|".join(f".*{i}.*" for i in range(3000)) + "){5}"},
    "schema of a long enum": lambda: {"guided_json": _enum_of_a_megabyte()},
    "schema of many properties": lambda: {"guided_json": _properties_of_a_megabyte()},
    "schema that nests": lambda: {"guided_json": _nested(20)},
    "schema that refers to itself": lambda: {
        "guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}
    },
    "grammar of a megabyte": lambda: {
        "guided_grammar": "start: r0\n"
        + "".join(f'r{i}: "x{i}" r{i + 1} | "y"\n' for i in range(30_000))
        + 'r30000: "z"'
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_hostile_forms(url: str, watch: Watch, form: str) -> None:
    """Served, or refused as the client's fault; and others are served meanwhile."""
    with watch, httpx.Client(base_url=url, timeout=120) as http:
        answers: list[httpx.Response] = []
        body = {"prompt": "Hello", "max_tokens": 8, **FORMS[form]()}
        sending = threading.Thread(target=lambda: answers.append(http.post(PATH, json=body)))
        sending.start()
        assert http.post(PATH, json={"prompt": "Hello", "max_tokens": 2}).status_code == 200
        sending.join()
    [answer] = answers
    assert answer.status_code in (200, 400), answer.text
    assert len(answer.content) < 4000


def test_ten_thousand_queued_requests(url: str, command: Command, watch: Watch) -> None:
    """All of them wait at once, since the engine is held; then each is answered."""
    children = Path(f"/proc/{command.process.pid}/task/{command.process.pid}/children")
    engine = int(children.read_text().split()[0])
    with watch, ThreadPoolExecutor(1) as thread, httpx.Client(base_url=url, timeout=60) as http:
        os.kill(engine, signal.SIGSTOP)
        try:
            flood = thread.submit(asyncio.run, _flood(url))
            Served.wait_until(lambda: http.get("/load").json() == {"server_load": NUM_REQUESTS} or flood.done(), 240)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert flood.result() == {200: NUM_REQUESTS}
        shown = http.get("/requests?limit=1").json()["engine"]
        assert (shown["num_running"], shown["num_waiting"], shown["blocks"]["used"]) == (0, 0, 0)
        assert shown["num_restarts"] == 0
        assert http.get("/load").json() == {"server_load": 0}


async def _flood(url: str) -> Counter[int]:
    """Every request on a connection of its own, written by hand: a client library would take longer than the server."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    opening = asyncio.Semaphore(500)  # connections that are being made, which the kernel's backlog must hold

    async def one() -> int:
        async with opening:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + body)
            await writer.drain()
        status = int((await reader.readline()).split()[1])
        await reader.read()
        writer.close()
        return status

    return Counter(await asyncio.gather(*(one() for _ in range(NUM_REQUESTS))))
