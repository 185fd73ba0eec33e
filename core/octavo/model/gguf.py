"""Weights from GGUF files: blocks to float32, and one name table for every architecture.

Formats of blocks: https://github.com/ggml-org/ggml, ggml-common.h. The gguf package unpacks them; the three that
most small models come in are unpacked here in a third of its time, as a start waits for nothing else.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as package_dequantize

from octavo.contract import GROUP_SIZE, QuantizedWeight
from octavo.errors import UnsupportedError
from octavo.gguf_file import GGUFFile
from octavo.model.checkpoint import Checkpoint

__all__ = ["GGUF_IGNORED", "GGUF_NAMES", "GGUF_TYPES", "PERMUTED", "GGUFCheckpoint", "dequantize", "repack"]

Type = GGMLQuantizationType
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

LOW, HIGH = np.uint8(0x0F), np.uint8(4)  # the low four bits; how far the high ones lie
CHUNK_BLOCKS = 1 << 13  # of 32
CHUNK_ELEMENTS = 1 << 18  # at a time, so that what lies between stays in the cache, and is small

# llama.cpp names tensors by their role, so one table serves every architecture.
GGUF_NAMES: Mapping[str, str] = {
    "embedding": "token_embd",
    "positions": "position_embd",
    "embedding_norm": "token_embd_norm",
    "final_norm": "output_norm",
    "head": "output",
    "layer": "blk.{i}.",
    "attn_pre": "attn_norm",
    "attn.qkv": "attn_q attn_k attn_v | attn_qkv",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.sinks": "attn_sinks",
    "attn.o": "attn_output",
    "attn.q_a": "attn_q_a",
    "attn.q_a_norm": "attn_q_a_norm",
    "attn.q": "attn_q_b | attn_q",
    "attn.kv_a": "attn_kv_a_mqa",
    "attn.kv_a_norm": "attn_kv_a_norm",
    "attn.kv_b": "attn_k_b:transpose attn_v_b | attn_kv_b",
    "attn_post": "post_attention_norm",
    "mlp_pre": "ffn_norm | post_attention_norm",
    "mlp.up": "ffn_gate ffn_up | ffn_up",
    "mlp.down": "ffn_down",
    "mlp_post": "post_ffw_norm",
    "moe.router": "ffn_gate_inp",
    "moe.correction": "exp_probs_b.bias",
    "moe.up": "ffn_gate_exps ffn_up_exps",
    "moe.down": "ffn_down_exps",
    "shared.up": "ffn_gate_shexp ffn_up_shexp",
    "shared.down": "ffn_down_shexp",
    "shared.gate": "ffn_gate_inp_shexp",
}
# Llama's converter and its heirs' put the two dims of each rotated pair side by side.
PERMUTED: Mapping[str, str] = {"attn.qkv": "attn_q:rope_halves attn_k:rope_halves attn_v"}
# Read with the config: tables of rope scaling. Not read: layers that draft the tokens after the next.
GGUF_IGNORED = (r"(.*\.)?rope_freqs\.weight", r"(.*\.)?rope_factors_(long|short)\.weight", r"blk\.{num_layers}\..*")


_READ = """F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS
IQ3_S IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4"""
GGUF_TYPES = frozenset(kind for kind in Type if kind.name in _READ.split())  # older packages lack the latest
_FLOATS = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}


def _q4_0(blocks: Bytes, out: Floats) -> None:
    scale, codes = _halves(blocks[:, :2]), blocks[:, 2:]
    np.multiply((codes & LOW).view(np.int8) - np.int8(8), scale, out=out[:, :16], dtype=np.float32)
    np.multiply((codes >> HIGH).view(np.int8) - np.int8(8), scale, out=out[:, 16:], dtype=np.float32)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    scale_low, codes = _halves(blocks[:, :4]), blocks[:, 4:]
    np.multiply(codes & LOW, scale_low[:, :1], out=out[:, :16], dtype=np.float32)
    np.multiply(codes >> HIGH, scale_low[:, :1], out=out[:, 16:], dtype=np.float32)
    out += scale_low[:, 1:]


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks[:, :2]), out=out, dtype=np.float32)


def _halves(columns: Bytes) -> Floats:
    return np.ascontiguousarray(columns).view(np.float16).astype(np.float32)


# From blocks [n, bytes a block] to their values [n, elements a block], bit-equal to the package's.
_UNPACK: Mapping[Type, Callable[[Bytes, Floats], None]] = {Type.Q4_0: _q4_0, Type.Q4_1: _q4_1, Type.Q8_0: _q8_0}


def dequantize(stored: Bytes, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> Floats:
    """The values of a tensor of `shape` whose bytes in the file are `stored`, float32."""
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = stored.reshape(-1, block_bytes)
    out = np.empty((len(blocks), block_elements), np.float32)
    step = CHUNK_ELEMENTS // block_elements
    unpack = _UNPACK.get(kind)
    for start in range(0, len(blocks), step):
        chunk = slice(start, start + step)
        if unpack:
            unpack(blocks[chunk], out[chunk])
            continue
        one_row = blocks[chunk].reshape(1, -1)  # of many rows the package takes 16 at a time
        out[chunk] = package_dequantize(one_row, kind).reshape(-1, block_elements)
    return out.reshape(shape)


# Types whose blocks are groups of `QuantizedWeight`: its format, and bytes of a block before the codes.
_PACKED: Mapping[Type, tuple[str, int]] = {Type.Q8_0: ("int8", 2), Type.Q4_0: ("int4", 2), Type.Q4_1: ("int4", 4)}


def repack(stored: Bytes, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> QuantizedWeight:
    """The rows of a tensor of `shape`, a type of `_PACKED`, with codes and scales as they are in the file."""
    weight_format, head = _PACKED[kind]
    num_columns = shape[-1]
    num_rows, num_groups = prod(shape[:-1]), num_columns // GROUP_SIZE
    _, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = stored.reshape(-1, block_bytes)
    codes = np.empty((len(blocks), block_bytes - head), np.uint8)
    for start in range(0, len(blocks), CHUNK_BLOCKS):
        chunk = slice(start, start + CHUNK_BLOCKS)
        if weight_format == "int8":
            np.bitwise_xor(blocks[chunk, head:], np.uint8(0x80), out=codes[chunk])  # two's complement, plus 128
        else:
            _neighbours(blocks[chunk, head:], codes[chunk])
    fields = np.ascontiguousarray(blocks[:, :head]).view(np.float16)
    parts = [torch.from_numpy(np.ascontiguousarray(column)).view(num_rows, num_groups) for column in fields.T]
    bits = 8 if weight_format == "int8" else 4
    return QuantizedWeight((num_rows, num_columns), bits, torch.from_numpy(codes).view(num_rows, -1), *parts)


def _neighbours(codes: Bytes, out: Bytes) -> None:
    """From bytes that hold codes j and j + 16 to bytes that hold codes 2j and 2j + 1."""
    pairs = np.ascontiguousarray(codes).view("<u2")
    out[:, :8] = (pairs & 0x000F) | (pairs >> 4 & 0x00F0)
    out[:, 8:] = (pairs >> 4 & 0x000F) | (pairs >> 8 & 0x00F0)


class GGUFCheckpoint(Checkpoint):
    """The tensors of a GGUF file, dequantised as they are read, or as they are stored."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.where = str(file.path)
        self.shapes = {name: info.shape for name, info in file.tensors.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The type of most of its elements; bfloat16 for quantised ones, which nothing can overflow."""
        sizes: Counter[Type] = Counter()
        for info in self._file.tensors.values():
            sizes[info.type] += prod(info.shape)
        return _FLOATS.get(sizes.most_common(1)[0][0], torch.bfloat16) if sizes else torch.float32

    def check_readable(self, name: str) -> None:
        """Types of `GGUF_TYPES` only."""
        kind = self._file.tensors[name].type
        if kind not in GGUF_TYPES:
            read = ", ".join(sorted(t.name for t in GGUF_TYPES))
            raise UnsupportedError(f"{self.where}: tensor {name} is stored as {kind.name}, read are {read}")

    def packed_format(self, name: str) -> str | None:
        """That of a matrix of Q8_0, Q4_0 or Q4_1."""
        info = self._file.tensors[name]
        return _PACKED[info.type][0] if info.type in _PACKED and len(info.shape) > 1 else None

    def read_packed(self, name: str) -> QuantizedWeight:
        """Without loss."""
        info = self._file.tensors[name]
        return repack(self._file.tensor_bytes(name), info.type, info.shape)

    def read(self, name: str) -> torch.Tensor:
        """Float32."""
        info = self._file.tensors[name]
        return torch.from_numpy(dequantize(self._file.tensor_bytes(name), info.type, info.shape))
