"""The executor of one device in this process."""

from collections.abc import Callable, Mapping

from octavo.config import EngineConfig
from octavo.contract import Platform, Probe, ProgramCosts, Support
from octavo.executor.base import Executor
from octavo.executor.memory import MemoryPlan
from octavo.executor.worker import Worker
from octavo.hardware.registry import Registry
from octavo.hardware.resolve import Manifest
from octavo.model.describe import ModelDescription
from octavo.scheduler.messages import ModelRunnerOutput, SchedulerOutput
from octavo.text.grammar import GrammarCompiler

__all__ = ["LocalExecutor"]


class LocalExecutor(Executor):
    """One worker, called directly.

    Args:
        config: settled.
        description: of the model.
        platform: the device.
        registry: where portable ops come from.
        vocab_size: ids from here on are never sampled (the tokenizer's size); None: every row of the head may be.
        grammars: compiles structured outputs; None: requests for one fail.
        progress: show bars while weights load.

    Raises:
        OctavoError: the model, a setting or the platform cannot serve; see `Worker`.

    """

    def __init__(
        self,
        config: EngineConfig,
        description: ModelDescription,
        platform: Platform,
        registry: Registry,
        *,
        vocab_size: int | None = None,
        grammars: GrammarCompiler | None = None,
        progress: bool = False,
    ) -> None:
        self._worker = Worker(
            config, description, platform, registry, vocab_size=vocab_size, grammars=grammars, progress=progress
        )

    @property
    def memory_plan(self) -> MemoryPlan:
        return self._worker.memory_plan

    @property
    def manifest(self) -> Manifest:
        return self._worker.manifest

    @property
    def row_invariant(self) -> Support:
        return self._worker.row_invariant

    def facts(self) -> Mapping[str, str]:
        return self._worker.facts()

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self._worker.execute(step)

    def on_progress(self, beat: Callable[[], None]) -> None:
        self._worker.on_progress(beat)

    def on_phase(self, mark: Callable[[str], None]) -> None:
        self._worker.on_phase(mark)

    def probe(self, num_bytes: int) -> Probe | None:
        return self._worker.probe(num_bytes)

    def costs(self) -> ProgramCosts | None:
        return self._worker.costs()

    def shutdown(self) -> None:
        self._worker.close()
