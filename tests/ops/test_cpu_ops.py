"""Native norms, rope and activations against the reference in float64: odd sizes, strides, guards, rows alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from ops.cpu_cases import DTYPES, SIZES, assert_close

from octavo.contract import (
    OPS,
    ActAndMul,
    Activation,
    FusedAddRMSNorm,
    LayerNorm,
    OpSignature,
    RMSNorm,
    RotaryEmbedding,
)
from octavo.contract.reference import ACTIVATIONS, GATED_ACTIVATIONS, reference_ops
from octavo_cpu.native import NativeLibrary
from octavo_cpu.ops import native_ops

REFERENCE = {impl.op: impl.fn for impl in reference_ops()}
Make = Callable[..., torch.Tensor]


def native(library: NativeLibrary, op: str) -> Callable[[Any], Any]:
    return next(impl.fn for impl in native_ops(library) if impl.op == op)


def wide(args: Any) -> Any:
    """The args object in float64, its tensors copied."""
    fields = {name: getattr(args, name) for name in args.__struct_fields__}
    for name, field in fields.items():
        if isinstance(field, torch.Tensor):
            fields[name] = field.double() if field.is_floating_point() else field.clone()
    return type(args)(**fields)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def rows(dtype: torch.dtype) -> Make:
    """Rows [num, width] with a stride of their own, three times normal."""
    generator = torch.Generator().manual_seed(3)

    def make(num: int, width: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return (3 * torch.randn(num, width + 5, generator=generator)).to(dtype)[:, :width]

    return make


@pytest.mark.parametrize("size", SIZES)
def test_norms(size: int, rows: Make, isa_library: NativeLibrary) -> None:
    x, weight, bias = rows(7, size), rows(1, size)[0], rows(1, size)[0]
    for args in (
        RMSNorm(x, weight, 1e-5),
        RMSNorm(x, None, 1e-6),
        RMSNorm(x, weight.float(), 1e-5, 1.0),
        LayerNorm(x, weight, bias, 1e-2),
        LayerNorm(x, weight, None, 1e-2, 1.0),
        LayerNorm(x, None, None, 1e-2),
        LayerNorm(x, weight, bias.float(), 1e-2),
    ):
        op = "rms_norm" if isinstance(args, RMSNorm) else "layer_norm"
        fn = native(isa_library, op)
        before = x.clone()
        y = fn(args)
        assert_close(y, REFERENCE[op](wide(args)))
        assert torch.equal(x, before)
        alone = [fn(msgspec.structs.replace(args, x=x[i : i + 1])) for i in range(7)]
        assert torch.equal(torch.cat(alone), y)


def test_norm_takes_heads_of_a_product_as_they_lie(rows: Make, isa_library: NativeLibrary) -> None:
    heads = rows(5, 33 + 4 * 19)[:, 33:].unflatten(-1, (4, 19))
    args = RMSNorm(heads, rows(1, 19)[0], 1e-5)
    y = native(isa_library, "rms_norm")(args)
    assert y.is_contiguous()
    assert_close(y, REFERENCE["rms_norm"](wide(args)))
    four_axes = heads.unflatten(0, (5, 1))
    assert torch.equal(native(isa_library, "rms_norm")(RMSNorm(four_axes, args.weight, 1e-5)), y.unsqueeze(1))
    assert torch.equal(native(isa_library, "rms_norm")(RMSNorm(heads[0, 0], args.weight, 1e-5)), y[0, 0])


@pytest.mark.parametrize("size", SIZES)
def test_fused_add_rms_norm(size: int, rows: Make, isa_library: NativeLibrary) -> None:
    fn = native(isa_library, "fused_add_rms_norm")
    x, residual, weight = rows(7, size), rows(7, size), rows(1, size)[0]
    total = x + residual
    alone = [fn(FusedAddRMSNorm(x[i : i + 1].clone(), residual[i : i + 1].clone(), weight, 1e-5)) for i in range(7)]
    y, r = fn(FusedAddRMSNorm(x, residual, weight, 1e-5))
    assert torch.equal(r, total)
    assert_close(y, REFERENCE["rms_norm"](RMSNorm(total.double(), weight.double(), 1e-5)))
    assert torch.equal(torch.cat([one[0] for one in alone]), y)
    assert torch.equal(torch.cat([one[1] for one in alone]), r)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_size", [2, 20, 33, 64, 99])
def test_rotary_embedding(head_size: int, interleaved: bool, rows: Make, isa_library: NativeLibrary) -> None:
    fn = native(isa_library, "rotary_embedding")
    positions = torch.tensor([0, 5, 5, 39, 1, 17, 2])
    for rotary_dim in {2, head_size // 2 // 2 * 2, head_size // 2 * 2}:
        if rotary_dim == 0:
            continue
        angles = torch.outer(torch.arange(40.0), torch.linspace(1, 0.01, rotary_dim // 2))
        cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        product = rows(7, 4 * head_size)
        query, key = product.split((3 * head_size, head_size), -1)
        args = RotaryEmbedding(
            query.unflatten(-1, (3, head_size)), key.unflatten(-1, (1, head_size)), positions, cos_sin, interleaved
        )
        expected = REFERENCE["rotary_embedding"](wide(args))
        alone = RotaryEmbedding(args.query[3:4].clone(), args.key[3:4].clone(), positions[3:4], cos_sin, interleaved)
        fn(alone)
        turned = fn(args)
        assert turned[0] is args.query
        for got, want in zip(turned, expected, strict=True):
            assert_close(got, want)
        assert torch.equal(alone.query[0], args.query[3])
        assert torch.equal(alone.key[0], args.key[3])


def test_a_position_past_the_table_is_an_error(library: NativeLibrary) -> None:
    query = torch.randn(1, 2, 8)
    for position in (10, -1):
        args = RotaryEmbedding(query, query.clone(), torch.tensor([position]), torch.zeros(10, 8))
        with pytest.raises(ValueError, match=r"rotary_embedding with positions below 10: .* out of range"):
            native(library, "rotary_embedding")(args)


@pytest.mark.parametrize("name", [*ACTIVATIONS, *GATED_ACTIVATIONS])
def test_activations(name: str, dtype: torch.dtype, rows: Make, isa_library: NativeLibrary) -> None:
    far = 40.0 if dtype == torch.float16 else 60000.0  # its square must fit
    for size in SIZES:
        x = rows(5, 2 * size)
        x[0, 0], x[1, 0] = far, -far
        gated = native(isa_library, "act_and_mul")
        args = ActAndMul(x, name)
        y = gated(args)
        assert_close(y, REFERENCE["act_and_mul"](wide(args)))
        assert torch.equal(torch.cat([gated(ActAndMul(x[i : i + 1], name)) for i in range(5)]), y)
        if name in ACTIVATIONS:
            plain = Activation(x, name)
            assert_close(native(isa_library, "activation")(plain), REFERENCE["activation"](wide(plain)))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_stays_nan(name: str, isa_library: NativeLibrary) -> None:
    y = native(isa_library, "activation")(Activation(torch.full((33,), torch.nan), name))
    assert y.isnan().all()


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "act_and_mul", "activation"])
def test_no_rows_are_no_work(op: str, library: NativeLibrary) -> None:
    x, weight = torch.empty(0, 8), torch.ones(8)
    args = {
        "rms_norm": RMSNorm(x, weight, 1e-5),
        "layer_norm": LayerNorm(x, weight, weight, 1e-5),
        "act_and_mul": ActAndMul(x, "silu"),
        "activation": Activation(x, "silu"),
    }[op]
    assert native(library, op)(args).shape[0] == 0


@pytest.mark.parametrize("op", ["rms_norm", "act_and_mul"])
def test_the_number_of_threads_changes_nothing(op: str, isa_library: NativeLibrary) -> None:
    x = torch.randn(300, 1000)
    args = RMSNorm(x, torch.randn(1000), 1e-5) if op == "rms_norm" else ActAndMul(x, "silu")
    fn = native(isa_library, op)
    isa_library.set_num_threads(1)
    one = fn(args)
    for num_threads in (2, 5, 2):
        isa_library.set_num_threads(num_threads)
        assert isa_library.num_threads == num_threads
        assert torch.equal(fn(args), one)


def test_what_is_offered_is_what_can_be_served(library: NativeLibrary) -> None:
    offered = {impl.op: impl for impl in native_ops(library)}
    assert set(offered) == set(OPS) - {"embedding"}
    for impl in offered.values():
        assert impl.tier == "native"
        assert impl.row_invariant
        dtype = torch.float32 if impl.op == "sample" else torch.bfloat16
        signature = OpSignature(impl.op, dtype, "cpu", (("activation", "silu"), ("rotary_dim", 64)))
        assert impl.supports(signature)
        assert not impl.supports(replace(signature, dtype=torch.float64))
        assert not impl.supports(replace(signature, device_type="meta"))
    odd = OpSignature("rotary_embedding", torch.float32, "cpu", (("rotary_dim", 3),))
    assert str(offered["rotary_embedding"].supports(odd)) == "no: rotary_dim 3 is odd"
    form = OpSignature("linear", torch.float32, "cpu", (("weight_format", "int2"),))
    assert "weight format int2, built for dense, int8, int4" in str(offered["linear"].supports(form))
    unknown = OpSignature("activation", torch.float32, "cpu", (("activation", "swish9"),))
    assert "activation swish9, built for silu, gelu" in str(offered["activation"].supports(unknown))
