"""Checkpoints of compressed-tensors: 8-bit weights with scales, and integers packed in words.

Layout of packed integers, from K inputs to N outputs, in G groups of inputs
(https://github.com/vllm-project/compressed-tensors, compressors/quantized_compressors/pack_quantized.py):

    NAME.weight_packed      int32 [N, ceil(K * bits / 32)]   along inputs, the first in the lowest bits; a code is
                                                             the signed value plus 2 ** (bits - 1)
    NAME.weight_scale       float [N, G]
    NAME.weight_zero_point  int32 [ceil(N * bits / 32), G]   along outputs, in the same way; absent where symmetric
    NAME.weight_shape       int64 [2]                        N, K
    NAME.weight_g_idx       int32 [K]                        the group of each input; absent where of neighbours
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from octavo.errors import ModelError
from octavo.model.checkpoint import FLOAT_TYPES, SafetensorsCheckpoint
from octavo.model.formats.base import Packed, Quantization, WeightFormat
from octavo.model.formats.packing import dequantize, group_of_inputs, unpack
from octavo.model.formats.scaled import FLOAT8, Scaled

__all__ = ["PackedIntegers", "compressed_tensors"]

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")


def compressed_tensors(config: Quantization) -> WeightFormat:
    """The format that a quantization_config of compressed-tensors describes.

    Raises:
        UnsupportedError: it is none of those that are read.
        ModelError: it describes none.

    """
    form = config.choice("format", FORMATS, FORMATS[0])
    for key in ("sparsity_config", "transform_config"):
        extra = config.get(key)
        if isinstance(extra, dict) and extra and extra.get("format") != "dense":
            raise config.unsupported(f"a {key}", f"formats {', '.join(FORMATS)} alone")
    weights = _weights(config)
    kind = weights.choice("type", ("float", "int"), "int")
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"), "tensor")
    if form == "pack-quantized":
        bits = weights.choice("num_bits", (4, 8), 4)
        return PackedIntegers(bits, weights.group_size() if strategy == "group" else None)
    bits = weights.choice("num_bits", (8,), 8)
    if kind == "int":
        weights.choice("symmetric", (True,), True)
    block = None
    if strategy == "block":
        block = weights.integers("block_structure", 2)
    elif strategy == "group":
        block = (1, *(weights.integers("group_size", 1) or ()))
    if strategy in ("block", "group") and len(block or ()) != 2:
        raise ModelError(f"{config.where}: weights quantised by {strategy} without its size")
    types = FLOAT8 if kind == "float" else ("I8",)
    return Scaled(f"compressed-tensors, {form}", types, (block[0], block[1]) if block else None)


def _weights(config: Quantization) -> Quantization:
    """How weights are stored, which must be the same in all groups of layers."""
    groups = config.get("config_groups")
    found: list[Any] = (
        [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    )
    if not found or not all(isinstance(weights, dict) for weights in found):
        raise ModelError(f"{config.where}: the quantization_config needs config_groups that say how weights are stored")
    if any(weights != found[0] for weights in found):
        raise config.unsupported(f"{len(found)} ways to store weights", "one for all layers")
    return Quantization({"quant_method": config.method, **found[0]}, config.where)


@dataclass(frozen=True)
class PackedIntegers(WeightFormat):
    """Integers packed in words.

    Attributes:
        bits: of a code.
        group_size: inputs that share a scale; None for all.

    """

    bits: int
    group_size: int | None
    unused = Scaled.unused

    def __str__(self) -> str:
        return f"compressed-tensors, pack-quantized, {self.bits} bits, groups of {self.group_size or 'all inputs'}"

    def find(self, stored: SafetensorsCheckpoint) -> Iterator[Packed]:
        """A weight for each tensor of words."""
        for words in [n for n in stored.shapes if n.endswith(".weight_packed")]:
            name = words.removesuffix("_packed")
            self.part(stored, words, words, ("I32",))
            listed = self.part(stored, f"{name}_shape", words, ("I64", "I32"), [(2,)])
            shape = tuple(stored.read(listed).tolist())
            if min(shape) < 1 or stored.shapes[words] != (shape[0], self._num_words(shape[1])):
                raise ModelError(
                    f"{stored.where}: {listed} says {list(shape)}, but {words} is {list(stored.shapes[words])} ({self})"
                )
            num_groups = -(-shape[1] // (self.group_size or shape[1]))
            scale = self.part(stored, f"{name}_scale", words, FLOAT_TYPES, [(shape[0], num_groups)])
            parts = {"codes": words, "shape": listed, "scales": scale}
            if (zeros := f"{name}_zero_point") in stored.shapes:
                zeros_shape = (self._num_words(shape[0]), num_groups)
                parts["zeros"] = self.part(stored, zeros, words, ("I32",), [zeros_shape])
            if (group := f"{name}_g_idx") in stored.shapes:
                parts["group"] = self.part(stored, group, words, ("I32", "I64"), [(shape[1],)])
            yield Packed(name, shape, parts)

    def read(self, packed: Packed, stored: SafetensorsCheckpoint) -> torch.Tensor:
        """Float32."""
        words, scales = (stored.read(packed.parts[role]).t() for role in ("codes", "scales"))
        num_outputs, num_inputs = packed.shape
        if "zeros" in packed.parts:
            zeros = unpack(stored.read(packed.parts["zeros"]), self.bits)[:num_outputs].t()
        else:
            zeros = torch.full(scales.shape, 1 << (self.bits - 1), dtype=torch.uint8)

        def codes(inputs: slice) -> torch.Tensor:
            chunk = words[inputs.start * self.bits // 32 : self._num_words(inputs.stop)]
            return unpack(chunk, self.bits)[: inputs.stop - inputs.start]

        group = group_of_inputs(num_inputs, self.group_size, packed.parts.get("group"), stored)
        return dequantize(codes, zeros, scales, group)

    def _num_words(self, num_values: int) -> int:
        return -(-num_values * self.bits // 32)
