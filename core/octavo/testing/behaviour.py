"""Checks of a served model: the engine on a platform, whatever serves its ops."""

import gc
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.sampling_params import SamplingParams
from octavo.testing.bench import PROMPTS, Bench, Sample
from octavo.testing.outcome import CheckError, NotOfferedError, require

__all__ = [
    "chunks",
    "copies",
    "costs",
    "greedy",
    "memory",
    "prefix_cache",
    "recompute",
    "rows",
    "samples",
    "spawned",
    "swap",
]

NUM_STEPS = 1000
READINGS = (0.3, 0.65, 1.0)  # of memory, as shares of those steps
MAX_GROWTH = 4 << 20  # bytes over 350 steps: a leak of 12 KiB a step shows
SPAWN_SECONDS = 300
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def greedy(bench: Bench) -> str:
    """See `Bench.baseline`."""
    found = bench.baseline
    num_tokens = sum(len(sample.token_ids) for samples in found for sample in samples)
    return f"{num_tokens} tokens in {str(bench.dtype).removeprefix('torch.')}"


def rows(bench: Bench) -> str:
    """One request a step, and another order."""
    with bench.engine(max_num_seqs=1) as llm:
        bench.check_like_baseline(bench.outputs(llm), "alone")
    with bench.engine() as llm:
        backwards = bench.outputs(llm, PROMPTS[::-1])[::-1]
    bench.check_like_baseline(backwards, "in another order")
    return _how_equal(bench)


def chunks(bench: Bench) -> str:
    """Chunks of 9 tokens, which divide nothing."""
    with bench.engine(max_num_batched_tokens=9) as llm:
        bench.check_like_baseline(bench.outputs(llm), "in chunks")
    return _how_equal(bench)


