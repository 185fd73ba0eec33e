"""Tensors amid guards: who reads or writes beside them is seen."""

import torch

from octavo.testing.outcome import require

__all__ = ["Guarded"]

MARGIN = 64  # elements on either side
CANARY = 2**62 + 7  # beside integers: no position, slot or token


class Guarded:
    """A copy of a host tensor on a device, with its strides, amid NaN (of floats) or nonsense (of integers).

    Between the rows of a strided tensor there are guards too. What a kernel reads there shows as NaN in its result,
    what it writes there is seen by `check`.

    Attributes:
        tensor: the copy, on the device.

    """

    def __init__(self, host: torch.Tensor, device: torch.device) -> None:
        steps = zip(host.shape, host.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in steps) if host.numel() else 0
        offset = MARGIN + host.storage_offset() % MARGIN  # as badly aligned as it was
        canary = float("nan") if host.is_floating_point() else CANARY
        self._before = torch.full((offset + span + MARGIN,), canary, dtype=host.dtype)
        self._geometry = (host.shape, host.stride(), offset)
        self._before.as_strided(*self._geometry).copy_(host)
        self._memory = torch.empty(self._before.shape, dtype=host.dtype, device=device)
        self._memory.copy_(self._before)
        self.tensor = self._memory.as_strided(*self._geometry)

    def check(self, name: str, *, may_be_written: bool = False) -> None:
        """Compare with what was there, bit by bit.

        Raises:
            CheckError: the guards have changed, or the tensor has and must not.

        """
        now = self._memory.cpu()
        if not may_be_written:
            inside, was = now.as_strided(*self._geometry), self._before.as_strided(*self._geometry)
            require(torch.equal(inside, was), f"writes into {name}, which is not its own")
        now.as_strided(*self._geometry).copy_(self._before.as_strided(*self._geometry))
        require(torch.equal(now.view(torch.uint8), self._before.view(torch.uint8)), f"writes beside {name}")
