"""Weights of 8 bits that are used as they are, times a scale: of a tensor, of each output, or of each block.

Layout, from K inputs to N outputs; experts may stand before, all in one tensor:

    NAME             float8 or int8 [N, K]
    NAME_scale_inv   or NAME_scale, a float: one number; [N, 1] or [N]; or, for blocks of R outputs by C inputs (the
                     last ones may be smaller), [ceil(N / R), ceil(K / C)]

A weight is value * scale under both names: the scale is the inverse of what the writer multiplied with. Written by
DeepSeek V3 (https://github.com/deepseek-ai/DeepSeek-V3, inference/fp8_cast_bf16.py), by transformers ("fp8",
"fbgemm_fp8"), AutoFP8 ("fp8") and compressed-tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from octavo.errors import ModelError
from octavo.model.checkpoint import FLOAT_TYPES, SafetensorsCheckpoint
from octavo.model.formats.base import Packed, Quantization, WeightFormat
from octavo.model.formats.packing import CHUNK_ELEMENTS

__all__ = ["FLOAT8", "Scaled"]

FLOAT8 = ("F8_E4M3", "F8_E5M2")
SCALES = (*FLOAT_TYPES, "F8_E8M0")
SUFFIXES = ("_scale_inv", "_scale")


@dataclass(frozen=True)
class Scaled(WeightFormat):
    """Values times scales.

    Attributes:
        name: of the format.
        types: of the values.
        block: outputs and inputs that share a scale; None where it is all of a tensor, or all inputs of an output.

    """

    name: str
    types: tuple[str, ...] = FLOAT8
    block: tuple[int, int] | None = None
    unused = (
        *("input_scale", "output_scale", "activation_scale", "q_scale", "k_scale", "v_scale"),  # of activations, cache
        *("input_scale_ub", "input_zero_point", "output_zero_point"),
    )

    @classmethod
    def of(cls, config: Quantization) -> "Scaled":
        """The format that a quantization_config of "fp8" or "fbgemm_fp8" describes."""
        config.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        config.choice("expert_dtype", ("fp8",), "fp8")
        block = config.integers("weight_block_size", 2)
        return cls("fp8", FLOAT8, (block[0], block[1]) if block else None)

    def __str__(self) -> str:
        return f"{self.name}, {'x'.join(map(str, self.block))} blocks" if self.block else self.name

    def find(self, stored: SafetensorsCheckpoint) -> Iterator[Packed]:
        """A weight for each tensor of 8-bit values."""
        for name in [n for n, kind in stored.types.items() if kind in self.types]:
            shape = stored.shapes[name]
            if len(shape) < 2:
                raise ModelError(f"{stored.where}: {name} {list(shape)} in {stored.types[name]} is no matrix")
            scale = next((name + suffix for suffix in SUFFIXES if name + suffix in stored.shapes), name + SUFFIXES[0])
            self.part(stored, scale, name, SCALES, self._grids(shape))
            yield Packed(name, shape, {"values": name, "scales": scale})

    def read(self, packed: Packed, stored: SafetensorsCheckpoint) -> torch.Tensor:
        """Float32."""
        values, scales = stored.read(packed.parts["values"]), stored.read(packed.parts["scales"])
        *experts, num_outputs, num_inputs = packed.shape
        grid = self._grids(packed.shape)[tuple(scales.shape)]
        scales = scales.float().view(grid).expand(*experts, *grid[-2:]).reshape(-1, *grid[-2:])
        num_rows, num_columns = self.block or (-(-num_outputs // grid[-2]), num_inputs)
        out = torch.empty(prod(experts), num_outputs, num_inputs)
        of_byte = torch.arange(256, dtype=torch.uint8).view(values.dtype).float()  # several times as fast as to convert
        values = values.view(torch.uint8).view(out.shape)
        step = max(1, CHUNK_ELEMENTS // num_inputs)
        for target, source, scale in zip(out, values, scales, strict=True):
            for start in range(0, num_outputs, step):
                rows = slice(start, min(start + step, num_outputs))
                factors = scale[torch.arange(rows.start, rows.stop) // num_rows]
                if grid[-1] > 1:
                    factors = factors.repeat_interleave(num_columns, 1)[:, :num_inputs]
                chunk = of_byte.index_select(0, source[rows].reshape(-1).int()).view(-1, num_inputs)
                torch.mul(chunk, factors, out=target[rows])
        return out.view(packed.shape)

    def _grids(self, shape: tuple[int, ...]) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Shapes that scales may have -> the same by experts, blocks of outputs and blocks of inputs."""
        *experts, num_outputs, num_inputs = shape
        if self.block:
            grid = (*experts, -(-num_outputs // self.block[0]), -(-num_inputs // self.block[1]))
            return {grid: grid}
        by_output, by_expert, one = (*experts, num_outputs, 1), (*experts, 1, 1), (1,) * len(shape)
        return {(): one, (1,): one, (*experts, num_outputs): by_output, by_output: by_output, by_expert: by_expert}
