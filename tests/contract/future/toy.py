"""A small program of paged attention layers, written on the contract alone, for what engines are still to do."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from octavo.contract import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    CompileRequest,
    DecoderSpec,
    KVCache,
    Program,
    RowMode,
    Rows,
    Shard,
    StepBatch,
    StepHandle,
    StepOutput,
    Support,
)
from octavo.contract.reference_attention import ReferenceAttention
from octavo.testing.cases_attention import make_batch

HIDDEN, HEADS, KV_HEADS, SIZE, VOCAB, BLOCK = 16, 4, 2, 8, 40, 4
CPU = torch.device("cpu")
WHOLE = Shard()


def attention_spec(num_layers: int, shard: Shard = WHOLE, **changes: Any) -> AttentionSpec:
    heads = HEADS // shard.num_ranks, KV_HEADS // shard.num_ranks
    facts: dict[str, Any] = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_size": SIZE, "value_size": SIZE}
    return AttentionSpec(
        num_layers, **{**facts, **changes}, block_size=BLOCK, dtype=torch.float64, kv_dtype=torch.float64, scale=0.5
    )


def make_weights(num_layers: int, num_adapters: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw, dtype=torch.float64) / columns**0.5

    weights = {"embedding": random(VOCAB, HIDDEN) * 4, "head": random(VOCAB, HIDDEN)}
    for i in range(num_layers):
        weights[f"layers.{i}.attn.qkv"] = random((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN)
        weights[f"layers.{i}.attn.o"] = random(HIDDEN, HEADS * SIZE)
        for a in range(num_adapters):
            weights[f"adapters.{a}.layers.{i}.attn.o.down"] = random(2, HEADS * SIZE)
            weights[f"adapters.{a}.layers.{i}.attn.o.up"] = random(HIDDEN, 2)
    return weights


def cut(weights: Mapping[str, torch.Tensor], shard: Shard) -> dict[str, torch.Tensor]:
    """What core will do when it loads a rank's weights: whole heads go to each."""

    def part(x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.chunk(shard.num_ranks, axis)[shard.rank]

    found = dict(weights)
    for name, weight in weights.items():
        if name.endswith(".qkv"):
            q, k, v = weight.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE])
            found[name] = torch.cat((part(q, 0), part(k, 0), part(v, 0)))
        elif name.endswith("attn.o"):
            found[name] = part(weight, 1)
    return found


class Link:
    """Sums over the ranks of one process, a thread each."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=30)
        self._parts: list[torch.Tensor | None] = [None] * num_ranks

    def all_reduce(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self._parts[rank] = x
        self._barrier.wait()
        total = torch.stack([part for part in self._parts if part is not None]).sum(0)
        self._barrier.wait()
        return total


@dataclass(frozen=True)
class Done:
    """A step that is over when it is submitted."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


