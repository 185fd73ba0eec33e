"""Attention over paged blocks: one backend writes keys and values and attends to them.

Write and attend are resolved together because only the backend knows how a block lies in memory. Core counts
blocks, hands out block tables and never looks inside a `KVCache`.

Words: T tokens of a step, R rows (one a scheduled sequence), M blocks of the longest table, slot = block *
block_size + offset. Tokens of a row are contiguous, rows stand one after another.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from octavo.contract.support import Support
from octavo.contract.version import FIRST_VERSION, AddedField, version_for

__all__ = ["AttentionBackend", "AttentionBatch", "AttentionSpec", "KVCache"]


@dataclass(frozen=True)
class AttentionSpec:
    """What a group of layers asks of a backend: layers with equal specs share one KV cache and one plan.

    Attributes:
        num_layers: layers in the group; `layer` arguments below count from 0 to num_layers - 1.
        num_heads: query heads on this rank.
        num_kv_heads: key and value heads on this rank; divides num_heads.
        head_size: dims of a query and of a key.
        value_size: dims of a value; equals head_size but for latent attention, where the value is the first
            `value_size` dims of the key and nothing else is stored.
        block_size: tokens a block.
        dtype: of queries, keys, values and outputs.
        kv_dtype: of what the cache stores. int8: whole numbers up to 127, and for each token and KV head a
            float32 scale of its key and one of its value; not where latent.
        scale: multiplies the scores.
        window: tokens a query sees, itself included; None: all before it.
        softcap: scores become softcap * tanh(scores / softcap) after scaling; None: as they are.
        sinks: whether `attend` gets a learned score for each head.
        latent: the value is a prefix of the key (one KV head).

    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: bool = False

    added: ClassVar[tuple[AddedField, ...]] = ()  # fields that came after the first version

    @property
    def version(self) -> tuple[int, int]:
        """The first version of the contract that knows everything the spec asks for."""
        return version_for(self.added, lambda field: getattr(self, field.name))


@dataclass
class KVCache:
    """The blocks of one group of layers. Opaque to core: only the backend that made it reads it.

    Attributes:
        spec: what it was allocated for.
        num_blocks: blocks a layer; ids run from 0 to num_blocks - 1.
        tensors: storage, one a layer (or one a layer and kind), the block axis first. The default
            `copy_blocks` and `swap_blocks` move `tensor[block]`; a backend whose storage is something else
            leaves this empty and overrides both.

    """

    spec: AttentionSpec
    num_blocks: int
    tensors: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class AttentionBatch:
    """Geometry of one step for one KV group, on the device and mirrored on the host. R and T may be 0.

    Attributes:
        query_start_loc: [R + 1] int32, row r owns tokens query_start_loc[r] to query_start_loc[r + 1] - 1.
        seq_lens: [R] int32, tokens of the row in the cache once this step has written its own.
        block_table: [R, M] int32; entries past the row's blocks are arbitrary and must not be read. In a group
            with a window, those of blocks that no query of the step sees are valid ids of any block: what is
            stored there must not reach the output, be it NaN.
        slot_mapping: [T] int64, where each token's key and value go; -1 writes nowhere.
        query_start_loc_host, seq_lens_host, block_table_host, slot_mapping_host: the same as numpy arrays.

    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc_host: npt.NDArray[np.int32]
    seq_lens_host: npt.NDArray[np.int32]
    block_table_host: npt.NDArray[np.int32]
    slot_mapping_host: npt.NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.seq_lens_host)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.slot_mapping_host)


class AttentionBackend(ABC):
    """Paged attention of one provider. Stateless but for what `plan` returns.

    Slots that nobody has written may hold anything, NaN included, and must not reach the output. Where
    `row_invariant` says yes, a row's result does not depend on the rows beside it: splits over the KV lie at
    absolute positions and nothing reads batch-wide maxima.
    """

    name: str
    api_version: tuple[int, int] = FIRST_VERSION  # of the contract that it was written for

    @abstractmethod
    def supports(self, spec: AttentionSpec) -> Support:
        """Whether this backend serves the spec; asked once, when the model loads."""

    @property
    def row_invariant(self) -> Support:
        """Whether a row's output is bitwise the same alone and in any batch, whole and in chunks."""
        return Support.no(f"attention backend {self.name} makes no claim")

    @abstractmethod
    def block_bytes(self, spec: AttentionSpec) -> int:
        """Bytes that one block takes over all layers of the group."""

    @abstractmethod
    def allocate(self, spec: AttentionSpec, num_blocks: int) -> KVCache:
        """A cache of `num_blocks` blocks on the device, which may hold anything until they are written."""

    def allocate_host(self, spec: AttentionSpec, num_blocks: int) -> KVCache:
        """(optional) A cache of the same layout in host memory, the other side of `swap_blocks`.

        Default: tensors of the shapes that `allocate` gives a block. Where a cache holds no tensors,
        override this, `copy_blocks` and `swap_blocks`; the defaults raise TypeError then.
        """
        one = self.allocate(spec, 1)
        _require_tensors(one)
        tensors = tuple(torch.zeros(num_blocks, *t.shape[1:], dtype=t.dtype) for t in one.tensors)
        return KVCache(spec, num_blocks, tensors)

    @abstractmethod
    def plan(self, cache: KVCache, batch: AttentionBatch) -> Any:
        """Work lists of a step, made once and handed to each layer's calls. Holds `cache`."""

    @abstractmethod
    def write(self, plan: Any, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key [T, num_kv_heads, head_size] and value [T, num_kv_heads, value_size] at their slots.

        Inputs may be strided views whose last axis is contiguous.
        """

    @abstractmethod
    def attend(
        self,
        plan: Any,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attend query [T, num_heads, head_size] causally to the cache; fills out [T, num_heads, value_size].

        `sinks` [num_heads] float32 is given exactly when the spec says so.
        """

    def write_attend(
        self,
        plan: Any,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """(optional, fused) `write` and then `attend`. Default: calls both."""
        self.write(plan, layer, key, value)
        self.attend(plan, layer, query, out, sinks)

    def copy_blocks(self, cache: KVCache, mapping: Sequence[tuple[int, int]]) -> None:
        """(optional) Copy whole blocks within `cache`, each (source, target). Default: tensor by tensor.

        No target is also a source, and no target occurs twice.
        """
        _move_blocks(cache, cache, mapping)

    def swap_blocks(self, source: KVCache, target: KVCache, mapping: Sequence[tuple[int, int]]) -> None:
        """(optional) Copy whole blocks between a device and a host cache. Default: tensor by tensor.

        When it returns, the source blocks may be overwritten by work submitted later.
        """
        _move_blocks(source, target, mapping)


def _require_tensors(cache: KVCache) -> None:
    if not cache.tensors:
        raise TypeError("a KV cache without tensors needs its backend's own allocate_host, copy_blocks, swap_blocks")


def _move_blocks(source: KVCache, target: KVCache, mapping: Sequence[tuple[int, int]]) -> None:
    if not mapping:
        return
    _require_tensors(source)
    from_blocks, to_blocks = torch.tensor(mapping, dtype=torch.int64).unbind(1)
    from_blocks = from_blocks.to(source.tensors[0].device)
    to_blocks = to_blocks.to(target.tensors[0].device)
    for from_, to in zip(source.tensors, target.tensors, strict=True):
        to[to_blocks] = from_[from_blocks].to(to.device)
