"""The engine's loop: schedule, execute, update. It knows token ids only; text stays with the front."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from octavo.cache.manager import BlockManager
from octavo.config import EngineConfig
from octavo.executor.base import Executor
from octavo.scheduler.messages import RequestUpdate, SampleUpdate
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
        self._config = config
        self.executor = executor
        self.manager, self.scheduler = _fresh(config, executor)
        self._is_sound = True  # whether nothing of the scheduler's own work is half done
        self._lost: list[RequestUpdate] = []
        self._mark: Callable[[str], None] = _ignore

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work or bool(self._lost)

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
        with self._whole():
            self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; what they held is free before the next step."""
        with self._whole():
            self.scheduler.abort(request_ids)

    def finish_sample(self, request_id: str, index: int) -> None:
        """End a sample whose text is complete."""
        with self._whole():
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
        if self._lost:
            lost, self._lost = self._lost, []
            return lost
        self._is_sound = False
        try:
            updates = self._step(on_begin)
            self._is_sound = True
        finally:
            if not self._is_sound:
                self._begin_anew()
        return updates

    def _step(self, on_begin: Callable[[Sequence[str]], None] | None) -> list[RequestUpdate]:
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
            self._is_sound = True
            raise
        self._mark("update")
        return self.scheduler.update(result)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Something small is done by the scheduler, or was cut off."""
        try:
            yield
        except Exception:
            raise  # a refusal
        except BaseException:
            self._begin_anew()
            raise

    def _begin_anew(self) -> None:
        """The scheduler was cut off within its own work (Ctrl-C), and nobody knows what of it holds.

        Another takes its place, with an empty cache; the requests that were there end with an error.
        """
        old = self.scheduler
        logger.warning(
            "a step was cut off within the scheduler; it begins anew, and %d requests end", len(old.requests)
        )
        self.manager, self.scheduler = _fresh(self._config, self.executor)
        self.scheduler.forget_before(old)
        self._lost = [
            RequestUpdate(
                request.request_id,
                tuple(SampleUpdate(index, finish_reason="error") for index in range(request.params.n)),
                error="the step of another request was interrupted, and this one cannot go on; send it again",
                is_finished=True,
            )
            for request in list(old.requests.values())
        ]
        self._is_sound = True


def _fresh(config: EngineConfig, executor: Executor) -> tuple[BlockManager, Scheduler]:
    """A scheduler without requests over blocks that are all free."""
    assert config.cache.block_size is not None, "settle the config first"
    assert config.model.max_model_len is not None, "settle the config first"
    plan = executor.memory_plan
    manager = BlockManager(
        plan.num_blocks,
        config.cache.block_size,
        num_host_blocks=plan.num_host_blocks,
        prefix_caching=config.cache.enable_prefix_caching,
    )
    return manager, Scheduler(config.scheduler, manager, config.model.max_model_len)


def _ignore(phase: str) -> None:
    """Nobody wants to know."""
