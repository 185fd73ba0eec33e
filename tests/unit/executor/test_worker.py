"""A worker and the local executor: loading, the plan, refusals, and a real (tiny, random) model in poisoned memory."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.fake_program import FakePlatform, fake_greedy

from octavo.config import EngineConfig
from octavo.contract import (
    Attention,
    AttentionBackend,
    Capabilities,
    CompileRequest,
    DecoderSpec,
    KVCache,
    Layer,
    MemoryInfo,
    Mlp,
    Norm,
    Platform,
    Program,
    Rope,
    Support,
)
from octavo.contract.reference_attention import ReferenceAttention
from octavo.errors import ConfigError, PlatformError, UnsupportedError
from octavo.executor import worker
from octavo.executor.local import LocalExecutor
from octavo.executor.worker import POISON_VARIABLE
from octavo.hardware.registry import discover
from octavo.model.description import NativeModel
from octavo.model.files import ModelFiles
from octavo.model.names import NameTable
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import ModelRunnerOutput, NewSequence, ScheduledSequence, SchedulerOutput

VOCAB = 97
PROMPT = [5, 3, 8, 1, 40, 22, 9]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "load_format": "dummy",
    "max_model_len": 64,
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "swap_space": 0.0,
}


class Host(Platform):
    """No kernels of its own: the generic program on torch."""

    name = "host"

    def capabilities(self) -> Capabilities:
        return Capabilities(unified_memory=True)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(free=1 << 30, total=1 << 31)


def describe() -> NativeModel:
    rope = Rope(tuple(10_000 ** (-i / 4) for i in range(4)))
    layer = Layer(
        attn=Attention(num_heads=4, num_kv_heads=2, head_size=8, scale=8**-0.5, rope=rope),
        mlp=Mlp(48, "silu"),
        attn_pre=Norm(1e-5),
        mlp_pre=Norm(1e-5),
    )
    spec = DecoderSpec(VOCAB, 32, (layer, layer), Norm(1e-5), tied_embeddings=True)
    return NativeModel(
        files=ModelFiles("tiny", "folder", Path("tiny"), Path("tiny")),
        architecture="llama",
        vocab_size=VOCAB,
        spec=spec,
        names=NameTable({}),
        max_position=64,
        eos_token_ids=frozenset((0,)),
        bos_token_id=None,
        sampling_defaults={},
        dtype=torch.float32,
        num_parameters=None,
    )


def start(platform: Platform, vocab_size: int | None = None, **settings: Any) -> LocalExecutor:
    config = EngineConfig.of(**{**SETTINGS, **settings})
    return LocalExecutor(config, describe(), platform, discover([]), vocab_size=vocab_size)


def run(executor: LocalExecutor, prompt: list[int], params: SamplingParams, num: int) -> list[ModelRunnerOutput]:
    """One sequence alone, `num` tokens, its prompt in chunks of 3, in blocks that are not in order."""
    blocks = [7, 2, 9, 0, 5][: -(-(len(prompt) + num) // 4)]
    scored = 1 if params.prompt_logprobs is not None else None
    new: tuple[NewSequence, ...] = (NewSequence(1, 0, prompt, len(prompt), params, frozenset((0,)), blocks, scored),)
    results, computed, known = [], 0, len(prompt)
    while known < len(prompt) + num:
        size = min(3, known - computed)
        samples = (1,) if computed + size == known else ()
        item = ScheduledSequence(1, computed, size, sample_for=samples)
        results.append(executor.execute_model(SchedulerOutput(len(results), (item,), new)))
        new, computed, known = (), computed + size, known + len(samples)
    executor.execute_model(SchedulerOutput(len(results), (), removed=(1,)))
    return results


def tokens(results: list[ModelRunnerOutput]) -> list[int]:
    assert not any(result.failures for result in results)
    return [token for result in results for tokens in result.token_ids.values() for token in tokens]


def test_a_compiled_program_is_bound_and_runs() -> None:
    platform = FakePlatform()
    executor = start(platform, num_threads=3)
    assert platform.num_threads == 3
    assert platform.program is not None and len(platform.program.caches) == 1
    assert tokens(run(executor, PROMPT, SamplingParams(temperature=0), 6)) == fake_greedy(PROMPT, 6, VOCAB)
    assert executor.facts()["program"] == "compiled by fake"
    assert executor.row_invariant
    assert [row.provider for row in executor.manifest.rows] == ["fake", "numpy"]  # attention, and core's own sample


def test_the_plan_is_that_of_the_weights_and_caches() -> None:
    executor = start(Host())
    plan = executor.memory_plan
    hidden, kv = 32, 2 * 8
    layer = hidden * (2 * hidden + 2 * kv) + 3 * 48 * hidden + 2 * hidden
    assert plan.weights == 4 * (VOCAB * hidden + 2 * layer + hidden)
    assert plan.block_bytes == 2 * 2 * 4 * kv * 4
    assert plan.num_blocks == 4 * 16
    assert (plan.total, plan.free, plan.num_host_blocks) == (1 << 31, 1 << 30, 0)
    assert plan.workspace > 0
    with_swap = start(Host(), preemption_mode="swap", swap_space=0.001)
    assert with_swap.memory_plan.num_host_blocks == int(0.001 * 2**30) // plan.block_bytes


def test_a_real_model_reads_nothing_that_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = start(Host())
    monkeypatch.setenv(POISON_VARIABLE, "1")
    poisoned = start(Host())
    params = SamplingParams(temperature=0, prompt_logprobs=2, logprobs=3)
    expected, found = run(plain, PROMPT, params, 8), run(poisoned, PROMPT, params, 8)
    assert found == expected
    scored = [entry for result in found for entries in result.prompt_logprobs.values() for entry in entries]
    assert [entry.token_id for entry in scored] == PROMPT[1:]
    chosen = [entry for result in found for entries in result.logprobs.values() for entry in entries]
    assert [entry.token_id for entry in chosen] == tokens(found)
    assert all(entry.rank == 1 and entry.logprob == entry.top_logprobs[0] < 0 for entry in chosen)
    greedy = run(poisoned, PROMPT, SamplingParams(temperature=0), 8)
    assert tokens(greedy) == tokens(found)
    assert plain.facts()["program"].startswith("generic")


def test_weights_that_are_no_numbers_fail_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> dict[str, torch.Tensor]:
        weights = load(*args, **kwargs)
        weights["final_norm"] = torch.full_like(weights["final_norm"], torch.nan)
        return weights

    load: Callable[..., dict[str, torch.Tensor]] = worker.load_weights
    monkeypatch.setattr(worker, "load_weights", broken)
    executor = start(Host())
    for params in (SamplingParams(temperature=0), SamplingParams(seed=1)):
        new = (NewSequence(1, 0, PROMPT, 7, params, frozenset(), [0, 1]),)
        item = ScheduledSequence(1, 0, 7, sample_for=(1,))
        result = executor.execute_model(SchedulerOutput(0, (item,), new, removed=(1,)))
        assert [failure.seq_id for failure in result.failures] == [1]
        assert "not numbers" in result.failures[0].message


def test_ids_beyond_the_tokenizer_are_never_sampled() -> None:
    executor = start(FakePlatform(), vocab_size=20)
    results = run(executor, PROMPT, SamplingParams(seed=1, temperature=5), 12)
    results += run(executor, PROMPT, SamplingParams(temperature=0), 12)
    assert max(tokens(results)) < 20


def test_deterministic_refuses_the_op_that_is_not() -> None:
    with pytest.raises(ConfigError, match=r"deterministic is set.*linear.*tiling"):
        start(Host(), deterministic=True)
    with pytest.raises(ConfigError, match="the head's product"):
        start(FakePlatform(row_invariant=Support.no("the head's product")), deterministic=True)
    assert start(FakePlatform(), deterministic=True).row_invariant


def test_a_model_whose_longest_request_does_not_fit() -> None:
    roomy = start(FakePlatform()).memory_plan
    total = int((roomy.weights + roomy.workspace + 5 * roomy.block_bytes) / 0.9) + 1
    small = FakePlatform(memory=MemoryInfo(free=total, total=total))
    with pytest.raises(
        ConfigError, match=r"max_model_len 64 needs .* the largest that fits is 20: .*memory_utilization"
    ):
        start(small)
    assert start(small, max_model_len=20).memory_plan.num_blocks == 5
    assert start(small, num_blocks_override=8).memory_plan.num_blocks == 8


@pytest.mark.parametrize(
    "error",
    [RuntimeError("out of\nmemory"), MemoryError("out of memory"), OSError(12, "out of memory")],
    ids=lambda error: type(error).__name__,
)
def test_an_allocation_that_the_device_refuses(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: AttentionBackend, spec: object, num_blocks: int) -> None:
        raise error

    monkeypatch.setattr(ReferenceAttention, "allocate", refuse)
    rule = r"^there is no memory for 9 KV blocks .* out of memory; lower num_blocks_override[^\n]*$"
    with pytest.raises(ConfigError, match=rule):
        start(Host(), num_blocks_override=9)


def test_buffers_that_the_host_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("358 GiB")

    monkeypatch.setattr(worker, "ModelRunner", refuse)
    with pytest.raises(ConfigError, match=r"no memory for the buffers of a step: 358 GiB; lower max_num_seqs"):
        start(Host())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no such unit"), "platform fake failed to compile the model: no such unit"),
        (UnsupportedError("windows are not served"), "^windows are not served"),
    ],
)
def test_a_platform_that_fails_to_compile(error: Exception, expected: str) -> None:
    class Broken(FakePlatform):
        def compile(self, request: CompileRequest) -> Program | None:
            raise error

    with pytest.raises((PlatformError, UnsupportedError), match=expected):
        start(Broken())


def test_shutdown_lets_go_and_may_come_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    load, allocate = worker.load_weights, ReferenceAttention.allocate

    def watch_weights(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        weights = load(*args, **kwargs)
        held.extend(map(weakref.ref, weights.values()))
        return weights

    def watch_caches(self: ReferenceAttention, *args: Any) -> KVCache:
        cache = allocate(self, *args)
        held.extend(map(weakref.ref, cache.tensors))
        return cache

    monkeypatch.setattr(worker, "load_weights", watch_weights)
    monkeypatch.setattr(ReferenceAttention, "allocate", watch_caches)
    executor = start(Host())
    run(executor, PROMPT, SamplingParams(temperature=0), 2)
    assert any(tensor() is not None for tensor in held)
    executor.shutdown()
    gc.collect()
    assert [tensor() for tensor in held if tensor() is not None] == []
    executor.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        executor.execute_model(SchedulerOutput(0, ()))