@dataclass
class ToyProgram:
    """x + o(attention(qkv(x))) for each layer of its stage, then the head."""

    request: CompileRequest
    link: Link | None = None
    backend: AttentionBackend = field(default_factory=lambda: ReferenceAttention(CPU))
    row_invariant: Support = field(default_factory=Support.yes)
    modes: frozenset[RowMode] = frozenset({RowMode.LOGITS, RowMode.GREEDY})
    caches: Sequence[KVCache] = ()

    def __post_init__(self) -> None:
        shard, num_layers = self.request.shard, sum(spec.num_layers for spec in self.request.attention)
        self.layers = range(shard.stage * num_layers, (shard.stage + 1) * num_layers)

    def workspace_bytes(self, max_tokens: int, max_rows: int) -> int:
        return 8 * max_tokens * HIDDEN + 8 * max_rows * VOCAB

    def bind(self, kv_caches: Sequence[KVCache]) -> None:
        self.caches = kv_caches

    def submit(self, batch: StepBatch, rows: Rows) -> StepHandle:
        weights, shard = self.request.weights, self.request.shard
        plans = [self.backend.plan(c, b) for c, b in zip(self.caches, batch.attention, strict=True)]
        if batch.hidden_in is not None:
            x = batch.hidden_in
        elif batch.input_embeds is not None:
            x = batch.input_embeds
        else:
            x = weights["embedding"][batch.token_ids]
        for at, layer in enumerate(self.layers):
            spec = self.caches[0].spec
            q, k, v = torch.split(
                (x @ weights[f"layers.{layer}.attn.qkv"].T).view(len(x), -1, SIZE),
                [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads],
                1,
            )
            out = torch.empty_like(q)
            self.backend.write_attend(plans[0], at, q, k, v, out)
            y = out.flatten(1) @ weights[f"layers.{layer}.attn.o"].T
            y = y + self._adapted(batch, layer, out.flatten(1))
            x = x + (y if self.link is None else self.link.all_reduce(shard.rank, y))
        if shard.stage < shard.num_stages - 1:
            return Done(StepOutput(hidden_out=x))
        logits = x[torch.from_numpy(rows.index)] @ weights["head"].T
        best = logits.argmax(-1).numpy()
        wanted = logits[torch.from_numpy(rows.of(RowMode.LOGITS))].float()
        return Done(StepOutput(logits=wanted, greedy_ids=best[rows.of(RowMode.GREEDY)]))

    def _adapted(self, batch: StepBatch, layer: int, x: torch.Tensor) -> torch.Tensor | float:
        """Each row's own low-rank addition."""
        if batch.adapter_ids is None:
            return 0.0
        counts = np.diff(batch.attention[0].query_start_loc_host)
        of_token = np.repeat(batch.adapter_ids.numpy(), counts)
        added = torch.zeros(len(x), HIDDEN, dtype=x.dtype)
        for adapter in set(of_token.tolist()) - {-1}:
            at = f"adapters.{adapter}.layers.{layer}.attn.o"
            down, up = self.request.weights[f"{at}.down"], self.request.weights[f"{at}.up"]
            added[of_token == adapter] = x[of_token == adapter] @ down.T @ up.T
        return added


def make_program(
    weights: Mapping[str, torch.Tensor],
    num_layers: int,
    shard: Shard = WHOLE,
    link: Link | None = None,
) -> ToyProgram:
    """Compiled and bound."""
    spec = attention_spec(num_layers, shard)
    whole = DecoderSpec(VOCAB, HIDDEN, (), None, tied_embeddings=False)
    request = CompileRequest(whole, weights, torch.float64, [spec], max_tokens=64, max_rows=64, shard=shard)
    program = ToyProgram(request, link)
    program.bind([program.backend.allocate(spec, 64)])
    return program


@dataclass
class Fed:
    """Token ids, blocks, and how many tokens the caches hold."""

    token_ids: list[int]
    blocks: list[int]
    done: int = 0


def make_sequences(*lengths: int) -> list[Fed]:
    draw, blocks = np.random.default_rng(1), np.random.default_rng(2).permutation(64)
    found, taken = [], 0
    for length in lengths:
        needed = -(-(length + 8) // BLOCK)
        found.append(Fed(draw.integers(0, VOCAB, length).tolist(), blocks[taken : taken + needed].tolist()))
        taken += needed
    return found


def batch_of(work: Sequence[tuple[Fed, int]]) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """Token ids, positions and geometry of a step that feeds each sequence its next n tokens; they count as done."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    table = np.full((len(work), max(len(s.blocks) for s, _ in work)), -1, np.int32)
    for row, (sequence, count) in enumerate(work):
        table[row, : len(sequence.blocks)] = sequence.blocks
        for position in range(sequence.done, sequence.done + count):
            ids.append(sequence.token_ids[position])
            positions.append(position)
            slots.append(sequence.blocks[position // BLOCK] * BLOCK + position % BLOCK)
        sequence.done += count
    start = np.cumsum([0, *(count for _, count in work)])
    lengths = np.array([sequence.done for sequence, _ in work])
    return torch.tensor(ids), torch.tensor(positions), make_batch(start, lengths, table, np.array(slots))


def all_rows(num_tokens: int, mode: RowMode = RowMode.LOGITS) -> Rows:
    return Rows(np.arange(num_tokens), np.full(num_tokens, mode, np.uint8))


def run(program: Program, work: Sequence[tuple[Fed, int]], **fields: Any) -> StepOutput:
    """One step, all of whose tokens give logits."""
    ids, positions, attention = batch_of(work)
    batch = StepBatch(ids, positions, [attention], **fields)
    return program.submit(batch, all_rows(len(ids))).result()


def logits_of(output: StepOutput) -> torch.Tensor:
    assert output.logits is not None
    return output.logits
