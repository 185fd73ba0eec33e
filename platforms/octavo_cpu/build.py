"""From a spec and its weights to the structures that the native decoder reads."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from octavo.contract import (
    Attention,
    AttentionSpec,
    CompileRequest,
    LatentAttention,
    Layer,
    Mlp,
    Moe,
    Norm,
    ProgramCosts,
    QuantizedWeight,
    Rope,
    Weight,
)
from octavo.contract.rope import rope_table
from octavo_cpu.matrix import PackedMatrix, pack, packed_bytes
from octavo_cpu.memory import zeros
from octavo_cpu.native import DTYPES, NativeLibrary
from octavo_cpu.ops import ACTIVATIONS, GATED_ACTIVATIONS
from octavo_cpu.structures import (
    DecoderStruct,
    LatentStruct,
    LayerStruct,
    MatrixStruct,
    MoeStruct,
    NormStruct,
)

__all__ = ["Builder"]

T = TypeVar("T")

_NORMS = {"rms": 1, "layer": 2}
_RESIDUALS = {"sequential": 0, "parallel": 1, "parallel_shared_norm": 2}
_SCORES = {"softmax": 0, "sigmoid": 1}
_QK_NORMS = {"head": 0, "each_head": 1, "all_heads": 2}


class Builder:
    """Fills the structures of a decoder, and keeps alive what they point to."""

    def __init__(self, library: NativeLibrary, request: CompileRequest) -> None:
        self.keep: list[object] = []
        self.places: list[tuple[int, int]] = []  # of each layer: its group, and its index there
        self._library = library
        self._request = request
        self._weights: Mapping[str, Weight] = request.weights
        self._tables: dict[Rope, torch.Tensor] = {}
        self._matrices: dict[str, PackedMatrix] = {}
        self.layers = (LayerStruct * len(request.spec.layers))()

    def decoder(self) -> DecoderStruct:
        """The whole of it."""
        spec = self._request.spec
        self._pack()
        counts = [0] * len(self._request.attention)
        for i, layer in enumerate(spec.layers):
            group = _group_of(layer, self._request.attention)
            self.places.append((group, counts[group]))
            counts[group] += 1
            self._fill(self.layers[i], f"layers.{i}", layer, group)
        decoder = DecoderStruct(
            embedding=self._matrix("embedding"),
            head=self._matrix("embedding" if spec.tied_embeddings else "head"),
            layers=self.layers,
            num_layers=len(spec.layers),
            hidden=spec.hidden_size,
            # Rounded as the weights are: models that scale embeddings were trained with the rounded factor.
            embedding_scale=torch.tensor(spec.embedding_scale, dtype=self._request.dtype).item(),
            logit_scale=spec.logit_scale,
            logit_softcap=spec.logit_softcap or 0.0,
            dtype=DTYPES[self._request.dtype],
            embedding_norm=self._norm("embedding_norm", spec.embedding_norm),
            final_norm=self._norm("final_norm", spec.final_norm),
        )
        if spec.positions:
            table = self._kept(_dense(self._weights["positions"]).float().contiguous())
            decoder.positions = table.data_ptr()
            decoder.num_positions = len(table)
            decoder.position_offset = spec.positions.offset
        self.keep.append(self._matrices)
        return decoder

    def costs(self) -> ProgramCosts:
        """Of the matrices that were packed."""
        tied = self._request.spec.tied_embeddings
        head = self._matrices["embedding" if tied else "head"]
        layers = [matrix for name, matrix in self._matrices.items() if name.startswith("layers.")]
        return ProgramCosts(
            layer_bytes=sum(matrix.num_bytes for matrix in layers),
            head_bytes=head.num_bytes,
            layer_dtype=layers[0].input_dtype if layers else self._request.dtype,
            head_dtype=head.input_dtype,
            attention_dtype=self._request.dtype,
        )

    def _fill(self, struct: LayerStruct, at: str, layer: Layer, group: int) -> None:
        attn, mlp = layer.attn, layer.mlp
        for name in ("attn_pre", "attn_post", "mlp_pre", "mlp_post"):
            setattr(struct, name, self._norm(f"{at}.{name}", getattr(layer, name)))
        if isinstance(attn, LatentAttention):
            struct.latent = ctypes.pointer(self._kept(self._latent(at, attn)))
        else:
            self._fill_attention(struct, at, attn)
        struct.o = self._matrix(f"{at}.attn.o")
        if isinstance(mlp, Moe):
            struct.moe = ctypes.pointer(self._kept(self._moe(at, mlp)))
        else:
            struct.up = self._matrix(f"{at}.mlp.up")
            struct.down = self._matrix(f"{at}.mlp.down")
            struct.activation = _activation(mlp)
        if attn.rope:
            struct.cos_sin = self._rope(attn.rope).data_ptr()
            struct.num_positions = len(self._rope(attn.rope))
            struct.rotary_dim = attn.rope.rotary_dim
            struct.interleaved = int(attn.rope.interleaved)
        struct.group = group
        struct.residual = _RESIDUALS[layer.residual]
        struct.residual_scale = layer.residual_scale

    def _fill_attention(self, struct: LayerStruct, at: str, attn: Attention) -> None:
        struct.qkv = self._matrix(f"{at}.attn.qkv")
        if attn.qk_norm:
            struct.q_norm = self._norm(f"{at}.attn.q_norm", attn.qk_norm.norm)
            struct.k_norm = self._norm(f"{at}.attn.k_norm", attn.qk_norm.norm)
            struct.qk_norm_over = _QK_NORMS[attn.qk_norm.over]
        if attn.sinks:
            struct.sinks = self._kept(_dense(self._weights[f"{at}.attn.sinks"]).float().contiguous()).data_ptr()
        struct.qkv_clip = attn.qkv_clip or 0.0

    def _latent(self, at: str, attn: LatentAttention) -> LatentStruct:
        to_latent, from_latent = (self._matrices[f"{at}.attn.{name}"] for name in ("to_latent", "from_latent"))
        struct = LatentStruct(
            q=self._matrix(f"{at}.attn.q"),
            kv_a=self._matrix(f"{at}.attn.kv_a"),
            kv_a_norm=self._norm(f"{at}.attn.kv_a_norm", attn.norm),
            to_latent=to_latent.struct,
            from_latent=from_latent.struct,
            to_latent_bytes=to_latent.num_bytes // attn.num_heads,
            from_latent_bytes=from_latent.num_bytes // attn.num_heads,
            num_heads=attn.num_heads,
            rank=attn.kv_rank,
            nope_size=attn.nope_dim,
            rope_size=attn.rope.rotary_dim,
        )
        if attn.q_rank is not None:
            struct.q_a = self._matrix(f"{at}.attn.q_a")
            struct.q_a_norm = self._norm(f"{at}.attn.q_a_norm", attn.norm)
        return struct

    def _moe(self, at: str, moe: Moe) -> MoeStruct:
        up, down = self._matrices[f"{at}.moe.up"], self._matrices[f"{at}.moe.down"]
        struct = MoeStruct(
            router=self._matrix(f"{at}.moe.router"),
            up=up.struct,
            down=down.struct,
            up_bytes=up.num_bytes // moe.num_experts,
            down_bytes=down.num_bytes // moe.num_experts,
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            score=_SCORES[moe.score],
            renormalize=int(moe.renormalize),
            scale=moe.scale,
            activation=_activation(moe.expert),
        )
        if (correction := self._weights.get(f"{at}.moe.correction")) is not None:
            struct.correction = self._kept(_dense(correction).float().contiguous()).data_ptr()
        if moe.groups:
            struct.num_groups = moe.groups.num_groups
            struct.top_per_group = moe.groups.top_per_group
            struct.num_kept_groups = moe.groups.num_kept
        if moe.shared:
            struct.shared_up, struct.shared_down = (self._matrix(f"{at}.shared.{name}") for name in ("up", "down"))
            struct.shared_activation = _activation(moe.shared.mlp)
            if moe.shared.gated:
                struct.shared_gate = self._matrix(f"{at}.shared.gate")
        return struct

    def _pack(self) -> None:
        """All matrices into one piece of memory, in the order in which a step reads them."""
        library = self._library
        places = {place: self._stack(place) for place in _places(self._request)}
        sizes = [len(stack) * packed_bytes(library, stack[0], p.dtype, gated=p.gated) for p, stack in places.items()]
        parts = torch.split(zeros(sum(sizes), torch.uint8), sizes)
        for (place, stack), part in zip(places.items(), parts, strict=True):
            bias = self._weights.get(f"{place.slot}.bias")
            biases = [None] * len(stack) if bias is None else _dense(bias).float().view(len(stack), -1)
            packed = [
                pack(library, weight, place.dtype, bias=own_bias, gated=place.gated, memory=memory)
                for weight, own_bias, memory in zip(stack, biases, part.chunk(len(stack)), strict=True)
            ]
            self.keep.append((packed, biases))
            self._matrices[place.slot] = replace(packed[0], memory=part)

    def _stack(self, place: "_Place") -> list[Weight]:
        """The matrices that lie at a place: one, one an expert ([E, N, K], or quantised [E N, K]), or one a head."""
        at, _, name = place.slot.rpartition(".")
        if name in ("to_latent", "from_latent"):
            kv_b = _dense(self._weights[f"{at}.kv_b"])
            by_head = kv_b.view(place.num_matrices, -1, kv_b.shape[1])
            keys, values = by_head[:, : place.split], by_head[:, place.split :]
            return list(keys.mT if name == "to_latent" else values)
        weight = self._weights[place.slot]
        if place.num_matrices == 1 and len(weight.shape) == 2:
            return [weight]
        if not isinstance(weight, QuantizedWeight):
            return list(weight)
        num_rows = weight.shape[0] // place.num_matrices
        return [weight[i * num_rows : (i + 1) * num_rows] for i in range(place.num_matrices)]

    def _matrix(self, slot: str) -> MatrixStruct:
        return self._matrices[slot].struct

    def _norm(self, slot: str, norm: Norm | None) -> NormStruct:
        struct = NormStruct()
        if norm is None:
            return struct
        struct.kind = _NORMS[norm.kind]
        struct.eps = norm.eps
        if norm.weighted:
            weight = _dense(self._weights[slot]).float() + norm.weight_offset
            struct.weight = self._kept(weight.contiguous()).data_ptr()
            if (bias := self._weights.get(f"{slot}.bias")) is not None:
                struct.bias = self._kept(_dense(bias).float().contiguous()).data_ptr()
        return struct

    def _rope(self, rope: Rope) -> torch.Tensor:
        if rope not in self._tables:
            self._tables[rope] = self._kept(rope_table(rope, self._request.max_model_len).contiguous())
        return self._tables[rope]

    def _kept(self, value: T) -> T:
        self.keep.append(value)
        return value


@dataclass(frozen=True)
class _Place:
    """A matrix of a decoder.

    Attributes:
        slot: where its weight is.
        dtype: of its products, where it is not quantised.
        gated: its rows are those of a gate and of what the gate multiplies.
        num_matrices: that lie one after another there, all of one shape: one an expert, or one a head.
        split: rows of a head's keys in `kv_b`, which its values follow.

    """

    slot: str
    dtype: torch.dtype
    gated: bool = False
    num_matrices: int = 1
    split: int = 0


def _places(request: CompileRequest) -> Iterator[_Place]:
    """The matrices of a decoder in the order in which a step reads them."""
    spec, dtype = request.spec, request.dtype
    for i, layer in enumerate(spec.layers):
        at, mlp = f"layers.{i}", layer.mlp
        if isinstance(layer.attn, LatentAttention):
            yield from _latent_places(f"{at}.attn", dtype, layer.attn)
        else:
            yield _Place(f"{at}.attn.qkv", dtype)
        yield _Place(f"{at}.attn.o", dtype)
        if isinstance(mlp, Mlp):
            yield from _mlp_places(f"{at}.mlp", dtype, mlp)
            continue
        yield _Place(f"{at}.moe.router", torch.float32)
        yield from _mlp_places(f"{at}.moe", dtype, mlp.expert, mlp.num_experts)
        if mlp.shared:
            yield from _mlp_places(f"{at}.shared", dtype, mlp.shared.mlp)
            if mlp.shared.gated:
                yield _Place(f"{at}.shared.gate", torch.float32)
    yield _Place("embedding", dtype)
    if not spec.tied_embeddings:
        yield _Place("head", dtype)


def _latent_places(at: str, dtype: torch.dtype, attn: LatentAttention) -> Iterator[_Place]:
    if attn.q_rank is not None:
        yield _Place(f"{at}.q_a", dtype)
    yield _Place(f"{at}.q", dtype)
    yield _Place(f"{at}.kv_a", dtype)
    for name in ("to_latent", "from_latent"):
        yield _Place(f"{at}.{name}", dtype, num_matrices=attn.num_heads, split=attn.nope_dim)


def _mlp_places(at: str, dtype: torch.dtype, mlp: Mlp, num_experts: int = 1) -> Iterator[_Place]:
    yield _Place(f"{at}.up", dtype, mlp.gated, num_experts)
    yield _Place(f"{at}.down", dtype, num_matrices=num_experts)


def _activation(mlp: Mlp) -> int:
    return (GATED_ACTIVATIONS if mlp.gated else ACTIVATIONS)[mlp.activation]


def _dense(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor), "only matrices are quantised"
    return weight


def _group_of(layer: Layer, groups: Sequence[AttentionSpec]) -> int:
    """Which group a layer's keys and values are of: the one of its geometry."""
    for i, spec in enumerate(groups):
        if _geometry(layer.attn) == _geometry(spec):
            return i
    raise ValueError(f"no KV group has the geometry of {layer.attn}")


def _geometry(attn: Attention | LatentAttention | AttentionSpec) -> tuple[object, ...]:
    """What tells groups apart: latent or not, heads, sizes, scale, and what a token sees."""
    if isinstance(attn, LatentAttention):
        return True, attn.num_heads, 1, attn.kv_rank + attn.rope.rotary_dim, attn.scale, None, None, False
    latent = isinstance(attn, AttentionSpec) and attn.latent
    return latent, attn.num_heads, attn.num_kv_heads, attn.head_size, attn.scale, attn.window, attn.softcap, attn.sinks
