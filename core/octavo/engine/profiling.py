"""Where the time of a step goes: noted in the engine process while somebody asks for it, and costing nothing else.

A phase lasts from its mark to the next one: schedule, build (sequences, blocks and the batch), program (the model),
sample, update, send. What lies between two steps is spent on hearing the front, or on waiting for it.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from octavo.errors import BusyError, EngineDeadError

__all__ = ["MAX_STEPS", "PHASES", "EngineSteps", "Profile", "Profiled", "Profiles", "StepProfile", "StepProfiler"]

PHASES = ("schedule", "build", "program", "sample", "update", "send")
MAX_STEPS = 10_000  # of one profile
ANSWER_SECONDS = 30.0  # within which an engine that is told to stop profiling must have ended its step


class StepProfile(msgspec.Struct, frozen=True, array_like=True):
    """One step: times are seconds since the profile began.

    Attributes:
        marks: (phase, when it began), in order; a step of several program calls has some phases several times.
        end: when the last phase ended.
        num_tokens: that it computed.
        num_generated: that it sampled.
        num_seqs: requests in it.
        num_running, num_waiting, num_used_blocks: after it.

    """

    marks: tuple[tuple[str, float], ...]
    end: float
    num_tokens: int
    num_generated: int
    num_seqs: int
    num_running: int
    num_waiting: int
    num_used_blocks: int

    @property
    def begin(self) -> float:
        """When its first phase began."""
        return self.marks[0][1]

    @property
    def seconds(self) -> dict[str, float]:
        """Phase to its time; together they are the step's."""
        times = dict.fromkeys(PHASES, 0.0)
        ends = [when for _, when in self.marks[1:]] + [self.end]
        for (phase, start), end in zip(self.marks, ends, strict=True):
            times[phase] = times.get(phase, 0.0) + end - start
        return times


class Profile(msgspec.Struct, frozen=True, tag=True):
    """Profile the next `num_steps` steps, or with 0 send what there is; `number` is in the answer again."""

    number: int
    num_steps: int


class Profiled(msgspec.Struct, frozen=True, tag=True):
    """A profile that is complete, or was cut short: when it began, in seconds since the epoch, and its steps."""

    number: int
    began: float
    steps: list[StepProfile]


class EngineSteps(Protocol):
    """What a profiler needs of an engine."""

    def on_phase(self, mark: Callable[[str], None] | None) -> None:
        """Call `mark` where a step enters a phase; None: no more."""


class _Stats(Protocol):
    """What it needs of the engine after a step."""

    @property
    def num_running(self) -> int:
        """Requests on the device."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""

    @property
    def num_used_blocks(self) -> int:
        """KV blocks that are held."""

    @property
    def counts(self) -> dict[str, int]:
        """What has grown, and to what."""


class StepProfiler:
    """Takes the times of an engine's steps while it is asked to; otherwise the engine knows nothing of it."""

    def __init__(self, engine: EngineSteps, send: Callable[[Profiled], None]) -> None:
        self.is_on = False
        self._engine = engine
        self._send = send
        self._number = self._num_steps = 0
        self._steps: list[StepProfile] = []
        self._marks: list[tuple[str, float]] = []
        self._began = self._zero = 0.0
        self._counts: dict[str, int] = {}
        self._num_seqs = 0

    def obey(self, message: Profile, counts: dict[str, int]) -> None:
        """Begin, or end early; `counts` are the engine's by now."""
        self._number = message.number
        if message.num_steps <= 0:
            self._stop()
            return
        self.is_on, self._num_steps = True, min(message.num_steps, MAX_STEPS)
        self._began, self._zero = time.time(), time.perf_counter()
        self._steps, self._counts = [], counts
        self._engine.on_phase(self._mark)

    def begin_step(self, num_seqs: int) -> None:
        """A step computes with so many requests."""
        self._num_seqs = num_seqs

    def mark(self, phase: str) -> None:
        """A phase outside the engine begins."""
        if self.is_on:
            self._mark(phase)

    def end_step(self, stats: _Stats) -> None:
        """A step is over and has been told of."""
        if not self.is_on:
            return
        marks, self._marks = tuple(self._marks), []
        before, self._counts = self._counts, stats.counts
        if stats.counts["num_steps"] == before.get("num_steps", 0):
            return  # nothing was computed: requests came to an end, and that was told
        self._steps.append(
            StepProfile(
                marks,
                self._now(),
                stats.counts["num_computed_tokens"] - before.get("num_computed_tokens", 0),
                stats.counts["num_generated_tokens"] - before.get("num_generated_tokens", 0),
                self._num_seqs,
                stats.num_running,
                stats.num_waiting,
                stats.num_used_blocks,
            )
        )
        if len(self._steps) >= self._num_steps:
            self._stop()

    def _mark(self, phase: str) -> None:
        self._marks.append((phase, self._now()))

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    def _stop(self) -> None:
        self.is_on = False
        self._engine.on_phase(None)
        self._send(Profiled(self._number, self._began, self._steps))
        self._steps, self._marks = [], []


class Profiles:
    """The front's side: asks an engine process for one profile at a time."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._number = 0
        self._waits: asyncio.Future[Profiled] | None = None

    async def take(self, num_steps: int, seconds: float) -> Profiled:
        """Profile the next steps: until there were so many, or as long as that.

        Raises:
            BusyError: another profile is being taken.
            EngineDeadError: the engine went away meanwhile.

        """
        if self._waits is not None:
            raise BusyError("another profile is being taken; ask again when it is done", max(seconds, 1.0))
        waits = self._waits = asyncio.get_running_loop().create_future()
        self._number += 1
        self._send(Profile(self._number, num_steps))
        try:
            done, _ = await asyncio.wait([waits], timeout=seconds)
            if not done:
                self._send(Profile(self._number, 0))
                await asyncio.wait([waits], timeout=ANSWER_SECONDS)
            if not waits.done():
                raise EngineDeadError("the engine did not end its step in time to tell how it went")
            profiled: Profiled = waits.result()
            return profiled
        finally:
            if not waits.done():  # whoever asked has left, or the engine is stuck
                self._send(Profile(self._number, 0))
            self._waits = None

    def hear(self, message: Profiled) -> None:
        """The engine has sent a profile. One that nobody waits for any more is dropped."""
        if message.number == self._number and self._waits is not None and not self._waits.done():
            self._waits.set_result(message)

    def fail(self, reason: str) -> None:
        """The engine is gone, and the profile with it."""
        if self._waits is not None and not self._waits.done():
            self._waits.set_exception(EngineDeadError(f"the engine went away while it was profiled: {reason}"))
