"""The engine process: one thread that steps and, between steps, hears the front.

Started by the front as `python -m octavo.engine.child ADDRESS PARENT`. It dies with its parent, leaves SIGINT and
SIGTERM to it, and knows token ids only.
"""

import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import zmq

from octavo.config import EngineConfig
from octavo.engine.assembly import load_engine, prepare
from octavo.engine.board import Board
from octavo.engine.embedding import EmbeddingEngine
from octavo.engine.loop import EngineCore
from octavo.engine.profiling import Profile, StepProfiler
from octavo.engine.wire import (
    Abort,
    AddRequest,
    Failed,
    FinishSample,
    FromEngine,
    Gained,
    Ready,
    Refused,
    ResetPrefixCache,
    Start,
    Stop,
    ToEngine,
    WireStats,
    decode_to_engine,
    encode,
)
from octavo.errors import OctavoError, RequestError
from octavo.scheduler.request import Request
from octavo.text.grammar import CompiledGrammar

__all__ = ["main"]

IDLE_SECONDS = 1.0  # between signs of life when there is nothing to do
COMPILING_SECONDS = 0.005  # between looks whether a structured output is compiled, when there is nothing else to do
PR_SET_PDEATHSIG = 1  # Linux prctl(2)
LOG_LEVEL_VARIABLE = "OCTAVO_LOG_LEVEL"

logger = logging.getLogger(__name__)


class EngineChild:
    """Serves one front until it says stop or is gone."""

    def __init__(self, address: str, parent: int) -> None:
        self._parent = parent
        self._socket = zmq.Context().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)  # the front bounds what is under way; nothing is dropped here
        self._socket.connect(address)
        self._numbers: dict[str, int] = {}
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="octavo-grammar")
        self._compiling: list[tuple[AddRequest, Future[CompiledGrammar]]] = []

    def run(self) -> int:
        """Load, then step until told to stop; the process's exit status."""
        start = decode_to_engine(self._socket.recv())
        if not isinstance(start, Start):  # the front changed its mind
            self._socket.close(linger=0)
            return 0
        self._board = Board(Path(start.board), start.max_requests)
        try:
            prepared = prepare(EngineConfig.of(**start.settings), progress=False)
            self._grammars = prepared.grammars
            self._engine: EngineCore | EmbeddingEngine = load_engine(prepared, progress=False)
            self._engine.on_progress(self._board.beat)
            self._profiler = StepProfiler(self._engine, self._send)
        except OctavoError as error:
            self._send(Failed(type(error).__name__, str(error)))
            self._socket.close(linger=2000)
            return 1
        facts, memory = {}, []
        if isinstance(self._engine, EngineCore):
            facts = dict(self._engine.executor.facts())
            memory = self._engine.executor.memory_plan.lines()
        gc.freeze()  # what is loaded stays: a collection while requests wait need not look at it
        self._send(Ready(prepared.config.flat(), facts, memory, self._stats()))
        while self._hear():
            if self._engine.has_work:
                self._step()
        self._engine.close()
        return 0

    def _hear(self) -> bool:
        """Take the front's messages, waiting for one where there is nothing else to do; False: stop."""
        idle = COMPILING_SECONDS if self._compiling else IDLE_SECONDS
        wait = 0 if self._engine.has_work else int(idle * 1000)
        while self._socket.poll(wait):
            message = decode_to_engine(self._socket.recv())
            if isinstance(message, Stop):
                return False
            self._obey(message)
            wait = 0
        self._add_compiled()
        self._board.beat()
        return os.getppid() == self._parent

    def _obey(self, message: ToEngine) -> None:
        if isinstance(message, AddRequest):
            if message.params.structured is None:
                self._add(message, None)
            else:  # it waits until its form is compiled, in the helper's thread
                compiling = self._helper.submit(self._grammars.compile, message.params.structured)
                self._compiling.append((message, compiling))
        elif isinstance(message, Abort):
            self._abort(message.request_ids)
        elif isinstance(message, FinishSample):
            self._engine.finish_sample(message.request_id, message.index)
        elif isinstance(message, ResetPrefixCache):
            self._engine.reset_prefix_cache()
        elif isinstance(message, Profile):
            self._profiler.obey(message, self._stats().counts)

    def _abort(self, request_ids: Sequence[str]) -> None:
        gone = set(request_ids)
        for message, _ in self._compiling:
            if message.request_id in gone:  # it has to be there for its end to be told
                self._add(message, None)
        self._compiling = [waiting for waiting in self._compiling if waiting[0].request_id not in gone]
        self._engine.abort(request_ids)
        for request_id in request_ids:
            self._numbers.pop(request_id, None)

    def _add_compiled(self) -> None:
        """Add the requests whose structured outputs are compiled by now."""
        waiting, self._compiling = self._compiling, []
        for message, compiling in waiting:
            if not compiling.done():
                self._compiling.append((message, compiling))
            elif (error := compiling.exception()) is None:
                self._add(message, compiling.result())
            else:
                param = error.param if isinstance(error, RequestError) else None
                self._send(Refused(message.request_id, str(error), param))

    def _add(self, message: AddRequest, grammar: CompiledGrammar | None) -> None:
        request = Request(
            message.request_id,
            message.token_ids,
            message.params,
            pooling=message.pooling,
            eos_token_ids=frozenset(message.eos_token_ids),
            priority=message.priority,
            tenant=message.tenant,
            salt=message.salt,
            known_outputs=message.outputs,
            known_finished=message.finished,
            num_prompt_logprobs=message.num_prompt_logprobs,
            num_prompt_done=message.num_prompt_done,
            runs_alone=message.runs_alone,
            grammar=grammar,
        )
        try:
            self._engine.add_request(request)
        except RequestError as error:
            self._send(Refused(message.request_id, str(error), error.param))
        else:
            self._numbers[message.request_id] = message.number

    def _step(self) -> None:
        updates = self._engine.step(self._begin_step)
        self._profiler.mark("send")
        self._board.end_step()
        for update in updates:
            if update.is_finished:
                self._numbers.pop(update.request_id, None)
        stats = self._stats()
        self._send(Gained(updates, stats))
        self._profiler.end_step(stats)

    def _begin_step(self, request_ids: Sequence[str]) -> None:
        self._profiler.begin_step(len(request_ids))
        self._board.begin_step([self._numbers[request_id] for request_id in request_ids])

    def _stats(self) -> WireStats:
        stats = self._engine.stats
        return WireStats(
            stats.num_running,
            stats.num_waiting,
            stats.num_swapped,
            stats.num_blocks,
            stats.num_used_blocks,
            stats.num_cached_blocks,
            stats.num_shared_blocks,
            stats.counts.counts(),
            stats.num_host_blocks,
            stats.num_used_host_blocks,
        )

    def _send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))


def main(arguments: Sequence[str]) -> int:
    """Run the engine process."""
    address, parent = arguments[0], int(arguments[1])
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group, they are for the front to act on
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the line above
        return 1
    level = os.environ.get(LOG_LEVEL_VARIABLE, "info").upper()
    logging.basicConfig(level=level, format="%(asctime)s engine %(levelname)s %(name)s: %(message)s")
    if level != "DEBUG":  # the front says how each request ended, whatever became of the engines that ran it
        logging.getLogger("octavo.scheduler.request").setLevel(logging.ERROR)
    return EngineChild(address, parent).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
