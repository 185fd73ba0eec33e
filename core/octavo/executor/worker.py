"""A worker: one device with its platform, program, KV caches and runner."""

import ctypes
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from octavo.config import EngineConfig
from octavo.contract import (
    OPS,
    AttentionBackend,
    CompileRequest,
    MemoryInfo,
    Platform,
    Probe,
    Program,
    ProgramCosts,
    QuantizedWeight,
    Sample,
    Support,
)
from octavo.errors import ConfigError, OctavoError, PlatformError
from octavo.executor.calibrate import calibrator
from octavo.executor.memory import MemoryPlan, MemoryRequest, plan_memory
from octavo.executor.model_runner import KVGroupCaches, ModelRunner, RunnerLimits
from octavo.executor.prompts import MAX_PROMPT_LOGITS, scores_prompts
from octavo.hardware.choose import portable_ops
from octavo.hardware.registry import Registry
from octavo.hardware.resolve import Manifest, OpResolver
from octavo.model.describe import load_weights
from octavo.model.description import HfModel, ModelDescription, NativeModel
from octavo.model.generic import GenericProgram
from octavo.model.kv_groups import KVGroup, group_layers, kv_groups
from octavo.model.precision import Precision, told_weights
from octavo.scheduler.messages import ModelRunnerOutput, SchedulerOutput
from octavo.text.grammar import GrammarCompiler

__all__ = ["POISON_VARIABLE", "Worker"]

# 1: buffers and KV blocks that were never written hold garbage and NaN, so that tests see a read of one.
POISON_VARIABLE = "OCTAVO_POISON"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Loaded:
    """A model on a device, before its KV caches."""

    program: Program
    kind: str
    groups: tuple[KVGroup, ...]
    backends: tuple[AttentionBackend, ...]
    weight_bytes: int
    weights: str  # how many matrices in which form


class Worker:
    """Loads a model onto one device and runs its steps.

    Args:
        config: settled, so that nothing the core needs is open.
        description: of the model.
        platform: the device.
        registry: where portable ops come from.
        vocab_size: ids from here on are never sampled (the tokenizer's size); None: every row of the head may be.
        progress: show bars while weights load.

    Raises:
        ConfigError: the KV cache of one request does not fit, or `deterministic` refuses the chain of ops.
        ModelError, PlatformError: the model cannot be loaded, or not be run here.

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
        self.platform = platform
        self._description = description
        if config.platform.num_threads is not None:
            platform.set_num_threads(config.platform.num_threads)
        memory = platform.memory_info()
        ops = portable_ops(registry, platform, config.platform.platform)
        resolver = OpResolver(platform, ops, config.platform.strict_ops)
        loaded = _load(config, description, platform, resolver, progress)
        _return_freed_memory()
        num_logits = description.vocab_size
        num_ids = min(vocab_size or num_logits, num_logits)
        sample = _sample_op(resolver, num_ids)
        resolver.freeze()
        self.manifest: Manifest = resolver.manifest
        self._log_manifest()
        self._program = loaded.program
        self.program_kind = loaded.kind
        self._weights = loaded.weights
        self.row_invariant: Support = loaded.program.row_invariant
        if config.platform.deterministic and not self.row_invariant:
            raise ConfigError(
                "deterministic is set, and rows depend on their batch mates: "
                f"{'; '.join(self.row_invariant.reasons)}; unset deterministic, or choose another platform or dtype"
            )
        self.memory_plan = _plan(config, platform, loaded, memory)
        poison = os.environ.get(POISON_VARIABLE) == "1"
        caches = _allocate(loaded, self.memory_plan, poison)
        loaded.program.bind([group.device for group in caches])
        limits = RunnerLimits(
            vocab_size=num_ids,
            num_logits=num_logits,
            block_size=_settled(config.cache.block_size),
            max_model_len=_settled(config.model.max_model_len),
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=_settled(config.scheduler.max_num_batched_tokens),
            pinned_memory=platform.capabilities().pinned_memory,
            poison=poison,
        )
        self._runner: ModelRunner | None = None
        with _refusals("the buffers of a step", "max_num_seqs, max_num_batched_tokens or max_model_len"):
            self._runner = ModelRunner(loaded.program, caches, limits, platform.device, grammars, sample)

    def facts(self) -> Mapping[str, str]:
        """Name to one line, for `octavo info`."""
        return {
            "platform": f"{self.platform.name} on {self.platform.device}",
            "model": f"{self._description.files.name} ({self._description.architecture})",
            "program": self.program_kind,
            "weights": self._weights,
            "row invariant": str(self.row_invariant),
            "op table": self.manifest.hash,
            **self.platform.diagnostics(),
        }

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. Raises what the program raised."""
        if self._runner is None:
            raise RuntimeError("the worker is closed")
        return self._runner.execute(step)

    def on_progress(self, beat: Callable[[], None]) -> None:
        """Call `beat` before each layer of a step, where the program can."""
        if hasattr(self._program, "on_layer"):
            self._program.on_layer = beat

    def on_phase(self, mark: Callable[[str], None]) -> None:
        """Call `mark` where a step enters a phase."""
        if self._runner is not None:
            self._runner.mark = mark

    def probe(self, num_bytes: int) -> Probe | None:
        """What the device does at most; see `Platform.probe`."""
        return self.platform.probe(num_bytes)

    def costs(self) -> ProgramCosts | None:
        """What the program reads a step, where it tells; see `Platform.costs`."""
        return self.platform.costs(self._program)

    def close(self) -> None:
        """Let go of weights and KV caches."""
        if self._runner is not None:
            self.platform.synchronize()
            self._runner = None
            del self._program

    def _log_manifest(self) -> None:
        for row in self.manifest.rows:
            passed_over = f"; passed over: {', '.join(map(str, row.skipped))}" if row.skipped else ""
            logger.info("%s: %s (%s)%s", row.call, row.provider, row.tier, passed_over)


