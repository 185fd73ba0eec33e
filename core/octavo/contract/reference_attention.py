"""The truth of paged attention in plain torch: on any device that torch reaches, slow where rows are many.

Rows are served one after another, each in tiles of `TILE` queries that begin at absolute positions. A tile's
matrix products have shapes that follow from its positions alone: queries that this step does not hold are
zeros, and so are keys and values that no query of the step sees. So torch runs the same kernel on the same
shapes for a token alone, in any batch, whole and in chunks, and the token's bits agree.

Storage of a layer is a key tensor [num_blocks, block_size, num_kv_heads, head_size] and a value tensor
[num_blocks, block_size, num_kv_heads, value_size]; with a latent spec the key tensor alone. An int8 cache has a
float32 tensor of scales [num_blocks, block_size, num_kv_heads, 1] after each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from octavo.contract.attention import AttentionBackend, AttentionBatch, AttentionSpec, KVCache
from octavo.contract.support import Support
from octavo.contract.version import API_VERSION

__all__ = ["ReferenceAttention", "quantize_kv"]

TILE = 16  # queries a matrix product
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def quantize_kv(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values [..., size] as an int8 cache holds them: int8 [..., size] and float32 scales [..., 1].

    A scale takes the largest of its token and head to 127; codes are the nearest whole numbers.
    """
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True) / 127.0
    inverse = torch.where(scales > 1e-37, 1.0 / scales, 0.0)
    return (wide * inverse).nan_to_num().round().clamp(-127, 127).to(torch.int8), scales


@dataclass(frozen=True)
class _Tile:
    """Some queries of one row, all at positions of one tile, and the keys that they see.

    Attributes:
        tokens: which of the step's tokens.
        queries: where they stand within the tile.
        slots: [n] int64, of the keys that any of them sees, in order of position.
        keys: where those stand within the tile's span of keys.
        hidden: [TILE, span] bool, the keys that each query must not see.

    """

    tokens: slice
    queries: slice
    slots: torch.Tensor
    keys: slice
    hidden: torch.Tensor


@dataclass(frozen=True)
class _Plan:
    cache: KVCache
    tiles: tuple[_Tile, ...]
    write_tokens: torch.Tensor | slice
    write_slots: torch.Tensor


