"""The one program that runs any spec, on the ops and attention backends that the platform's resolver gives.

T tokens of a step, H hidden size, D head size, S requested rows, V vocabulary. Everything that does not depend on
a step's tokens (implementations, packed weights, cos and sin) is settled when the program is made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from octavo.contract import (
    Attention,
    AttentionBackend,
    DecoderSpec,
    KVCache,
    LatentAttention,
    Layer,
    Moe,
    RowMode,
    Rows,
    StepBatch,
    StepOutput,
    Support,
    Weight,
)
from octavo.contract.reference import by_element
from octavo.contract.row_outputs import RowOutputs, num_chunk_rows, row_outputs
from octavo.errors import UnsupportedError
from octavo.hardware.resolve import OpResolver
from octavo.model.blocks import Blocks, NormBlock
from octavo.model.kv_groups import KVGroup
from octavo.model.moe import MoeBlock

__all__ = ["GenericProgram", "InputBlock", "LayerBlock", "Step"]


class GenericProgram:
    """A `Program` for any spec. Work is submitted to the device in order; the host platform computes in `submit`."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Weight],
        *,
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[KVGroup],
        resolver: OpResolver,
        max_model_len: int,
    ) -> None:
        """Resolve every op and pack every weight.

        Args:
            spec: the decoder.
            weights: its slots, see `slots`. What was packed is copied: drop the mapping afterwards.
            dtype: of activations and weights.
            device: of tensors.
            groups: the spec's, from `kv_groups`; `bind` gets a cache for each.
            resolver: of the platform.
            max_model_len: positions run from 0 to max_model_len - 1.

        Raises:
            UnsupportedError: nothing serves an op or an attention spec.

        """
        blocks = Blocks(weights, resolver, dtype=dtype, device=device, max_model_len=max_model_len)
        self.on_layer: Callable[[], None] = _nothing  # called before each layer: a sign of life
        self._spec = spec
        self._dtype = dtype
        self._backends = [resolver.resolve_attention(group.spec) for group in groups]
        for backend in self._backends:
            blocks.limit(f"attention ({backend.name})", backend.row_invariant)
        self._caches: Sequence[KVCache] = ()
        self._input = InputBlock(blocks, spec)
        place = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
        self._layers = [
            LayerBlock(blocks, f"layers.{i}", layer, self._backends[place[i][0]], *place[i])
            for i, layer in enumerate(spec.layers)
        ]
        self._final_norm = blocks.norm("final_norm", spec.final_norm)
        self._head = blocks.linear("embedding" if spec.tied_embeddings else "head")
        self._row_invariant = blocks.row_invariant

    @property
    def row_invariant(self) -> Support:
        """The answers of all ops and backends together."""
        return self._row_invariant

    @property
    def modes(self) -> frozenset[RowMode]:
        """All of them."""
        return frozenset(RowMode)

    def workspace_bytes(self, max_tokens: int, max_rows: int) -> int:
        """The widest layer's activations, the residual stream twice, a chunk of logits thrice, and their rows."""
        spec = self._spec
        width = max(_layer_width(layer, spec.hidden_size) for layer in spec.layers)
        tokens = max_tokens * (width + 3 * spec.hidden_size) * self._dtype.itemsize
        chunk_rows = min(max_rows, num_chunk_rows(spec.vocab_size))
        return tokens + (max_rows + 3 * chunk_rows) * spec.vocab_size * torch.float32.itemsize

    def bind(self, kv_caches: Sequence[KVCache]) -> None:
        """The caches, one a group in the groups' order."""
        if len(kv_caches) != len(self._backends):
            raise ValueError(f"{len(kv_caches)} KV caches for {len(self._backends)} groups")
        self._caches = tuple(kv_caches)

    def submit(self, batch: StepBatch, rows: Rows) -> "_Handle":
        """Run the step as far as the device does so on its own."""
        if batch.adapter_ids is not None or batch.hidden_in is not None:
            raise UnsupportedError("the generic program runs whole models without adapters")
        with torch.no_grad():
            return _Handle(self._run(batch, rows))

    def _run(self, batch: StepBatch, rows: Rows) -> RowOutputs:
        plans = [
            backend.plan(cache, attention)
            for backend, cache, attention in zip(self._backends, self._caches, batch.attention, strict=True)
        ]
        step = Step(batch.positions, plans)
        x, delta = self._input(batch), None
        for layer in self._layers:
            self.on_layer()
            x, delta = layer(x, delta, step)
        if not len(rows.index):
            return RowOutputs()
        distinct, inverse = np.unique(rows.index, return_inverse=True)
        if len(distinct) < len(x):
            index = torch.from_numpy(distinct).to(x.device)
            x, delta = x[index], None if delta is None else delta[index]
        hidden, _ = _join(x, delta, self._final_norm)
        return row_outputs(hidden, inverse.reshape(-1), rows, self._logits, self._spec.vocab_size)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] float32."""
        logits = self._head(hidden).float()
        if self._spec.logit_scale != 1.0:
            logits = logits * self._spec.logit_scale
        cap = self._spec.logit_softcap
        return logits if cap is None else cap * by_element(torch.tanh, logits / cap)


def _nothing() -> None:
    pass


@dataclass
class Step:
    """What the layers of a step share.

    Attributes:
        positions: [T] int64.
        plans: one a KV group.
        outs: attention outputs by shape, each written anew by every layer.

    """

    positions: torch.Tensor
    plans: list[Any]
    outs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def out(self, like: torch.Tensor, num_heads: int, value_size: int) -> torch.Tensor:
        """[T, num_heads, value_size] to attend into."""
        key = (num_heads, value_size)
        if key not in self.outs:
            self.outs[key] = like.new_empty((len(like), *key))
        return self.outs[key]


class _Handle:
    """A step under way: its outputs are fetched to the host when they are asked for."""

    def __init__(self, outputs: RowOutputs) -> None:
        self._outputs = outputs

    def result(self) -> StepOutput:
        """The outputs, in host memory."""
        return self._outputs.fetch()


def _join(x: torch.Tensor, delta: torch.Tensor | None, norm: NormBlock | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the residual stream, the stream), once what the last branch added is in it."""
    if delta is not None:
        if norm:
            return norm.add(delta, x)
        x = x + delta
    return (norm(x) if norm else x), x


