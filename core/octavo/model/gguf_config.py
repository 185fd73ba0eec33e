"""A GGUF file's metadata in the words of config.json, so that one builder a family serves both."""

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError, UnsupportedError
from octavo.gguf_file import GGUFFile
from octavo.model.families import FAMILIES, Family
from octavo.model.families.base import FULL, SLIDING
from octavo.model.gguf import GGUFCheckpoint

__all__ = ["gguf_config"]

# What follows the architecture's name in a metadata key -> config.json's keys, in all their spellings.
KEYS: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "use_parallel_residual": "use_parallel_residual",
    "logit_scale": "logit_scale logits_scaling",
    "residual_scale": "residual_multiplier",
    "embedding_scale": "embedding_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.scale": "attention_multiplier",
    "attention.clamp_kqv": "clip_qkv",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length_mla": "qk_head_dim",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
    "expert_gating_func": "scoring_func",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "expert_count": "num_experts num_local_experts n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}
ROPE_KEYS: Mapping[str, str] = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_log_multiplier": "yarn_log_multiplier",
}


def gguf_config(file: GGUFFile) -> tuple[Family, dict[str, Any]]:
    """The family that a file is of, and the config that its metadata amounts to.

    Raises:
        UnsupportedError: no family has this architecture, or the model is split over several files.
        ModelError: a value has another kind than it must have.

    """
    metadata = file.metadata
    family = _family(file)
    assert family.gguf is not None
    prefix = f"{family.gguf.architecture}."
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedError(f"{file.path}: one of {metadata['split.count']} files of a split model; join them first")
    config: dict[str, Any] = {"model_type": family.model_type}
    for name, keys in KEYS.items():
        if prefix + name in metadata:
            config |= dict.fromkeys(keys.split(), _one_value(file, prefix + name))
    config["num_hidden_layers"] = config.get("num_hidden_layers", 0) - metadata.get(f"{prefix}nextn_predict_layers", 0)
    config["vocab_size"] = _vocab_size(file, prefix)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["has_mlp_norm"] = "blk.0.ffn_norm.weight" in file.tensors
    config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in file.tensors
    config |= _window(file, prefix, config["num_hidden_layers"])
    config["rope_parameters"] = _rope(file, prefix)
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
    rotated = metadata.get(f"{prefix}rope.dimension_count")
    if rotated and head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    return family, {**config, **family.gguf.fixed(config)}


def _family(file: GGUFFile) -> Family:
    architecture = file.metadata.get("general.architecture")
    mine = [(f, f.gguf) for f in FAMILIES.values() if f.gguf and f.gguf.architecture == architecture]
    marked = [f for f, gguf in mine if gguf.mark and f"{architecture}.{gguf.mark}" in file.metadata]
    plain = [f for f, gguf in mine if not gguf.mark]
    if not marked + plain:
        known = ", ".join(sorted({f.gguf.architecture for f in FAMILIES.values() if f.gguf}))
        raise UnsupportedError(f"{file.path}: architecture {architecture!r} is not supported, supported are {known}")
    return (marked + plain)[0]


def _one_value(file: GGUFFile, key: str) -> Any:
    value = file.metadata[key]
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UnsupportedError(f"{file.path}: {key} differs between layers, one value for all is supported")
    return value[0]


def _vocab_size(file: GGUFFile, prefix: str) -> int | None:
    """Rows of the embedding; a file without one fails later, when its tensors are checked."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        size: int | None = file.metadata.get(f"{prefix}vocab_size")
        return size
    return embedding.shape[0]


def _window(file: GGUFFile, prefix: str, num_layers: int) -> dict[str, Any]:
    """The window, null where there is none, and who slides where the file says so."""
    window = file.metadata.get(f"{prefix}attention.sliding_window") or None
    pattern = file.metadata.get(f"{prefix}attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return {"sliding_window": window}
    kinds = [SLIDING if slides else FULL for slides in pattern[:num_layers]]
    return {"sliding_window": window, "layer_types": kinds}


def _rope(file: GGUFFile, prefix: str) -> dict[str, Any]:
    """Rope scaling by metadata, or by the tables that some converters put among the tensors."""
    metadata, checkpoint = file.metadata, GGUFCheckpoint(file)
    given = {
        theirs: metadata[f"{prefix}rope.scaling.{ours}"]
        for ours, theirs in ROPE_KEYS.items()
        if f"{prefix}rope.scaling.{ours}" in metadata
    }
    if "rope_freqs.weight" in file.tensors:
        return {**given, "rope_type": "factors", "factors": checkpoint.read("rope_freqs.weight").tolist()}
    if "rope_factors_long.weight" in file.tensors and "rope_factors_short.weight" in file.tensors:
        factors = {
            f"{kind}_factor": checkpoint.read(f"rope_factors_{kind}.weight").tolist() for kind in ("long", "short")
        }
        return {**given, "rope_type": "longrope", **factors}
    scaling = metadata.get(f"{prefix}rope.scaling.type", "none")
    if not isinstance(scaling, str):
        raise ModelError(f"{file.path}: {prefix}rope.scaling.type must be a name, it is {scaling!r:.40}")
    return {"rope_type": "default"} if scaling == "none" else {**given, "rope_type": scaling}
