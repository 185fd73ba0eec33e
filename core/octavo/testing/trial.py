"""A short trial of what a platform offers, for a report: whether its yes holds at all. The kit asks for much more."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from octavo.contract import AttentionBackend, OpImpl, Platform, Support
from octavo.testing.attention import check_truth, run
from octavo.testing.cases_attention import LENGTHS, MIXED, SPECS
from octavo.testing.cases_ops import CASES
from octavo.testing.ops import check_case, knows
from octavo.testing.outcome import CheckError

__all__ = ["lies_of_attention", "lies_of_ops"]

NUM_CASES = 3  # an op
GEOMETRIES = ("plain", "ratio-3", "ratio-4", "latent")  # the first that a backend serves is tried


def lies_of_ops(platform: Platform, ops: Sequence[OpImpl]) -> Iterator[str]:
    """What is wrong with implementations, on the first few cases that each says it serves."""
    dtype = _dtype(platform)
    for impl in ops:
        signatures = [(case, case.signature(dtype, platform.device.type)) for case in CASES if case.op == impl.op]
        served = [
            (case, signature) for case, signature in signatures if knows(impl, signature) and impl.supports(signature)
        ]
        try:
            for case, signature in served[:NUM_CASES]:
                check_case(impl, case, signature, platform.device)
        except CheckError as error:
            yield str(error)


def lies_of_attention(platform: Platform, backends: Sequence[AttentionBackend]) -> Iterator[str]:
    """What is wrong with backends, on the first geometry that each says it serves."""
    dtype, sizes = _dtype(platform), platform.capabilities().block_sizes
    for backend in backends:
        for name in GEOMETRIES:
            spec = replace(SPECS[name], dtype=dtype, kv_dtype=dtype)
            if sizes and spec.block_size not in sizes:
                spec = replace(spec, block_size=sizes[0])
            answer = backend.supports(spec)
            if not isinstance(answer, Support):
                yield f"{backend.name}: supports() returns {type(answer).__name__}, not a Support"
                break
            if not answer:
                continue
            try:
                check_truth(*run(backend, spec, LENGTHS, MIXED, device=platform.device))
            except CheckError as error:
                yield str(error) if str(error).startswith(backend.name) else f"{backend.name}: {error}"
            break


def _dtype(platform: Platform) -> torch.dtype:
    return next(iter(platform.capabilities().dtypes), torch.float32)
