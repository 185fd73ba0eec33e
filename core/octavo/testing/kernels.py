"""Checks of ops and attention as a platform has them."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from octavo.contract import AttentionBackend, AttentionSpec, Support
from octavo.hardware.resolve import OpResolver
from octavo.testing import attention
from octavo.testing.bench import Bench
from octavo.testing.cases_attention import SPECS, TOLERANCE
from octavo.testing.cases_ops import CASES
from octavo.testing.ops import check_case, knows
from octavo.testing.outcome import CheckError, NotOfferedError, require

__all__ = ["copies", "empty", "op", "own", "own_attention", "serving", "serving_attention", "slots", "swaps"]

T = TypeVar("T")
TOO_OLD = Support.no("written for a contract without weight formats")
OnBackend = Callable[[AttentionBackend, AttentionSpec, torch.device], None]


def op(bench: Bench, name: str, dtype: torch.dtype) -> str:
    """All implementations of an op, each on the cases that it says it serves."""
    _require_dtype(bench, dtype)
    counts: dict[str, int] = {}
    refusals: dict[str, str] = {}
    for impl in bench.all_ops:
        if impl.op != name:
            continue
        who = f"{impl.provider} ({impl.tier})"
        for case in CASES:
            if case.op != name:
                continue
            signature = case.signature(dtype, bench.device.type)
            answer = ask(impl.supports, signature, who) if knows(impl, signature) else TOO_OLD
            if answer:
                check_case(impl, case, signature, bench.device)
                counts[who] = counts.get(who, 0) + 1
            else:
                refusals.setdefault(who, "; ".join(answer.reasons))
    require(bool(counts), f"no case of {name} is served: {refusals}")
    served = ", ".join(f"{who}: {count} cases" for who, count in counts.items())
    passed_over = "".join(f"; {who} says no to some: {why}" for who, why in refusals.items())
    return served + passed_over


def serving_attention(bench: Bench, name: str) -> str:
    """One geometry on whatever serves it."""
    spec = _fitted(bench, SPECS[name], bench.dtype)
    backend = OpResolver(bench.platform, bench.shared_ops).resolve_attention(spec)
    attention.check_spec(backend, spec, bench.device)
    return f"by {backend.name}"


def own_attention(bench: Bench, name: str) -> str:
    """One geometry on the platform's own backends, in each dtype of activations and of the cache."""
    served: list[str] = []
    refusals: list[str] = []
    for backend in _own_backends(bench):
        for spec in _in_dtypes(bench, SPECS[name]):
            answer = ask(backend.supports, spec, backend.name)
            if answer:
                attention.check_spec(backend, spec, bench.device)
                served.append(f"{backend.name} {_short(spec.dtype)}/{_short(spec.kv_dtype)}")
            else:
                refusals.append(f"{backend.name}: {'; '.join(answer.reasons)}")
    if not served:
        raise NotOfferedError(", ".join(dict.fromkeys(refusals)))
    return ", ".join(served)


def serving(check: OnBackend) -> Callable[[Bench], str]:
    """A check of whatever serves the plain geometry."""

    def run(bench: Bench) -> str:
        spec = _fitted(bench, SPECS["plain"], bench.dtype)
        backend = OpResolver(bench.platform, bench.shared_ops).resolve_attention(spec)
        _guarded(check, backend, spec, bench.device)
        return f"by {backend.name}"

    return run


def own(check: OnBackend) -> Callable[[Bench], str]:
    """A check of the platform's own backends, on a plain geometry that they serve."""

    def run(bench: Bench) -> str:
        done: list[str] = []
        refusals: list[str] = []
        for backend in _own_backends(bench):
            for name in ("plain", "ratio-3", "ratio-4"):
                spec = _fitted(bench, SPECS[name], bench.dtype)
                answer = ask(backend.supports, spec, backend.name)
                if answer:
                    _guarded(check, backend, spec, bench.device)
                    done.append(f"{backend.name} ({name})")
                    break
                refusals += answer.reasons
        if not done:
            raise NotOfferedError("; ".join(dict.fromkeys(refusals)))
        return ", ".join(done)

    return run


def empty(backend: AttentionBackend, spec: AttentionSpec, device: torch.device) -> None:
    """See `check_empty`."""
    attention.check_empty(backend, spec, device)


def slots(backend: AttentionBackend, spec: AttentionSpec, device: torch.device) -> None:
    """See `check_slot_minus_one`."""
    attention.check_slot_minus_one(backend, spec, device)


def copies(backend: AttentionBackend, spec: AttentionSpec, device: torch.device) -> None:
    """See `check_copies` and `check_bytes`."""
    attention.check_bytes(backend, spec)
    attention.check_copies(backend, spec, device)


def swaps(backend: AttentionBackend, spec: AttentionSpec, device: torch.device) -> None:
    """See `check_swaps`."""
    attention.check_swaps(backend, spec, device)


def ask(supports: Callable[[T], Support], call: T, who: str) -> Support:
    """The answer to whether a call is served.

    Raises:
        CheckError: it raised, or is no Support.

    """
    try:
        answer = supports(call)
    except Exception as error:
        raise CheckError(f"{who}: supports({call}) raises {type(error).__name__}: {error}") from error
    require(isinstance(answer, Support), f"{who}: supports({call}) returns {type(answer).__name__}, not a Support")
    return answer


def _guarded(check: OnBackend, backend: AttentionBackend, spec: AttentionSpec, device: torch.device) -> None:
    try:
        check(backend, spec, device)
    except CheckError as error:
        raise CheckError(f"{backend.name}: {error}") from error
    except Exception as error:
        raise CheckError(f"{backend.name} says yes to {spec} and raises {type(error).__name__}: {error}") from error


def _own_backends(bench: Bench) -> list[AttentionBackend]:
    if not bench.backends:
        raise NotOfferedError("the platform has no attention of its own; the reference serves")
    return bench.backends


def _in_dtypes(bench: Bench, spec: AttentionSpec) -> list[AttentionSpec]:
    """The spec in each dtype with a cache of the same, and in the first with each other kind of cache."""
    dtypes = [dtype for dtype in bench.capabilities.dtypes or (torch.float32,) if dtype in TOLERANCE]
    kv_dtypes = bench.capabilities.kv_cache_dtypes
    pairs = [(dtype, dtype) for dtype in dtypes if not kv_dtypes or dtype in kv_dtypes]
    pairs += [(bench.dtype, kv) for kv in kv_dtypes if (kv in TOLERANCE or kv == torch.int8) and kv != bench.dtype]
    return [replace(_fitted(bench, spec, dtype), kv_dtype=kv) for dtype, kv in dict.fromkeys(pairs)]


def _fitted(bench: Bench, spec: AttentionSpec, dtype: torch.dtype) -> AttentionSpec:
    """In a dtype, and on blocks that the platform has."""
    sizes = bench.capabilities.block_sizes
    block_size = spec.block_size if spec.block_size in sizes or not sizes else sizes[0]
    return replace(spec, dtype=dtype, kv_dtype=dtype, block_size=block_size)


def _require_dtype(bench: Bench, dtype: torch.dtype) -> None:
    dtypes = bench.capabilities.dtypes
    if dtypes and dtype not in dtypes:
        raise NotOfferedError(f"{_short(dtype)} is none of the platform's dtypes ({', '.join(map(_short, dtypes))})")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
