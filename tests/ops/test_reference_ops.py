"""The torch reference of every op against float64 formulas, and its claims about rows."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from octavo.contract import (
    ActAndMul,
    Activation,
    FusedAddRMSNorm,
    LayerNorm,
    OpImpl,
    RMSNorm,
    RotaryEmbedding,
)
from octavo.contract.reference import ACTIVATIONS, GATED_ACTIVATIONS, reference_ops
from octavo.testing.cases_ops import CASES, DTYPES, Draw, OpCase
from octavo.testing.ops import check_rows_alone, check_truth

REFERENCE: dict[str, OpImpl] = {impl.op: impl for impl in reference_ops()}


def check(op: str, args: Any, dtype: torch.dtype, factor: float = 1.0) -> None:
    check_truth(REFERENCE[op], args, dtype, factor)


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_formula(case: OpCase, dtype: torch.dtype) -> None:
    assert REFERENCE[case.op].supports(case.signature(dtype, "cpu"))
    check(case.op, case.args(dtype), dtype, case.tolerance_factor)


sizes = st.integers(1, 130)
seeds = st.integers(0, 2**32)
dtypes = st.sampled_from((torch.float64, *DTYPES))


@settings(max_examples=40)
@given(rows=st.integers(0, 9), size=sizes, seed=seeds, dtype=dtypes, scale=st.sampled_from((1e-3, 1.0, 50.0)))
def test_norms_of_any_size(rows: int, size: int, seed: int, dtype: torch.dtype, scale: float) -> None:
    d = Draw(seed, dtype)
    x, residual, weight = d.normal(rows, size, scale=scale), d.normal(rows, size, scale=scale), d.normal(size)
    check("rms_norm", RMSNorm(x, weight, 1e-5, 1.0), dtype)
    # Centred values may be far smaller than the values: the error grows by that much.
    check("layer_norm", LayerNorm(x, None, weight, 1e-2), dtype, factor=max(1.0, scale))
    check("fused_add_rms_norm", FusedAddRMSNorm(x, residual, weight, 1e-5), dtype)


@settings(max_examples=40)
@given(
    rows=st.integers(0, 9),
    heads=st.integers(1, 5),
    half=st.integers(1, 20),
    rest=st.integers(0, 9),
    interleaved=st.booleans(),
    seed=seeds,
    dtype=dtypes,
)
def test_rotations_of_any_size(
    rows: int, heads: int, half: int, rest: int, interleaved: bool, seed: int, dtype: torch.dtype
) -> None:
    d = Draw(seed, dtype)
    angles = d.normal(11, half, scale=3, dtype=torch.float32)
    size = 2 * half + rest
    query, key = d.normal(rows, heads, size), d.normal(rows, 1, size)
    args = RotaryEmbedding(query, key, d.integers(11, rows), torch.cat((angles.cos(), angles.sin()), -1), interleaved)
    untouched = query[..., 2 * half :].clone()
    check("rotary_embedding", args, dtype)
    assert torch.equal(query[..., 2 * half :], untouched)


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted((*ACTIVATIONS, *GATED_ACTIVATIONS))),
    rows=st.integers(0, 9),
    size=sizes,
    seed=seeds,
    dtype=dtypes,
    scale=st.sampled_from((0.1, 1.0, 5.0)),
)
def test_activations_of_any_size(name: str, rows: int, size: int, seed: int, dtype: torch.dtype, scale: float) -> None:
    d = Draw(seed, dtype)
    x = d.normal(rows, 2 * size, scale=scale)
    # Far below 0 a gelu is what little is left of two large numbers: errors count beside a result of common size.
    x[:1, :1] = x[:1, size : size + 1] = 1 + scale
    check("act_and_mul", ActAndMul(x, name), dtype)
    if name in ACTIVATIONS:
        check("activation", Activation(x, name), dtype)


def test_rotation_happens_in_place() -> None:
    (case,) = [c for c in CASES if c.label == "19x9/3x64-64" and c.op == "rotary_embedding"]
    args = case.args(torch.float32)
    query, key = REFERENCE["rotary_embedding"].fn(args)
    assert query is args.query
    assert key is args.key


BY_ROW = [case for case in CASES if REFERENCE[case.op].row_invariant]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", BY_ROW, ids=str)
def test_a_row_is_the_same_alone_and_in_company(case: OpCase, dtype: torch.dtype) -> None:
    check_rows_alone(REFERENCE[case.op], case, dtype)


@pytest.mark.parametrize("name", sorted((*ACTIVATIONS, *GATED_ACTIVATIONS)))
def test_threads_that_share_a_large_step_change_no_bits(name: str) -> None:
    """An odd width, so that the pieces of threads begin in the middle of rows and of vector registers."""
    x = Draw(0, torch.float32).normal(67, 2 * 1537, scale=3)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = REFERENCE["act_and_mul"].fn(ActAndMul(x, name))
        torch.set_num_threads(1)
        for row in range(0, 67, 6):
            assert torch.equal(REFERENCE["act_and_mul"].fn(ActAndMul(x[row : row + 1], name))[0], together[row])
    finally:
        torch.set_num_threads(num_threads)