def _return_freed_memory() -> None:
    """What loading took for a while goes back to the system; the C library would keep much of it."""
    with suppress(AttributeError, OSError, TypeError):  # not every C library has such a call
        ctypes.CDLL(None).malloc_trim(0)


def _sample_op(resolver: OpResolver, vocab_size: int) -> Callable[[Sample], torch.Tensor]:
    """Who draws tokens."""
    signature = OPS["sample"].signature(torch.float32, "", {"vocab_size": vocab_size})  # of no kind of device
    return resolver.resolve(signature).fn


def _load(
    config: EngineConfig, description: ModelDescription, platform: Platform, resolver: OpResolver, progress: bool
) -> _Loaded:
    if isinstance(description, HfModel):
        return _load_hf(config, description, platform, resolver, progress)
    assert isinstance(description, NativeModel)
    return _load_native(config, description, platform, resolver, progress)


def _load_hf(
    config: EngineConfig, description: HfModel, platform: Platform, resolver: OpResolver, progress: bool
) -> _Loaded:
    from octavo.model.hf import HfProgram, load_hf

    dtype, kv_dtype, device = _dtype(config.model.dtype), _dtype(config.cache.kv_cache_dtype), platform.device
    block_size = _settled(config.cache.block_size)
    attentions = [layer.attention for layer in description.layers]
    groups = group_layers(attentions, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype)
    backends = tuple(resolver.resolve_attention(group.spec) for group in groups)
    model = load_hf(
        description,
        dtype=dtype,
        device=device,
        max_model_len=_settled(config.model.max_model_len),
        progress=progress,
        seed_dummy=_seed_dummy(config),
    )
    program = HfProgram(description, model, dtype=dtype, device=device, groups=groups, backends=backends)
    num_bytes = _num_bytes([*model.parameters(), *model.buffers()])
    told = told_weights(dict(model.named_parameters()))
    return _Loaded(program, f"transformers' {description.class_name}", groups, backends, num_bytes, told)


