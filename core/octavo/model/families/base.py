"""What a family is, and the decoder that most of them are a variation of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.contract import Attention, DecoderSpec, Layer, Mlp, Norm
from octavo.contract.reference import ACTIVATIONS
from octavo.errors import ModelError, UnsupportedError
from octavo.model.config import ConfigView
from octavo.model.families.rope import FULL, SLIDING, rope

__all__ = ["FULL", "GGUF", "LLAMA", "SLIDING", "Family", "activation", "edit", "llama", "rms", "sliding_pattern"]

LLAMA: Mapping[str, str] = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "layer": "model.layers.{i}.",
    "attn_pre": "input_layernorm",
    "attn.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.o": "self_attn.o_proj",
    "mlp_pre": "post_attention_layernorm",
    "mlp.up": "mlp.gate_proj mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "moe.router": "mlp.gate",
    "moe.up": "mlp.experts.{n}.gate_proj mlp.experts.{n}.up_proj | mlp.experts.gate_up_proj",
    "moe.down": "mlp.experts.{n}.down_proj | mlp.experts.down_proj",
}


@dataclass(frozen=True)
class GGUF:
    """How GGUF files hold a family.

    Attributes:
        architecture: what they call it.
        mark: a metadata key, less the architecture, that tells it from others of the same architecture; "" for the
            one that is meant where no mark is there.
        permuted: their queries and keys rotate by neighbours, as Llama's converter and its heirs' write them.
        fixed: config values that such files do not have, from those that they do.

    """

    architecture: str
    mark: str = ""
    permuted: bool = False
    fixed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}


@dataclass(frozen=True)
class Family:
    """One model type of Hugging Face configs.

    Attributes:
        model_type: as config.json spells it.
        build: from the config and the longest request's number of tokens to the spec.
        names: what safetensors checkpoints call the slots' tensors, see `names.NameTable`.
        defaults: what the config class fills in where config.json omits a key; families whose layers may slide name
            sliding_window here, be it null.
        aliases: key to this family's spelling of it.
        ignored: regular expressions of tensors that no program reads; {num_layers} stands for their number.
        gguf: how GGUF files hold it; None: they do not, or in a way that is not read.

    """

    model_type: str
    build: Callable[[ConfigView, int], DecoderSpec]
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    gguf: GGUF | None = None


def rms(c: ConfigView, weight_offset: float = 0.0) -> Norm:
    """The config's rms norm."""
    return Norm(c.get("rms_norm_eps", 1e-6), weight_offset=weight_offset)


def activation(name: str) -> str:
    """`reference.ACTIVATIONS`' name for what a config calls an activation."""
    spellings = {
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "swish": "silu",
    }
    known = spellings.get(name, name)
    if known not in ACTIVATIONS:
        raise UnsupportedError(
            f"activation {name!r} is not known, known are {', '.join(sorted({*ACTIVATIONS, *spellings}))}"
        )
    return known


def sliding_pattern(num_layers: int, every: int) -> list[str]:
    """Kinds of layers of which each `every`th sees everything and the others slide."""
    return [FULL if (i + 1) % every == 0 else SLIDING for i in range(num_layers)]


def llama(
    c: ConfigView,
    max_model_len: int,
    *,
    norm: Norm | None = None,
    kinds: list[str] | None = None,
    gated: bool = True,
    interleaved: bool = False,
    has_rope: bool = True,
) -> DecoderSpec:
    """Pre-normed attention and MLP with a plain residual, by the keys that most configs have.

    Args:
        c: the config.
        max_model_len: tokens of the longest request.
        norm: of everything; the config's rms norm if None.
        kinds: of the layers where the config does not list them; if None, all slide where there is a window.
        gated: the MLP has a gate.
        interleaved: neighbouring dims of a head rotate together.
        has_rope: positions are rotary.

    """
    num_heads = c.num_attention_heads
    num_kv_heads = c.get("num_key_value_heads", num_heads)
    head_size = c.get("head_dim") or c.hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly")
    window = c.get("sliding_window")
    kinds = c.get("layer_types") or kinds or [SLIDING if window else FULL] * c.num_hidden_layers
    if len(kinds) != c.num_hidden_layers:
        raise ModelError(f"the config lists {len(kinds)} layer_types for {c.num_hidden_layers} layers")
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise ModelError(f"layers of type {unknown[0]} are not known, known are {FULL} and {SLIDING}")
    norm = norm or rms(c)
    act = activation(c.get("hidden_act") or c.get("hidden_activation", "silu"))
    mlp = Mlp(c.get("intermediate_size") or 4 * c.hidden_size, act, gated)

    def layer(kind: str) -> Layer:
        turn = rope(c, max_model_len, head_size, kind, interleaved=interleaved) if has_rope else None
        seen = window if kind == SLIDING else None
        attn = Attention(num_heads, num_kv_heads, head_size, head_size**-0.5, turn, seen)
        return Layer(attn, mlp, attn_pre=norm, mlp_pre=norm)

    of_kind = {kind: layer(kind) for kind in set(kinds)}
    layers = tuple(of_kind[kind] for kind in kinds)
    return DecoderSpec(c.vocab_size, c.hidden_size, layers, norm, c.get("tie_word_embeddings", False))


Fields = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]


def edit(
    spec: DecoderSpec,
    *,
    attn: Fields | None = None,
    mlp: Fields | None = None,
    layer: Fields | None = None,
    **top: Any,
) -> DecoderSpec:
    """The spec with fields replaced: of every layer's attention, MLP and itself, and of the spec.

    Fields are a mapping, or a function from the number of a layer to one.
    """

    def of(fields: Fields | None, i: int) -> Mapping[str, Any]:
        if fields is None:
            return {}
        return fields(i) if callable(fields) else fields

    def edited(i: int, old: Layer) -> Layer:
        parts = {"attn": replace(old.attn, **of(attn, i)), "mlp": replace(old.mlp, **of(mlp, i))}
        return replace(old, **{**parts, **of(layer, i)})

    return replace(spec, layers=tuple(edited(i, old) for i, old in enumerate(spec.layers)), **top)