def prefix_cache(bench: Bench) -> str:
    """The same prompts again, and with the cache off."""
    prompts = [prompt * (1 + 2 * bench.block_size // len(prompt)) for prompt in PROMPTS]
    with bench.engine(enable_prefix_caching=False) as llm:
        computed = bench.outputs(llm, prompts)
    bench.check_greedy(prompts, computed)
    with bench.engine(enable_prefix_caching=True) as llm:
        bench.outputs(llm, prompts)
        cached = bench.outputs(llm, prompts)
        num_hits = llm.stats.counts.num_cached_prompt_tokens
        claims = bool(llm.executor.row_invariant)
    bench.check_greedy(prompts, cached)
    require(num_hits >= len(prompts) * bench.block_size, f"{num_hits} prompt tokens came from the cache")
    require(not claims or cached == computed, "claims row invariance, and a cached prefix changes a request")
    return f"{num_hits} tokens from the cache"


def recompute(bench: Bench) -> str:
    """Too few blocks for all."""
    return _preempted(bench, preemption_mode="recompute")


def swap(bench: Bench) -> str:
    """Too few blocks for all, and some on the host."""
    return _preempted(bench, preemption_mode="swap", swap_space=0.01)


def _preempted(bench: Bench, **settings: Any) -> str:
    block_size = min(bench.capabilities.block_sizes or (16,))
    lengths = [len(prompt) + LONG.max_tokens for prompt in PROMPTS if LONG.max_tokens]
    num_blocks = max(-(-max(lengths) // block_size), sum(-(-length // block_size) for length in lengths) * 2 // 3)
    limits = {"block_size": block_size, "max_model_len": max(lengths), "enable_prefix_caching": False}
    with bench.engine(num_blocks_override=num_blocks, **limits, **settings) as llm:
        found = bench.outputs(llm, params=LONG)
        counts = llm.stats.counts
    require(counts.num_preemptions > 0, f"nothing was preempted with {num_blocks} blocks: a fault of this check")
    bench.check_greedy(PROMPTS, found)
    require((counts.num_swaps > 0) == ("swap_space" in settings), f"{counts.num_swaps} requests were swapped")
    return f"{counts.num_preemptions} preemptions, {counts.num_swaps} swaps"


def samples(bench: Bench) -> str:
    """Copy-on-write and seeds."""
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=10, logprobs=0, ignore_eos=True)
    with bench.engine() as llm:
        first, second = bench.outputs(llm, params=params), bench.outputs(llm, params=params)
        claims = bool(llm.executor.row_invariant)
    parted = [len({sample.token_ids for sample in request}) for request in first]
    require(max(parted) > 1, "the samples of a request are all the same")
    truths = [bench.model.logits([*prompt, *sample.token_ids]) for prompt, sample in _flat(first)]
    for (prompt, sample), logits in zip(_flat(first), truths, strict=True):
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(sample.token_ids)[:, None])
        worst = float((torch.tensor(sample.logprobs).double() - expected[:, 0]).abs().max())
        allowed = {torch.float32: 5e-3}.get(bench.dtype, 1.0)
        require(worst < allowed, f"a sampled token's log-probability is off by {worst:.4f}")
    require(not claims or first == second, "claims row invariance, and a seed gives other tokens the second time")
    return f"{parted} different samples of 3"


def _flat(found: list[list[Sample]]) -> list[tuple[list[int], Sample]]:
    return [(prompt, sample) for prompt, request in zip(PROMPTS, found, strict=True) for sample in request]


def copies(bench: Bench) -> str:
    """Counted at torch's dispatcher; copies that a platform makes by other means do not show."""
    if bench.device.type == torch.empty(0).device.type:
        raise NotOfferedError("the platform's tensors are host memory: there is nothing to count")
    told = []
    params = {
        "greedy": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        "sampled": SamplingParams(temperature=0.8, seed=1, max_tokens=12, logprobs=2, ignore_eos=True),
    }
    for name, one in params.items():
        with bench.engine() as llm:
            bench.outputs(llm, params=one)
            before = llm.stats.counts.num_steps
            with _counting(bench.device.type) as counts:
                bench.outputs(llm, params=one)
            num_steps = llm.stats.counts.num_steps - before
        found = f"{counts.num_copies} copies to the host and {counts.num_waits} waits in {num_steps} steps ({name})"
        require(counts.num_copies <= num_steps and not counts.num_waits, found)
        told.append(found)
    return ", ".join(told)


class _Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies from a kind of device to the host, and operators that make the host wait for a value."""

    WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self.num_copies = 0
        self.num_waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::_to_copy", "aten::copy_"):
            source = args[1] if name == "aten::copy_" else args[0]
            self.num_copies += self._is_there(source) and not self._is_there(result)
        elif name in self.WAITS:
            self.num_waits += any(self._is_there(arg) for arg in args)
        return result

    def _is_there(self, x: object) -> bool:
        return isinstance(x, torch.Tensor) and x.device.type == self._device_type


@contextmanager
def _counting(device_type: str) -> Iterator[_Counts]:
    with _Counts(device_type) as counts:
        yield counts


def memory(bench: Bench) -> str:
    """Bytes of the process, of the device, and Python's objects."""
    measured = bool(_process_bytes())
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    on_host = bench.device.type == torch.empty(0).device.type
    readings: list[tuple[int, int, int]] = []
    with bench.engine() as llm:
        for share in READINGS:
            while llm.stats.counts.num_steps < NUM_STEPS * share:
                bench.outputs(llm, PROMPTS[:1], params)
            gc.collect()
            readings.append((_process_bytes(), bench.platform.memory_info().free, len(gc.get_objects())))
    # What leaks does so in every span; what an allocator takes once, and what others in the process take, does not.
    spans = list(pairwise(readings))
    grown = min(after[0] - before[0] for before, after in spans)
    lost = min(before[1] - after[1] for before, after in spans)
    num_new = min(after[2] - before[2] for before, after in spans)
    told, num_steps = [], int(NUM_STEPS * (READINGS[1] - READINGS[0]))
    if measured:
        require(grown <= MAX_GROWTH, f"the process grew by {grown} bytes over {num_steps} steps, again and again")
        told.append(f"process {grown:+} bytes")
    if not on_host:
        require(lost <= MAX_GROWTH, f"the device lost {lost} bytes over {num_steps} steps, again and again")
        told.append(f"device {lost:+} bytes")
    require(num_new <= num_steps, f"{num_new} Python objects more over {num_steps} steps, again and again")
    return ", ".join([*told, f"{num_new:+} objects"])


def _process_bytes() -> int:
    """Private memory of this process; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


def spawned(bench: Bench) -> str:
    """Nothing of this process but the settings reaches the child."""
    expected = [[sample.token_ids for sample in request] for request in bench.baseline]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            found = pool.submit(_serve, bench.settings()).result(SPAWN_SECONDS)
        except BrokenProcessPool as error:
            raise CheckError("the spawned process died") from error
    if bench.row_invariant:
        require(found == expected, "a spawned process has other tokens")
    for prompt, request in zip(PROMPTS, found, strict=True):
        for token_ids in request:
            bench.model.check_greedy(prompt, token_ids)
    return ""


def costs(bench: Bench) -> str:
    """Bytes of layers and of the head."""
    with bench.engine() as llm:
        told = llm.executor.costs()
    if told is None:
        raise NotOfferedError("core counts what a step reads")
    for name in ("layer_bytes", "head_bytes"):
        given = getattr(told, name)
        require(type(given) is int and given > 0, f"costs() says {name} {given!r}; a number of bytes is right")
    for name in ("layer_dtype", "head_dtype", "attention_dtype"):
        given = getattr(told, name)
        require(isinstance(given, torch.dtype), f"costs() says {name} {given!r}; a torch.dtype is right")
    return f"{told.layer_bytes} + {told.head_bytes} bytes a step"


def _serve(settings: dict[str, Any]) -> list[list[tuple[int, ...]]]:
    from octavo.engine.llm import LLM

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(**settings) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return [[tuple(sample.token_ids) for sample in output.outputs] for output in outputs]


def _how_equal(bench: Bench) -> str:
    return "bit by bit" if bench.row_invariant else "near ties aside, as it claims no row invariance"