class InputBlock:
    """What a step is given -> the residual stream [T, H] that the first layer reads."""

    def __init__(self, blocks: Blocks, spec: DecoderSpec) -> None:
        self._embedding = blocks.embedding("embedding")
        # Rounded as the weights are: models that scale embeddings were trained with the rounded factor.
        self._scale = torch.tensor(spec.embedding_scale, dtype=blocks.dtype).item()
        self._positions = blocks.embedding("positions") if spec.positions else None
        self._offset = spec.positions.offset if spec.positions else 0
        self._norm = blocks.norm("embedding_norm", spec.embedding_norm)

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        given = batch.input_embeds
        x = self._embedding(batch.token_ids) if given is None else given.clone()  # fused ops write over the stream
        if self._scale != 1.0:
            x = x * self._scale
        if self._positions:
            x = x + self._positions(batch.positions + self._offset)
        return self._norm(x) if self._norm else x


class LayerBlock:
    """One layer. The sum of its last branch and the stream is left to whoever norms it next, as one op."""

    def __init__(
        self, blocks: Blocks, at: str, layer: Layer, backend: AttentionBackend, group: int, layer_in_group: int
    ) -> None:
        attend = _Attend(backend, group, layer_in_group)
        self._scale = layer.residual_scale
        self._residual = layer.residual
        self._attn_pre = blocks.norm(f"{at}.attn_pre", layer.attn_pre)
        self._attn_post = blocks.norm(f"{at}.attn_post", layer.attn_post)
        self._mlp_pre = blocks.norm(f"{at}.mlp_pre", layer.mlp_pre)
        self._mlp_post = blocks.norm(f"{at}.mlp_post", layer.mlp_post)
        self._attn: Callable[[torch.Tensor, Step], torch.Tensor]
        if isinstance(layer.attn, LatentAttention):
            self._attn = _LatentAttentionBlock(blocks, f"{at}.attn", layer.attn, attend)
        else:
            self._attn = _AttentionBlock(blocks, f"{at}.attn", layer.attn, attend)
        self._mlp: Callable[[torch.Tensor], torch.Tensor]
        self._mlp = (
            MoeBlock(blocks, at, layer.mlp) if isinstance(layer.mlp, Moe) else blocks.mlp(f"{at}.mlp", layer.mlp)
        )

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream [T, H] and what the layer before adds to it -> the stream, and what this one adds."""
        h, x = _join(x, delta, self._attn_pre)
        attended = self._branch(self._attn(h, step), self._attn_post)
        if self._residual == "sequential":
            h, x = _join(x, attended, self._mlp_pre)
            return x, self._branch(self._mlp(h), self._mlp_post)
        if self._residual == "parallel":
            h = self._mlp_pre(x) if self._mlp_pre else x
        return x, attended + self._branch(self._mlp(h), self._mlp_post)

    def _branch(self, y: torch.Tensor, post: NormBlock | None) -> torch.Tensor:
        y = post(y) if post else y
        return y if self._scale == 1.0 else y * self._scale


@dataclass(frozen=True)
class _Attend:
    """Where a layer's keys and values go."""

    backend: AttentionBackend
    group: int
    layer: int

    def __call__(
        self,
        step: Step,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, Hq, value size]; valid until the step's next layer attends."""
        out = step.out(query, query.shape[1], value.shape[2])
        self.backend.write_attend(step.plans[self.group], self.layer, query, key, value, out, sinks)
        return out


