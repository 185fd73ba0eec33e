"""Two hundred clients on a tiny pool, some of whom leave; and thousands of requests that leave nothing behind."""

import asyncio
import gc
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from server.served import Served

from octavo.server.options import ServerOptions

PATH = "/v1/completions"
NUM_CLIENTS = 200
MAX_WAITING = 150


class Client:
    """A connection over which requests go one after another; cheap enough for thousands of them."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: dict[str, Any], leave_after: int | None = None) -> tuple[int, bytes]:
        """Status and body; with `leave_after` the connection is closed once so many events have come."""
        self._streams = self._streams or await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        data = json.dumps(body).encode()
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (PATH.encode(), len(data)) + data)
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if b"transfer-encoding: chunked" not in head:
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            return status, await reader.readexactly(int(length.split(b":")[1]))
        found = b""
        while size := int(await reader.readline(), 16):
            found += (await reader.readexactly(size + 2))[:-2]
            if leave_after is not None and found.count(b"data: ") >= leave_after:
                await self.close()
                return status, found
        await reader.readexactly(2)
        return status, found

    async def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def check_whole(answer: bytes, wish: dict[str, Any]) -> list[int]:
    """The token ids of a stream, which came to its end, and said so once."""
    *events, done, rest = answer.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    [reason] = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert reason == "length"
    token_ids = [token_id for chunk in chunks for choice in chunk["choices"] for token_id in choice["token_ids"]]
    assert len(token_ids) == wish["max_tokens"]
    return token_ids


def check_idle(served: Served) -> None:
    """Nothing runs, waits, holds a block or is remembered as under way."""
    served.wait_until(served.is_idle)
    stats, history = served.engine.stats, served.engine.history
    assert (stats.num_running, stats.num_waiting, stats.num_swapped, stats.num_used_blocks) == (0, 0, 0, 0)
    assert (history.num_waiting, history.num_waiting_tokens) == (0, 0)
    assert len(served.engine._requests) == len(served.engine._requests.outputs) == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_two_hundred_clients_on_a_tiny_pool(tiny_folder: Path, mode: str) -> None:
    """All finish but those who leave and those who are told that too much waits; the tokens are those of a quiet hour.

    24 blocks of 8 tokens hold three of the longest requests.
    """
    rng = random.Random(3)
    wishes = []
    for number in range(NUM_CLIENTS):
        prompt = [5 + (number * 7 + 3 * i) % 200 for i in range(rng.randrange(1, 40))]
        length = {"max_tokens": rng.randrange(2, 24), "ignore_eos": True, "return_token_ids": True, "stream": True}
        wishes.append({"prompt": prompt, "seed": number, "temperature": number % 3 / 2, **length})
    leavers = set(rng.sample(range(NUM_CLIENTS), NUM_CLIENTS // 10))
    settings = {"num_blocks_override": 24, "max_num_seqs": 16, "preemption_mode": mode}
    if mode == "swap":
        settings["swap_space"] = 0.001
    served = Served(tiny_folder, ServerOptions(max_waiting_requests=MAX_WAITING), **settings).ready()

    async def all_at_once() -> list[tuple[int, bytes]]:
        return await asyncio.gather(
            *(
                Client(served.url).ask(wish, leave_after=1 if number in leavers else None)
                for number, wish in enumerate(wishes)
            )
        )

    async def one_by_one(numbers: list[int]) -> list[tuple[int, bytes]]:
        client = Client(served.url)
        return [await client.ask(wishes[number]) for number in numbers]

    try:
        answers = asyncio.run(asyncio.wait_for(all_at_once(), 240))
        check_idle(served)
        found = {}
        for number, (wish, (status, answer)) in enumerate(zip(wishes, answers, strict=True)):
            if status == 503:
                error = json.loads(answer)["error"]
                assert "requests wait, at most 150 may (max_waiting_requests)" in error["message"]
            elif number not in leavers:
                assert status == 200
                found[number] = check_whole(answer, wish)
        statuses = Counter(status for status, _ in answers)
        assert set(statuses) <= {200, 503}
        assert len(found) + len(leavers) + statuses[503] >= NUM_CLIENTS
        assert statuses[200] >= MAX_WAITING
        assert served.engine.stats.counts["num_preemptions"] > 0
        again = list(found)[::10]
        for number, (_, answer) in zip(again, asyncio.run(one_by_one(again)), strict=True):
            assert check_whole(answer, wishes[number]) == found[number]
        check_idle(served)
    finally:
        served.close()


def memory_of(pid: int) -> int:
    """Bytes that a process has for itself."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) * 1024


def test_thousands_of_requests_leave_nothing_behind(tiny_folder: Path) -> None:
    """5,000 over HTTP: streamed and whole, n = 2, logprobs, stop strings, a form; some leave, some are wrong."""
    kinds: list[dict[str, Any]] = [
        {"stream": True},
        {},
        {"n": 2},
        {"stream": True, "logprobs": 2},
        {"stop": ["a", "b"]},
        {"structured_outputs": {"regex": "[ab]{2}"}},
        {"stream": True, "temperature": 0, "max_tokens": 30},
        {"temperature": -1},
    ]
    served = Served(tiny_folder, ServerOptions(), num_blocks_override=64).ready()
    wrong = 0

    async def client(first: int, last: int, step: int) -> None:
        nonlocal wrong
        connection = Client(served.url)
        for number in range(first, last, step):
            kind = kinds[number % len(kinds)]
            prompt = [5 + (number + 3 * i) % 200 for i in range(1 + number % 20)]
            body = {"prompt": prompt, "max_tokens": 2, "seed": number, **kind}
            status, _ = await connection.ask(body, leave_after=2 if kind.get("max_tokens") else None)
            wrong += status != (400 if kind.get("temperature") == -1 else 200)
        await connection.close()

    async def clients(first: int, last: int) -> None:
        await asyncio.gather(*(client(first + i, last, 16) for i in range(16)))

    def taken() -> tuple[int, int]:
        check_idle(served)
        gc.collect()
        return memory_of(served.engine.pid), len(gc.get_objects())

    try:
        asyncio.run(asyncio.wait_for(clients(0, 2000), 300))  # by then everything has been there once
        before = taken()
        asyncio.run(asyncio.wait_for(clients(2000, 5000), 300))
        after = taken()
        assert wrong == 0
        assert after[0] - before[0] < 8 << 20, f"the engine's process grew by {after[0] - before[0]} bytes"
        assert after[1] - before[1] < 3000, f"the front has {after[1] - before[1]} objects more"
        assert len(served.engine.history) <= 1000
    finally:
        served.close()