def _load_native(
    config: EngineConfig, description: NativeModel, platform: Platform, resolver: OpResolver, progress: bool
) -> _Loaded:
    dtype, kv_dtype = _dtype(config.model.dtype), _dtype(config.cache.kv_cache_dtype)
    spec, device = description.spec, platform.device
    groups = kv_groups(spec, block_size=_settled(config.cache.block_size), dtype=dtype, kv_dtype=kv_dtype)
    backends = tuple(resolver.resolve_attention(group.spec) for group in groups)
    seed = _seed_dummy(config)
    precision = Precision(config.model.quantization, platform.weight_formats())
    weights = load_weights(
        description,
        dtype=dtype,
        device=device,
        progress=progress,
        seed_dummy=seed,
        precision=precision,
        calibrate=calibrator(config, description, platform, resolver, dtype, progress=progress),
    )
    request = CompileRequest(
        spec=spec,
        weights=weights,
        dtype=dtype,
        attention=[group.spec for group in groups],
        max_tokens=_settled(config.scheduler.max_num_batched_tokens),
        max_rows=_num_choosing_rows(config) + MAX_PROMPT_LOGITS,
        max_model_len=_settled(config.model.max_model_len),
    )
    program = _compiled(platform, request)
    kind = f"compiled by {platform.name}"
    if program is None:
        program = GenericProgram(
            spec,
            weights,
            dtype=dtype,
            device=device,
            groups=groups,
            resolver=resolver,
            max_model_len=_settled(config.model.max_model_len),
        )
        kind = "generic, on the op table"
    parts = [t for w in weights.values() for t in (w.tensors if isinstance(w, QuantizedWeight) else (w,))]
    return _Loaded(program, kind, groups, backends, _num_bytes(parts), told_weights(weights))


def _num_choosing_rows(config: EngineConfig) -> int:
    """Rows from which tokens are chosen: of each sequence one, and one for each guess."""
    limits = config.scheduler
    guesses = limits.num_speculative_tokens if limits.speculative_method != "none" else 0
    return min(limits.max_num_seqs * (1 + guesses), _settled(limits.max_num_batched_tokens))


def _seed_dummy(config: EngineConfig) -> int | None:
    return config.model.seed if config.model.load_format == "dummy" else None


def _num_bytes(weights: Iterable[torch.Tensor]) -> int:
    """Of all weights together, some of which may share a tensor (a head tied to the embedding)."""
    return sum({w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights}.values())


def _compiled(platform: Platform, request: CompileRequest) -> Program | None:
    try:
        return platform.compile(request)
    except OctavoError:
        raise
    except Exception as error:
        raise PlatformError(f"platform {platform.name} failed to compile the model: {error}") from error


def _plan(config: EngineConfig, platform: Platform, loaded: _Loaded, memory: MemoryInfo) -> MemoryPlan:
    limits = config.scheduler
    # Rows of logits from which tokens are chosen, and those from which prompts are scored where nothing else serves.
    max_rows = _num_choosing_rows(config) + (0 if scores_prompts(loaded.program) else MAX_PROMPT_LOGITS)
    block_bytes = sum(b.block_bytes(g.spec) for b, g in zip(loaded.backends, loaded.groups, strict=True))
    return plan_memory(
        MemoryRequest(
            total=memory.total,
            free=memory.free,
            weights=loaded.weight_bytes,
            workspace=loaded.program.workspace_bytes(_settled(limits.max_num_batched_tokens), max_rows),
            block_bytes=block_bytes,
            block_size=_settled(config.cache.block_size),
            unified=platform.capabilities().unified_memory,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=_settled(config.model.max_model_len),
            memory_utilization=config.cache.memory_utilization,
            swap_space=(config.cache.swap_space or 0.0) if limits.preemption_mode == "swap" else 0.0,
            num_blocks_override=config.cache.num_blocks_override,
        )
    )


def _allocate(loaded: _Loaded, plan: MemoryPlan, poison: bool) -> list[KVGroupCaches]:
    caches: list[KVGroupCaches] = []
    what = f"{plan.num_blocks} KV blocks here and {plan.num_host_blocks} on the host, each of {plan.block_bytes} bytes"
    with _refusals(what, "num_blocks_override, memory_utilization or swap_space"):
        for backend, group in zip(loaded.backends, loaded.groups, strict=True):
            device = backend.allocate(group.spec, plan.num_blocks)
            host = backend.allocate_host(group.spec, plan.num_host_blocks) if plan.num_host_blocks else None
            caches.append(KVGroupCaches(backend, device, host))
    if poison:
        for cache in caches:
            for tensor in cache.device.tensors + (cache.host.tensors if cache.host else ()):
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
    return caches


@contextmanager
def _refusals(what: str, settings: str) -> Iterator[None]:
    """Systems and libraries that have no more memory say so in many ways; here all of them become one."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"there is no memory for {what}: {reason[:200]}; lower {settings}") from error


def _settled(value: int | None) -> int:
    assert value is not None, "settle the config first"
    return value


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    assert isinstance(dtype, torch.dtype), f"settle the config first: dtype is {name}"
    return dtype
