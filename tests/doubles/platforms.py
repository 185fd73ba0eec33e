"""Platforms without hardware, for tests of who is chosen and what serves."""

from collections.abc import Sequence

import torch

from octavo.contract import AttentionBackend, Capabilities, MemoryInfo, OpImpl, Platform

__all__ = ["ToyPlatform"]


class ToyPlatform(Platform):
    """The least that a platform must have, and whatever ops and backends a test gives it."""

    name = "toy"

    def __init__(
        self,
        ops: Sequence[OpImpl] = (),
        backends: Sequence[AttentionBackend] = (),
        capabilities: Capabilities | None = None,
    ) -> None:
        self._ops = list(ops)
        self._backends = list(backends)
        self._capabilities = capabilities or Capabilities()

    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(free=2**30, total=2**31)

    def ops(self) -> list[OpImpl]:
        return self._ops

    def attention_backends(self) -> list[AttentionBackend]:
        return self._backends
