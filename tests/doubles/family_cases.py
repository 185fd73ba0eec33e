"""Configurations of every native family: what its tests run, as logits and through the engine."""

from .tiny_models import Tiny, base

__all__ = ["CASES", "longrope"]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}


def longrope(num_factors: int) -> dict[str, object]:
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(num_factors)],
        "long_factor": [1.0 + i for i in range(num_factors)],
        "rope_theta": 10000.0,
    }


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.1,
}
GLM_MOE = {
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "head_dim": 16,
}
DEEPSEEK = {
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "qk_nope_head_dim": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
GEMMA = {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 48}

CASES = {
    "llama": Tiny("Llama", base()),
    "llama-biases-head-dim": Tiny("Llama", base(attention_bias=True, mlp_bias=True, head_dim=32)),
    "llama-rope-llama3-tied": Tiny("Llama", base(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama-rope-linear": Tiny("Llama", base(rope_parameters=LINEAR)),
    "llama-rope-yarn": Tiny("Llama", base(rope_parameters=YARN)),
    "mistral-window": Tiny("Mistral", base(sliding_window=8)),
    "mistral-no-window": Tiny("Mistral", base(sliding_window=None)),
    "qwen2": Tiny("Qwen2", base()),
    "qwen2-window": Tiny("Qwen2", base(use_sliding_window=True, sliding_window=8, max_window_layers=2)),
    "phi3-window": Tiny("Phi3", base(sliding_window=8)),
    "phi3-longrope-short": Tiny("Phi3", base(rope_parameters=longrope(8), original_max_position_embeddings=64)),
    "ministral-window": Tiny(
        "Ministral", base(head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2)
    ),
    "seed_oss": Tiny("SeedOss", base(head_dim=32, attention_out_bias=True)),
    "helium": Tiny("Helium", base(head_dim=16)),
    "glm": Tiny("Glm", base(head_dim=16)),
    "arcee": Tiny("Arcee", base()),
    "gemma": Tiny("Gemma", base(head_dim=32)),
    "olmo-clip": Tiny("Olmo", base(clip_qkv=0.8)),
    "cohere": Tiny("Cohere", base()),
    "cohere-qk-norm": Tiny("Cohere", base(use_qk_norm=True, logit_scale=0.5)),
    "qwen3": Tiny("Qwen3", base(head_dim=32)),
    "gemma2": Tiny("Gemma2", base(**GEMMA)),
    "gemma3": Tiny(
        "Gemma3",
        base(
            **GEMMA, num_hidden_layers=6, sliding_window_pattern=3, rope_scaling={"rope_type": "linear", "factor": 8.0}
        ),
        "Gemma3TextConfig",
    ),
    "granite": Tiny("Granite", base(**MULTIPLIERS)),
    "olmo2": Tiny("Olmo2", base()),
    "olmo3-window": Tiny("Olmo3", base(sliding_window=8)),
    "exaone4-window": Tiny("Exaone4", base(sliding_window=8, sliding_window_pattern=2)),
    "exaone4-full": Tiny("Exaone4", base(sliding_window=None, layer_types=["full_attention"] * 4)),
    "smollm3": Tiny("SmolLM3", base(no_rope_layer_interval=2)),
    "smollm3-window": Tiny("SmolLM3", base(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=8)),
    "glm4": Tiny("Glm4", base(head_dim=16)),
    "ernie4_5": Tiny("Ernie4_5", base(head_dim=32, use_bias=True)),
    "cohere2": Tiny("Cohere2", base(sliding_window=8, sliding_window_pattern=2, logit_scale=0.25)),
    "stablelm": Tiny("StableLm", base(use_qkv_bias=True)),
    "stablelm-parallel-qk-norm": Tiny("StableLm", base(qk_layernorm=True, use_parallel_residual=True)),
    "phi": Tiny("Phi", base()),
    "phi-qk-norm": Tiny("Phi", base(qk_layernorm=True)),
    "starcoder2-window": Tiny("Starcoder2", base(sliding_window=8)),
    "nemotron": Tiny("Nemotron", base()),
    "gpt_neox": Tiny("GPTNeoX", base(num_key_value_heads=..., rotary_pct=0.5)),
    "gpt_neox-sequential": Tiny("GPTNeoX", base(num_key_value_heads=..., use_parallel_residual=False)),
    "gpt2": Tiny(
        "GPT2",
        {"vocab_size": 160, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128, "eos_token_id": None},
        model_class="GPT2LMHeadModel",
    ),
    "opt": Tiny("OPT", base(intermediate_size=..., num_key_value_heads=..., ffn_dim=96)),
    "mixtral-window": Tiny("Mixtral", base(num_local_experts=6, sliding_window=8)),
    "granitemoe": Tiny("GraniteMoe", base(**MULTIPLIERS, num_local_experts=8)),
    "minimax_m2": Tiny("MiniMaxM2", base(**LOCAL_EXPERTS, head_dim=32)),
    "olmoe-clip": Tiny("Olmoe", base(num_experts=8, num_experts_per_tok=3, clip_qkv=0.8)),
    "qwen3_moe": Tiny("Qwen3Moe", base(**EXPERTS, head_dim=32, norm_topk_prob=True, mlp_only_layers=[1])),
    "qwen3_moe-every-other": Tiny(
        "Qwen3Moe", base(**EXPERTS, head_dim=32, norm_topk_prob=False, decoder_sparse_step=2)
    ),
    "qwen2_moe": Tiny("Qwen2Moe", base(**EXPERTS, shared_expert_intermediate_size=48)),
    "qwen2_moe-window": Tiny(
        "Qwen2Moe",
        base(
            **EXPERTS,
            shared_expert_intermediate_size=48,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=3,
        ),
    ),
    "gpt_oss": Tiny(
        "GptOss",
        base(
            **LOCAL_EXPERTS,
            head_dim=32,
            sliding_window=8,
            rope_parameters={**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        ),
    ),
    "glm4_moe-qk-norm": Tiny("Glm4Moe", base(**GLM_MOE, use_qk_norm=True)),
    "deepseek_v3-yarn": Tiny(
        "DeepseekV3",
        base(**DEEPSEEK, q_lora_rank=24, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    ),
    "deepseek_v3-dense": Tiny("DeepseekV3", base(**{**DEEPSEEK, "first_k_dense_replace": 99}, q_lora_rank=24)),
    "deepseek_v3-no-q-rank": Tiny("DeepseekV3", base(**DEEPSEEK, q_lora_rank=None, norm_topk_prob=False)),
}
