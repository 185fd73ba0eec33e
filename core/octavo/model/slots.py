"""The slots of a spec: every weight that a program of it needs, by name, shape and dtype. The one list of them.

Weights reach programs as a flat mapping of slot name to tensor (letters as in `contract.ops`; E experts, Hq and
Hkv query and KV heads, D head size):

    embedding                [V, H]
    positions                [num_positions + offset, H]  where spec.positions is set
    embedding_norm           [H]                          where spec.embedding_norm is set
    layers.{i}.attn_pre      [H]        likewise attn_post, mlp_pre, mlp_post, where the layer has them
    layers.{i}.attn.qkv      [(Hq + 2 Hkv) D, H]          rows of q, then k, then v
    layers.{i}.attn.q_norm   [D], [Hq, D] or [Hq D]       likewise k_norm, by the layer's QKNorm
    layers.{i}.attn.sinks    [Hq] float32
    layers.{i}.attn.o        [H, Hq D]
    layers.{i}.mlp.up        [2 I, H]                     rows of the gate, then of up; [I, H] if not gated
    layers.{i}.mlp.down      [H, I]
    layers.{i}.moe.router    [E, H] float32
    layers.{i}.moe.correction [E] float32                 added to scores for the choice of experts only
    layers.{i}.moe.up        [E, 2 I, H]                  and moe.down [E, H, I], as mlp.up and mlp.down
    layers.{i}.shared.up     [2 I, H]                     and shared.down [H, I], shared.gate [1, H]
    final_norm               [H]
    head                     [V, H]                       absent where spec.tied_embeddings: it is the embedding

Latent attention has, in place of attn.qkv: attn.q_a [q_rank, H] and attn.q_a_norm [q_rank] (absent where q_rank is
None), attn.q [Hq (nope + rope), q_rank or H], attn.kv_a [kv_rank + rope, H], attn.kv_a_norm [kv_rank], attn.kv_b
[Hq (nope + v), kv_rank]; and attn.o is [H, Hq v].

Matrices whose slot has a role may be a `QuantizedWeight`; stacked experts then lie below each other, as [E N, K].

Any matrix and any layer norm may have a bias: the slot's name with ".bias", one axis less than a matrix has, there
exactly when the checkpoint has it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from octavo.contract import Attention, DecoderSpec, LatentAttention, Layer, Mlp, Moe, Norm, QKNorm

__all__ = ["Slot", "slots"]


@dataclass(frozen=True)
class Slot:
    """One weight.

    Attributes:
        name: its key among the weights.
        shape: of the tensor.
        parts: how many rows (entries of the last but one axis, or of the last of a vector) each of its parts has,
            where a checkpoint may hold the parts as tensors of their own; none for most.
        groups: the rows are so many groups, each of all parts.
        has_bias: a checkpoint may hold a bias for it.
        optional: a checkpoint may lack it.
        dtype: None for the weights' common dtype.
        norm: the norm whose weight it is, or None.
        role: what becomes of it in a quantised model: "float" stays as it is, "layer" takes the format that is asked
            for, "down" (an MLP's way back, not that of experts) and "table" (embedding and head) 8 bits.

    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[int, ...] = ()
    groups: int = 1
    has_bias: bool = True
    optional: bool = False
    dtype: torch.dtype | None = None
    norm: Norm | None = None
    role: Literal["float", "layer", "down", "table"] = "float"

    @property
    def key(self) -> str:
        """The name within its layer: what a name table has an entry for."""
        return self.name.split(".", 2)[2] if self.name.startswith("layers.") else self.name

    @property
    def layer(self) -> int | None:
        """Which layer it belongs to."""
        return int(self.name.split(".", 2)[1]) if self.name.startswith("layers.") else None

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """Of its bias."""
        return self.shape if self.norm else self.shape[:-1]


def slots(spec: DecoderSpec) -> tuple[Slot, ...]:
    """Every slot of `spec`, in the order in which a step reads them."""
    return tuple(_slots(spec))


def _slots(spec: DecoderSpec) -> Iterator[Slot]:
    vocab, hidden = spec.vocab_size, spec.hidden_size
    yield Slot("embedding", (vocab, hidden), has_bias=False, role="table")
    if spec.positions:
        yield Slot("positions", (spec.positions.num_positions + spec.positions.offset, hidden), has_bias=False)
    yield from _norm("embedding_norm", spec.embedding_norm, hidden)
    for i, layer in enumerate(spec.layers):
        yield from _layer(f"layers.{i}.", layer, hidden)
    yield from _norm("final_norm", spec.final_norm, hidden)
    if not spec.tied_embeddings:
        yield Slot("head", (vocab, hidden), role="table")


def _layer(at: str, layer: Layer, hidden: int) -> Iterator[Slot]:
    yield from _norm(f"{at}attn_pre", layer.attn_pre, hidden)
    if isinstance(layer.attn, Attention):
        yield from _attention(f"{at}attn.", layer.attn, hidden)
    else:
        yield from _latent_attention(f"{at}attn.", layer.attn, hidden)
    yield from _norm(f"{at}attn_post", layer.attn_post, hidden)
    yield from _norm(f"{at}mlp_pre", layer.mlp_pre, hidden)
    if isinstance(layer.mlp, Moe):
        yield from _moe(at, layer.mlp, hidden)
    else:
        yield from _mlp(f"{at}mlp.", layer.mlp, hidden)
    yield from _norm(f"{at}mlp_post", layer.mlp_post, hidden)


def _attention(at: str, attn: Attention, hidden: int) -> Iterator[Slot]:
    q, kv = attn.num_heads * attn.head_size, attn.num_kv_heads * attn.head_size
    yield Slot(f"{at}qkv", (q + 2 * kv, hidden), parts=(q, kv, kv), role="layer")
    if attn.qk_norm:
        yield _qk_norm(f"{at}q_norm", attn.qk_norm, attn.num_heads, attn.head_size)
        yield _qk_norm(f"{at}k_norm", attn.qk_norm, attn.num_kv_heads, attn.head_size)
    if attn.sinks:
        yield Slot(f"{at}sinks", (attn.num_heads,), has_bias=False, dtype=torch.float32)
    yield Slot(f"{at}o", (hidden, q), role="layer")


def _latent_attention(at: str, attn: LatentAttention, hidden: int) -> Iterator[Slot]:
    if attn.q_rank is not None:
        yield Slot(f"{at}q_a", (attn.q_rank, hidden), role="layer")
        yield from _norm(f"{at}q_a_norm", attn.norm, attn.q_rank)
    rope = attn.rope.rotary_dim
    yield Slot(f"{at}q", (attn.num_heads * (attn.nope_dim + rope), attn.q_rank or hidden), role="layer")
    yield Slot(f"{at}kv_a", (attn.kv_rank + rope, hidden), role="layer")
    yield from _norm(f"{at}kv_a_norm", attn.norm, attn.kv_rank)
    by_head = (attn.nope_dim, attn.v_dim)
    shape = (attn.num_heads * sum(by_head), attn.kv_rank)
    yield Slot(f"{at}kv_b", shape, parts=by_head, groups=attn.num_heads, has_bias=False)
    yield Slot(f"{at}o", (hidden, attn.num_heads * attn.v_dim), role="layer")


def _qk_norm(name: str, qk_norm: QKNorm, num_heads: int, head_size: int) -> Slot:
    shapes = {"head": (head_size,), "each_head": (num_heads, head_size), "all_heads": (num_heads * head_size,)}
    return Slot(name, shapes[qk_norm.over], has_bias=qk_norm.norm.kind == "layer", norm=qk_norm.norm)


def _norm(name: str, norm: Norm | None, size: int) -> Iterator[Slot]:
    if norm and norm.weighted:
        yield Slot(name, (size,), has_bias=norm.kind == "layer", norm=norm)


def _mlp(at: str, mlp: Mlp, hidden: int) -> Iterator[Slot]:
    parts = (mlp.width, mlp.width) if mlp.gated else (mlp.width,)
    yield Slot(f"{at}up", (sum(parts), hidden), parts=parts, role="layer")
    yield Slot(f"{at}down", (hidden, mlp.width), role="down")


def _moe(at: str, moe: Moe, hidden: int) -> Iterator[Slot]:
    num, width = moe.num_experts, moe.expert.width
    parts = (width, width) if moe.expert.gated else (width,)
    yield Slot(f"{at}moe.router", (num, hidden), dtype=torch.float32)
    yield Slot(f"{at}moe.correction", (num,), has_bias=False, optional=True, dtype=torch.float32)
    yield Slot(f"{at}moe.up", (num, sum(parts), hidden), parts=parts, role="layer")
    yield Slot(f"{at}moe.down", (num, hidden, width), role="layer")
    if moe.shared:
        yield from _mlp(f"{at}shared.", moe.shared.mlp, hidden)
        if moe.shared.gated:
            yield Slot(f"{at}shared.gate", (1, hidden), has_bias=False)
