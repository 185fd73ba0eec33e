"""Llama and those that are it in all but their config's defaults, or names, or the order of rotated dims."""

from octavo.contract import DecoderSpec
from octavo.model.config import ConfigView
from octavo.model.families.base import FULL, GGUF, LLAMA, SLIDING, Family, llama

__all__ = ["FAMILIES", "GLM", "PACKED", "PLAIN_MLP", "qwen2"]


def plain_llama(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return llama(c, max_model_len)


def qwen2(c: ConfigView, max_model_len: int) -> DecoderSpec:
    slides_from = c.max_window_layers if c.get("use_sliding_window") else c.num_hidden_layers
    kinds = [SLIDING if i >= slides_from else FULL for i in range(c.num_hidden_layers)]
    return llama(c, max_model_len, kinds=kinds)


def neighbours(c: ConfigView, max_model_len: int) -> DecoderSpec:
    """Dims that rotate together lie side by side."""
    return llama(c, max_model_len, interleaved=True)


def arcee(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return llama(c, max_model_len, gated=False)


PACKED = {**LLAMA, "attn.qkv": f"{LLAMA['attn.qkv']} | self_attn.qkv_proj", "mlp.up": "mlp.gate_up_proj"}
PLAIN_MLP = {**LLAMA, "mlp.up": "mlp.up_proj"}

MISTRAL = {"sliding_window": 4096, "num_key_value_heads": 8}
GLM = {"partial_rotary_factor": 0.5, "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07}
HELIUM = {"rope_theta": 1e5, "rms_norm_eps": 1e-8, "head_dim": 128, "num_key_value_heads": 20}
PHI3 = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": None}
ERNIE = {
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}

FAMILIES = (
    Family("llama", plain_llama, gguf=GGUF("llama", permuted=True)),
    Family("mistral", plain_llama, defaults=MISTRAL),
    Family("ministral", plain_llama, defaults=MISTRAL),
    Family("qwen2", qwen2, defaults={"sliding_window": 4096, "max_window_layers": 28}, gguf=GGUF("qwen2")),
    Family("phi3", plain_llama, PACKED, PHI3, gguf=GGUF("phi3")),
    Family("seed_oss", plain_llama, defaults={"head_dim": 128, "num_key_value_heads": 8}, gguf=GGUF("seed_oss")),
    Family("ernie4_5", neighbours, defaults=ERNIE, gguf=GGUF("ernie4_5")),
    Family("helium", neighbours, defaults=HELIUM),
    Family("glm", neighbours, PACKED, GLM),
    Family("arcee", arcee, PLAIN_MLP, {"rms_norm_eps": 1e-5, "hidden_act": "relu2"}, gguf=GGUF("arcee", permuted=True)),
)
