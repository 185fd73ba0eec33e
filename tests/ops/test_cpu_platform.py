"""Native ops and attention of the host platform on the cases that every implementation shares."""

from functools import cache

import pytest
import torch

from octavo.contract import AttentionBackend, OpImpl, Platform
from octavo.testing.attention import check_rows_alone, check_truth, run
from octavo.testing.cases_attention import LENGTHS, MIXED, SPECS, WHOLE
from octavo.testing.cases_ops import CASES, DTYPES, OpCase
from octavo.testing.ops import check_rows_alone as check_op_rows_alone
from octavo.testing.ops import check_truth as check_op_truth
from octavo_cpu.plugin import octavo_platforms

NATIVE_OPS = {"rms_norm", "fused_add_rms_norm", "layer_norm", "rotary_embedding", "activation", "act_and_mul"}
OWN_BLOCKS = {name: spec for name, spec in SPECS.items() if spec.block_size in (8, 16, 32)}


@cache
def platform() -> Platform:
    (info,) = octavo_platforms()
    return info.create(0)


def native(op: str) -> OpImpl:
    (impl,) = [impl for impl in platform().ops() if impl.op == op]
    assert impl.tier == "native"
    return impl


def attention() -> AttentionBackend:
    (backend,) = platform().attention_backends()
    return backend


def test_native_kernels_are_there() -> None:
    assert {impl.op for impl in platform().ops()} >= NATIVE_OPS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.op in NATIVE_OPS], ids=str)
def test_an_op_equals_the_formula_and_keeps_its_claim(case: OpCase, dtype: torch.dtype) -> None:
    impl = native(case.op)
    assert impl.supports(case.signature(dtype, "cpu"))
    check_op_truth(impl, case.args(dtype), dtype, case.tolerance_factor)
    assert impl.row_invariant
    check_op_rows_alone(impl, case, dtype)


@pytest.mark.parametrize("name", OWN_BLOCKS)
def test_attention_equals_dense_attention_and_keeps_its_claim(name: str) -> None:
    backend = attention()
    assert backend.supports(OWN_BLOCKS[name])
    check_truth(*run(backend, OWN_BLOCKS[name], LENGTHS, WHOLE))
    check_truth(*run(backend, OWN_BLOCKS[name], LENGTHS, MIXED))
    assert backend.row_invariant
    check_rows_alone(backend, OWN_BLOCKS[name])


@pytest.mark.parametrize("name", sorted(set(SPECS) - set(OWN_BLOCKS)))
def test_blocks_of_other_sizes_are_left_to_the_reference(name: str) -> None:
    assert "block size" in attention().supports(SPECS[name]).reasons[0]
