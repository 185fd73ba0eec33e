"""Packed matrices: weights in the order in which the native products read them."""

import ctypes
from dataclasses import dataclass

import torch

from octavo.contract import QuantizedWeight, Weight
from octavo_cpu.memory import zeros
from octavo_cpu.native import DTYPES, NativeLibrary
from octavo_cpu.structures import MatrixStruct

__all__ = ["PRODUCTS", "WEIGHT_FORMATS", "PackedMatrix", "pack", "packed_bytes"]

WEIGHT_FORMATS = ("int8", "int4")  # beside dense
_INT8, _INT4, _INT4_MIN = 2, 3, 4
_FORMATS = {torch.float32: 0, torch.bfloat16: 1}
PRODUCTS = {**_FORMATS, torch.int8: _INT8}  # dtype of the operands of products, to the format's number


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [N, K] for `octavo_linear` and decoders.

    Attributes:
        struct: what the library reads; it points into `memory` and `bias`.
        memory: the packed weights.
        bias: [N] float32, or None.

    """

    struct: MatrixStruct
    memory: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Of the packed weights."""
        return self.memory.nbytes

    @property
    def input_dtype(self) -> torch.dtype:
        """Of the operands of its products."""
        return next((dtype for dtype, known in _FORMATS.items() if known == self.struct.format), torch.int8)


def packed_bytes(library: NativeLibrary, weight: Weight, dtype: torch.dtype, *, gated: bool = False) -> int:
    """Bytes that `pack` needs for a matrix, a multiple of 64."""
    struct = _struct(weight, dtype, gated)
    return -(-library.packed_bytes(ctypes.addressof(struct)) // 64) * 64


def pack(
    library: NativeLibrary,
    weight: Weight,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    memory: torch.Tensor | None = None,
) -> PackedMatrix:
    """Pack a matrix [N, K].

    Args:
        library: that will multiply it.
        weight: quantised, kept as it is; or dense, of any float dtype.
        dtype: float32 or bfloat16: what a dense one is stored in.
        bias: [N], or None.
        gated: its rows are those of a gate and as many of what the gate multiplies.
        memory: uint8 [packed_bytes], aligned to 64 bytes, for the result; None: of its own.

    """
    bias = None if bias is None else bias.float().contiguous()
    struct = _struct(weight, dtype, gated)
    if bias is not None:
        struct.bias = bias.data_ptr()
    if memory is None:
        memory = zeros(packed_bytes(library, weight, dtype, gated=gated), torch.uint8)
    address = ctypes.addressof(struct)
    if isinstance(weight, QuantizedWeight):
        mins = None if weight.mins is None else weight.mins.data_ptr()
        tensors = weight.codes.data_ptr(), weight.scales.data_ptr(), mins
        status = library.pack_groups(memory.data_ptr(), address, *tensors)
    else:
        weight = weight.contiguous()
        status = library.pack_dense(memory.data_ptr(), address, weight.data_ptr(), DTYPES[weight.dtype])
    library.check(status, f"packing a matrix {list(weight.shape)}")
    struct.cols = weight.shape[1]
    struct.data = memory.data_ptr()
    return PackedMatrix(struct, memory, bias)


def _struct(weight: Weight, dtype: torch.dtype, gated: bool) -> MatrixStruct:
    """Of a matrix that is to be packed; codes have whole groups of columns."""
    num_rows, num_columns = weight.shape
    if not isinstance(weight, QuantizedWeight):
        return MatrixStruct(rows=num_rows, cols=num_columns, format=_FORMATS[dtype], gated=int(gated))
    format_id = _INT8 if weight.bits == 8 else _INT4 if weight.mins is None else _INT4_MIN
    return MatrixStruct(rows=num_rows, cols=weight.scales.shape[1] * 32, format=format_id, gated=int(gated))
