"""A platform: one kind of hardware, as far as the engine needs to know it."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from octavo.contract.attention import AttentionBackend, AttentionSpec
from octavo.contract.ops import OpImpl
from octavo.contract.program import Program
from octavo.contract.quantized import Weight
from octavo.contract.spec import DecoderSpec

__all__ = [
    "Capabilities",
    "CompileRequest",
    "MemoryInfo",
    "Platform",
    "PlatformInfo",
    "Probe",
    "ProgramCosts",
    "Shard",
]


@dataclass(frozen=True)
class Capabilities:
    """What a device can do, as plain data. Empty means any.

    Attributes:
        dtypes: of weights and activations, the preferred one first.
        kv_cache_dtypes: of stored keys and values, the preferred one first.
        block_sizes: tokens a KV block, the preferred one first.
        head_sizes: that its attention kernels were built for.
        kernel_languages: in which portable kernels may be offered, by their lower-case names.
        graph_capture: which steps may be captured and replayed.
        pinned_memory: host buffers may be pinned.
        unified_memory: device memory is host memory.
        int64_indexing: kernels address beyond 2^31 elements.
        distributed_backend: torch.distributed's name for its collectives, or None.

    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    kv_cache_dtypes: tuple[torch.dtype, ...] = ()
    block_sizes: tuple[int, ...] = (16, 32, 8, 64, 128)
    head_sizes: tuple[int, ...] = ()
    kernel_languages: tuple[str, ...] = ()
    graph_capture: Literal["never", "uniform_decode", "always"] = "never"
    pinned_memory: bool = False
    unified_memory: bool = False
    int64_indexing: bool = True
    distributed_backend: str | None = None


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of device memory that are free for this process, and in all."""

    free: int
    total: int


@dataclass(frozen=True)
class Probe:
    """What the device does at most, measured just now: the limits that benchmarks give shares of.

    Attributes:
        read_bytes_per_second: reading the probed bytes over and over, laid out as weights are.
        ops_per_second: dtype of a product's operands to multiplications and additions a second in large products,
            each of the two counted; dtypes that no product is taken in are absent.

    """

    read_bytes_per_second: float
    ops_per_second: Mapping[torch.dtype, float]


@dataclass(frozen=True)
class ProgramCosts:
    """What a program's weights ask of the device, for benchmarks.

    Attributes:
        layer_bytes: that every step reads, however few its tokens.
        head_bytes: that a step reads besides, where it yields something.
        layer_dtype, head_dtype, attention_dtype: of the operands of their products, as `Probe.ops_per_second` has
            them: int8 for weights of 4 bits that are multiplied as int8.

    """

    layer_bytes: int
    head_bytes: int
    layer_dtype: torch.dtype
    head_dtype: torch.dtype
    attention_dtype: torch.dtype


@dataclass(frozen=True)
class Shard:
    """Which part of a model a device holds: of each layer the slice `rank`, of the layers those of `stage`.

    Attributes:
        rank, num_ranks: heads, MLP columns and vocabulary are cut evenly over the ranks.
        stage, num_stages: the layers are cut in order; a stage before the last yields `StepOutput.hidden_out`, one
            after the first gets `StepBatch.hidden_in`.

    """

    rank: int = 0
    num_ranks: int = 1
    stage: int = 0
    num_stages: int = 1


@dataclass(frozen=True)
class CompileRequest:
    """What `Platform.compile` gets.

    Attributes:
        spec: the decoder, whole.
        weights: slot name ("embedding", "layers.3.attn.qkv", ...) to tensor, as the weight table filled it; those of
            the shard alone. The embedding, the head and the matrices of `linear` may be `QuantizedWeight`, of the
            formats in the platform's `weight_formats` alone and not all of one; so may stacked experts, as [E N, K].
        dtype: of activations.
        attention: the spec of each KV group; the caches come later, through `Program.bind`.
        max_tokens, max_rows: the largest step.
        shard: the part of the model that the program is for.
        max_model_len: positions run from 0 to max_model_len - 1.

    """

    spec: DecoderSpec
    weights: Mapping[str, Weight]
    dtype: torch.dtype
    attention: Sequence[AttentionSpec]
    max_tokens: int
    max_rows: int
    shard: Shard = Shard()
    max_model_len: int = 0


class Platform(ABC):
    """One device of one kind. Made by `PlatformInfo.create`; passed around, never a global.

    Required are `capabilities`, `device` and `memory_info`; every other hook has a working default.
    """

    name: str

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Frozen facts; asked once."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where weights and activations live."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Bytes (free, total) of device memory; what other processes and containers hold is not free."""

    def synchronize(self) -> None:
        """(optional) Wait for all submitted work. Default: nothing, for devices that run in order with the host."""

    def config_defaults(self, view: Mapping[str, Any]) -> Mapping[str, Any]:
        """(optional) Settings this platform prefers where the user left them unset.

        `view` maps setting names to what the user gave (unset ones are absent). Default: no preference.
        """
        return {}

    def ops(self) -> list[OpImpl]:
        """(optional) Implementations of ops. Default: none, so that portable and reference ops serve."""
        return []

    def weight_formats(self) -> tuple[str, ...]:
        """(optional) Names in `WEIGHT_FORMATS` that its `linear` and the programs that it compiles take.

        Weights of these reach both as `QuantizedWeight`; others are dense. Default: none.
        """
        return ()

    def attention_backends(self) -> list[AttentionBackend]:
        """(optional) Attention backends, preferred first. Default: none, so that the reference serves."""
        return []

    def compile(self, request: CompileRequest) -> Program | None:
        """(optional) A program of its own for a spec. Default: None, the generic program runs."""
        return None

    def diagnostics(self) -> Mapping[str, str]:
        """(optional) What `octavo info` prints of this device: name to one line. Default: nothing."""
        return {}

    def set_num_threads(self, num_threads: int) -> None:
        """(optional) How many host threads its kernels may use. Default: nothing."""

    def probe(self, num_bytes: int) -> Probe | None:
        """(optional) Measure memory, by reading `num_bytes` of it, and products; within about a second.

        `num_bytes` is what a step reads, since caches and page tables make small reads faster. Called between steps,
        on the threads of `set_num_threads`. Default: None, benchmarks print figures without limits.
        """
        return None

    def costs(self, program: Program) -> ProgramCosts | None:
        """(optional) What a program from `compile` really reads a step. Default: None, core counts the spec."""
        return None


