"""Writes transformers' models as GGUF files the way llama.cpp's converter does, by the gguf package's name maps."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

__all__ = ["Conversion", "write_gguf", "write_tensors"]

# config.json's key -> metadata key less the architecture.
COMMON = {
    "num_hidden_layers": "block_count",
    "n_layer": "block_count",
    "max_position_embeddings": "context_length",
    "n_positions": "context_length",
    "hidden_size": "embedding_length",
    "n_embd": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "n_head": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}


@dataclass(frozen=True)
class Conversion:
    """What is special of an architecture.

    Attributes:
        arch: the gguf package's name of it.
        also: further config keys and their metadata keys.
        permuted: queries and keys rotate by neighbours.
        whole_norms: norms are stored with the 1 that the checkpoint leaves out.
        rotary_share: of a head, written as a number of dims.
        window_pattern: the file lists which layers slide.
        extra: metadata that config.json does not hold.
        v_head_dim: of latent attention.

    """

    arch: str
    also: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    whole_norms: bool = False
    rotary_share: float | None = None
    window_pattern: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    v_head_dim: int = 12


def write_gguf(
    folder: Path, path: Path, conversion: Conversion, tables: Mapping[str, np.ndarray] | None = None
) -> None:
    """Convert the model in `folder`; `tables` are tensors that stand beside its weights."""
    arch = getattr(gguf.MODEL_ARCH, conversion.arch)
    name = gguf.MODEL_ARCH_NAMES[arch]
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, name)
    values = {m: config[c] for c, m in {**COMMON, **conversion.also}.items() if config.get(c) is not None}
    values |= _rope(config, conversion) | dict(conversion.extra)
    if conversion.window_pattern:
        values["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    for key, value in values.items():
        _add(writer, f"{name}.{key}", value)
    num_layers = values["block_count"]
    heads = values["attention.head_count"]
    for tensor_name, tensor in _tensors(_stacked(_saved(folder)), arch, num_layers, heads, conversion).items():
        writer.add_tensor(tensor_name, tensor.contiguous().float().numpy())
    for tensor_name, table in (tables or {}).items():
        writer.add_tensor(tensor_name, table)
    _write(writer)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _rope(config: Mapping[str, Any], conversion: Conversion) -> dict[str, Any]:
    whole = config.get("rope_parameters") or {}
    p = whole.get("full_attention", whole)
    values: dict[str, Any] = {}
    if "rope_theta" in p:
        values["rope.freq_base"] = float(p["rope_theta"])
    if "rope_theta" in whole.get("sliding_attention", {}):
        values["rope.freq_base_swa"] = float(whole["sliding_attention"]["rope_theta"])
    if p.get("rope_type") in ("linear", "yarn"):
        values |= {"rope.scaling.type": p["rope_type"], "rope.scaling.factor": float(p["factor"])}
    if p.get("rope_type") == "yarn":
        values["rope.scaling.original_context_length"] = p["original_max_position_embeddings"]
    if conversion.rotary_share:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        values["rope.dimension_count"] = int(head_dim * conversion.rotary_share)
    return values


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One tensor for all experts (or, in Stable LM, all heads' norms), gate and up apart."""
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.(?:experts|norms))\.(\d+)\.(.*)", name):
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            gate, up = tensor.chunk(2, -2)
            at = name.removesuffix("block_sparse_moe.input_linear.weight")
            found |= {f"{at}block_sparse_moe.experts.w1.weight": gate, f"{at}block_sparse_moe.experts.w3.weight": up}
        elif name.endswith("block_sparse_moe.output_linear.weight"):
            found[name.replace("output_linear", "experts.w2")] = tensor
        elif name.endswith("e_score_correction_bias"):
            found[name.replace("_bias", ".bias")] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in stacks.items()}


def _tensors(
    saved: Mapping[str, torch.Tensor], arch: gguf.MODEL_ARCH, num_layers: int, num_heads: int, conversion: Conversion
) -> dict[str, torch.Tensor]:
    names = gguf.get_tensor_name_map(arch, num_layers)
    out: dict[str, torch.Tensor] = {}
    for name, tensor in saved.items():
        if arch is gguf.MODEL_ARCH.GPT_OSS and ".mlp.experts." in name:
            out |= _gpt_oss_experts(name, tensor)
            continue
        if arch is gguf.MODEL_ARCH.STABLELM and "layernorm.norms" in name:
            layer = name.split(".")[2]
            out[f"blk.{layer}.attn_{'q' if '.q_' in name else 'k'}_norm.weight"] = tensor
            continue
        if arch is gguf.MODEL_ARCH.DEEPSEEK2 and "kv_b_proj" in name:
            nope = tensor.view(num_heads, -1, tensor.shape[1]).shape[1] - conversion.v_head_dim
            keys, values = tensor.view(num_heads, -1, tensor.shape[1]).split([nope, conversion.v_head_dim], 1)
            at = f"blk.{name.split('.')[2]}"
            out |= {f"{at}.attn_k_b.weight": keys.transpose(1, 2), f"{at}.attn_v_b.weight": values}
            continue
        target = names.get_name(name.replace(".sinks", ".sinks.weight"), (".weight", ".bias"))
        assert target is not None, f"the gguf package has no name for {name}"
        if conversion.permuted and (".q_proj." in name or ".k_proj." in name):
            heads = num_heads if ".q_proj." in name else tensor.shape[0] * num_heads // _query_rows(saved, name)
            tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        if conversion.whole_norms and name.endswith("norm.weight"):
            tensor = tensor + 1
        if arch is gguf.MODEL_ARCH.GPT2 and re.search(r"(attn|mlp)\.c_.*\.weight", name):
            tensor = tensor.T
        if arch is gguf.MODEL_ARCH.GPTNEOX and "query_key_value" in name:
            split = tensor.view(num_heads, 3, -1, *tensor.shape[1:])
            tensor = split.transpose(0, 1).reshape(tensor.shape)
        out[target] = tensor
    return out


def _query_rows(saved: Mapping[str, torch.Tensor], key_name: str) -> int:
    """Rows of the query that stands beside a key."""
    return saved[key_name.replace(".k_proj.", ".q_proj.")].shape[0]


def _gpt_oss_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    layer, is_bias = name.split(".")[2], name.endswith("_bias")
    suffix, tensor = ("bias", tensor) if is_bias else ("weight", tensor.transpose(-1, -2))
    if "down_proj" in name:
        return {f"blk.{layer}.ffn_down_exps.{suffix}": tensor}
    rows = 1 if is_bias else -2
    index = torch.arange(tensor.shape[rows] // 2) * 2
    return {
        f"blk.{layer}.ffn_gate_exps.{suffix}": tensor.index_select(rows, index),
        f"blk.{layer}.ffn_up_exps.{suffix}": tensor.index_select(rows, index + 1),
    }


def write_tensors(path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """A file of just this."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    _write(writer)
