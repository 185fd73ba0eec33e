"""Decoders that differ from Llama by norms, residuals, multipliers or who has rope."""

from octavo.contract import DecoderSpec, Norm, QKNorm
from octavo.model.config import ConfigView
from octavo.model.families.base import FULL, GGUF, LLAMA, SLIDING, Family, edit, llama, rms, sliding_pattern
from octavo.model.families.llama import GLM, PACKED, PLAIN_MLP, qwen2

__all__ = ["FAMILIES", "MULTIPLIERS", "POST", "granite"]

POST = {**LLAMA, "attn_post": "post_attention_layernorm", "mlp_post": "post_feedforward_layernorm"}
WINDOW = {"sliding_window": 4096}
SIDE_BY_SIDE = {"residual": "parallel_shared_norm", "mlp_pre": None}


def without_rope(where: bool) -> dict[str, None]:
    return {"rope": None} if where else {}


def qwen3(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return edit(qwen2(c, max_model_len), attn={"qk_norm": QKNorm(rms(c))})


QWEN3 = Family("qwen3", qwen3, defaults={**WINDOW, "max_window_layers": 28, "head_dim": 128}, gguf=GGUF("qwen3"))


def granite(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return edit(
        llama(c, max_model_len),
        attn={"scale": c.attention_multiplier},
        layer={"residual_scale": c.residual_multiplier},
        embedding_scale=c.embedding_multiplier,
        logit_scale=1 / c.logits_scaling,
    )


MULTIPLIERS = {f"{name}_multiplier": 1.0 for name in ("attention", "residual", "embedding")} | {"logits_scaling": 1.0}
GRANITE = Family("granite", granite, defaults=MULTIPLIERS, gguf=GGUF("granite", permuted=True))


def olmo(c: ConfigView, max_model_len: int) -> DecoderSpec:
    """Norms without weights."""
    spec = llama(c, max_model_len, norm=Norm(1e-5, "layer", weighted=False))
    return edit(spec, attn={"qkv_clip": c.get("clip_qkv")})


OLMO = Family("olmo", olmo, gguf=GGUF("olmo", permuted=True))


def olmo2(c: ConfigView, max_model_len: int, kinds: list[str] | None = None) -> DecoderSpec:
    """Norms after the branches instead of before them."""
    norm = rms(c)
    post = {"attn_pre": None, "mlp_pre": None, "attn_post": norm, "mlp_post": norm}
    return edit(llama(c, max_model_len, kinds=kinds), attn={"qk_norm": QKNorm(norm, "all_heads")}, layer=post)


OLMO2 = Family("olmo2", olmo2, POST, {"rms_norm_eps": 1e-5}, gguf=GGUF("olmo2"))


def olmo3(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return olmo2(c, max_model_len, sliding_pattern(c.num_hidden_layers, 4))


OLMO3 = Family(
    "olmo3",
    olmo3,
    POST,
    {**WINDOW, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_local_base_freq": 5e5},
    gguf=GGUF("olmo2", mark="attention.sliding_window"),
)


def exaone4(c: ConfigView, max_model_len: int) -> DecoderSpec:
    """As Olmo 2, with norms by head; where some layers slide, those that see everything have no rope."""
    slides = c.get("sliding_window") is not None
    kinds = c.get("layer_types", sliding_pattern(c.num_hidden_layers, c.sliding_window_pattern if slides else 1))
    qk_norm = {"qk_norm": QKNorm(rms(c))}
    return edit(olmo2(c, max_model_len, kinds), attn=lambda i: qk_norm | without_rope(slides and kinds[i] == FULL))


EXAONE4 = Family(
    "exaone4", exaone4, POST, {**WINDOW, "rms_norm_eps": 1e-5, "sliding_window_pattern": 4}, gguf=GGUF("exaone4")
)


def smollm3(c: ConfigView, max_model_len: int) -> DecoderSpec:
    has_rope = c.get("no_rope_layers") or [(i + 1) % c.no_rope_layer_interval for i in range(c.num_hidden_layers)]
    slides = c.get("use_sliding_window") and c.get("sliding_window") is not None
    kinds = [SLIDING if slides and not rotates else FULL for rotates in has_rope]
    return edit(llama(c, max_model_len, kinds=kinds), attn=lambda i: without_rope(not has_rope[i]))


SMOLLM3 = Family(
    "smollm3",
    smollm3,
    defaults={
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "sliding_window": None,
    },
    gguf=GGUF("smollm3", permuted=True),
)


def glm4(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return edit(llama(c, max_model_len, interleaved=True), layer={"attn_post": rms(c), "mlp_post": rms(c)})


GLM4_NAMES = {**PACKED, "attn_post": "post_self_attn_layernorm", "mlp_post": "post_mlp_layernorm"}
GLM4 = Family("glm4", glm4, GLM4_NAMES, GLM, gguf=GGUF("glm4"))


def cohere(c: ConfigView, max_model_len: int) -> DecoderSpec:
    """Attention and MLP side by side behind one norm."""
    norm = Norm(c.layer_norm_eps, "layer")
    return edit(
        llama(c, max_model_len, norm=norm, interleaved=True),
        attn={"qk_norm": QKNorm(norm, "each_head") if c.use_qk_norm else None},
        layer=SIDE_BY_SIDE,
        logit_scale=c.logit_scale,
    )


COHERE_DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}
COHERE = Family(
    "cohere",
    cohere,
    defaults={**COHERE_DEFAULTS, "rope_theta": 5e5, "use_qk_norm": False},
    gguf=GGUF("command-r", fixed=lambda config: {"use_qk_norm": config["qk_layernorm"]}),
)


def cohere2(c: ConfigView, max_model_len: int) -> DecoderSpec:
    """As Cohere; layers that see everything have no rope."""
    kinds = c.get("layer_types", sliding_pattern(c.num_hidden_layers, c.sliding_window_pattern))
    spec = llama(c, max_model_len, norm=Norm(c.layer_norm_eps, "layer"), kinds=kinds, interleaved=True)
    no_rope = lambda i: without_rope(kinds[i] == FULL)  # noqa: E731
    return edit(spec, attn=no_rope, layer=SIDE_BY_SIDE, logit_scale=c.logit_scale)


COHERE2 = Family(
    "cohere2", cohere2, defaults={**COHERE_DEFAULTS, **WINDOW, "sliding_window_pattern": 4}, gguf=GGUF("cohere2")
)


def stablelm(c: ConfigView, max_model_len: int) -> DecoderSpec:
    norm = Norm(c.layer_norm_eps, "layer")
    qk_norm = QKNorm(norm, "each_head") if c.qk_layernorm else None
    layer = SIDE_BY_SIDE if c.use_parallel_residual else {}
    return edit(llama(c, max_model_len, norm=norm), attn={"qk_norm": qk_norm}, layer=layer)


STABLELM = Family(
    "stablelm",
    stablelm,
    {**LLAMA, **{f"attn.{x}_norm": f"self_attn.{x}_layernorm.norms.{{n}}" for x in "qk"}},
    {"layer_norm_eps": 1e-5, "use_parallel_residual": False, "qk_layernorm": False, "partial_rotary_factor": 0.25},
    gguf=GGUF("stablelm", fixed=lambda config: {"use_parallel_residual": not config["has_mlp_norm"]}),
)


def phi(c: ConfigView, max_model_len: int) -> DecoderSpec:
    norm = Norm(c.layer_norm_eps, "layer")
    qk_norm = QKNorm(norm) if c.qk_layernorm else None
    return edit(llama(c, max_model_len, norm=norm, gated=False), attn={"qk_norm": qk_norm}, layer=SIDE_BY_SIDE)


PHI_NAMES = {
    **LLAMA,
    "final_norm": "model.final_layernorm",
    "attn.q_norm": "self_attn.q_layernorm",
    "attn.k_norm": "self_attn.k_layernorm",
    "attn.o": "self_attn.dense",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
PHI = Family(
    "phi",
    phi,
    PHI_NAMES,
    {"layer_norm_eps": 1e-5, "qk_layernorm": False, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new"},
    gguf=GGUF("phi2"),
)


def starcoder2(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return llama(c, max_model_len, norm=Norm(c.norm_epsilon, "layer"), gated=False)


STARCODER2 = Family(
    "starcoder2",
    starcoder2,
    {**LLAMA, "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    {
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "sliding_window": None,
    },
    gguf=GGUF("starcoder2"),
)


def nemotron(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return llama(c, max_model_len, norm=Norm(c.norm_eps, "layer", c.norm_weight_offset), gated=False)


NEMOTRON = Family(
    "nemotron",
    nemotron,
    PLAIN_MLP,
    {"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5, "norm_weight_offset": 1.0},
    gguf=GGUF("nemotron", fixed=lambda config: {"norm_weight_offset": 0.0}),  # such files store whole norms
)

FAMILIES = (
    QWEN3,
    GRANITE,
    OLMO,
    OLMO2,
    OLMO3,
    EXAONE4,
    SMOLLM3,
    GLM4,
    COHERE,
    COHERE2,
    STABLELM,
    PHI,
    STARCODER2,
    NEMOTRON,
)
