"""The engine's loop: schedule, execute, update. It knows token ids only; text stays with the front."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from octavo.cache.manager import BlockManager
from octavo.config import EngineConfig
from octavo.executor.base import Executor
from octavo.scheduler.messages import RequestUpdate
from octavo.scheduler.request import Request
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.stats import SchedulerStats

__all__ = ["EngineCore", "EngineStats"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStats:
    """A glance at the engine between two steps; `counts` grow over its life."""

    num_running: int
    num_waiting: int
    num_swapped: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    counts: SchedulerStats
    num_shared_blocks: int = 0
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0


class EngineCore:
    """One scheduler over one executor. Single-threaded: whoever owns it calls it between steps only."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        assert config.cache.block_size is not None, "settle the config first"
        assert config.model.max_model_len is not None, "settle the config first"
        plan = executor.memory_plan
        self.manager = BlockManager(
            plan.num_blocks,
            config.cache.block_size,
            num_host_blocks=plan.num_host_blocks,
            prefix_caching=config.cache.enable_prefix_caching,
        )
        self.scheduler = Scheduler(config.scheduler, self.manager, config.model.max_model_len)
        self.executor = executor
        self._mark: Callable[[str], None] = _ignore

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work

    @property
    def stats(self) -> EngineStats:
        """Queue and block counts."""
        pool, scheduler = self.manager.pool, self.scheduler
        num_running, num_swapped = len(scheduler.running), scheduler.num_swapped
        return EngineStats(
            num_running,
            len(scheduler.requests) - num_running - num_swapped,
            num_swapped,
            pool.num_blocks,
            pool.num_used,
            pool.num_cached,
            replace(scheduler.stats),
            pool.num_shared,
            self.manager.host_pool.num_blocks,
            self.manager.host_pool.num_used,
        )

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served.

        """
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; what they held is free before the next step."""
        self.scheduler.abort(request_ids)

    def finish_sample(self, request_id: str, index: int) -> None:
        """End a sample whose text is complete."""
        self.scheduler.finish_sample(request_id, index)

    def reset_prefix_cache(self) -> None:
        """Forget all published blocks; running requests keep theirs."""
        if self.manager.prefix is not None:
            self.manager.prefix.clear()

    def on_progress(self, beat: Callable[[], None]) -> None:
        """Call `beat` every now and then within a step, as a sign of life."""
        self.executor.on_progress(beat)

    def on_phase(self, mark: Callable[[str], None] | None) -> None:
        """Call `mark` where a step enters a phase: schedule, build, program, sample, update; None: no more."""
        self._mark = mark or _ignore
        self.executor.on_phase(self._mark)

    def close(self) -> None:
        """Give back what is held on the devices."""
        self.executor.shutdown()

    def step(self, on_begin: Callable[[Sequence[str]], None] | None = None) -> list[RequestUpdate]:
        """Run one step and return what requests gained. A fault of the step ends at most the requests in it.

        `on_begin` is told the ids of the requests that compute, before they do.
        """
        self._mark("schedule")
        output = self.scheduler.schedule()
        if output is None:
            return self.scheduler.take_updates()
        if on_begin is not None:
            on_begin(self.scheduler.in_step)
        self._mark("program")  # until the executor says what it is at
        try:
            result = self.executor.execute_model(output)
        except Exception as error:
            logger.exception("step %d failed with %d sequences", output.step, len(output.scheduled))
            return self.scheduler.fail_step(f"the model failed: {type(error).__name__}: {error}"[:500])
        except BaseException:
            self.scheduler.abandon_step()
            raise
        self._mark("update")
        return self.scheduler.update(result)


def _ignore(phase: str) -> None:
    """Nobody wants to know."""
