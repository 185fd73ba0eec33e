"""Matrices of small integers in groups that share a scale: the weight formats beside dense.

Letters as in `ops`: N output features (rows), K input features. Kp is K rounded up to whole groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

__all__ = ["GROUP_SIZE", "WEIGHT_FORMATS", "QuantizedWeight", "Weight"]

GROUP_SIZE = 32  # input features that share a scale
WEIGHT_FORMATS: dict[str, int] = {"int8": 8, "int4": 4}  # name, as platforms and users say it, to bits of a code
CHUNK_ELEMENTS = 1 << 18  # dequantised at a time, so that what lies between stays in the cache


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix [N, K] of integers of 8 or 4 bits; each group of 32 neighbours in a row has one scale.

    With n a row, k a column, g = k // 32:

        w[n, k] = scales[n, g] * (code[n, k] - offset)        offset 128 or 8, where `mins` is None
        w[n, k] = scales[n, g] * code[n, k] + mins[n, g]      4 bits only

    computed in float32, which is exact but for the last addition. These are the blocks of GGUF's Q8_0, Q4_0 and Q4_1
    as stored, but for the order of nibbles; 8 bits are stored plus 128.

    All tensors are contiguous and on one device. Implementations that pack may drop them afterwards. Activations are
    float: how a kernel rounds them inside (to int8 in the same groups, with scales made as it runs) is its own
    affair, within the error that such rounding has; see `octavo.testing.quantized`.

    Attributes:
        shape: (N, K).
        bits: of a code, 8 or 4.
        codes: uint8 [N, Kp] of 8 bits; [N, Kp / 2] of 4, where the low nibble of byte j is code 2j, the high 2j + 1.
            Columns from K on have the code of zero: the offset, or 0 where there are mins (their activations are to
            be zero, as a min belongs to the whole group).
        scales: float16 [N, Kp / 32]; may be negative, as Q4_0's are.
        mins: float16 [N, Kp / 32], or None.

    Raises:
        TypeError, ValueError: a field is not what is said here.

    """

    shape: tuple[int, int]
    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    mins: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.bits not in WEIGHT_FORMATS.values():
            raise ValueError(f"codes of {self.bits} bits; 8 or 4 are right")
        if self.mins is not None and self.bits != 4:
            raise ValueError("mins beside codes of 8 bits; they go with 4 bits only")
        num_rows, num_groups = self.shape[0], -(-self.shape[1] // GROUP_SIZE)
        by_group, num_bytes = (num_rows, num_groups), num_groups * GROUP_SIZE * self.bits // 8
        _check("codes", self.codes, (num_rows, num_bytes), torch.uint8)
        _check("scales", self.scales, by_group, torch.float16)
        if self.mins is not None:
            _check("mins", self.mins, by_group, torch.float16)

    @property
    def format(self) -> str:
        """Its name among `WEIGHT_FORMATS`."""
        return f"int{self.bits}"

    @property
    def offset(self) -> int:
        """The code of zero, where there are no mins."""
        return 1 << (self.bits - 1)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.codes.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it consists of."""
        return (self.codes, self.scales) if self.mins is None else (self.codes, self.scales, self.mins)

    @property
    def num_bytes(self) -> int:
        """That the tensors take."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to(self, device: torch.device) -> "QuantizedWeight":
        """The same on a device; itself where it is there."""
        return self if device == self.device else self._with(*(tensor.to(device) for tensor in self.tensors))

    def __getitem__(self, rows: slice | torch.Tensor) -> "QuantizedWeight":
        """Some of the rows: a slice, or indices of any integer dtype [n]; views where a slice has no step."""
        return self._with(*(tensor[rows].contiguous() for tensor in self.tensors))

    def unpacked_codes(self) -> torch.Tensor:
        """uint8 [N, Kp], one code a byte."""
        if self.bits == 8:
            return self.codes
        return torch.stack((self.codes & 0x0F, self.codes >> 4), -1).flatten(-2)

    def dequantize(self) -> torch.Tensor:
        """Float32 [N, K]."""
        num_rows, num_columns = self.shape
        out = torch.empty(num_rows, num_columns, device=self.device)
        step = max(1, CHUNK_ELEMENTS // max(num_columns, 1))
        for start in range(0, num_rows, step):
            part = self[start : start + step]
            groups = part.unpacked_codes().view(len(part.codes), -1, GROUP_SIZE).float()
            if part.mins is None:
                values = (groups - part.offset) * part.scales.float()[..., None]
            else:
                values = groups * part.scales.float()[..., None] + part.mins.float()[..., None]
            out[start : start + step] = values.flatten(-2)[:, :num_columns]
        return out

    @staticmethod
    def concatenate(parts: Sequence["QuantizedWeight"]) -> "QuantizedWeight":
        """Rows of several matrices of equal K below each other, each value as it was.

        Where the parts differ they take a form that has room for all: mins beside none become mins, 4 bits beside 8
        become 8.

        Raises:
            ValueError: no form has room for all (mins beside 8 bits, or a min beyond float16), or K differs.

        """
        if len({part.shape[1] for part in parts}) != 1:
            raise ValueError(f"matrices of shapes {[part.shape for part in parts]} have no K in common")
        bits = max(part.bits for part in parts)
        if any(part.mins is not None for part in parts):
            parts = [part._with_mins() for part in parts]
        parts = [part._widened() if part.bits < bits else part for part in parts]
        shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        columns = zip(*(part.tensors for part in parts), strict=True)
        return QuantizedWeight(shape, bits, *(torch.cat(column) for column in columns))

    def _with(self, *tensors: torch.Tensor) -> "QuantizedWeight":
        return QuantizedWeight((len(tensors[0]), self.shape[1]), self.bits, *tensors)

    def _with_mins(self) -> "QuantizedWeight":
        if self.mins is not None:
            return self
        if self.bits != 4:
            raise ValueError("a matrix of 8 bits has no room for mins beside it")
        mins = self.scales * -float(self.offset)  # exact, unless it overflows
        if bool((mins.isinf() & ~self.scales.isinf()).any()):
            raise ValueError("a scale is too large for its min to be a float16")
        return QuantizedWeight(self.shape, 4, self.codes, self.scales, mins)

    def _widened(self) -> "QuantizedWeight":
        if self.mins is not None:
            raise ValueError("a matrix with mins has no form of 8 bits with the same values")
        return QuantizedWeight(self.shape, 8, self.unpacked_codes() + (128 - self.offset), self.scales)

    def __repr__(self) -> str:
        kind = "" if self.mins is None else ", mins"
        return f"QuantizedWeight({self.format}{kind}, {list(self.shape)})"


Weight: TypeAlias = torch.Tensor | QuantizedWeight


def _check(name: str, tensor: Any, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
        raise TypeError(f"{name} must be a tensor of {dtype}, got {getattr(tensor, 'dtype', type(tensor).__name__)}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
