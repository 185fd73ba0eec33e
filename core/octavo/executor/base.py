"""An executor: everything below the scheduler, on however many devices."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from octavo.contract import Probe, ProgramCosts, Support
from octavo.executor.memory import MemoryPlan
from octavo.hardware.resolve import Manifest
from octavo.scheduler.messages import ModelRunnerOutput, SchedulerOutput

__all__ = ["Executor"]


class Executor(ABC):
    """Runs the scheduler's steps, one at a time and in order."""

    @property
    @abstractmethod
    def memory_plan(self) -> MemoryPlan:
        """What the memory of a device goes to; all devices have the same."""

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """Who serves each op and attention, and who was passed over."""

    @property
    @abstractmethod
    def row_invariant(self) -> Support:
        """Whether logits are bitwise the same in any batch, whole and in chunks; else which op is at fault."""

    @abstractmethod
    def facts(self) -> Mapping[str, str]:
        """What `octavo info` prints besides: name to one line."""

    @abstractmethod
    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step.

        Raises:
            Exception: the step as a whole failed and gave nothing. The executor goes on: its sequences may be
                removed and sent anew.

        """

    def on_progress(self, beat: Callable[[], None]) -> None:
        """Call `beat` within steps, as a sign of life. Default: never, so that a step is one silence."""

    def on_phase(self, mark: Callable[[str], None]) -> None:
        """Call `mark` where a step enters a phase: "build", "program", "sample". Default: never."""

    def probe(self, num_bytes: int) -> Probe | None:
        """What the devices do at most together; see `Platform.probe`. Default: None, nobody measures it."""
        return None

    def costs(self) -> ProgramCosts | None:
        """What the program reads a step, where it tells; see `Platform.costs`. Default: None."""
        return None

    @abstractmethod
    def shutdown(self) -> None:
        """Give back what is held on the devices; may be called twice, nothing else after it."""
