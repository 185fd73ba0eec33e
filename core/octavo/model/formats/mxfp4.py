"""MXFP4 experts, as gpt_oss has them.

Layout, E experts from K inputs to N outputs (https://github.com/openai/gpt-oss, gpt_oss/torch/weights.py; OCP
Microscaling Formats 1.0):

    NAME_blocks   uint8 [E, N, K / 32, 16]   byte i holds inputs 2 i (low four bits) and 2 i + 1; a code is sign,
                                             two bits of exponent, one of mantissa
    NAME_scales   uint8 [E, N, K / 32]       E8M0: the power of two, plus 127; 255 is NaN
"""

from collections.abc import Iterator
from math import prod

import torch

from octavo.errors import ModelError
from octavo.model.checkpoint import SafetensorsCheckpoint
from octavo.model.formats.base import Packed, Quantization, WeightFormat
from octavo.model.formats.packing import CHUNK_ELEMENTS

__all__ = ["Mxfp4"]

HALF_BLOCK = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4(WeightFormat):
    """MXFP4."""

    @classmethod
    def of(cls, config: Quantization) -> "Mxfp4":
        """The only variant."""
        return cls()

    def __str__(self) -> str:
        return "MXFP4"

    def find(self, stored: SafetensorsCheckpoint) -> Iterator[Packed]:
        """A tensor for each one of blocks."""
        for blocks in [n for n in stored.shapes if n.endswith("_blocks")]:
            name = blocks.removesuffix("_blocks")
            self.part(stored, blocks, blocks, ("U8",))
            shape = stored.shapes[blocks]
            if len(shape) < 3 or shape[-1] != HALF_BLOCK:
                raise ModelError(f"{stored.where}: {blocks} {list(shape)} does not hold blocks of {HALF_BLOCK} bytes")
            scales = self.part(stored, f"{name}_scales", blocks, ("U8",), [shape[:-1]])
            dense = (*shape[:-2], shape[-2] * HALF_BLOCK * 2)
            yield Packed(name, dense, {"blocks": blocks, "scales": scales})

    def read(self, packed: Packed, stored: SafetensorsCheckpoint) -> torch.Tensor:
        """Bfloat16, which holds every value exactly."""
        codes = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.bfloat16)
        pairs = torch.stack((codes.repeat(16), codes.repeat_interleave(16)), 1)  # of each byte
        blocks = stored.read(packed.parts["blocks"]).view(-1, HALF_BLOCK)
        scales = stored.read(packed.parts["scales"]).view(torch.float8_e8m0fnu).view(-1, 1)
        out = torch.empty(prod(packed.shape) // (2 * HALF_BLOCK), 2 * HALF_BLOCK, dtype=torch.bfloat16)
        step = CHUNK_ELEMENTS // (2 * HALF_BLOCK)
        for start in range(0, len(out), step):
            rows = slice(start, start + step)
            values = pairs.index_select(0, blocks[rows].reshape(-1).int()).view(-1, 2 * HALF_BLOCK)
            torch.mul(values, scales[rows].to(torch.bfloat16), out=out[rows])
        return out.view(packed.shape)
