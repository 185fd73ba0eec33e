"""Decoders that differ from Llama by norms, residuals, biases, multipliers or who has rope."""

from octavo.contract import DecoderSpec, Norm, QKNorm
from octavo.model.config import ConfigView
from octavo.model.families.base import FULL, GGUF, LLAMA, SLIDING, Family, edit, llama, rms, sliding_pattern
from octavo.model.families.llama import GLM, PACKED, PLAIN_MLP, qwen2

__all__ = ["FAMILIES", "POST", "granite", "qwen3"]

POST = {**LLAMA, "attn_post": "post_attention_layernorm", "mlp_post": "post_feedforward_layernorm"}


SIDE_BY_SIDE = {"residual": "parallel_shared_norm", "mlp_pre": None}


def qwen3(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return edit(qwen2(c, max_model_len), attn={"qk_norm": QKNorm(rms(c))})


def granite(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return edit(
        llama(c, max_model_len),
        attn={"scale": c.attention_multiplier},
        layer={"residual_scale": c.residual_multiplier},
        embedding_scale=c.embedding_multiplier,
        logit_scale=1 / c.logits_scaling,
    )


MULTIPLIERS = {f"{name}_multiplier": 1.0 for name in ("attention", "residual", "embedding")} | {"logits_scaling": 1.0}


def olmo(c: ConfigView, max_model_len: int) -> DecoderSpec:
    """Norms without weights."""
    spec = llama(c, max_model_len, norm=Norm(1e-5, "layer", weighted=False))
    return edit(spec, attn={"qkv_clip": c.get("clip_qkv")})


def olmo2(c: ConfigView, max_model_len: int, kinds: list[str] | None = None) -> DecoderSpec:
    """Norms after the branches instead of before them."""
    norm = rms(c)
    spec = llama(c, max_model_len, kinds=kinds)
    post = {"attn_pre": None, "mlp_pre": None, "attn_post": norm, "mlp_post": norm}
    return edit(spec, attn={"qk_norm": QKNorm(norm, "all_heads")}, layer=post)


def olmo3(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return olmo2(c, max_model_len, sliding_pattern(c.num_hidden_layers, 4))


def exaone4(c: ConfigView, max_model_len: int) -> DecoderSpec:
    """As Olmo 2, with norms by head; where some layers slide, those that see everything have no rope."""
    slides = c.get("sliding_window") is not None
    pattern = sliding_pattern(c.num_hidden_layers, c.sliding_window_pattern if slides else 1)
    kinds = c.get("layer_types", pattern)
    no_rope = [slides and kind == FULL for kind in kinds]
    return edit(olmo2(c, max_model_len, kinds), attn=lambda i: {"qk_norm": QKNorm(rms(c))} | _no_rope(no_rope[i]))


def smollm3(c: ConfigView, max_model_len: int) -> DecoderSpec:
    has_rope = c.get("no_rope_layers") or [(i + 1) % c.no_rope_layer_interval for i in range(c.num_hidden_layers)]
    slides = c.get("use_sliding_window") and c.get("sliding_window") is not None
    kinds = [SLIDING if slides and not rotates else FULL for rotates in has_rope]
    return edit(llama(c, max_model_len, kinds=kinds), attn=lambda i: _no_rope(not has_rope[i]))


def _no_rope(where: bool) -> dict[str, None]:
    return {"rope": None} if where else {}


def glm4(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return edit(llama(c, max_model_len, interleaved=True), layer={"attn_post": rms(c), "mlp_post": rms(c)})


def cohere(c: ConfigView, max_model_len: int) -> DecoderSpec:
    """Attention and MLP side by side behind one norm."""
    norm = Norm(c.layer_norm_eps, "layer")
    return edit(
        llama(c, max_model_len, norm=norm, interleaved=True),
        attn={"qk_norm": QKNorm(norm, "each_head") if c.use_qk_norm else None},
        layer=SIDE_BY_SIDE,
        logit_scale=c.logit_scale,
    )


def cohere2(c: ConfigView, max_model_len: int) -> DecoderSpec:
    """As Cohere; layers that see everything have no rope."""
    kinds = c.get("layer_types", sliding_pattern(c.num_hidden_layers, c.sliding_window_pattern))
    spec = llama(c, max_model_len, norm=Norm(c.layer_norm_eps, "layer"), kinds=kinds, interleaved=True)
    return edit(
        spec,
        attn=lambda i: _no_rope(kinds[i] == FULL),
        layer=SIDE_BY_SIDE,
        logit_scale=c.logit_scale,
    )


def stablelm(c: ConfigView, max_model_len: int) -> DecoderSpec:
    norm = Norm(c.layer_norm_eps, "layer")
    qk_norm = QKNorm(norm, "each_head") if c.qk_layernorm else None
    layer = SIDE_BY_SIDE if c.use_parallel_residual else {}
    return edit(llama(c, max_model_len, norm=norm), attn={"qk_norm": qk_norm}, layer=layer)


def phi(c: ConfigView, max_model_len: int) -> DecoderSpec:
    norm = Norm(c.layer_norm_eps, "layer")
    spec = llama(c, max_model_len, norm=norm, gated=False)
    return edit(spec, attn={"qk_norm": QKNorm(norm) if c.qk_layernorm else None}, layer=SIDE_BY_SIDE)


def starcoder2(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return llama(c, max_model_len, norm=Norm(c.norm_epsilon, "layer"), gated=False)


def nemotron(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return llama(c, max_model_len, norm=Norm(c.norm_eps, "layer", c.norm_weight_offset), gated=False)


WINDOW = {"sliding_window": 4096}
STABLELM_NAMES = {
    **LLAMA,
    "attn.q_norm": "self_attn.q_layernorm.norms.{n}",
    "attn.k_norm": "self_attn.k_layernorm.norms.{n}",
}
PHI_NAMES = {
    **LLAMA,
    "final_norm": "model.final_layernorm",
    "attn.q_norm": "self_attn.q_layernorm",
    "attn.k_norm": "self_attn.k_layernorm",
    "attn.o": "self_attn.dense",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
GLM4_NAMES = {**PACKED, "attn_post": "post_self_attn_layernorm", "mlp_post": "post_mlp_layernorm"}

FAMILIES = (
    Family("qwen3", qwen3, defaults={**WINDOW, "max_window_layers": 28, "head_dim": 128}, gguf=GGUF("qwen3")),
    Family("granite", granite, defaults=MULTIPLIERS, gguf=GGUF("granite", permuted=True)),
    Family("olmo", olmo, gguf=GGUF("olmo", permuted=True)),
    Family("olmo2", olmo2, POST, {"rms_norm_eps": 1e-5}, gguf=GGUF("olmo2")),
    Family(
        "olmo3",
        olmo3,
        POST,
        {**WINDOW, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_local_base_freq": 5e5},
        gguf=GGUF("olmo2", mark="attention.sliding_window"),
    ),
    Family(
        "exaone4", exaone4, POST, {**WINDOW, "rms_norm_eps": 1e-5, "sliding_window_pattern": 4}, gguf=GGUF("exaone4")
    ),
    Family(
        "smollm3",
        smollm3,
        defaults={
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        gguf=GGUF("smollm3", permuted=True),
    ),
    Family(
        "glm4",
        glm4,
        GLM4_NAMES,
        GLM,
        gguf=GGUF("glm4"),
    ),
    Family(
        "cohere",
        cohere,
        defaults={
            "rope_theta": 5e5,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "use_qk_norm": False,
            "tie_word_embeddings": True,
        },
        gguf=GGUF("command-r", fixed=lambda config: {"use_qk_norm": config["qk_layernorm"]}),
    ),
    Family(
        "cohere2",
        cohere2,
        defaults={
            **WINDOW,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
        },
        gguf=GGUF("cohere2"),
    ),
    Family(
        "stablelm",
        stablelm,
        STABLELM_NAMES,
        {"layer_norm_eps": 1e-5, "use_parallel_residual": False, "qk_layernorm": False, "partial_rotary_factor": 0.25},
        gguf=GGUF("stablelm", fixed=lambda config: {"use_parallel_residual": not config["has_mlp_norm"]}),
    ),
    Family(
        "phi",
        phi,
        PHI_NAMES,
        {"layer_norm_eps": 1e-5, "qk_layernorm": False, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new"},
        gguf=GGUF("phi2"),
    ),
    Family(
        "starcoder2",
        starcoder2,
        {**LLAMA, "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
        {
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        gguf=GGUF("starcoder2"),
    ),
    Family(
        "nemotron",
        nemotron,
        PLAIN_MLP,
        {"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5, "norm_weight_offset": 1.0},
        gguf=GGUF("nemotron", fixed=lambda config: {"norm_weight_offset": 0.0}),  # they store whole norms
    ),
)
