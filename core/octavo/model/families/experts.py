"""Mixtures of experts, and DeepSeek's latent attention with them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.contract import DecoderSpec, ExpertGroups, LatentAttention, Mlp, Moe, Norm, QKNorm, SharedExpert
from octavo.errors import UnsupportedError
from octavo.model.config import ConfigView
from octavo.model.families.base import FULL, GGUF, LLAMA, SLIDING, Family, activation, edit, llama, rms, sliding_pattern
from octavo.model.families.dense import MULTIPLIERS, granite
from octavo.model.families.rope import rope, rope_parameters, yarn_gain

__all__ = ["FAMILIES"]


def expert(c: ConfigView, width: int) -> Mlp:
    return Mlp(width, activation(c.get("hidden_act", "silu")))


def mixtral(c: ConfigView, max_model_len: int) -> DecoderSpec:
    moe = Moe(c.num_local_experts, c.num_experts_per_tok, expert(c, c.intermediate_size))
    return edit(llama(c, max_model_len), layer={"mlp": moe})


def granitemoe(c: ConfigView, max_model_len: int) -> DecoderSpec:
    moe = Moe(c.num_local_experts, c.num_experts_per_tok, expert(c, c.intermediate_size))
    return edit(granite(c, max_model_len), layer={"mlp": moe})


def minimax_m2(c: ConfigView, max_model_len: int) -> DecoderSpec:
    moe = Moe(c.num_local_experts, c.num_experts_per_tok, expert(c, c.intermediate_size), "sigmoid")
    return edit(llama(c, max_model_len), attn={"qk_norm": QKNorm(rms(c), "all_heads")}, layer={"mlp": moe})


def olmoe(c: ConfigView, max_model_len: int) -> DecoderSpec:
    moe = Moe(c.num_experts, c.num_experts_per_tok, expert(c, c.intermediate_size), renormalize=c.norm_topk_prob)
    attn = {"qk_norm": QKNorm(rms(c), "all_heads"), "qkv_clip": c.get("clip_qkv")}
    return edit(llama(c, max_model_len), attn=attn, layer={"mlp": moe})


def qwen3_moe(c: ConfigView, max_model_len: int) -> DecoderSpec:
    kinds = [SLIDING if c.get("use_sliding_window") else FULL] * c.num_hidden_layers
    spec = llama(c, max_model_len, kinds=kinds)
    return edit(spec, attn={"qk_norm": QKNorm(rms(c))}, layer=lambda i: _qwen_sparse(c, i))


def qwen2_moe(c: ConfigView, max_model_len: int) -> DecoderSpec:
    every_other = sliding_pattern(c.num_hidden_layers, 2)
    slides = c.get("use_sliding_window", False)
    kinds = [kind if slides and i < c.max_window_layers else FULL for i, kind in enumerate(every_other)]
    shared = SharedExpert(expert(c, c.shared_expert_intermediate_size), gated=True)
    return edit(llama(c, max_model_len, kinds=kinds), layer=lambda i: _qwen_sparse(c, i, shared))


def _qwen_sparse(c: ConfigView, i: int, shared: SharedExpert | None = None) -> dict[str, Any]:
    if i in c.get("mlp_only_layers", []) or (i + 1) % c.decoder_sparse_step:
        return {}
    routed = expert(c, c.moe_intermediate_size)
    moe = Moe(c.num_experts, c.num_experts_per_tok, routed, renormalize=c.norm_topk_prob, shared=shared)
    return {"mlp": moe}


def gpt_oss(c: ConfigView, max_model_len: int) -> DecoderSpec:
    if (c.swiglu_alpha, c.swiglu_limit) != (1.702, 7.0):
        raise UnsupportedError(
            f"swiglu_alpha {c.swiglu_alpha} and swiglu_limit {c.swiglu_limit}, supported are 1.702 and 7"
        )
    spec = llama(c, max_model_len, kinds=sliding_pattern(c.num_hidden_layers, 2))
    moe = Moe(c.num_local_experts, c.num_experts_per_tok, Mlp(c.intermediate_size, "swiglu_clamped"))
    return edit(spec, attn={"sinks": True}, layer={"mlp": moe})


def glm4_moe(c: ConfigView, max_model_len: int) -> DecoderSpec:
    qk_norm = QKNorm(rms(c)) if c.use_qk_norm else None
    return edit(llama(c, max_model_len), attn={"qk_norm": qk_norm}, layer=lambda i: _deepseek_sparse(c, i))


def deepseek_v3(c: ConfigView, max_model_len: int) -> DecoderSpec:
    p = rope_parameters(c)
    scale = (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
    if p["rope_type"] != "default" and p.get("mscale_all_dim"):
        scale *= yarn_gain(p["factor"], p["mscale_all_dim"]) ** 2
    attn = LatentAttention(
        num_heads=c.num_attention_heads,
        q_rank=c.get("q_lora_rank"),
        kv_rank=c.kv_lora_rank,
        nope_dim=c.qk_nope_head_dim,
        v_dim=c.v_head_dim,
        scale=scale,
        rope=rope(c, max_model_len, c.qk_rope_head_dim, interleaved=c.rope_interleave),
        norm=Norm(1e-6),
    )
    spec = llama(c, max_model_len, has_rope=False)
    layers = tuple(replace(layer, attn=attn, **_deepseek_sparse(c, i)) for i, layer in enumerate(spec.layers))
    return replace(spec, layers=layers)


def _deepseek_sparse(c: ConfigView, i: int) -> dict[str, Any]:
    if i < c.first_k_dense_replace:
        return {}
    routed = expert(c, c.moe_intermediate_size)
    moe = Moe(
        c.n_routed_experts,
        c.num_experts_per_tok,
        routed,
        score="sigmoid",
        renormalize=c.norm_topk_prob,
        scale=c.routed_scaling_factor,
        groups=ExpertGroups(c.n_group, c.topk_group),
        shared=SharedExpert(replace(routed, width=routed.width * c.n_shared_experts)),
    )
    return {"mlp": moe}


MIXTRAL = "block_sparse_moe.experts.{n}"
MIXTRAL_NAMES = {
    **LLAMA,
    "moe.router": "block_sparse_moe.gate | mlp.gate",
    "moe.up": f"{MIXTRAL}.w1 {MIXTRAL}.w3 | mlp.experts.gate_up_proj",
    "moe.down": f"{MIXTRAL}.w2 | mlp.experts.down_proj",
}
MINIMAX_NAMES = {
    **MIXTRAL_NAMES,
    "moe.correction": "block_sparse_moe.e_score_correction_bias | mlp.e_score_correction_bias",
}
GRANITE_NAMES = {
    **LLAMA,
    "moe.router": "block_sparse_moe.router.layer | block_sparse_moe.router",
    "moe.up": "block_sparse_moe.input_linear | block_sparse_moe.experts.gate_up_proj",
    "moe.down": "block_sparse_moe.output_linear | block_sparse_moe.experts.down_proj",
}
QWEN2_NAMES = {
    **LLAMA,
    "shared.up": "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj",
    "shared.down": "mlp.shared_expert.down_proj",
    "shared.gate": "mlp.shared_expert_gate",
}
GPT_OSS_NAMES = {
    **LLAMA,
    "attn.sinks": "self_attn.sinks",
    "moe.router": "mlp.router",
    "moe.up": "mlp.experts.gate_up_proj:transpose,even_rows_first",
    "moe.down": "mlp.experts.down_proj:transpose",
}
GLM_NAMES = {
    **LLAMA,
    "moe.correction": "mlp.gate.e_score_correction_bias",
    "shared.up": "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj",
    "shared.down": "mlp.shared_experts.down_proj",
}
DEEPSEEK_NAMES = {
    **GLM_NAMES,
    "attn.q_a": "self_attn.q_a_proj",
    "attn.q_a_norm": "self_attn.q_a_layernorm",
    "attn.q": "self_attn.q_b_proj | self_attn.q_proj",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm",
    "attn.kv_b": "self_attn.kv_b_proj",
}
NEXT_TOKENS = (r"model\.layers\.{num_layers}\..*",)  # a head that drafts the token after the next

QWEN = {"sliding_window": 4096, "decoder_sparse_step": 1, "norm_topk_prob": False}
DEEPSEEK = {
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "rope_interleave": True,
}
GLM = {
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "use_qk_norm": False,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = {
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rope_theta": 150000.0,
    "rope_parameters": GPT_OSS_ROPE,
    "rms_norm_eps": 1e-5,
}


def gpt_oss_gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Such files do not say that yarn's range is not rounded, and count the width of an expert apart."""
    return {
        "intermediate_size": config["moe_intermediate_size"],
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
    }


