"""Mixtures of experts."""

from collections.abc import Mapping
from typing import Any

from octavo.contract import DecoderSpec, Mlp, Moe, QKNorm, SharedExpert
from octavo.errors import UnsupportedError
from octavo.model.config import ConfigView
from octavo.model.families.base import FULL, GGUF, LLAMA, SLIDING, Family, activation, edit, llama, rms, sliding_pattern
from octavo.model.families.dense import MULTIPLIERS, granite

__all__ = ["FAMILIES"]


def local_experts(c: ConfigView, **options: Any) -> Moe:
    """Experts of the config's intermediate size."""
    expert = Mlp(c.intermediate_size, activation(c.get("hidden_act", "silu")))
    return Moe(c.num_local_experts, c.num_experts_per_tok, expert, **options)


def mixtral(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return edit(llama(c, max_model_len), layer={"mlp": local_experts(c)})


EACH = "block_sparse_moe.experts.{n}"
MIXTRAL_NAMES = {
    **LLAMA,
    "moe.router": "block_sparse_moe.gate | mlp.gate",
    "moe.up": f"{EACH}.w1 {EACH}.w3 | mlp.experts.gate_up_proj",
    "moe.down": f"{EACH}.w2 | mlp.experts.down_proj",
}
MIXTRAL = Family(
    "mixtral",
    mixtral,
    MIXTRAL_NAMES,
    {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "sliding_window": None},
    gguf=GGUF("llama", mark="expert_count", permuted=True),
)


def minimax_m2(c: ConfigView, max_model_len: int) -> DecoderSpec:
    qk_norm = QKNorm(rms(c), "all_heads")
    return edit(llama(c, max_model_len), attn={"qk_norm": qk_norm}, layer={"mlp": local_experts(c, score="sigmoid")})


MINIMAX_M2 = Family(
    "minimax_m2",
    minimax_m2,
    {
        **MIXTRAL_NAMES,
        "moe.correction": "block_sparse_moe.e_score_correction_bias | mlp.e_score_correction_bias",
    },
    {"rope_theta": 5e6, "head_dim": 128, "num_key_value_heads": 8},
    gguf=GGUF("minimax-m2"),
)


def granitemoe(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return edit(granite(c, max_model_len), layer={"mlp": local_experts(c)})


GRANITE_MOE = Family(
    "granitemoe",
    granitemoe,
    {
        **LLAMA,
        "moe.router": "block_sparse_moe.router.layer | block_sparse_moe.router",
        "moe.up": "block_sparse_moe.input_linear | block_sparse_moe.experts.gate_up_proj",
        "moe.down": "block_sparse_moe.output_linear | block_sparse_moe.experts.down_proj",
    },
    {**MULTIPLIERS, "num_local_experts": 8, "num_experts_per_tok": 2},
    gguf=GGUF("granitemoe", permuted=True),
)


def olmoe(c: ConfigView, max_model_len: int) -> DecoderSpec:
    attn = {"qk_norm": QKNorm(rms(c), "all_heads"), "qkv_clip": c.get("clip_qkv")}
    return edit(llama(c, max_model_len), attn=attn, layer={"mlp": local_experts(c, renormalize=c.norm_topk_prob)})


OLMOE = Family(
    "olmoe",
    olmoe,
    LLAMA,
    {"norm_topk_prob": False, "rms_norm_eps": 1e-5},
    {"num_local_experts": "num_experts"},
    gguf=GGUF("olmoe"),
)


def qwen_experts(c: ConfigView, i: int, shared: SharedExpert | None = None) -> dict[str, Any]:
    """Layer i's experts, if it has any."""
    if i in c.get("mlp_only_layers", []) or (i + 1) % c.decoder_sparse_step:
        return {}
    expert = Mlp(c.moe_intermediate_size, activation(c.get("hidden_act", "silu")))
    return {"mlp": Moe(c.num_experts, c.num_experts_per_tok, expert, renormalize=c.norm_topk_prob, shared=shared)}


QWEN = {"sliding_window": 4096, "decoder_sparse_step": 1, "norm_topk_prob": False}


def qwen3_moe(c: ConfigView, max_model_len: int) -> DecoderSpec:
    kinds = [SLIDING if c.get("use_sliding_window") else FULL] * c.num_hidden_layers
    spec = llama(c, max_model_len, kinds=kinds)
    return edit(spec, attn={"qk_norm": QKNorm(rms(c))}, layer=lambda i: qwen_experts(c, i))


QWEN3_MOE = Family(
    "qwen3_moe",
    qwen3_moe,
    LLAMA,
    {**QWEN, "num_key_value_heads": 4},
    {"num_experts": "num_local_experts"},
    gguf=GGUF("qwen3moe", fixed=lambda config: {"norm_topk_prob": True}),
)


def qwen2_moe(c: ConfigView, max_model_len: int) -> DecoderSpec:
    every_other = sliding_pattern(c.num_hidden_layers, 2)
    slides = c.get("use_sliding_window", False)
    kinds = [kind if slides and i < c.max_window_layers else FULL for i, kind in enumerate(every_other)]
    shared = Mlp(c.shared_expert_intermediate_size, activation(c.get("hidden_act", "silu")))
    gated = SharedExpert(shared, gated=True)
    return edit(llama(c, max_model_len, kinds=kinds), layer=lambda i: qwen_experts(c, i, gated))


QWEN2_MOE = Family(
    "qwen2_moe",
    qwen2_moe,
    {
        **LLAMA,
        "shared.up": "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj",
        "shared.down": "mlp.shared_expert.down_proj",
        "shared.gate": "mlp.shared_expert_gate",
    },
    {**QWEN, "max_window_layers": 28},
    gguf=GGUF("qwen2moe"),
)


def gpt_oss(c: ConfigView, max_model_len: int) -> DecoderSpec:
    alpha, limit = c.swiglu_alpha, c.swiglu_limit
    if (alpha, limit) != (1.702, 7.0):
        raise UnsupportedError(f"swiglu_alpha {alpha} and swiglu_limit {limit}, supported are 1.702 and 7")
    spec = llama(c, max_model_len, kinds=sliding_pattern(c.num_hidden_layers, 2))
    moe = Moe(c.num_local_experts, c.num_experts_per_tok, Mlp(c.intermediate_size, "swiglu_clamped"))
    return edit(spec, attn={"sinks": True}, layer={"mlp": moe})


def gpt_oss_gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Such files do not say that yarn's range is not rounded, and count the width of an expert apart."""
    return {
        "intermediate_size": config["moe_intermediate_size"],
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
    }


GPT_OSS = Family(
    "gpt_oss",
    gpt_oss,
    {
        **LLAMA,
        "attn.sinks": "self_attn.sinks",
        "moe.router": "mlp.router",
        "moe.up": "mlp.experts.gate_up_proj:transpose,even_rows_first",
        "moe.down": "mlp.experts.down_proj:transpose",
    },
    {
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    gguf=GGUF("gpt-oss", fixed=gpt_oss_gguf),
)

FAMILIES = (MIXTRAL, MINIMAX_M2, GRANITE_MOE, OLMOE, QWEN3_MOE, QWEN2_MOE, GPT_OSS)
