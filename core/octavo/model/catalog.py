"""What models are served, by which program, and what each family takes: found by building them, so that it is so."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from octavo.contract import Attention, DecoderSpec, LatentAttention, Moe, Rope
from octavo.model.config import ConfigView
from octavo.model.families import FAMILIES, Family

__all__ = ["TRIED_THROUGH_TRANSFORMERS", "FamilyEntry", "families"]

# Causal language models of transformers that no family covers and that the tests hold against transformers.
TRIED_THROUGH_TRANSFORMERS = (
    "biogpt",
    "codegen",
    "ctrl",
    "gpt_bigcode",
    "gptj",
    "minicpm3",
    "modernbert-decoder",
    "nanochat",
    "persimmon",
    "phimoe",
)

MAX_MODEL_LEN = 512
# A small model that asks for everything that any family's config can.
EVERYTHING: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "use_sliding_window": True,
    "max_window_layers": 6,
    "use_parallel_residual": True,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "clip_qkv": 1.0,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
ORIGINAL = {"original_max_position_embeddings": 64}
SCALINGS: Mapping[str, Mapping[str, Any]] = {
    "linear": {},
    "dynamic": {},
    "llama3": {**ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": ORIGINAL,
    "longrope": ORIGINAL,
}


@dataclass(frozen=True)
class FamilyEntry:
    """One family that the native program runs.

    Attributes:
        model_type: as config.json spells it.
        attention: what its attention layers are or can be ("sliding", "q/k norm", ...).
        feed_forward: the same of what follows them ("gated", "experts", ...).
        positions: how it tells positions ("rope", ...).
        rope_scalings: the rope scalings that it takes.
        gguf: its architecture in GGUF files; None: they are not read.

    """

    model_type: str
    attention: tuple[str, ...]
    feed_forward: tuple[str, ...]
    positions: tuple[str, ...]
    rope_scalings: tuple[str, ...]
    gguf: str | None


@cache
def families() -> tuple[FamilyEntry, ...]:
    """Every family, by name."""
    return tuple(_entry(FAMILIES[name]) for name in sorted(FAMILIES))


def _entry(family: Family) -> FamilyEntry:
    spec = _build(family)
    slides = "sliding_window" in family.defaults
    windowed = _build(family, sliding_window=8) if slides else spec
    return FamilyEntry(
        family.model_type,
        tuple(_attention(spec, windowed)),
        tuple(_feed_forward(spec)),
        tuple(_positions(spec)),
        tuple(name for name in SCALINGS if _takes(family, spec, name)),
        family.gguf.architecture if family.gguf else None,
    )


def _build(family: Family, **more: Any) -> DecoderSpec:
    values = {**EVERYTHING, "model_type": family.model_type, "sliding_window": None, **more}
    return family.build(ConfigView(values, family.model_type, family.defaults, family.aliases), MAX_MODEL_LEN)


def _attention(*specs: DecoderSpec) -> Iterator[str]:
    kinds = [layer.attn for spec in specs for layer in spec.layers]
    plain = [attn for attn in kinds if isinstance(attn, Attention)]
    if any(isinstance(attn, LatentAttention) for attn in kinds):
        yield "latent"
    if any(attn.window is None for attn in plain):
        yield "full"
    if any(attn.window is not None for attn in plain):
        yield "sliding"
    if any(attn.qk_norm for attn in plain):
        yield "q/k norm"
    if any(attn.qkv_clip for attn in plain):
        yield "clip"
    if any(attn.softcap for attn in plain):
        yield "soft cap"
    if any(attn.sinks for attn in plain):
        yield "sinks"


def _feed_forward(spec: DecoderSpec) -> Iterator[str]:
    kinds = [layer.mlp for layer in spec.layers]
    experts = [mlp for mlp in kinds if isinstance(mlp, Moe)]
    if any(not isinstance(mlp, Moe) and mlp.gated for mlp in kinds):
        yield "gated"
    if any(not isinstance(mlp, Moe) and not mlp.gated for mlp in kinds):
        yield "plain"
    if experts:
        yield f"experts by {experts[0].score}"
    if any(moe.shared for moe in experts):
        yield "shared expert"
    if any(layer.residual != "sequential" for layer in spec.layers):
        yield "beside attention"


def _positions(spec: DecoderSpec) -> Iterator[str]:
    ropes = list(_ropes(spec))
    if any(ropes):
        yield "rope" if all(ropes) else "rope in some layers"
    if spec.positions:
        yield "learned"


def _ropes(spec: DecoderSpec) -> Iterator[Rope | None]:
    return (layer.attn.rope for layer in spec.layers)


def _takes(family: Family, plain: DecoderSpec, scaling: str) -> bool:
    """Whether the scaling makes another rope of some layer."""
    rope = next(filter(None, _ropes(plain)), None)
    if rope is None:
        return False
    factors = {f"{kind}_factor": [4.0] * len(rope.inv_freq) for kind in ("short", "long")}
    parameters = {"rope_type": scaling, "factor": 4.0, **factors, **SCALINGS[scaling]}
    return tuple(_ropes(_build(family, rope_parameters=parameters))) != tuple(_ropes(plain))