class _AttentionBlock:
    """x [T, H] -> [T, H]."""

    def __init__(self, blocks: Blocks, at: str, attn: Attention, attend: _Attend) -> None:
        self._heads = [attn.num_heads, attn.num_kv_heads, attn.num_kv_heads]
        self._head_size = attn.head_size
        self._clip = attn.qkv_clip
        self._attend = attend
        self._qkv = blocks.linear(f"{at}.qkv")
        self._q_norm = blocks.qk_norm(f"{at}.q_norm", attn.qk_norm)
        self._k_norm = blocks.qk_norm(f"{at}.k_norm", attn.qk_norm)
        self._rope = blocks.rope(attn.rope, attn.head_size)
        self._sinks = blocks.tensor(f"{at}.sinks") if attn.sinks else None
        self._o = blocks.linear(f"{at}.o")

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        qkv = self._qkv(x)
        q, k, v = torch.split(qkv.view(len(x), -1, self._head_size), self._heads, 1)
        if self._q_norm and self._k_norm:
            q, k = self._q_norm(q), self._k_norm(k)
        if self._clip is not None:
            q, k, v = (part.clamp(-self._clip, self._clip) for part in (q, k, v))
        if self._rope:
            q, k = self._rope(q, k, step.positions)
        return self._o(self._attend(step, q, k, v, self._sinks).flatten(1))


class _LatentAttentionBlock:
    """x [T, H] -> [T, H], in the absorbed form: keys and values are one latent row, shared by all heads."""

    def __init__(self, blocks: Blocks, at: str, attn: LatentAttention, attend: _Attend) -> None:
        blocks.limit("latent attention", Support.no("torch's matrix product by head picks its tiling by the rows"))
        self._attn = attn
        self._attend = attend
        self._q_a = blocks.linear(f"{at}.q_a") if attn.q_rank is not None else None
        self._q_a_norm = blocks.norm(f"{at}.q_a_norm", attn.norm) if attn.q_rank is not None else None
        self._q = blocks.linear(f"{at}.q")
        self._kv_a = blocks.linear(f"{at}.kv_a")
        self._kv_a_norm = blocks.norm(f"{at}.kv_a_norm", attn.norm)
        self._rope = blocks.rope(attn.rope, attn.rope.rotary_dim)
        self._o = blocks.linear(f"{at}.o")
        by_head = blocks.tensor(f"{at}.kv_b").view(attn.num_heads, -1, attn.kv_rank)
        self._to_key, self._to_value = torch.split(by_head, [attn.nope_dim, attn.v_dim], 1)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        attn = self._attn
        h = x
        if self._q_a and self._q_a_norm:
            h = self._q_a_norm(self._q_a(x))
        q = self._q(h).view(len(x), attn.num_heads, -1)
        latent, k_rope = torch.split(self._kv_a(x), [attn.kv_rank, attn.rope.rotary_dim], -1)
        if self._kv_a_norm:
            latent = self._kv_a_norm(latent)
        q_nope, q_rope = torch.split(q, [attn.nope_dim, attn.rope.rotary_dim], -1)
        k_rope = k_rope[:, None]
        if self._rope:
            q_rope, k_rope = self._rope(q_rope, k_rope, step.positions)
        query = torch.cat((torch.einsum("thn,hnr->thr", q_nope, self._to_key), q_rope), -1)
        key = torch.cat((latent[:, None], k_rope), -1)
        out = self._attend(step, query, key, key[..., : attn.kv_rank])
        return self._o(torch.einsum("thr,hvr->thv", out, self._to_value).flatten(1))


def _layer_width(layer: Layer, hidden_size: int) -> int:
    """Numbers a token that live at once in a layer, at most: attention's and the MLP's do not overlap."""
    attn, mlp = layer.attn, layer.mlp
    if isinstance(attn, LatentAttention):
        attended = attn.num_heads * (3 * attn.kv_rank + attn.nope_dim + 3 * attn.rope.rotary_dim + attn.v_dim)
    else:
        attended = (3 * attn.num_heads + 2 * attn.num_kv_heads) * attn.head_size
    if not isinstance(mlp, Moe):
        return max(attended, 3 * mlp.width)
    shared = 3 * mlp.shared.mlp.width if mlp.shared else 0
    return max(attended, 3 * mlp.expert.width + 2 * hidden_size + 3 * mlp.num_experts + shared)
