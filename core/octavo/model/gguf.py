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

from octavo.errors import UnsupportedError
from octavo.gguf_file import GGUFFile
from octavo.model.checkpoint import Checkpoint

__all__ = ["GGUF_IGNORED", "GGUF_NAMES", "GGUF_TYPES", "PERMUTED", "GGUFCheckpoint", "dequantize"]

Type = GGMLQuantizationType
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

LOW, HIGH = np.uint8(0x0F), np.uint8(4)  # the low four bits; how far the high ones lie
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


class GGUFCheckpoint(Checkpoint):
    """The tensors of a GGUF file, dequantised as they are read."""

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

    def read(self, name: str) -> torch.Tensor:
        """Float32."""
        info = self._file.tensors[name]
        return torch.from_numpy(dequantize(self._file.tensor_bytes(name), info.type, info.shape))
