"""Gemma: norms around each branch that store their weights less 1, scaled embeddings, soft caps."""

from collections.abc import Mapping
from typing import Any

from octavo.contract import DecoderSpec, QKNorm
from octavo.errors import UnsupportedError
from octavo.model.config import ConfigView
from octavo.model.families.base import GGUF, LLAMA, Family, edit, llama, rms, sliding_pattern
from octavo.model.families.dense import POST

__all__ = ["FAMILIES"]

SANDWICH = {**POST, "mlp_pre": "pre_feedforward_layernorm"}


def gemma(c: ConfigView, max_model_len: int) -> DecoderSpec:
    spec = llama(c, max_model_len, norm=rms(c, weight_offset=c.norm_weight_offset))
    mlp = {"activation": "gelu_tanh"}  # also where the first releases say "gelu"
    return edit(spec, mlp=mlp, embedding_scale=c.hidden_size**0.5)


def gemma2(c: ConfigView, max_model_len: int) -> DecoderSpec:
    if c.get("use_bidirectional_attention"):
        raise UnsupportedError("attention to later tokens (use_bidirectional_attention) is not supported")
    norm = rms(c, weight_offset=c.norm_weight_offset)
    kinds = sliding_pattern(c.num_hidden_layers, c.sliding_window_pattern)
    return edit(
        llama(c, max_model_len, norm=norm, kinds=kinds),
        attn={"scale": c.query_pre_attn_scalar**-0.5, "softcap": c.get("attn_logit_softcapping")},
        layer={"attn_post": norm, "mlp_post": norm},
        embedding_scale=c.hidden_size**0.5,
        logit_softcap=c.get("final_logit_softcapping"),
    )


def gemma3(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return edit(gemma2(c, max_model_len), attn={"qk_norm": QKNorm(rms(c, weight_offset=c.norm_weight_offset))})


DEFAULTS = {
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "norm_weight_offset": 1.0,
    "tie_word_embeddings": True,
}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3 = {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4}


def gguf_values(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Such files store whole norms, and leave the score's scale to the reader: the 27 billion ones have their own."""
    by_width = config["num_hidden_layers"] in (46, 62)
    scalar = config["hidden_size"] // config["num_attention_heads"] if by_width else config["head_dim"]
    return {"norm_weight_offset": 0.0, "query_pre_attn_scalar": scalar}


GEMMA = {"head_dim": 256, "num_key_value_heads": 16, "norm_weight_offset": 1.0, "tie_word_embeddings": True}

FAMILIES = (
    Family("gemma", gemma, LLAMA, GEMMA, gguf=GGUF("gemma", fixed=lambda config: {"norm_weight_offset": 0.0})),
    Family(
        "gemma2",
        gemma2,
        SANDWICH,
        {**DEFAULTS, **CAPS, "sliding_window_pattern": 2},
        gguf=GGUF("gemma2", fixed=gguf_values),
    ),
    Family("gemma3_text", gemma3, SANDWICH, {**DEFAULTS, **GEMMA3}, gguf=GGUF("gemma3", fixed=gguf_values)),
)
