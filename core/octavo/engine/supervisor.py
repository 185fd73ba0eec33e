"""The engine process as the front sees it: started, watched, ended."""

import asyncio
import logging
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq

from octavo.config import EngineConfig
from octavo.engine.board import Board
from octavo.engine.wire import FromEngine, Ready, Start, Stop, ToEngine, decode_from_engine, encode

__all__ = ["EngineProcess"]

CHILD_MODULE = "octavo.engine.child"  # what runs in the process
WATCH_SECONDS = 0.5  # between looks at the board
BUSY_SHARE = 0.01  # of a processor: a process that takes less computes nothing
BUSY_PATIENCE = 10  # times stall_timeout that one may compute from one sign of life to the next
STOP_SECONDS = 5.0  # that a process has to end by itself
DRAIN_SECONDS = 0.005  # without a message, after which a process that is gone has no more to say
MAX_TURN = 64  # messages that are taken before others have their turn

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
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._outbox: deque[bytes] = deque()
        self._on_message: Callable[[FromEngine], None] | None = None
        self._num_received = 0
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ready = False
        self._stall: str | None = None
        self._loop = asyncio.get_running_loop()
        self.death: asyncio.Future[str] = self._loop.create_future()

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
        """Start it; `on_message` is called with each of its messages, in order."""
        self._on_message = on_message
        address = f"ipc://{Path(self._folder.name) / 'engine'}"
        self._socket.bind(address)
        # The descriptor tells of changes alone, not of what is there (ZMQ_FD): every turn looks for all of it. Pyzmq's
        # own futures take a tenth of a millisecond a message, which is much where each step of the engine is one.
        self._loop.add_reader(self._socket.fileno(), self._turn)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", CHILD_MODULE, address, str(os.getpid()), stdin=asyncio.subprocess.DEVNULL
        )
        self.send(Start(self._config.flat(), str(self._board.path), self._max_requests))
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._wait())]

    def send(self, message: ToEngine) -> None:
        """Send a message, in the order of the calls and without waiting; one to a process that is gone is lost."""
        self._outbox.append(encode(message))
        self._loop.call_soon(self._turn)

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
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=0)
        self._board.remove()
        self._folder.cleanup()

    def _turn(self) -> None:
        """Send what callers left, as much as the process takes, and take what it has sent."""
        if self._socket.closed:
            return
        try:
            while self._outbox:
                self._socket.send(self._outbox[0], zmq.DONTWAIT)
                self._outbox.popleft()
        except zmq.Again:  # it is not there yet, or never will be
            pass
        for _ in range(MAX_TURN):
            try:
                data = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._num_received += 1
            self._hear(data)
            if self._socket.closed:
                return
        self._loop.call_soon(self._turn)

    def _hear(self, data: bytes) -> None:
        assert self._on_message is not None
        message = decode_from_engine(data)
        self._is_ready = self._is_ready or isinstance(message, Ready)
        try:
            self._on_message(message)
        except Exception:  # a fault of ours, which must not keep us from hearing the rest
            logger.exception("a message of the engine could not be taken")

    async def _watch(self) -> None:
        """End a process whose signs of life stand still: a stall is a death that has not been noticed.

        One that computes (a call that shows nothing of itself, a compiler) has more time. Time in which this process
        did not run either (a machine that was suspended) says nothing about the other.
        """
        period = min(WATCH_SECONDS, self._stall_timeout / 4)
        beats, still, computing = self._board.num_beats, 0.0, 0.0
        looked, spent = time.monotonic(), _seconds_computed(self.pid)
        while True:
            await asyncio.sleep(period)
            before, looked = looked, time.monotonic()
            spent_before, spent = spent, _seconds_computed(self.pid)
            if not self._is_ready or self._board.num_beats != beats:
                beats, still, computing = self._board.num_beats, 0.0, 0.0
                continue
            passed = min(looked - before, 2 * period)
            if spent - spent_before > BUSY_SHARE * passed:
                computing, still = computing + min(spent - spent_before, passed), 0.0
            else:
                still += passed
            if still > self._stall_timeout or computing > BUSY_PATIENCE * self._stall_timeout:
                self._stall = f"it made no progress for {still + computing:.0f} s (stall_timeout)"
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
        """Take what the process had sent before it ended."""
        before = -1
        while before < self._num_received:
            before = self._num_received
            await asyncio.sleep(DRAIN_SECONDS)
            self._turn()


def _seconds_computed(pid: int) -> float:
    """What a process has computed so far, all of its threads; 0 where the system does not tell or it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # Linux: the process's own clock, as its C library finds it
    except OSError:
        return 0.0
