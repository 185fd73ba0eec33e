"""A server in a thread of the tests' process: real sockets, a real engine process."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvicorn

from octavo import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.server.app import create_app
from octavo.server.options import ServerOptions

__all__ = ["OPTIONS", "SETTINGS", "Served"]

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "block_size": 8,
    "num_blocks_override": 256,
    "max_num_batched_tokens": 64,  # prompts longer than this come in chunks
}
OPTIONS = ServerOptions(served_model_names=("tiny", "second-name"), max_body_bytes=1 << 20)


class Served:
    """An engine, and any number of servers over it, on an event loop of their own thread."""

    def __init__(self, folder: Path, options: ServerOptions = OPTIONS, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._servers: list[tuple[uvicorn.Server, Any]] = []
        config = EngineConfig.of(model=str(folder), **{**SETTINGS, **settings})
        self.engine: AsyncEngine = self.call(AsyncEngine.start(config, wait=False))
        self.url = self.listen(options)

    def listen(self, options: ServerOptions, opened: socket.socket | None = None) -> str:
        """The address of one more server over the same engine, on a socket of its own or on this one."""
        app = create_app(self.engine, options)
        config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", ws="none", timeout_keep_alive=60)
        server = uvicorn.Server(config)
        serving = asyncio.run_coroutine_threadsafe(
            server._serve(opened and [opened]), self._loop
        )  # without its signal handlers
        self.wait_until(lambda: server.started)
        self._servers.append((server, serving))
        where = server.servers[0].sockets[0].getsockname()
        return str(where) if isinstance(where, str) else f"http://127.0.0.1:{where[1]}"

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What a coroutine of the loop returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def ready(self) -> "Served":
        """Itself, once the engine is."""
        self.call(self.engine.wait_ready())
        return self

    @staticmethod
    def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
        """Return once it holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it never came true"
            time.sleep(0.002)

    def is_idle(self) -> bool:
        """Whether nothing runs, waits or holds a block."""
        stats = self.engine.stats
        return not (self.engine.num_live or stats.num_running or stats.num_waiting or stats.num_used_blocks)

    def close(self) -> None:
        """End the servers, then the engine."""
        for server, serving in self._servers:
            server.should_exit = True
            serving.result(30)
        self.call(self.engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
