"""A decoder as one native call a step: what core's generic program does op by op.

T tokens of a step, R rows that are asked for, H hidden size, V vocabulary.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from octavo.contract import (
    AttentionBatch,
    CompileRequest,
    KVCache,
    Layer,
    Mlp,
    ProgramCosts,
    RowMode,
    Rows,
    StepBatch,
    StepOutput,
    Support,
)
from octavo.contract.row_outputs import row_outputs
from octavo_cpu.attention import NativeAttention, NativeCache, geometry_of
from octavo_cpu.build import Builder
from octavo_cpu.memory import zeros
from octavo_cpu.native import NativeLibrary
from octavo_cpu.ops import ACTIVATIONS, GATED_ACTIVATIONS
from octavo_cpu.structures import (
    ON_LAYER,
    AttentionGeometry,
    StepStruct,
)

__all__ = ["NativeProgram", "can_compile"]

_GREEDY, _LOGITS = bytes([RowMode.GREEDY]), bytes([RowMode.LOGITS])
_LONG_STEP = 64  # tokens
_NEVER = ON_LAYER()


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
        build = Builder(library, request)
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
        index, modes = rows.index, rows.mode.tobytes()
        few = len(index) <= self._step.num_tokens
        only_greedy = few and modes == _GREEDY * len(index)
        only_logits = few and len(index) > 0 and modes == _LOGITS * len(index) and bool((index[1:] > index[:-1]).all())
        inverse: npt.NDArray[np.int64] | None = None
        if not only_greedy and not only_logits:
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
        if only_logits:
            return StepOutput(logits=self._logits(hidden))
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
