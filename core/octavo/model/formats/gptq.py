"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

Layout, from K inputs to N outputs, in G groups of inputs (https://github.com/AutoGPTQ/AutoGPTQ,
auto_gptq/nn_modules/qlinear, `QuantLinear.pack`):

    NAME.qweight  int32 [K * bits / 32, N]   along inputs: word r of a column holds inputs 32 / bits * r and on, the
                                             first in the lowest bits; at 3 bits 32 inputs run through three words
    NAME.qzeros   int32 [G, N * bits / 32]   along outputs, in the same way
    NAME.scales   float [G, N]
    NAME.g_idx    int32 [K]                  the group of each input: k // group_size, or anything in act-order

A weight is (code - zero) * scale. Version 1 ("gptq") stores each zero less one, version 2 ("gptq_v2") stores it as it
is. What is 0 less one differs: 2 ** bits - 1, or, where GPTQModel subtracts ones from whole words, that and one less in
the next value of the word (https://github.com/ModelCloud/GPTQModel, gptqmodel/utils/model.py,
`convert_gptq_v2_to_v1_format_module`). Whether quantisation was symmetric shows in the zeros alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from octavo.errors import ModelError
from octavo.model.checkpoint import FLOAT_TYPES, SafetensorsCheckpoint
from octavo.model.formats.base import Packed, Quantization, WeightFormat
from octavo.model.formats.packing import dequantize, group_of_inputs, num_unpacked, unpack

__all__ = ["Gptq"]


@dataclass(frozen=True)
class Gptq(WeightFormat):
    """GPTQ.

    Attributes:
        bits: of a code.
        group_size: inputs that share a zero and a scale; None for all.
        act_order: groups are not of neighbours, so each layer must have its g_idx.
        version: of the layout, 1 or 2.
        borrows: version 1 was made by subtracting from whole words.

    """

    bits: int
    group_size: int | None
    act_order: bool
    version: int
    borrows: bool

    @classmethod
    def of(cls, config: Quantization) -> "Gptq":
        """The format that a quantization_config describes."""
        bits = config.choice("bits", (2, 3, 4, 8), 4)
        layouts = ("gptq", "gptq_v2")
        layout = config.choice("checkpoint_format", layouts, config.choice("format", layouts, layouts[0]))
        config.choice("is_marlin_format", (False,), False)
        config.choice("pack_dtype", ("int32",), "int32")
        changed = [rule for rule in config.get("dynamic") or () if not str(rule).startswith("-:")]
        if changed:
            raise config.unsupported(f"settings of their own for layers {changed[0]!r}", "the same for all layers")
        act_order = config.choice("desc_act", (True, False), False)
        meta = config.get("meta")
        writer = str(meta.get("quantizer")) if isinstance(meta, dict) else ""
        borrows = "gptqmodel" in writer and bits != 3  # its values of three bits never run into each other
        return cls(bits, config.group_size(default=128), act_order, 1 + layouts.index(layout), borrows)

    def __str__(self) -> str:
        return f"GPTQ, {self.bits} bits, groups of {self.group_size or 'all inputs'}"

    def find(self, stored: SafetensorsCheckpoint) -> Iterator[Packed]:
        """A weight for each qweight."""
        for name in [n for n in stored.shapes if n.endswith(".qweight")]:
            module = name.removesuffix(".qweight")
            self.part(stored, name, name, ("I32",))
            shape = stored.shapes[name]
            num_inputs = num_unpacked(shape[0], self.bits) if len(shape) == 2 else None
            if not num_inputs:
                raise ModelError(f"{stored.where}: {name} {list(shape)} is no matrix packed along inputs ({self})")
            num_outputs = shape[1]
            num_groups = -(-num_inputs // (self.group_size or num_inputs))
            zeros_shape = (num_groups, num_outputs * self.bits // 32)
            if num_unpacked(zeros_shape[1], self.bits) != num_outputs:
                raise ModelError(f"{stored.where}: the zeros of {num_outputs} outputs fill no words ({self})")
            parts = {
                "codes": name,
                "zeros": self.part(stored, f"{module}.qzeros", name, ("I32",), [zeros_shape]),
                "scales": self.part(stored, f"{module}.scales", name, FLOAT_TYPES, [(num_groups, num_outputs)]),
            }
            if self.act_order or f"{module}.g_idx" in stored.shapes:
                parts["group"] = self.part(stored, f"{module}.g_idx", name, ("I32", "I64"), [(num_inputs,)])
            yield Packed(f"{module}.weight", (num_outputs, num_inputs), parts)

    def read(self, packed: Packed, stored: SafetensorsCheckpoint) -> torch.Tensor:
        """Float32."""
        words, scales = stored.read(packed.parts["codes"]), stored.read(packed.parts["scales"])
        zeros = self._zeros(stored.read(packed.parts["zeros"]))
        group = group_of_inputs(packed.shape[1], self.group_size, packed.parts.get("group"), stored)

        def codes(inputs: slice) -> torch.Tensor:
            return unpack(words[inputs.start * self.bits // 32 : inputs.stop * self.bits // 32], self.bits)

        return dequantize(codes, zeros, scales, group)

    def _zeros(self, words: torch.Tensor) -> torch.Tensor:
        """Zeros uint8 [G, N] from their words [G, N * bits / 32]."""
        add = 1 if self.version == 1 else 0
        if self.borrows:
            words, add = words + add * sum(1 << j for j in range(0, 32, self.bits)), 0
        return (unpack(words.t(), self.bits).t() + add) & ((1 << self.bits) - 1)
