"""The real model runner over the fake program: the whole engine below the scheduler, without a model."""

from collections.abc import Mapping

import torch

from octavo.contract import RowMode, Support
from octavo.executor.base import Executor
from octavo.executor.memory import MemoryPlan
from octavo.executor.model_runner import KVGroupCaches, ModelRunner, RunnerLimits
from octavo.hardware.resolve import Manifest
from octavo.scheduler.messages import ModelRunnerOutput, SchedulerOutput

from .fake_program import ALL_MODES, FakeAttention, FakeProgram, fake_spec

__all__ = ["FakeExecutor"]


class FakeExecutor(Executor):
    """Runs steps on `program`, a `FakeProgram` over `num_groups` KV groups, with every buffer poisoned."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        num_host_blocks: int = 0,
        block_size: int = 4,
        vocab_size: int = 61,
        num_logits: int | None = None,
        max_model_len: int = 256,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        num_groups: int = 1,
        modes: frozenset[RowMode] = ALL_MODES,
        nan_token: int | None = None,
    ) -> None:
        num_logits = num_logits or vocab_size
        groups = [(FakeAttention(nan_token), fake_spec(block_size, num_layers=1 + i)) for i in range(num_groups)]
        self.program = FakeProgram(groups, num_logits, modes)
        self.caches = [
            KVGroupCaches(backend, backend.allocate(spec, num_blocks), backend.allocate_host(spec, num_host_blocks))
            for backend, spec in groups
        ]
        self.program.bind([group.device for group in self.caches])
        limits = RunnerLimits(
            vocab_size, num_logits, block_size, max_model_len, max_num_seqs, max_num_batched_tokens, poison=True
        )
        self.runner = ModelRunner(self.program, self.caches, limits, torch.device("cpu"))
        self._plan = MemoryPlan(1 << 30, 1 << 30, 0, 0, 16 * block_size, block_size, num_blocks, num_host_blocks)

    @property
    def memory_plan(self) -> MemoryPlan:
        return self._plan

    @property
    def manifest(self) -> Manifest:
        return Manifest(())

    @property
    def row_invariant(self) -> Support:
        return self.program.row_invariant

    def facts(self) -> Mapping[str, str]:
        return {}

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self.runner.execute(step)

    def shutdown(self) -> None:
        pass
