"""AWQ checkpoints, as AutoAWQ writes them for its "gemm" kernels.

Layout, from K inputs to N outputs, in G groups of neighbouring inputs (https://github.com/casper-hansen/AutoAWQ,
awq/modules/linear/gemm.py, `from_linear`):

    NAME.qweight  int32 [K, N / 8]   along outputs: bits 4 j .. 4 j + 3 of word w hold output 8 w + ORDER[j]
    NAME.qzeros   int32 [G, N / 8]   in the same way
    NAME.scales   float [G, N]

A weight is (code - zero) * scale.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from octavo.errors import ModelError
from octavo.model.checkpoint import FLOAT_TYPES, SafetensorsCheckpoint
from octavo.model.formats.base import Packed, Quantization, WeightFormat
from octavo.model.formats.packing import dequantize, group_of_inputs, unpack

__all__ = ["Awq"]

BITS = 4
PER_WORD = 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Awq(WeightFormat):
    """AWQ.

    Attributes:
        group_size: inputs that share a zero and a scale; None for all.

    """

    group_size: int | None

    @classmethod
    def of(cls, config: Quantization) -> "Awq":
        """The format that a quantization_config describes."""
        config.choice("bits", (BITS,), BITS)
        config.choice("zero_point", (True,), True)
        for key in ("version", "format", "checkpoint_format"):  # of different years
            config.choice(key, ("gemm", "GEMM"), "gemm")
        return cls(config.group_size(default=128))

    def __str__(self) -> str:
        return f"AWQ, {BITS} bits, groups of {self.group_size or 'all inputs'}"

    def find(self, stored: SafetensorsCheckpoint) -> Iterator[Packed]:
        """A weight for each qweight."""
        for name in [n for n in stored.shapes if n.endswith(".qweight")]:
            module = name.removesuffix(".qweight")
            self.part(stored, name, name, ("I32",))
            if len(stored.shapes[name]) != 2 or not stored.shapes[name][0]:
                raise ModelError(f"{stored.where}: {name} {list(stored.shapes[name])} is no packed matrix ({self})")
            num_inputs, num_words = stored.shapes[name]
            num_groups = -(-num_inputs // (self.group_size or num_inputs))
            num_outputs = num_words * PER_WORD
            parts = {
                "codes": name,
                "zeros": self.part(stored, f"{module}.qzeros", name, ("I32",), [(num_groups, num_words)]),
                "scales": self.part(stored, f"{module}.scales", name, FLOAT_TYPES, [(num_groups, num_outputs)]),
            }
            yield Packed(f"{module}.weight", (num_outputs, num_inputs), parts)

    def read(self, packed: Packed, stored: SafetensorsCheckpoint) -> torch.Tensor:
        """Float32."""
        words, zeros, scales = (stored.read(packed.parts[role]) for role in ("codes", "zeros", "scales"))
        group = group_of_inputs(packed.shape[1], self.group_size, None, stored)

        def codes(inputs: slice) -> torch.Tensor:
            return unpack(words[inputs].t(), BITS, ORDER).t()

        return dequantize(codes, unpack(zeros.t(), BITS, ORDER).t(), scales, group)
