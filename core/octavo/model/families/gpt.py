"""The GPT line: layer norms, biases, plain MLPs; learned positions or a partial rope."""

from octavo.contract import DecoderSpec, LearnedPositions, Norm
from octavo.errors import UnsupportedError
from octavo.model.config import ConfigView
from octavo.model.families.base import GGUF, Family, edit, llama

__all__ = ["FAMILIES"]


def gpt_neox(c: ConfigView, max_model_len: int) -> DecoderSpec:
    spec = llama(c, max_model_len, norm=Norm(c.layer_norm_eps, "layer"), gated=False)
    return edit(spec, layer={"residual": "parallel"} if c.use_parallel_residual else {})


GPT_NEOX = Family(
    "gpt_neox",
    gpt_neox,
    {
        "embedding": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out | lm_head",
        "layer": "gpt_neox.layers.{i}.",
        "attn_pre": "input_layernorm",
        "attn.qkv": "attention.query_key_value:split_heads",
        "attn.o": "attention.dense",
        "mlp_pre": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "use_parallel_residual": True, "partial_rotary_factor": 0.25},
    {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
    ignored=(r".*\.attention\.(masked_)?bias",),
    gguf=GGUF("gptneox"),
)


def gpt2(c: ConfigView, max_model_len: int) -> DecoderSpec:
    if c.get("scale_attn_by_inverse_layer_idx") or not c.scale_attn_weights:
        raise UnsupportedError("attention scores scaled by layer, or not at all, are not supported")
    spec = llama(c, max_model_len, norm=Norm(c.layer_norm_epsilon, "layer"), gated=False, has_rope=False)
    return edit(spec, positions=LearnedPositions(c.max_position_embeddings))


GPT2 = Family(
    "gpt2",
    gpt2,
    {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        "layer": "transformer.h.{i}.",
        "attn_pre": "ln_1",
        "attn.qkv": "attn.c_attn:transpose",
        "attn.o": "attn.c_proj:transpose",
        "mlp_pre": "ln_2",
        "mlp.up": "mlp.c_fc:transpose",
        "mlp.down": "mlp.c_proj:transpose",
    },
    {
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
    },
    ignored=(r"(.*\.)?attn\.(masked_)?bias",),
    gguf=GGUF("gpt2"),
)


def opt(c: ConfigView, max_model_len: int) -> DecoderSpec:
    if not c.do_layer_norm_before or c.get("word_embed_proj_dim", c.hidden_size) != c.hidden_size:
        raise UnsupportedError("norms on the residual stream and projected embeddings (opt-350m) are not supported")
    norm = Norm(1e-5, "layer", weighted=c.layer_norm_elementwise_affine)
    spec = llama(c, max_model_len, norm=norm, gated=False, has_rope=False)
    return edit(spec, positions=LearnedPositions(c.max_position_embeddings, offset=2))


OPT = Family(
    "opt",
    opt,
    {
        "embedding": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "final_norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
        "layer": "model.decoder.layers.{i}.",
        "attn_pre": "self_attn_layer_norm",
        "attn.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "attn.o": "self_attn.out_proj",
        "mlp_pre": "final_layer_norm",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    },
    {
        "do_layer_norm_before": True,
        "layer_norm_elementwise_affine": True,
        "hidden_act": "relu",
        "tie_word_embeddings": True,
    },
    {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
)

FAMILIES = (GPT_NEOX, GPT2, OPT)
