"""What the device's memory goes to, decided once before anything is allocated."""

from dataclasses import dataclass

from octavo.errors import ConfigError

__all__ = ["MemoryPlan", "MemoryRequest", "plan_memory"]

GIB = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device, and the blocks that they make.

    Attributes:
        total: the device's memory.
        free: of it, for this process, before it took anything.
        weights: that the program holds.
        workspace: of the largest step.
        block_bytes: one KV block over all layers.
        block_size: tokens that a block holds.
        num_blocks: on the device.
        num_host_blocks: in host memory, for preempted requests.

    """

    total: int
    free: int
    weights: int
    workspace: int
    block_bytes: int
    block_size: int
    num_blocks: int
    num_host_blocks: int

    @property
    def kv_bytes(self) -> int:
        """Of all KV blocks on the device."""
        return self.num_blocks * self.block_bytes

    @property
    def host_bytes(self) -> int:
        """Of all KV blocks in host memory."""
        return self.num_host_blocks * self.block_bytes

    @property
    def max_tokens(self) -> int:
        """Tokens that the KV blocks hold."""
        return self.num_blocks * self.block_size

    @property
    def reserved(self) -> int:
        """Everything that is taken on the device at most: weights, workspace and KV blocks."""
        return self.weights + self.workspace + self.kv_bytes

    @property
    def left(self) -> int:
        """What stays free; negative where num_blocks_override asks for more than there is."""
        return self.free - self.reserved

    def lines(self) -> list[tuple[str, str]]:
        """(what, how much), as `octavo info` prints it. In use before, the reserved parts and what is left add up."""
        blocks = f"{self.num_blocks} blocks of {self.block_size} tokens, {self.block_bytes / 1024:.0f} KiB each"
        rows = [
            ("memory", _gib(self.total)),
            ("in use before", _gib(self.total - self.free)),
            ("weights", _gib(self.weights)),
            ("workspace", _gib(self.workspace)),
            ("KV cache", f"{_gib(self.kv_bytes)}: {blocks}, {self.max_tokens} tokens in all"),
            ("reserved", f"{_gib(self.reserved)}: weights, workspace and KV cache"),
            ("available", f"{_gib(self.left)} left"),
        ]
        if self.num_host_blocks:
            rows.append(("host swap space", f"{_gib(self.host_bytes)}: {self.num_host_blocks} blocks"))
        return rows

    def __str__(self) -> str:
        return "\n".join(f"{what + ':':<17}{amount}" for what, amount in self.lines())


@dataclass(frozen=True)
class MemoryRequest:
    """From what a plan follows: the first six fields as in `MemoryPlan`, then the settings that bear on it.

    Attributes:
        unified: device memory is host memory, which others need too.
        swap_space: GiB of host memory for KV blocks.

    """

    total: int
    free: int
    weights: int
    workspace: int
    block_bytes: int
    block_size: int
    unified: bool
    max_num_seqs: int
    max_model_len: int
    memory_utilization: float
    swap_space: float = 0.0
    num_blocks_override: int | None = None


def plan_memory(request: MemoryRequest) -> MemoryPlan:
    """How many KV blocks there are.

    A device of its own gives `memory_utilization` of itself to weights, workspace and blocks. Memory that is
    shared with the host is not taken for the taking: the blocks are as many as max_num_seqs sequences of
    max_model_len fill, but no more than half of what the weights leave free; only one sequence of max_model_len
    may go beyond the half, up to `memory_utilization`. `num_blocks_override` wins over all of it.

    Raises:
        ConfigError: not one sequence of max_model_len fits. Says the largest that does and what changes it.

    """
    one_sequence = -(-request.max_model_len // request.block_size)
    usable = min(request.free, int(request.total * request.memory_utilization))
    room = max(usable - request.weights - request.workspace, 0) // request.block_bytes
    num_blocks = request.num_blocks_override or room
    if request.num_blocks_override is None:
        if room < one_sequence:
            raise _too_small(request, room, usable)
        if request.unified:
            half = max(request.free - request.weights - request.workspace, 0) // 2 // request.block_bytes
            num_blocks = min(room, max(one_sequence, min(request.max_num_seqs * one_sequence, half)))
    return MemoryPlan(
        total=request.total,
        free=request.free,
        weights=request.weights,
        workspace=request.workspace,
        block_bytes=request.block_bytes,
        block_size=request.block_size,
        num_blocks=num_blocks,
        num_host_blocks=int(request.swap_space * GIB) // request.block_bytes,
    )


def _too_small(request: MemoryRequest, room: int, usable: int) -> ConfigError:
    needed = -(-request.max_model_len // request.block_size) * request.block_bytes
    largest = room * request.block_size
    if largest:
        advice = f"the largest that fits is {largest}: lower max_model_len to it, or raise memory_utilization"
    else:
        advice = "not one block fits: raise memory_utilization, or free memory; no max_model_len would do"
    return ConfigError(
        f"max_model_len {request.max_model_len} needs {_gib(needed)} of KV cache and {_gib(room * request.block_bytes)}"
        f" is left of {_gib(usable)} (memory_utilization {request.memory_utilization:g}) after {_gib(request.weights)}"
        f" of weights and {_gib(request.workspace)} of workspace; {advice}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= GIB // 10 else f"{num_bytes / (1 << 20):.2f} MiB"
