"""The engine process as the front sees it: started, watched, ended."""

import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio

from octavo.config import EngineConfig
from octavo.engine.board import Board
from octavo.engine.wire import FromEngine, Ready, Start, Stop, ToEngine, decode_from_engine, encode

__all__ = ["EngineProcess"]

CHILD_MODULE = "octavo.engine.child"  # what runs in the process
WATCH_SECONDS = 0.5  # between looks at the board
STOP_SECONDS = 5.0  # that a process has to end by itself

logger = logging.getLogger(__name__)


class EngineProcess:
    """One engine process, from its start to its death. It is never started twice: make another.

    Attributes:
        death: done when the process is gone, with what the front should say of it.

    """

    def __init__(self, config: EngineConfig, *, max_requests: int, stall_timeout: float) -> None:
        self._config = config
        self._max_requests = max_requests
        self._stall_timeout = stall_timeout
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-")
        self._board = Board.create(max_requests)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._outbox: asyncio.Queue[ToEngine] = asyncio.Queue()
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ready = False
        self._stall: str | None = None
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None, "start it first"
        return self._process.pid

    @property
    def in_step(self) -> frozenset[int]:
        """Numbers of the requests that compute; after a death, of those in the fatal step."""
        return self._board.in_step

    async def start(self, on_message: Callable[[FromEngine], None]) -> None:
        """Start the process; `on_message` is awaited for each of its messages, in order."""
        address = f"ipc://{Path(self._folder.name) / 'engine'}"
        self._socket.bind(address)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", CHILD_MODULE, address, str(os.getpid()), stdin=asyncio.subprocess.DEVNULL
        )
        self.send(Start(self._config.flat(), str(self._board.path), self._max_requests))
        self._tasks = [
            asyncio.create_task(self._transmit()),
            asyncio.create_task(self._receive(on_message)),
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._wait()),
        ]

    def send(self, message: ToEngine) -> None:
        """Send a message, in the order of the calls and without waiting; one to a process that is gone is lost."""
        self._outbox.put_nowait(message)

    async def stop(self) -> None:
        """Ask the process to end, then make it; returns when it is gone."""
        process = self._process
        if process is not None and process.returncode is None:
            self.send(Stop())
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                self.kill()
                await process.wait()
        await self.release()

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def release(self) -> None:
        """Give back sockets, files and tasks of a process that is gone."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._socket.close(linger=0)
        self._board.remove()
        self._folder.cleanup()

    async def _transmit(self) -> None:
        """Send what callers left; waits while the process takes nothing, for ever where it is gone."""
        while True:
            await self._socket.send(encode(await self._outbox.get()))

    async def _receive(self, on_message: Callable[[FromEngine], None]) -> None:
        while True:
            message = decode_from_engine(await self._socket.recv())
            self._is_ready = self._is_ready or isinstance(message, Ready)
            on_message(message)

    async def _watch(self) -> None:
        """End a process whose signs of life stand still: a stall is a death that has not been noticed."""
        beats, since = self._board.num_beats, time.monotonic()
        while True:
            await asyncio.sleep(min(WATCH_SECONDS, self._stall_timeout / 4))
            now = time.monotonic()
            if not self._is_ready or self._board.num_beats != beats:
                beats, since = self._board.num_beats, now
            elif now - since > self._stall_timeout:
                self._stall = f"it made no progress for {now - since:.0f} s (stall_timeout)"
                logger.error("engine process %d: %s; it is ended", self.pid, self._stall)
                self.kill()
                return

    async def _wait(self) -> None:
        assert self._process is not None
        status = await self._process.wait()
        await self._drain()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        if not self.death.done():
            self.death.set_result(self._stall or f"it ended with {how}")

    async def _drain(self) -> None:
        """Let the receiver take what the process had sent before it ended."""
        for _ in range(20):
            if not await self._socket.poll(5):
                return
            await asyncio.sleep(0.005)
