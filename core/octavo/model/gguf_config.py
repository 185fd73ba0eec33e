"""A GGUF file's metadata in the words of config.json, so that one builder a family serves both."""

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.gguf_file import GGUFFile
from octavo.model.families.base import Family
from octavo.model.gguf import GGUFCheckpoint

__all__ = ["gguf_config"]

# What follows the architecture's name in a metadata key -> config.json's key.
KEYS: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
ROPE_TYPES = {"none": "default"}


def gguf_config(file: GGUFFile, family: Family) -> dict[str, Any]:
    """The config that the file's metadata amounts to.

    Raises:
        ModelError: a value has another kind than it must have.

    """
    prefix = f"{family.gguf}."
    metadata = file.metadata
    config: dict[str, Any] = {"model_type": family.model_type}
    for name, key in KEYS.items():
        value = metadata.get(prefix + name)
        if isinstance(value, list):  # one a layer
            if len(set(value)) != 1:
                raise ModelError(f"{file.path}: {prefix}{name} differs between layers, one value is supported")
            value = value[0]
        if value is not None:
            config[key] = value
    if "token_embd.weight" in file.tensors:
        config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["rope_parameters"] = _rope(file, prefix)
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
    rotated = metadata.get(f"{prefix}rope.dimension_count")
    if rotated and head_dim and rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    return config


def _rope(file: GGUFFile, prefix: str) -> dict[str, Any]:
    metadata = file.metadata
    if "rope_freqs.weight" in file.tensors:
        return {"rope_type": "factors", "factors": GGUFCheckpoint(file).read("rope_freqs.weight").tolist()}
    scaling = metadata.get(f"{prefix}rope.scaling.type", "none")
    given = {
        "rope_type": ROPE_TYPES.get(scaling, scaling),
        "factor": metadata.get(f"{prefix}rope.scaling.factor"),
        "original_max_position_embeddings": metadata.get(f"{prefix}rope.scaling.original_context_length"),
    }
    return {key: value for key, value in given.items() if value is not None}
