"""A decoder as one native call a step: what core's generic program does op by op.

T tokens of a step, R rows that are asked for, H hidden size, V vocabulary.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from octavo.contract import (
    Attention,
    AttentionBatch,
    AttentionSpec,
    CompileRequest,
    KVCache,
    Layer,
    Mlp,
    Moe,
    Norm,
    ProgramCosts,
    QuantizedWeight,
    Rope,
    RowMode,
    Rows,
    StepBatch,
    StepOutput,
    Support,
    Weight,
)
from octavo.contract.rope import rope_table
from octavo.contract.row_outputs import row_outputs
from octavo_cpu.attention import NativeAttention, NativeCache, geometry_of
from octavo_cpu.matrix import PackedMatrix, pack, packed_bytes
from octavo_cpu.memory import zeros
from octavo_cpu.native import DTYPES, NativeLibrary
from octavo_cpu.ops import ACTIVATIONS, GATED_ACTIVATIONS
from octavo_cpu.structures import (
    ON_LAYER,
    AttentionGeometry,
    DecoderStruct,
    LayerStruct,
    MatrixStruct,
    MoeStruct,
    NormStruct,
    StepStruct,
)

__all__ = ["NativeProgram", "can_compile"]

T = TypeVar("T")

_GREEDY = bytes([RowMode.GREEDY])
_LONG_STEP = 64  # tokens
_NEVER = ON_LAYER()

_NORMS = {"rms": 1, "layer": 2}
_RESIDUALS = {"sequential": 0, "parallel": 1, "parallel_shared_norm": 2}
_SCORES = {"softmax": 0, "sigmoid": 1}
_QK_NORMS = {"head": 0, "each_head": 1, "all_heads": 2}


def can_compile(library: NativeLibrary, request: CompileRequest) -> Support:
    """Whether the native decoder covers a request, and if not, why."""
    reasons: dict[str, None] = {}
    if request.dtype not in (torch.float32, torch.bfloat16):
        reasons[f"dtype {request.dtype}, built for float32 and bfloat16"] = None
    if request.shard.num_ranks > 1 or request.shard.num_stages > 1:
        reasons["a part of a model, built for whole ones"] = None
    backend = NativeAttention(library)
    for spec in request.attention:
        reasons |= dict.fromkeys(backend.supports(spec).reasons)
    for layer in request.spec.layers:
        reasons |= dict.fromkeys(_missing(layer))
    return Support.no(*reasons) if reasons else Support.yes()


def _missing(layer: Layer) -> Iterator[str]:
    """What the native decoder lacks for a layer."""
    if not isinstance(layer.attn, Attention):
        yield "latent attention"
    for mlp in _mlps(layer):
        known = GATED_ACTIVATIONS if mlp.gated else ACTIVATIONS
        if mlp.activation not in known:
            yield f"activation {mlp.activation}, built for {', '.join(known)}"


def _mlps(layer: Layer) -> Iterator[Mlp]:
    """What a layer's tokens go through: one MLP, or one of its experts and the one that is shared."""
    if isinstance(layer.mlp, Mlp):
        yield layer.mlp
        return
    yield layer.mlp.expert
    if layer.mlp.shared:
        yield layer.mlp.shared.mlp


