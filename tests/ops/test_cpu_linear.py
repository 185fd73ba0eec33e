"""Packed matrices: products in each instruction set against float64, rows alone and in company, weights taken back."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from octavo.contract import QuantizedWeight, Weight
from octavo_cpu.matrix import PackedMatrix, pack
from octavo_cpu.native import DTYPES, NativeLibrary

# Outputs and inputs: whole panels and groups, and neither.
SHAPES = [(64, 64), (33, 100), (1, 1), (96, 31), (130, 3200), (70, 6176)]
ROWS = (1, 2, 3, 8, 17, 33, 121, 512)
FORMATS = ("dense", "int8", "int4", "int4_min")
GROUP = 32

Dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def multiply(library: NativeLibrary, matrix: PackedMatrix, x: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(x), matrix.struct.rows), torch.nan, dtype=x.dtype)
    address = ctypes.addressof(matrix.struct)
    status = library.linear(out.data_ptr(), address, x.data_ptr(), len(x), x.stride(0), DTYPES[x.dtype])
    library.check(status, "linear")
    return out


def quantized(num_rows: int, num_columns: int, bits: int, mins: bool, make: torch.Generator) -> QuantizedWeight:
    """Random codes, of which those past the last column mean zero."""
    num_groups = -(-num_columns // GROUP)
    codes = torch.randint(0, 1 << bits, (num_rows, num_groups * GROUP), dtype=torch.uint8, generator=make)
    codes[:, num_columns:] = 0 if mins else 1 << (bits - 1)
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    scales = torch.randn(num_rows, num_groups, generator=make).half() / (1 << bits)
    offsets = torch.randn(num_rows, num_groups, generator=make).half() if mins else None
    return QuantizedWeight((num_rows, num_columns), bits, codes.contiguous(), scales, offsets)


def weight_of(form: str, shape: tuple[int, int], dtype: torch.dtype, make: torch.Generator) -> Weight:
    if form == "dense":
        return torch.randn(shape, generator=make).to(dtype)
    return quantized(*shape, 8 if form == "int8" else 4, form == "int4_min", make)


def as_codes(x: torch.Tensor) -> torch.Tensor:
    """What a product with codes sees of its inputs: a group of 32 rounded to 255 steps, in float64."""
    num_columns = x.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, -num_columns % GROUP)).view(len(x), -1, GROUP)
    largest = padded.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 1e-30, torch.full_like(largest, 127.0) / largest, 0.0)
    codes = (padded * inverse).round()
    return (codes.double() * (largest * (1 / 127)).double()).view(len(x), -1)[:, :num_columns]


@pytest.fixture
def make() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@Dtypes
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_right_and_a_row_is_the_same_alone(
    shape: tuple[int, int], form: str, dtype: torch.dtype, make: torch.Generator, isa_library: NativeLibrary
) -> None:
    weight = weight_of(form, shape, dtype, make)
    bias = torch.randn(shape[0], generator=make)
    matrix = pack(isa_library, weight, dtype, bias=bias)
    x = torch.randn(max(ROWS), shape[1] + 5, generator=make).to(dtype)[:, : shape[1]]
    x[3] = 0.0
    y = multiply(isa_library, matrix, x)

    seen = x.double() if form == "dense" else as_codes(x)
    exact = weight.double() if isinstance(weight, torch.Tensor) else weight.dequantize().double()
    expected = seen @ exact.T + bias.double()
    sizes = seen.abs() @ exact.abs().T + bias.abs().double()  # what rounding errors follow
    share = 2e-6 if dtype == torch.float32 or form != "dense" else 1e-5
    tolerance = sizes * share + expected.abs() * (2**-8 if dtype == torch.bfloat16 else 0.0)
    assert ((y.double() - expected).abs() <= tolerance).all()

    for num_rows in ROWS:
        for start in (0, 5):
            part = x[start : start + num_rows]
            assert torch.equal(multiply(isa_library, matrix, part), y[start : start + num_rows])
    isa_library.set_num_threads(1)
    assert torch.equal(multiply(isa_library, matrix, x), y)


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_not_a_number_stays_in_its_row(form: str, make: torch.Generator, isa_library: NativeLibrary) -> None:
    matrix = pack(isa_library, weight_of(form, (70, 100), torch.float32, make), torch.float32)
    x = torch.randn(9, 100, generator=make)
    clean = multiply(isa_library, matrix, x)
    x[4, 50] = torch.nan
    y = multiply(isa_library, matrix, x)
    assert y[4].isnan().all()
    assert torch.equal(y[:4], clean[:4])
    assert torch.equal(y[5:], clean[5:])


@Dtypes
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_taken_back_as_they_were_packed(
    shape: tuple[int, int], form: str, dtype: torch.dtype, make: torch.Generator, isa_library: NativeLibrary
) -> None:
    weight = weight_of(form, shape, dtype, make)
    matrix = pack(isa_library, weight, dtype)
    ids = torch.randint(0, shape[0], (40,), generator=make)
    out = torch.full((40, shape[1]), torch.nan)
    address = ctypes.addressof(matrix.struct)
    isa_library.check(isa_library.unpack_rows(out.data_ptr(), address, ids.data_ptr(), len(ids)), "unpack")
    exact = weight.float() if isinstance(weight, torch.Tensor) else weight.dequantize()
    if form == "int4_min":  # one rounding or two
        torch.testing.assert_close(out, exact[ids], rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(out, exact[ids])


def test_dense_weights_of_any_float_type_are_rounded_to_the_nearest(
    make: torch.Generator, library: NativeLibrary
) -> None:
    values = torch.cat((torch.randn(62, generator=make) * 10, torch.tensor([0.0, torch.inf])))
    for source in (torch.float32, torch.float16, torch.bfloat16):
        weight = values.to(source).view(1, -1)
        for dtype in (torch.float32, torch.bfloat16):
            matrix = pack(library, weight, dtype)
            out, ids = torch.empty(1, 64), torch.zeros(1, dtype=torch.int64)
            library.unpack_rows(out.data_ptr(), ctypes.addressof(matrix.struct), ids.data_ptr(), 1)
            assert torch.equal(out, weight.to(dtype).float())


@pytest.mark.parametrize(
    "call",
    [
        lambda lib, at: lib.unpack_rows(0, at, torch.tensor([70]).data_ptr(), 1),
        lambda lib, at: lib.linear(0, at, 0, -1, 0, 0),
        lambda lib, at: lib.linear(0, at, 0, 1, 0, 2),
        lambda lib, at: lib.pack_dense(0, at, 0, 3),
        lambda lib, at: lib.pack_groups(0, at, 0, 0, 0),
    ],
)
def test_what_cannot_be_is_a_status(call: Callable[[NativeLibrary, int], int], library: NativeLibrary) -> None:
    matrix = pack(library, torch.zeros(70, 100), torch.float32)
    assert call(library, ctypes.addressof(matrix.struct)) != 0
