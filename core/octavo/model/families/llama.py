"""Llama and those that are it in all but their config's defaults: Mistral, SmolLM, Qwen 2, Phi 3."""

from octavo.contract import DecoderSpec
from octavo.model.config import ConfigView
from octavo.model.families.base import FULL, GGUF, LLAMA, SLIDING, Family, llama

__all__ = ["FAMILIES", "PACKED", "plain_llama", "qwen2"]

PACKED = {
    **LLAMA,
    "attn.qkv": f"{LLAMA['attn.qkv']} | self_attn.qkv_proj",
    "mlp.up": "mlp.gate_up_proj",
}


def plain_llama(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return llama(c, max_model_len)


def qwen2(c: ConfigView, max_model_len: int) -> DecoderSpec:
    slides_from = c.max_window_layers if c.get("use_sliding_window") else c.num_hidden_layers
    kinds = [SLIDING if i >= slides_from else FULL for i in range(c.num_hidden_layers)]
    return llama(c, max_model_len, kinds=kinds)


FAMILIES = (
    Family("llama", plain_llama, gguf=GGUF("llama", permuted=True)),
    Family("mistral", plain_llama, defaults={"sliding_window": 4096, "num_key_value_heads": 8}),
    Family("qwen2", qwen2, defaults={"sliding_window": 4096, "max_window_layers": 28}, gguf=GGUF("qwen2")),
    Family("phi3", plain_llama, PACKED, {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}, gguf=GGUF("phi3")),
)