class NativeProgram:
    """A `Program` of a decoder on the native library."""

    def __init__(self, library: NativeLibrary, request: CompileRequest) -> None:
        """Pack the weights of a request that `can_compile` says yes to."""
        spec = request.spec
        self._library = library
        self._vocab_size = spec.vocab_size
        self._hidden_size = spec.hidden_size
        build = _Builder(library, request)
        self._decoder = build.decoder()
        self._layers = build.layers
        self._costs = build.costs()
        self._places = build.places
        self._keep = build.keep
        self._address = ctypes.addressof(self._decoder)
        self._geometries = (AttentionGeometry * len(request.attention))(*map(geometry_of, request.attention))
        self._step = StepStruct(groups=self._geometries)
        self._step_address = ctypes.addressof(self._step)
        self.on_layer = _nothing
        self._workspace = zeros(0, torch.uint8)
        self._room = 0  # tokens that the workspace is made for
        self._logits_memory = zeros(0, torch.float32)
        self._reserve(max(request.max_tokens, request.max_rows, 1))

    @property
    def on_layer(self) -> Callable[[], None]:
        """Called before each layer of a step of many tokens; short steps end before anyone could miss them."""
        return self._on_layer

    @on_layer.setter
    def on_layer(self, beat: Callable[[], None]) -> None:
        self._on_layer = beat
        self._called = ON_LAYER(beat)

    @property
    def row_invariant(self) -> Support:
        """Bitwise, whatever the batch, the chunks and the number of threads."""
        return Support.yes("each result is the sum of its own inputs in a fixed order")

    @property
    def modes(self) -> frozenset[RowMode]:
        """All of them."""
        return frozenset(RowMode)

    @property
    def costs(self) -> ProgramCosts:
        """What a step reads of the packed weights."""
        return self._costs

    def workspace_bytes(self, max_tokens: int, max_rows: int) -> int:
        """Activations of the widest layer, hidden states of the rows, and logits of those that want them."""
        logits = max_rows * self._vocab_size * torch.float32.itemsize
        return self._library.decoder_workspace(self._address, max(max_tokens, max_rows)) + logits

    def bind(self, kv_caches: Sequence[KVCache]) -> None:
        """The caches, one a group in the groups' order."""
        if len(kv_caches) != len(self._geometries):
            raise ValueError(f"{len(kv_caches)} KV caches for {len(self._geometries)} groups")
        for geometry, cache in zip(self._geometries, kv_caches, strict=True):
            assert isinstance(cache, NativeCache)
            geometry.num_blocks = cache.num_blocks
        for layer, (group, index) in zip(self._layers, self._places, strict=True):
            cache = kv_caches[group]
            assert isinstance(cache, NativeCache)
            layer.cache = cache.pointers[index]
        self._keep.extend(kv_caches)

    def submit(self, batch: StepBatch, rows: Rows) -> "_Handle":
        """Run the step; it is done when this returns."""
        if batch.adapter_ids is not None or batch.hidden_in is not None:
            raise ValueError("the native program runs whole models without adapters")
        num_tokens = len(batch.positions)
        if num_tokens > self._room:
            self._reserve(num_tokens)
        step = self._step
        step.num_tokens = num_tokens
        step.on_layer = self._called if num_tokens >= _LONG_STEP else _NEVER
        step.positions = batch.positions.data_ptr()
        embeds = None if batch.input_embeds is None else batch.input_embeds.float().contiguous()
        step.embeds = None if embeds is None else embeds.data_ptr()
        step.token_ids = batch.token_ids.data_ptr() if embeds is None else None
        for geometry, attention in zip(self._geometries, batch.attention, strict=True):
            _place(geometry, attention)
        return _Handle(self._run(rows))

    def _run(self, rows: Rows) -> StepOutput:
        index = rows.index
        only_greedy = rows.mode.tobytes() == _GREEDY * len(rows.mode) and len(index) <= self._step.num_tokens
        inverse: npt.NDArray[np.int64] | None = None
        if not only_greedy:
            index, inverse = np.unique(index, return_inverse=True)
        num_rows = len(index)
        hidden = torch.empty((num_rows, self._hidden_size), dtype=torch.float32)
        greedy_ids = np.empty(num_rows, np.int64)
        step = self._step
        step.rows = index.ctypes.data
        step.num_rows = num_rows
        step.hidden = hidden.data_ptr()
        step.greedy_ids = greedy_ids.ctypes.data if only_greedy else None
        status = self._library.decoder_step(self._address, self._step_address)
        if status:
            self._library.check(status, f"a step of {step.num_tokens} tokens")
        if inverse is None:
            return StepOutput(greedy_ids=greedy_ids) if num_rows else StepOutput()
        return row_outputs(hidden, inverse.reshape(-1), rows, self._logits, self._vocab_size).fetch()

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] float32, until the next call: fresh memory at every step would cost as much as filling it."""
        size = len(hidden) * self._vocab_size
        if size > len(self._logits_memory):
            self._logits_memory = zeros(size, torch.float32)
        logits = self._logits_memory[:size].view(len(hidden), self._vocab_size)
        arguments = logits.data_ptr(), hidden.contiguous().data_ptr(), len(hidden), self._workspace.data_ptr()
        self._library.check(self._library.decoder_logits(self._address, *arguments), "logits")
        return logits

    def _reserve(self, num_tokens: int) -> None:
        """Make room for steps of so many tokens."""
        self._workspace = zeros(self._library.decoder_workspace(self._address, num_tokens), torch.uint8)
        self._step.workspace = self._workspace.data_ptr()
        self._room = num_tokens


def _nothing() -> None:
    pass


class _Handle:
    """A step that is done."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


