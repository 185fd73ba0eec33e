"""KV groups: layers whose attention has one geometry share a cache, block tables and a plan."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from octavo.contract import Attention, AttentionSpec, DecoderSpec, LatentAttention

__all__ = ["KVGroup", "group_layers", "kv_groups"]


@dataclass(frozen=True)
class KVGroup:
    """Layers of one geometry.

    Attributes:
        spec: what their attention backend is asked for.
        layers: their numbers, ascending; layer `layers[i]` is the backend's layer i.

    """

    spec: AttentionSpec
    layers: tuple[int, ...]


def kv_groups(spec: DecoderSpec, *, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[KVGroup, ...]:
    """The groups of a decoder, in the order of their first layers: full, sliding, latent as they come."""
    return group_layers((layer.attn for layer in spec.layers), block_size=block_size, dtype=dtype, kv_dtype=kv_dtype)


def group_layers(
    layers: Iterable[Attention | LatentAttention], *, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[KVGroup, ...]:
    """The same of layers whose attention alone is known."""
    found: dict[AttentionSpec, list[int]] = {}
    for i, attn in enumerate(layers):
        found.setdefault(_attention_spec(attn, block_size, dtype, kv_dtype), []).append(i)
    return tuple(KVGroup(replace(one, num_layers=len(ids)), tuple(ids)) for one, ids in found.items())


def _attention_spec(
    attn: Attention | LatentAttention, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> AttentionSpec:
    if isinstance(attn, LatentAttention):
        return AttentionSpec(
            num_layers=1,
            num_heads=attn.num_heads,
            num_kv_heads=1,
            head_size=attn.kv_rank + attn.rope.rotary_dim,
            value_size=attn.kv_rank,
            block_size=block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            scale=attn.scale,
            latent=True,
        )
    return AttentionSpec(
        num_layers=1,
        num_heads=attn.num_heads,
        num_kv_heads=attn.num_kv_heads,
        head_size=attn.head_size,
        value_size=attn.head_size,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        scale=attn.scale,
        window=attn.window,
        softcap=attn.softcap,
        sinks=attn.sinks,
    )
