"""A step's rows: what is asked of the program, and what has come of it so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo.contract import RowMode, Rows
from octavo.scheduler.messages import HiddenSum, ModelRunnerOutput, SequenceFailure, TokenLogprobs

__all__ = ["NOT_NUMBERS", "RowList", "StepResult"]

NOT_NUMBERS = "the model gave logits that are not numbers"
NO_TARGETS: npt.NDArray[np.int64] = np.zeros(0, np.int64)


class RowList:
    """The rows of a step as they are asked for; knows where each will stand in its mode's output."""

    def __init__(self) -> None:
        self._index: list[int] = []
        self._mode: list[int] = []
        self._target: list[int] = []
        self._counts = [0] * len(RowMode)
        self._k = 0

    def add(self, mode: RowMode, index: Sequence[int], targets: Sequence[int] = (), k: int = 0) -> slice:
        """Ask `mode` of tokens `index`; returns their places among the entries of that mode."""
        start, num = self._counts[mode], len(index)
        self._counts[mode] = start + num
        if targets:
            self._target.extend([0] * (len(self._index) - len(self._target)))
            self._target.extend(targets)
        self._index.extend(index)
        self._mode.extend([mode] * num)
        self._k = max(self._k, k)
        return slice(start, start + num)

    def add_one(self, mode: RowMode, index: int) -> int:
        """Ask `mode` of one token; returns its place."""
        place = self._counts[mode]
        self._counts[mode] = place + 1
        self._index.append(index)
        self._mode.append(mode)
        return place

    def rows(self) -> Rows:
        """All of them."""
        target = NO_TARGETS
        if self._target:
            target = np.zeros(len(self._index), np.int64)
            target[: len(self._target)] = self._target
        return Rows(np.array(self._index, np.int64), np.array(self._mode, np.uint8), self._k, target)


@dataclass(slots=True)
class StepResult:
    """What the step has given so far; see `ModelRunnerOutput`."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    hidden_sums: dict[int, HiddenSum] = field(default_factory=dict)
    failures: dict[int, SequenceFailure] = field(default_factory=dict)

    def fail(self, seq_id: int, message: str, param: str | None = None) -> None:
        """A sequence must end with an error; see `SequenceFailure`."""
        self.failures[seq_id] = SequenceFailure(seq_id, message, param)

    def output(self) -> ModelRunnerOutput:
        """As the scheduler is told."""
        failures = tuple(self.failures.values())
        return ModelRunnerOutput(self.token_ids, self.logprobs, self.prompt_logprobs, self.hidden_sums, failures)
