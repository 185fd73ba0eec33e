"""What the op table adds to a call: the function that a platform gave, and the one that a frozen table gives back.

python docs/dispatch_cost.py
"""

import timeit

import torch

from octavo.contract import Capabilities, MemoryInfo, OpImpl, OpSignature, Platform
from octavo.hardware.resolve import OpResolver

NUM_CALLS = 1_000_000


class Bare(Platform):
    """A platform of one op that does nothing."""

    name = "bare"

    def capabilities(self) -> Capabilities:
        return Capabilities()

    @property
    def device(self) -> torch.device:
        return torch.get_default_device()

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(0, 0)

    def ops(self) -> list[OpImpl]:
        return [OpImpl("rms_norm", "bare", "native", nothing)]


def nothing(args: object) -> None:
    """A kernel without a launch."""


def main() -> None:
    """Print nanoseconds a call."""
    resolver = OpResolver(Bare())
    signature = OpSignature("rms_norm", torch.float32, "any", (("hidden_size", 64),))
    resolved = resolver.resolve(signature).fn
    resolver.freeze()
    for name, fn in (("bare function", nothing), ("frozen table", resolved)):
        seconds = min(timeit.repeat(lambda fn=fn: fn(None), number=NUM_CALLS, repeat=5))  # type: ignore[misc]
        print(f"{name:14} {seconds / NUM_CALLS * 1e9:6.0f} ns a call, the call of a lambda included")
    print(f"the same object: {resolved is nothing}")


if __name__ == "__main__":
    main()
