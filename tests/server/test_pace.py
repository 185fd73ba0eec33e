"""Requests that come by the thousand begin a few at a time, in their order, and keep no probe waiting."""

import asyncio
from typing import Any

from octavo.server.middleware import NUM_A_TURN, Paced


def test_a_probe_passes_a_crowd() -> None:
    begun: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])
        await asyncio.sleep(0)  # requests wait for this and that once they have begun

    async def crowd() -> None:
        paced = Paced(app)
        paths = [f"/v1/{i}" for i in range(500)] + ["/health"] + [f"/v1/{i}" for i in range(500, 600)]
        for path in paths:
            asyncio.get_running_loop().call_soon(begin, paced, path)
        while len(begun) < len(paths):
            await asyncio.sleep(0)

    tasks: set[asyncio.Task[None]] = set()

    def begin(paced: Paced, path: str) -> None:
        tasks.add(asyncio.ensure_future(paced({"type": "http", "method": "POST", "path": path}, None, None)))  # type: ignore[arg-type]

    asyncio.run(crowd())
    assert begun.index("/health") <= 3 * NUM_A_TURN
    begun.remove("/health")
    assert begun == [f"/v1/{i}" for i in range(600)]


def test_one_that_is_cancelled_takes_no_turn() -> None:
    begun: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])

    async def crowd() -> None:
        paced = Paced(app)
        scopes = [{"type": "http", "method": "POST", "path": f"/{i}"} for i in range(50)]
        tasks = [asyncio.ensure_future(paced(scope, None, None)) for scope in scopes]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        for task in tasks[1::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await paced({"type": "http", "method": "POST", "path": "/last"}, None, None)  # type: ignore[arg-type]

    asyncio.run(crowd())
    assert begun[-1] == "/last"
    assert set(begun) >= {f"/{i}" for i in range(0, 50, 2)}
