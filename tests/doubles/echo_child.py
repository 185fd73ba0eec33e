"""An engine process without an engine: each request gets its own prompt back, a token a step, over and over.

It takes the place of `octavo.engine.child` where only the front is looked at. OCTAVO_ECHO_STEP_SECONDS says how far
apart its steps are.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from octavo.engine.board import Board
from octavo.engine.wire import (
    Abort,
    AddRequest,
    FinishSample,
    FromEngine,
    Gained,
    Ready,
    Start,
    Stop,
    WireStats,
    decode_to_engine,
    encode,
)
from octavo.scheduler.messages import Event, RequestUpdate, SampleUpdate

__all__ = ["STEP_VARIABLE", "main"]

STEP_VARIABLE = "OCTAVO_ECHO_STEP_SECONDS"


class EchoChild:
    """Says what an engine would say that has room for everybody."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context().socket(zmq.PAIR)
        self._socket.connect(address)
        self._step_seconds = float(os.environ.get(STEP_VARIABLE, "0.01"))
        self._live: dict[str, AddRequest] = {}
        self._num_done: dict[str, int] = {}
        self._num_generated = 0
        self._num_steps = 0

    def run(self) -> None:
        """Serve until told to stop."""
        start = decode_to_engine(self._socket.recv())
        assert isinstance(start, Start)
        self._board = Board(Path(start.board), start.max_requests)
        settings = {**start.settings, "max_model_len": start.settings["max_model_len"] or 512}
        self._send(Ready(settings, {"platform": "echo"}, [], self._stats()))
        due = time.monotonic()
        while self._hear(due):
            if time.monotonic() >= due:
                due = max(due + self._step_seconds, time.monotonic() - self._step_seconds)
                self._step()

    def _hear(self, due: float) -> bool:
        while self._socket.poll(max((due - time.monotonic()) * 1000, 0) if self._live else 100):
            message = decode_to_engine(self._socket.recv())
            if isinstance(message, Stop):
                return False
            if isinstance(message, AddRequest):
                self._live[message.request_id] = message
                self._num_done[message.request_id] = 0
            elif isinstance(message, Abort):
                for request_id in message.request_ids:
                    self._live.pop(request_id, None)
            elif isinstance(message, FinishSample):
                self._live.pop(message.request_id, None)
        self._board.beat()
        return True

    def _step(self) -> None:
        if not self._live:
            return
        self._num_steps += 1
        updates = []
        for request_id, request in list(self._live.items()):
            num_done = self._num_done[request_id]
            ends = num_done + 1 == request.params.max_tokens
            token_id = request.token_ids[num_done % len(request.token_ids)]
            samples = tuple(
                SampleUpdate(index, (token_id,), finish_reason="length" if ends else None)
                for index in range(request.params.n)
            )
            events = () if num_done else (Event(time.time(), "admitted"), Event(time.time(), "first token"))
            num_prompt = len(request.token_ids)
            updates.append(
                RequestUpdate(request_id, samples, is_finished=ends, events=events, num_prompt_done=num_prompt)
            )
            self._num_generated += len(samples)
            self._num_done[request_id] = num_done + 1
            if ends:
                del self._live[request_id], self._num_done[request_id]
        self._send(Gained(updates, self._stats()))

    def _stats(self) -> WireStats:
        # As many counts as an engine has, so that taking them in costs what it costs.
        counts = {f"num_{i}": self._num_steps for i in range(10)}
        return WireStats(
            num_running=len(self._live),
            num_blocks=256,
            counts={**counts, "num_steps": self._num_steps, "num_generated_tokens": self._num_generated},
        )

    def _send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))


def main(arguments: Sequence[str]) -> int:
    """Run it."""
    EchoChild(arguments[0]).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
