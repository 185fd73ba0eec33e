"""DeepSeek: latent attention, and experts that are chosen by sigmoid beside shared ones; GLM 4 has such experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.contract import DecoderSpec, ExpertGroups, LatentAttention, Mlp, Moe, Norm, QKNorm, SharedExpert
from octavo.errors import UnsupportedError
from octavo.model.config import ConfigView
from octavo.model.families.base import GGUF, LLAMA, Family, activation, edit, llama, rms
from octavo.model.families.rope import rope, rope_parameters, yarn_gain

__all__ = ["FAMILIES"]


def experts(c: ConfigView, i: int) -> dict[str, Any]:
    """Layer i's experts, if it has any."""
    if i < c.first_k_dense_replace:
        return {}
    expert = Mlp(c.moe_intermediate_size, activation(c.get("hidden_act", "silu")))
    moe = Moe(
        c.n_routed_experts,
        c.num_experts_per_tok,
        expert,
        score="sigmoid",
        renormalize=c.norm_topk_prob,
        scale=c.routed_scaling_factor,
        groups=ExpertGroups(c.n_group, c.topk_group),
        shared=SharedExpert(replace(expert, width=expert.width * c.n_shared_experts)),
    )
    return {"mlp": moe}


EXPERT_NAMES = {
    **LLAMA,
    "moe.correction": "mlp.gate.e_score_correction_bias",
    "shared.up": "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj",
    "shared.down": "mlp.shared_experts.down_proj",
}
NEXT_TOKENS = (r"model\.layers\.{num_layers}\..*",)  # a layer that drafts the token after the next


def glm4_moe(c: ConfigView, max_model_len: int) -> DecoderSpec:
    qk_norm = QKNorm(rms(c)) if c.use_qk_norm else None
    return edit(llama(c, max_model_len), attn={"qk_norm": qk_norm}, layer=lambda i: experts(c, i))


GLM4_MOE = Family(
    "glm4_moe",
    glm4_moe,
    EXPERT_NAMES,
    {
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
    },
    ignored=NEXT_TOKENS,
    gguf=GGUF("glm4moe", fixed=lambda config: {"use_qk_norm": config["qk_layernorm"]}),
)


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
    layers = tuple(replace(layer, attn=attn, **experts(c, i)) for i, layer in enumerate(spec.layers))
    return replace(spec, layers=layers)


SIGMOID = 2  # gguf.ExpertGatingFuncType


def deepseek_gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Such files count a head with its rope, and keep a tenth of what yarn multiplies the score's scale by."""
    if config.get("scoring_func") != SIGMOID:
        raise UnsupportedError("experts chosen by softmax (DeepSeek 2) are not supported, those by sigmoid are")
    scaling = dict(config["rope_parameters"])
    if "yarn_log_multiplier" in scaling:
        scaling["mscale"] = scaling["mscale_all_dim"] = scaling["yarn_log_multiplier"] * 10
    return {
        "qk_nope_head_dim": config["qk_head_dim"] - config["qk_rope_head_dim"],
        "partial_rotary_factor": None,
        "norm_topk_prob": config.get("norm_topk_prob", False),
        "rope_parameters": scaling,
    }


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    deepseek_v3,
    {
        **EXPERT_NAMES,
        "attn.q_a": "self_attn.q_a_proj",
        "attn.q_a_norm": "self_attn.q_a_layernorm",
        "attn.q": "self_attn.q_b_proj | self_attn.q_proj",
        "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
        "attn.kv_a_norm": "self_attn.kv_a_layernorm",
        "attn.kv_b": "self_attn.kv_b_proj",
    },
    {
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "rope_interleave": True,
    },
    ignored=NEXT_TOKENS,
    gguf=GGUF("deepseek2", fixed=deepseek_gguf),
)

FAMILIES = (GLM4_MOE, DEEPSEEK_V3)