@dataclass(frozen=True)
class PlatformInfo:
    """What the `octavo_platforms` hook returns: facts found without touching a device.

    Attributes:
        name: what `--platform` takes; lower case, digits, "-" and "_".
        api_version: the contract's (major, minor) the plugin was written for.
        available: whether it can serve here.
        reason: why, or why not, in one clause ("driver 12.8 found", "no driver library").
        priority: the available platform of highest priority is chosen; the in-tree host platform has 0, and
            one below 0 serves only who names it.
        devices: one line a device, as users know them.
        create: makes the platform for a device index; the first moment that may touch the device.

    Raises:
        TypeError, ValueError: a field is not what is said here. The core names the plugin with the text.

    """

    name: str
    api_version: tuple[int, int]
    available: bool
    reason: str
    create: Callable[[int], Platform]
    priority: int = 0
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", self.name):
            raise ValueError(f"name must be lower-case letters, digits, '-' and '_', got {self.name!r}")
        version = self.api_version
        if not isinstance(version, tuple) or [type(part) for part in version] != [int, int]:
            raise TypeError(f"api_version must be (major, minor), got {version!r}")
        if not isinstance(self.available, bool):
            raise TypeError(f"available must be True or False, got {self.available!r}")
        if not isinstance(self.reason, str) or not self.reason:
            raise TypeError(f"reason must be a text, got {self.reason!r}")
        if type(self.priority) is not int:
            raise TypeError(f"priority must be an integer, got {self.priority!r}")
        if not isinstance(self.devices, tuple) or not all(isinstance(line, str) for line in self.devices):
            raise TypeError(f"devices must be a tuple of texts, got {self.devices!r}")
        if not callable(self.create):
            raise TypeError(f"create must take a device index and return a Platform, got {self.create!r}")