SIGMOID = 2  # gguf.ExpertGatingFuncType


def deepseek_gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Such files count a head with its rope, and keep a tenth of what yarn multiplies the score's scale by."""
    if config.get("scoring_func") != SIGMOID:
        raise UnsupportedError("experts chosen by softmax (DeepSeek 2) are not supported, those by sigmoid are")
    rope = dict(config["rope_parameters"])
    if "yarn_log_multiplier" in rope:
        rope["mscale"] = rope["mscale_all_dim"] = rope["yarn_log_multiplier"] * 10
    return {
        "qk_nope_head_dim": config["qk_head_dim"] - config["qk_rope_head_dim"],
        "partial_rotary_factor": None,
        "norm_topk_prob": config.get("norm_topk_prob", False),
        "rope_parameters": rope,
    }


FAMILIES = (
    Family(
        "mixtral",
        mixtral,
        MIXTRAL_NAMES,
        {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
        gguf=GGUF("llama", mark="expert_count", permuted=True),
    ),
    Family(
        "granitemoe",
        granitemoe,
        GRANITE_NAMES,
        {**MULTIPLIERS, "num_local_experts": 8, "num_experts_per_tok": 2},
        gguf=GGUF("granitemoe", permuted=True),
    ),
    Family(
        "minimax_m2",
        minimax_m2,
        MINIMAX_NAMES,
        {"rope_theta": 5e6, "head_dim": 128, "num_key_value_heads": 8},
        gguf=GGUF("minimax-m2"),
    ),
    Family("olmoe", olmoe, defaults={"norm_topk_prob": False, "rms_norm_eps": 1e-5}, gguf=GGUF("olmoe")),
    Family(
        "qwen3_moe",
        qwen3_moe,
        LLAMA,
        {**QWEN, "num_key_value_heads": 4},
        {"num_experts": "num_local_experts"},
        gguf=GGUF("qwen3moe", fixed=lambda config: {"norm_topk_prob": True}),
    ),
    Family("qwen2_moe", qwen2_moe, QWEN2_NAMES, {**QWEN, "max_window_layers": 28}, gguf=GGUF("qwen2moe")),
    Family("gpt_oss", gpt_oss, GPT_OSS_NAMES, GPT_OSS, gguf=GGUF("gpt-oss", fixed=gpt_oss_gguf)),
    Family(
        "glm4_moe",
        glm4_moe,
        GLM_NAMES,
        GLM,
        ignored=NEXT_TOKENS,
        gguf=GGUF("glm4moe", fixed=lambda config: {"use_qk_norm": config["qk_layernorm"]}),
    ),
    Family(
        "deepseek_v3",
        deepseek_v3,
        DEEPSEEK_NAMES,
        DEEPSEEK,
        ignored=NEXT_TOKENS,
        gguf=GGUF("deepseek2", fixed=deepseek_gguf),
    ),
)
