"""A decoder-only language model as plain data.

A model family writes a `DecoderSpec` from a config; a weight table fills its slots; a program runs it. Layers
are spelled out one by one, so alternating local and global attention, layers without rope and dense layers
before sparse ones are nothing but unequal entries of a tuple. Every class is frozen and hashable.

Biases are not described: a linear slot has one exactly when the checkpoint does.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Attention",
    "DecoderSpec",
    "ExpertGroups",
    "LatentAttention",
    "Layer",
    "LearnedPositions",
    "Mlp",
    "Moe",
    "Norm",
    "QKNorm",
    "Rope",
    "SharedExpert",
]


@dataclass(frozen=True)
class Norm:
    """y = x / rms(x) * (weight + weight_offset), or the layer norm with mean and bias."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    weight_offset: float = 0.0  # gemma stores its weights less 1
    weighted: bool = True  # no: normalized and nothing more (olmo)


@dataclass(frozen=True)
class QKNorm:
    """A norm of queries and keys, after their projection and before rope.

    over "head": each head by itself, all with one weight [head_size]. "each_head": each by itself, with a weight
    of its own, [num_heads, head_size] (stablelm). "all_heads": one norm over a token's whole projection, with a
    weight [num_heads * head_size] (olmo2).
    """

    norm: Norm
    over: Literal["head", "each_head", "all_heads"] = "head"


@dataclass(frozen=True)
class Rope:
    """Rotary positions on the first `2 * len(inv_freq)` dims of each head; the other dims pass through.

    Scaling (linear, llama3, yarn, ...) and the partial factor are folded into `inv_freq` by the family.
    """

    inv_freq: tuple[float, ...]
    gain: float = 1.0  # multiplies cos and sin (yarn, longrope)
    interleaved: bool = False  # pairs are (0, 1), (2, 3), ... rather than (0, n), (1, n + 1), ...

    @property
    def rotary_dim(self) -> int:
        """Number of leading dims of a head that rotate."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class Attention:
    """Multi-head, grouped-query or multi-query attention over its own keys and values."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float  # of the scores, before soft cap and softmax
    rope: Rope | None = None
    window: int | None = None  # number of tokens a query sees, itself included; None: all
    qk_norm: QKNorm | None = None
    qkv_clip: float | None = None  # clamp of q, k and v, after the norm (olmoe)
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: bool = False  # a learned score a head that takes weight and gives nothing (gpt_oss)


@dataclass(frozen=True)
class LatentAttention:
    """MLA (deepseek): the cache holds one latent row a token, shared by all heads."""

    num_heads: int
    q_rank: int | None  # None: queries come straight from the hidden state
    kv_rank: int
    nope_dim: int  # the part of a query head without rope; the part with it has rope.rotary_dim dims
    v_dim: int
    scale: float
    rope: Rope
    norm: Norm  # of both latents


@dataclass(frozen=True)
class Mlp:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where it is not gated."""

    width: int
    activation: str  # a name in `reference.ACTIVATIONS`
    gated: bool = True


@dataclass(frozen=True)
class ExpertGroups:
    """Experts compete in groups, of which the best few stay (deepseek)."""

    num_groups: int
    num_kept: int
    top_per_group: int = 2  # a group is worth the sum of its best `top_per_group` experts


@dataclass(frozen=True)
class SharedExpert:
    """An MLP that runs for every token beside the routed ones."""

    mlp: Mlp
    gated: bool = False  # times the sigmoid of a learned score (qwen2_moe)


@dataclass(frozen=True)
class Moe:
    """A mixture of experts. The router's product is in float32."""

    num_experts: int
    top_k: int
    expert: Mlp
    score: Literal["softmax", "sigmoid"] = "softmax"  # over all experts, before the top k
    renormalize: bool = True  # the top k weights sum to 1 (softmax after the top k is just that)
    scale: float = 1.0  # of the routed sum
    groups: ExpertGroups | None = None
    shared: SharedExpert | None = None


@dataclass(frozen=True)
class Layer:
    """x + post(f(pre(x))), for f attention and then MLP; a norm that is None is left out.

    residual "sequential": the MLP reads what attention left. "parallel": both read the layer's input, each
    through its own norm. "parallel_shared_norm": both read attention's normed input, `mlp_pre` is None.
    """

    attn: Attention | LatentAttention
    mlp: Mlp | Moe
    attn_pre: Norm | None = None
    attn_post: Norm | None = None
    mlp_pre: Norm | None = None
    mlp_post: Norm | None = None
    residual: Literal["sequential", "parallel", "parallel_shared_norm"] = "sequential"
    residual_scale: float = 1.0  # of what a branch adds


@dataclass(frozen=True)
class LearnedPositions:
    """A table of position embeddings, added to the token's; position p is looked up at p + offset."""

    num_positions: int  # that can be served; the table has `offset` rows more
    offset: int = 0  # gpt2: 0, opt: 2


@dataclass(frozen=True)
class DecoderSpec:
    """The whole decoder: embedding, layers, final norm, head."""

    vocab_size: int  # rows of the embedding and the head, padding included
    hidden_size: int
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    tied_embeddings: bool  # the head is the embedding matrix
    embedding_scale: float = 1.0
    embedding_norm: Norm | None = None
    positions: LearnedPositions | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
