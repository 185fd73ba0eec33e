"""Gemma: norms that store their weights less 1, scaled embeddings, soft caps."""

from collections.abc import Mapping
from typing import Any

from octavo.contract import DecoderSpec, QKNorm
from octavo.errors import UnsupportedError
from octavo.model.config import ConfigView
from octavo.model.families.base import GGUF, LLAMA, Family, edit, llama, rms, sliding_pattern
from octavo.model.families.dense import POST

__all__ = ["FAMILIES"]


def gemma(c: ConfigView, max_model_len: int) -> DecoderSpec:
    spec = llama(c, max_model_len, norm=rms(c, weight_offset=c.norm_weight_offset))
    mlp = {"activation": "gelu_tanh"}  # also where the first releases say "gelu"
    return edit(spec, mlp=mlp, embedding_scale=c.hidden_size**0.5)


WHOLE_NORMS = {"norm_weight_offset": 0.0}  # in GGUF files
COMMON = {"head_dim": 256, "norm_weight_offset": 1.0, "tie_word_embeddings": True}
GEMMA = Family(
    "gemma",
    gemma,
    LLAMA,
    {**COMMON, "num_key_value_heads": 16},
    gguf=GGUF("gemma", fixed=lambda config: WHOLE_NORMS),
)


def gemma2(c: ConfigView, max_model_len: int) -> DecoderSpec:
    """Norms before and after each branch."""
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


def gguf_values(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Such files leave the scale of scores to the reader: the ones of 27 billion have their own."""
    by_width = config["num_hidden_layers"] in (46, 62)
    scalar = config["hidden_size"] // config["num_attention_heads"] if by_width else config["head_dim"]
    return {**WHOLE_NORMS, "query_pre_attn_scalar": scalar}


SANDWICH = {**POST, "mlp_pre": "pre_feedforward_layernorm"}
COMMON2 = {
    **COMMON,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA2 = Family(
    "gemma2",
    gemma2,
    SANDWICH,
    {**COMMON2, "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    gguf=GGUF("gemma2", fixed=gguf_values),
)


def gemma3(c: ConfigView, max_model_len: int) -> DecoderSpec:
    return edit(gemma2(c, max_model_len), attn={"qk_norm": QKNorm(rms(c, weight_offset=c.norm_weight_offset))})


GEMMA3 = Family(
    "gemma3_text",
    gemma3,
    SANDWICH,
    {**COMMON2, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    gguf=GGUF("gemma3", fixed=gguf_values),
)

FAMILIES = (GEMMA, GEMMA2, GEMMA3)
