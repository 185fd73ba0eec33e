"""What happened in a run: every step with its times, as seen around the executor."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from octavo.contract import Probe, ProgramCosts, Support
from octavo.executor.base import Executor
from octavo.executor.memory import MemoryPlan
from octavo.hardware.resolve import Manifest
from octavo.scheduler.messages import ModelRunnerOutput, SchedulerOutput

__all__ = ["Recorder", "Step"]


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        sent: what the scheduler sent.
        begin, end: seconds of `time.perf_counter` around the executor's part.
        num_new_tokens: tokens that each sequence gained.

    """

    sent: SchedulerOutput
    begin: float
    end: float
    num_new_tokens: Mapping[int, int]

    @property
    def seconds(self) -> float:
        """Of the executor's part."""
        return self.end - self.begin


class Recorder(Executor):
    """An executor that passes everything on and keeps the steps. What it adds to a step is under a microsecond or two.

    Attributes:
        steps: since they were last taken.

    """

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.steps: list[Step] = []

    def take(self) -> list[Step]:
        """The steps so far; from here on others are kept."""
        steps, self.steps = self.steps, []
        return steps

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        begin = time.perf_counter()
        result = self._inner.execute_model(step)
        end = time.perf_counter()
        gained = {seq_id: _count(tokens) for seq_id, tokens in result.token_ids.items()}
        self.steps.append(Step(step, begin, end, gained))
        return result

    @property
    def memory_plan(self) -> MemoryPlan:
        return self._inner.memory_plan

    @property
    def manifest(self) -> Manifest:
        return self._inner.manifest

    @property
    def row_invariant(self) -> Support:
        return self._inner.row_invariant

    def facts(self) -> Mapping[str, str]:
        return self._inner.facts()

    def on_progress(self, beat: Callable[[], None]) -> None:
        self._inner.on_progress(beat)

    def probe(self, num_bytes: int) -> Probe | None:
        return self._inner.probe(num_bytes)

    def costs(self) -> ProgramCosts | None:
        return self._inner.costs()

    def shutdown(self) -> None:
        self._inner.shutdown()


def _count(tokens: object) -> int:
    return len(tokens) if isinstance(tokens, Sequence) else 1
