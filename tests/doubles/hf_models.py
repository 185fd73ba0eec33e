"""Tiny models of many architectures of transformers, to be run by its layers with our attention."""

from typing import Any

from .tiny_models import Tiny, base

__all__ = ["HF_CASES", "VOCABULARY", "gpt_like", "tiny"]

VOCABULARY = 400  # of the byte-level tokenizer


def tiny(name: str, config_class: str = "", /, **changes: Any) -> Tiny:
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 3, "pad_token_id": 0}
    return Tiny(name, base(**sizes | changes), config_class)


def gpt_like(name: str, /, model_class: str = "", **changes: Any) -> Tiny:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 256, "n_embd": 64, "n_layer": 3, "n_head": 4}
    return Tiny(name, sizes | {"bos_token_id": None, "eos_token_id": None} | changes, model_class=model_class)


GEMMA = {"head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 48}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)],
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
}

# Some have a family here too, others run this way alone.
HF_CASES = {
    "llama": tiny("Llama"),
    "qwen2-window": tiny("Qwen2", use_sliding_window=True, sliding_window=12, max_window_layers=1),
    "gemma2": tiny("Gemma2", **GEMMA),
    "gemma3_text": tiny("Gemma3", "Gemma3TextConfig", **GEMMA, layer_types=MIXED),
    "cohere": tiny("Cohere", logit_scale=0.5),
    "gpt2": gpt_like("GPT2", "GPT2LMHeadModel"),
    "opt": tiny("OPT", ffn_dim=96, word_embed_proj_dim=32),
    "gpt_oss": tiny("GptOss", head_dim=16, sliding_window=12, layer_types=MIXED, **EXPERTS),
    "persimmon": tiny("Persimmon"),
    "biogpt": tiny("BioGpt"),
    "codegen": gpt_like("CodeGen", rotary_dim=8),
    "gptj": gpt_like("GPTJ", rotary_dim=8),
    "ctrl": gpt_like("CTRL", "CTRLLMHeadModel", dff=96),
    "gpt_bigcode": gpt_like("GPTBigCode"),
    "minicpm3": tiny("MiniCPM3", **LATENT),
    "nanochat": tiny("NanoChat"),
    "phimoe": tiny("Phimoe", **EXPERTS),
    "modernbert-decoder": tiny("ModernBertDecoder", bos_token_id=1, local_attention=24, global_attn_every_n_layers=3),
}
