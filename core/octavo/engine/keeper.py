"""Keeps an engine process there: when one dies, another takes its place, as long as that is of use."""

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Literal

import msgspec

from octavo import errors
from octavo.config import EngineConfig
from octavo.engine.history import History
from octavo.engine.live import LiveRequests
from octavo.engine.profiling import Profiled, Profiles
from octavo.engine.supervisor import EngineProcess
from octavo.engine.wire import AddRequest, Failed, FromEngine, Gained, Ready, ToEngine, WireStats
from octavo.errors import EngineDeadError, OctavoError
from octavo.pooling_params import PoolingParams
from octavo.sampling_params import SamplingParams

__all__ = ["Deaths", "EngineState", "Keeper"]

EngineState = Literal["loading", "ready", "restarting", "dead", "stopped"]

MAX_UNEXPLAINED_DEATHS = 3  # so many in a row without a request that was in all of them end the engine
CALM_SECONDS = 600.0  # after so long without a death the count begins anew
PROOF = AddRequest("proof", 2**64 - 1, [0], SamplingParams(temperature=0, max_tokens=1), [])  # that the engine works

logger = logging.getLogger(__name__)


class Deaths:
    """Those of late that no request explains, and whether another process would fare better."""

    def __init__(self) -> None:
        self._recent: list[tuple[float, frozenset[int]]] = []

    def add(self, fatal: frozenset[int], *, was_ready: bool, now: float) -> int | None:
        """One more, with these requests in its step: how many there were, if they should be the last."""
        self._recent = [death for death in self._recent if now - death[0] < CALM_SECONDS] + [(now, fatal)]
        latest = [requests for _, requests in self._recent[-MAX_UNEXPLAINED_DEATHS:]]
        is_unexplained = len(latest) == MAX_UNEXPLAINED_DEATHS and not frozenset.intersection(*latest)
        fails_to_start = not was_ready and len(self._recent) > 1
        return len(self._recent) if is_unexplained or fails_to_start else None

    def forgive(self, requests: Collection[int]) -> None:
        """These were to blame for those that they were in: without them the engine works."""
        self._recent = [death for death in self._recent if death[1].isdisjoint(requests)]


class Keeper:
    """One engine process after another, and whether requests are served now.

    Attributes:
        config: as settled by the engine once it is ready.
        facts, memory: lines that say what is served on what, once ready.
        requests: hear what the engine says, and go on in the next one when it dies.
        profiles: of its steps.
        state: of the engine.
        failure: why it is dead.
        num_restarts: processes that had to be replaced.
        process: the one that is there, or is to be.

    """

    def __init__(self, config: EngineConfig, history: History, *, stall_timeout: float) -> None:
        self.config = config
        self._given = config  # what each process starts from: settings mean less once they all have values
        self.facts: dict[str, str] = {}
        self.memory: list[tuple[str, str]] = []
        self.requests = LiveRequests(history, self.send)
        self.profiles = Profiles(self.send)
        self.state: EngineState = "loading"
        self.failure: OctavoError | None = None
        self.num_restarts = 0
        self.process: EngineProcess | None = None
        self._stall_timeout = stall_timeout
        self._deaths = Deaths()
        self._blamed: list[int] = []  # requests that were failed for deaths, which is not proved yet
        self._died = 0.0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End the process; requests under way fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self.process is not None:
            await self.process.stop()
            self.process = None
        if self.state != "dead":
            self._enter("stopped")
        self.requests.fail_all("the engine was stopped")

    def send(self, message: ToEngine) -> None:
        """Send a message if the engine is there. What it misses it is told when it is: see `LiveRequests.resume`."""
        if self.state == "ready" and self.process is not None:
            self.process.send(message)

    def check_alive(self) -> None:
        """Return if requests are served, now or soon.

        Raises:
            OctavoError: the engine has ended for good, and why.

        """
        if self.state in ("dead", "stopped"):
            raise self._gone()

    async def wait_ready(self) -> None:
        """Return once requests are served.

        Raises:
            OctavoError: that will not happen (any more), and why.

        """
        while self.state not in ("ready", "dead", "stopped"):
            await self._change()
        self.check_alive()

    async def wait_dead(self) -> str:
        """Return, with the reason, once the engine has ended for good."""
        while self.state not in ("dead", "stopped"):
            await self._change()
        return str(self._gone())

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _gone(self) -> OctavoError:
        return self.failure or EngineDeadError("the engine was stopped")

    def _enter(self, state: EngineState) -> None:
        self.state = state
        self._changed.set()

    async def _keep(self) -> None:
        """Run one engine process after another, until one ends for good."""
        while self.state not in ("dead", "stopped"):
            process = EngineProcess(
                self._given, max_requests=self.config.scheduler.max_num_seqs, stall_timeout=self._stall_timeout
            )
            self.process = process
            await process.start(self._take)
            reason = await process.death
            fatal = process.in_step
            await process.release()
            if self.state != "dead":
                self._mourn(reason, fatal)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            assert self.process is not None
            self.config = EngineConfig.of(**message.settings)
            self.facts, self.memory = message.facts, message.memory
            if self._blamed:
                pooling = None if self.memory else PoolingParams()  # an encoder, which has no KV blocks
                self.process.send(msgspec.structs.replace(PROOF, pooling=pooling))
            else:
                self._go_on(message.stats)
        elif self._blamed and isinstance(message, Gained):
            if any(update.request_id == PROOF.request_id and update.is_finished for update in message.updates):
                self._deaths.forgive(self._blamed)
                self._blamed.clear()
                self._go_on(message.stats)
        elif isinstance(message, Failed):
            self._die(getattr(errors, message.kind, EngineDeadError)(message.message))
        elif isinstance(message, Profiled):
            self.profiles.hear(message)
        else:
            self.requests.take(message)

    def _go_on(self, stats: WireStats) -> None:
        """The engine is there, and works as far as that is known."""
        assert self.process is not None
        self.requests.resume(stats, self.process.send)
        if self.num_restarts:
            seconds = time.monotonic() - self._died
            logger.info("the engine is there again after %.2f s; %d requests go on", seconds, len(self.requests))
        self._enter("ready")

    def _mourn(self, reason: str, fatal: frozenset[int]) -> None:
        """A process has died: decide what becomes of its requests, and whether another is started."""
        logger.error("the engine process died: %s; %d requests were in its step", reason, len(fatal))
        self._blamed += self.requests.bury(reason, fatal)
        self.profiles.fail(reason)
        was_ready, now = self.state == "ready", time.monotonic()
        self._died = now if was_ready else self._died
        count = self._deaths.add(fatal, was_ready=was_ready, now=now)
        if count is not None:
            self._die(EngineDeadError(f"the engine died {count} times and no request explains it; last: {reason}"))
            return
        self.num_restarts += 1
        self._enter("restarting")

    def _die(self, failure: OctavoError) -> None:
        self.failure = failure
        logger.critical("%s", failure)
        self._enter("dead")
        self.requests.fail_all(str(failure))
