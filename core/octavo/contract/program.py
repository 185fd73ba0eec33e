"""A program: what a spec and its weights become on a platform, and what a step sends in and gets out.

Core owns a generic program that runs any spec on the ops; a platform may compile one of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from octavo.contract.attention import AttentionBatch, KVCache
from octavo.contract.support import Support

__all__ = ["Program", "RowMode", "Rows", "StepBatch", "StepHandle", "StepOutput"]


class RowMode(IntEnum):
    """What is wanted of a token's final hidden state."""

    LOGITS = 0  # all V logits, float32; every program has this one
    GREEDY = 1  # the id of the best logit, the lowest id of equals
    TOPK = 2  # the k best (id, log-probability), best first, the lower id of equals first
    SCORE = 3  # the log-probability of a given id and its rank (1 is best)
    HIDDEN = 4  # the normed hidden state [H]


@dataclass(frozen=True)
class Rows:
    """Which tokens of a step yield something, and what. S entries; a token may occur more than once.

    Attributes:
        index: [S] int64, into the T tokens of the step.
        mode: [S] uint8 of `RowMode`.
        k: of all TOPK entries.
        target: [S] int64, read for SCORE entries.

    """

    index: npt.NDArray[np.int64]
    mode: npt.NDArray[np.uint8]
    k: int = 0
    target: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def of(self, mode: RowMode) -> npt.NDArray[np.int64]:
        """Positions within the S entries that ask for `mode`, ascending: the order of its output."""
        return np.flatnonzero(self.mode == mode)


@dataclass(frozen=True)
class StepBatch:
    """The tokens of one step, rows side by side.

    Attributes:
        token_ids: [T] int64 on the device.
        positions: [T] int64 on the device.
        attention: one batch a KV group, in the order of the program's groups.
        adapter_ids: [R] int32, the adapter of each row (-1: none), or None.
        input_embeds: [T, H] in place of token_ids' embeddings, or None.
        hidden_in: [T, H] from the stage before in a pipeline, or None.

    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: Sequence[AttentionBatch]
    adapter_ids: torch.Tensor | None = None
    input_embeds: torch.Tensor | None = None
    hidden_in: torch.Tensor | None = None


@dataclass(frozen=True)
class StepOutput:
    """What the rows asked for, in host memory; each array covers the entries of its mode, in their order.

    Arrays hold until the next step is submitted: a program may use their memory again then.

    Attributes:
        logits: [L, V] float32 tensor.
        greedy_ids: [G] int64; -1 where the logits hold NaN, which ends that sequence with an error.
        topk_ids, topk_logprobs: [K, k] int64 and float32.
        target_logprobs, target_ranks: [C] float32 and int64.
        hidden: [E, H] float32 tensor.
        hidden_out: [T, H] on the device, for the next stage of a pipeline, or None.

    """

    logits: torch.Tensor | None = None
    greedy_ids: npt.NDArray[np.int64] | None = None
    topk_ids: npt.NDArray[np.int64] | None = None
    topk_logprobs: npt.NDArray[np.float32] | None = None
    target_logprobs: npt.NDArray[np.float32] | None = None
    target_ranks: npt.NDArray[np.int64] | None = None
    hidden: torch.Tensor | None = None
    hidden_out: torch.Tensor | None = None


class StepHandle(Protocol):
    """A step under way."""

    def result(self) -> StepOutput:
        """Wait for the step and return what it gave. Raises what the step raised."""


class Program(Protocol):
    """Runs steps of one model on one device.

    A program whose steps may take seconds can have an attribute `on_layer`, a function without arguments: core sets
    it, and the program calls it before each layer, as a sign of life. It costs some microseconds.
    """

    @property
    def row_invariant(self) -> Support:
        """Whether a row's logits are bitwise the same alone and in any batch, whole and in chunks."""

    @property
    def modes(self) -> frozenset[RowMode]:
        """The row modes it serves; LOGITS is always among them."""

    def workspace_bytes(self, max_tokens: int, max_rows: int) -> int:
        """Device bytes that a step of at most so many tokens and output rows needs beside weights and KV."""

    def bind(self, kv_caches: Sequence[KVCache]) -> None:
        """Hand over the KV caches, one a group, once and before the first step."""

    def submit(self, batch: StepBatch, rows: Rows) -> StepHandle:
        """Start a step. Its KV writes are visible to every step submitted later."""