def _place(geometry: AttentionGeometry, batch: AttentionBatch) -> None:
    """The rows of a step in a group's geometry. Tensors on the host are the arrays that the library reads."""
    table = batch.block_table
    geometry.num_rows = len(batch.seq_lens_host)
    geometry.num_tokens = len(batch.slot_mapping_host)
    geometry.query_start_loc = batch.query_start_loc.data_ptr()
    geometry.seq_lens = batch.seq_lens.data_ptr()
    geometry.block_table = table.data_ptr()
    geometry.block_table_stride = table.stride(0) if len(table) > 1 else table.shape[1]
    geometry.slots = batch.slot_mapping.data_ptr()


class _Builder:
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
        assert isinstance(attn, Attention)
        for name in ("attn_pre", "attn_post", "mlp_pre", "mlp_post"):
            setattr(struct, name, self._norm(f"{at}.{name}", getattr(layer, name)))
        if attn.qk_norm:
            struct.q_norm = self._norm(f"{at}.attn.q_norm", attn.qk_norm.norm)
            struct.k_norm = self._norm(f"{at}.attn.k_norm", attn.qk_norm.norm)
            struct.qk_norm_over = _QK_NORMS[attn.qk_norm.over]
        struct.qkv = self._matrix(f"{at}.attn.qkv")
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
        if attn.sinks:
            struct.sinks = self._kept(_dense(self._weights[f"{at}.attn.sinks"]).float().contiguous()).data_ptr()
        struct.group = group
        struct.qkv_clip = attn.qkv_clip or 0.0
        struct.residual = _RESIDUALS[layer.residual]
        struct.residual_scale = layer.residual_scale

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
        places = {place: _experts(self._weights[place.slot], place.num_experts) for place in _places(self._request)}
        sizes = [len(ws) * packed_bytes(library, ws[0], p.dtype, gated=p.gated) for p, ws in places.items()]
        parts = torch.split(zeros(sum(sizes), torch.uint8), sizes)
        for (place, experts), part in zip(places.items(), parts, strict=True):
            bias = self._weights.get(f"{place.slot}.bias")
            biases = [None] * len(experts) if bias is None else _dense(bias).float().view(len(experts), -1)
            packed = [
                pack(library, weight, place.dtype, bias=own_bias, gated=place.gated, memory=memory)
                for weight, own_bias, memory in zip(experts, biases, part.chunk(len(experts)), strict=True)
            ]
            self.keep.append((packed, biases))
            self._matrices[place.slot] = replace(packed[0], memory=part)

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
        num_experts: that its weight is stacked of.

    """

    slot: str
    dtype: torch.dtype
    gated: bool = False
    num_experts: int = 1


def _places(request: CompileRequest) -> Iterator[_Place]:
    """The matrices of a decoder in the order in which a step reads them."""
    spec, dtype = request.spec, request.dtype
    for i, layer in enumerate(spec.layers):
        at, mlp = f"layers.{i}", layer.mlp
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


def _mlp_places(at: str, dtype: torch.dtype, mlp: Mlp, num_experts: int = 1) -> Iterator[_Place]:
    yield _Place(f"{at}.up", dtype, mlp.gated, num_experts)
    yield _Place(f"{at}.down", dtype, num_experts=num_experts)


def _experts(weight: Weight, num_experts: int) -> list[Weight]:
    """The matrices that a weight is stacked of: [E, N, K], or quantised [E N, K]."""
    if num_experts == 1 and len(weight.shape) == 2:
        return [weight]
    if not isinstance(weight, QuantizedWeight):
        return list(weight)
    num_rows = weight.shape[0] // num_experts
    return [weight[i * num_rows : (i + 1) * num_rows] for i in range(num_experts)]


def _activation(mlp: Mlp) -> int:
    return (GATED_ACTIVATIONS if mlp.gated else ACTIVATIONS)[mlp.activation]


def _dense(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor), "only matrices are quantised"
    return weight


def _group_of(layer: Layer, groups: Sequence[AttentionSpec]) -> int:
    """Which group a layer's keys and values are of: the one of its geometry."""
    attn = layer.attn
    assert isinstance(attn, Attention)
    for i, spec in enumerate(groups):
        same_heads = (spec.num_heads, spec.num_kv_heads) == (attn.num_heads, attn.num_kv_heads)
        same_size = spec.head_size == attn.head_size and spec.scale == attn.scale
        same_view = (spec.window, spec.softcap, spec.sinks) == (attn.window, attn.softcap, attn.sinks)
        if same_heads and same_size and same_view:
            return i
    raise ValueError(f"no KV group has the geometry of {attn}")