class ReferenceAttention(AttentionBackend):
    """Paged attention on torch's own operators, computed in float32 (float64 where the tensors are).

    Reads no slot but those of visible positions: blocks that nobody wrote may hold NaN, and table entries
    past a row's blocks, or before its window, may hold anything.
    """

    name = "torch"
    api_version = API_VERSION

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def supports(self, spec: AttentionSpec) -> Support:
        """Everything in the usual float types, and int8 caches."""
        answer = Support.yes()
        for what, dtype in (("dtype", spec.dtype), ("KV dtype", spec.kv_dtype)):
            if dtype not in DTYPES and (what, dtype) != ("KV dtype", torch.int8):
                known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
                known += " and int8" if what == "KV dtype" else ""
                answer &= Support.no(f"{what} {str(dtype).removeprefix('torch.')}, computed are {known}")
        if spec.num_heads % spec.num_kv_heads:
            answer &= Support.no(f"{spec.num_heads} heads cannot share {spec.num_kv_heads} KV heads evenly")
        if spec.latent and (spec.num_kv_heads != 1 or spec.value_size > spec.head_size):
            answer &= Support.no("a latent cache has one KV head, and its value is a prefix of the key")
        if spec.latent and spec.kv_dtype == torch.int8:
            answer &= Support.no("a latent cache is not stored in int8 (setting: kv_cache_dtype)")
        return answer

    @property
    def row_invariant(self) -> Support:
        """Yes: see the module's first lines."""
        return Support.yes(f"products in tiles of {TILE} at absolute positions, bitwise as far as torch repeats itself")

    def block_bytes(self, spec: AttentionSpec) -> int:
        """Keys and values of every layer; keys alone where latent."""
        dims = spec.head_size + (0 if spec.latent else spec.value_size)
        scales = 2 * torch.float32.itemsize if spec.kv_dtype == torch.int8 else 0
        return spec.num_layers * spec.block_size * spec.num_kv_heads * (dims * spec.kv_dtype.itemsize + scales)

    def allocate(self, spec: AttentionSpec, num_blocks: int) -> KVCache:
        """Zeros on the device."""
        return _allocate(spec, num_blocks, self.device)

    def allocate_host(self, spec: AttentionSpec, num_blocks: int) -> KVCache:
        """Zeros in host memory."""
        return _allocate(spec, num_blocks, None)

    def plan(self, cache: KVCache, batch: AttentionBatch) -> _Plan:
        """Cut each row into tiles and look up the slots of what it sees. Two copies bring it all to the device."""
        spec = cache.spec
        spans: list[tuple[slice, slice, slice, slice]] = []  # of each tile: tokens, queries, slots, keys
        slots: list[npt.NDArray[np.int64]] = []  # of what each row sees
        num_slots = 0
        hidden: list[npt.NDArray[np.bool_]] = []
        for row in range(batch.num_rows):
            first, last = int(batch.query_start_loc_host[row]), int(batch.query_start_loc_host[row + 1])
            seq_len = int(batch.seq_lens_host[row])
            if first == last:
                continue
            start = seq_len - (last - first)  # position of the row's first query
            seen_from = _first_visible(start, spec.window)
            positions = np.arange(seen_from, seq_len)
            blocks = batch.block_table_host[row, positions // spec.block_size].astype(np.int64)
            slots.append(blocks * spec.block_size + positions % spec.block_size)
            at = num_slots - seen_from  # a position's place among the slots of all rows
            num_slots += len(positions)
            for tile_start in range(start // TILE * TILE, seq_len, TILE):
                low, high = max(start, tile_start), min(seq_len, tile_start + TILE)
                visible = _first_visible(low, spec.window)
                span_start = _first_visible(tile_start, spec.window) // TILE * TILE
                tokens = slice(first + low - start, first + high - start)
                queries = slice(low - tile_start, high - tile_start)
                keys = slice(visible - span_start, high - span_start)
                spans.append((tokens, queries, slice(at + visible, at + high), keys))
                hidden.append(_hidden(tile_start, span_start, spec.window))
        kept = np.flatnonzero(batch.slot_mapping_host >= 0)
        kept_slots = batch.slot_mapping_host[kept].astype(np.int64)
        seen, write_slots, written = self._upload([*slots, kept_slots, kept], [num_slots, len(kept), len(kept)])
        masks = self._upload([mask.reshape(-1) for mask in hidden], [mask.size for mask in hidden])
        tiles = tuple(
            _Tile(tokens, queries, seen[places], keys, mask.view(TILE, -1))
            for (tokens, queries, places, keys), mask in zip(spans, masks, strict=True)
        )
        return _Plan(cache, tiles, slice(None) if len(kept) == batch.num_tokens else written, write_slots)

    def _upload(self, parts: Sequence[npt.NDArray[Any]], sizes: list[int]) -> Sequence[torch.Tensor]:
        """Arrays of one dtype on the device, by one copy, cut anew into `sizes`."""
        return torch.split(torch.from_numpy(np.concatenate(parts)).to(self.device), sizes) if parts else ()

    def write(self, plan: _Plan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Scatter by slot."""
        for storage, new in zip(_storage(plan.cache, layer), (key, value), strict=False):
            parts = quantize_kv(new) if len(storage) > 1 else (new,)
            for tensor, part in zip(storage, parts, strict=True):
                tensor[plan.write_slots] = part[plan.write_tokens].to(tensor.dtype)

    def attend(
        self,
        plan: _Plan,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Tile by tile."""
        spec = plan.cache.spec
        stored = _storage(plan.cache, layer)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        heads = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads)
        for tile in plan.tiles:
            span = tile.hidden.shape[1]
            q = query.new_zeros(TILE, *heads, spec.head_size, dtype=wide)
            q[tile.queries] = query[tile.tokens].reshape(-1, *heads, spec.head_size).to(wide)
            k, *rest = (_gather(storage, tile, wide) for storage in stored)
            v = rest[0] if rest else k[..., : spec.value_size]
            # [Hkv, group x TILE, D]: the query heads of one KV head are rows of one product.
            rows = q.permute(1, 2, 0, 3).flatten(1, 2)
            scores = (torch.bmm(rows, k.permute(1, 2, 0)) * spec.scale).view(*heads, TILE, span)
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            scores = scores.masked_fill(tile.hidden, -torch.inf)
            weights = _softmax(scores, None if sinks is None else sinks.to(wide).view(*heads, 1, 1))
            y = torch.bmm(weights.flatten(1, 2), v.transpose(0, 1)).view(*heads, TILE, spec.value_size)
            out[tile.tokens] = y.permute(2, 0, 1, 3).flatten(1, 2)[tile.queries].to(out.dtype)


def _gather(storage: Sequence[torch.Tensor], tile: _Tile, dtype: torch.dtype) -> torch.Tensor:
    """[span, num_kv_heads, size]: what the tile's queries see, zeros around it."""
    seen, *scales = (tensor.index_select(0, tile.slots).to(dtype) for tensor in storage)
    for scale in scales:
        seen = seen * scale
    return F.pad(seen, (0, 0, 0, 0, tile.keys.start, tile.hidden.shape[1] - tile.keys.stop))


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position + 1 - window)


def _hidden(tile_start: int, span_start: int, window: int | None) -> npt.NDArray[np.bool_]:
    """[TILE, span] bool: later keys, and those that have left the window."""
    queries = np.arange(tile_start, tile_start + TILE)[:, None]
    keys = np.arange(span_start, tile_start + TILE)[None, :]
    hidden: npt.NDArray[np.bool_] = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return hidden


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Over the last axis; a sink takes its share and gives nothing."""
    if sinks is None:
        return scores.softmax(-1)
    best = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = torch.exp(scores - best)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(sinks - best))


def _allocate(spec: AttentionSpec, num_blocks: int, device: torch.device | None) -> KVCache:
    sizes = (spec.head_size,) if spec.latent else (spec.head_size, spec.value_size)
    kinds = [(size, spec.kv_dtype) for size in sizes]
    if spec.kv_dtype == torch.int8:
        kinds = [kind for codes in kinds for kind in (codes, (1, torch.float32))]
    tensors = tuple(
        torch.zeros(num_blocks, spec.block_size, spec.num_kv_heads, size, dtype=dtype, device=device)
        for size, dtype in kinds * spec.num_layers
    )
    return KVCache(spec, num_blocks, tensors)


def _storage(cache: KVCache, layer: int) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Of keys and of values, by slot: [num_blocks * block_size, num_kv_heads, size], and scales where there are."""
    kinds, parts = 1 if cache.spec.latent else 2, 2 if cache.spec.kv_dtype == torch.int8 else 1
    first = kinds * parts * layer
    tensors = [t.flatten(0, 1) for t in cache.tensors[first : first + kinds * parts]]
    return tuple(tuple(tensors[i * parts : (i + 1) * parts]) for i in range(kinds))
