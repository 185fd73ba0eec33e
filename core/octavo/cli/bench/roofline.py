"""The machine's limit for a run: bytes that its steps must read and write, operations that they must do.

A step takes at least as long as its bytes at the bandwidth, and as its operations at the peak; the longer of the two
is its limit (Williams, Waterman and Patterson, "Roofline", 2009). Counted is what no program can do without: each
weight once a step, each stored key and value once a step and row that sees it, each product of the model's formulas.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from octavo.cli.bench.recorder import Step
from octavo.contract import Attention, LatentAttention, Layer, Moe, Probe, ProgramCosts
from octavo.executor.base import Executor
from octavo.model.description import ModelDescription, NativeModel

__all__ = ["LayerCosts", "Limit", "ModelCosts", "Work", "limit_of", "model_costs", "work_of"]


@dataclass(frozen=True)
class Work:
    """What a step asks of the device: bytes, and operations (multiplications and additions, each counted)."""

    num_bytes: int = 0
    layer_ops: int = 0
    head_ops: int = 0
    attention_ops: int = 0

    @property
    def num_ops(self) -> int:
        """All of them."""
        return self.layer_ops + self.head_ops + self.attention_ops

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.num_bytes + other.num_bytes,
            self.layer_ops + other.layer_ops,
            self.head_ops + other.head_ops,
            self.attention_ops + other.attention_ops,
        )


@dataclass(frozen=True)
class ModelCosts:
    """What a model's steps are made of.

    Attributes:
        layers: each different layer, and how many there are of it.
        head_parameters: of the product that gives logits.
        program: bytes and dtypes of the weights.
        told_by: who says so: the platform, or the counted spec.

    """

    layers: tuple[tuple["LayerCosts", int], ...]
    head_parameters: int
    program: ProgramCosts
    told_by: str

    @property
    def layer_parameters(self) -> int:
        """Of all layers' products, all experts included."""
        return sum(
            count * (layer.parameters + layer.num_experts * layer.expert_parameters) for layer, count in self.layers
        )


@dataclass(frozen=True)
class LayerCosts:
    """What one layer asks.

    Attributes:
        attention: its geometry; None where it is not known.
        parameters: of the products that every token goes through.
        kv_bytes: that a token stores.
        expert_parameters, num_experts, num_active_experts: of one routed expert; their number; those a token takes.

    """

    attention: Attention | LatentAttention | None
    parameters: int
    kv_bytes: float = 0.0
    expert_parameters: int = 0
    num_experts: int = 0
    num_active_experts: int = 0

    @property
    def window(self) -> int | None:
        return self.attention.window if isinstance(self.attention, Attention) else None

    @property
    def ops_per_pair(self) -> int:
        """Operations of a query token on one token that it sees: the score and the weighted sum, of all heads."""
        match self.attention:
            case Attention(num_heads=heads, head_size=size):
                return 2 * heads * 2 * size
            case LatentAttention(num_heads=heads, nope_dim=nope, v_dim=v_dim, rope=rope):
                return 2 * heads * (nope + rope.rotary_dim + v_dim)
            case None:
                return 0

    def parameters_read(self, num_tokens: int) -> int:
        """By a step of so many tokens, which choose different experts where they can."""
        num_experts = min(num_tokens * self.num_active_experts, self.num_experts)
        return self.parameters + num_experts * self.expert_parameters


def model_costs(description: ModelDescription, executor: Executor, dtype: torch.dtype) -> ModelCosts:
    """Counted from the spec, with the platform's word on what its program reads where it gives one.

    A model that runs by somebody else's program has no spec: its bytes alone are known, and products count two
    operations for each parameter.
    """
    plan, told = executor.memory_plan, executor.costs()
    kv_bytes = plan.block_bytes / plan.block_size
    if isinstance(description, NativeModel):
        spec = description.spec
        layers = [_layer_costs(layer, spec.hidden_size) for layer in spec.layers]
        head = spec.vocab_size * spec.hidden_size
        held = 0 if spec.tied_embeddings else head  # rows of an embedding of its own are read one by one
    else:
        layers, head, held = [LayerCosts(None, plan.weights // dtype.itemsize)], 0, 0
    num_stored = sum(_kv_numbers(layer.attention) for layer in layers)
    layers = [replace(one, kv_bytes=kv_bytes * _kv_numbers(one.attention) / num_stored) for one in layers]
    costs = ModelCosts(
        tuple(Counter(layers).items()),
        head,
        told or ProgramCosts(0, 0, dtype, dtype, dtype),
        "the platform" if told else "the spec",
    )
    if told:
        return costs
    bytes_each = plan.weights / max(costs.layer_parameters + head + held, 1)
    layer_bytes, head_bytes = int(costs.layer_parameters * bytes_each), int(head * bytes_each)
    return replace(costs, program=replace(costs.program, layer_bytes=layer_bytes, head_bytes=head_bytes))


def work_of(step: Step, costs: ModelCosts) -> Work:
    """Bytes and operations of one step, guessed tokens included."""
    rows = [(s.num_computed, s.num_tokens + len(s.draft_token_ids)) for s in step.sent.scheduled]
    num_tokens = sum(tokens for _, tokens in rows)
    num_logits = sum(1 + len(s.draft_token_ids) for s in step.sent.scheduled if s.sample_for)
    num_bytes = costs.program.layer_bytes * _share_read(costs, num_tokens)
    num_bytes += costs.program.head_bytes if num_logits else 0
    layer_ops = attention_ops = 0
    for layer, count in costs.layers:
        parameters = layer.parameters + layer.num_active_experts * layer.expert_parameters
        layer_ops += count * 2 * parameters * num_tokens
        for computed, tokens in rows:
            attention_ops += count * layer.ops_per_pair * _pairs(computed, tokens, layer.window)
            moved = _tokens_seen(computed, tokens, layer.window) + tokens  # read and written
            num_bytes += count * layer.kv_bytes * moved
    return Work(int(num_bytes), layer_ops, 2 * costs.head_parameters * num_logits, attention_ops)


@dataclass(frozen=True)
class Limit:
    """Seconds that some steps take at least.

    Attributes:
        seconds: each step at the slower of its two limits, or at the bandwidth where no peak is known.
        byte_seconds, op_seconds: of all bytes alone, of all operations alone.
        without_peak: the dtype for which the probe has no peak; None where all are known.

    """

    seconds: float
    byte_seconds: float
    op_seconds: float
    without_peak: torch.dtype | None = None


def limit_of(works: Iterable[Work], costs: ModelCosts, probe: Probe) -> Limit:
    """The least time for steps of such work, one after another."""
    dtypes = (costs.program.layer_dtype, costs.program.head_dtype, costs.program.attention_dtype)
    peaks = [probe.ops_per_second.get(dtype) for dtype in dtypes]
    missing = next((dtype for dtype, peak in zip(dtypes, peaks, strict=True) if peak is None), None)
    seconds = byte_seconds = op_seconds = 0.0
    for work in works:
        reading = work.num_bytes / probe.read_bytes_per_second
        computing = sum(ops / peak for ops, peak in zip(_ops(work), peaks, strict=True) if peak is not None)
        seconds += max(reading, computing)
        byte_seconds += reading
        op_seconds += computing
    return Limit(seconds, byte_seconds, op_seconds, missing)


def _ops(work: Work) -> Sequence[int]:
    return work.layer_ops, work.head_ops, work.attention_ops


def _share_read(costs: ModelCosts, num_tokens: int) -> float:
    """Of the layers' weights; below 1 where tokens leave experts out."""
    read = sum(count * layer.parameters_read(num_tokens) for layer, count in costs.layers)
    return read / costs.layer_parameters if costs.layer_parameters else 1.0


def _pairs(computed: int, tokens: int, window: int | None) -> int:
    """Pairs of a query token and a token that it sees, over `tokens` queries after `computed` tokens."""
    if window is None:
        return tokens * computed + tokens * (tokens + 1) // 2
    return sum(min(computed + i + 1, window) for i in range(tokens))


def _tokens_seen(computed: int, tokens: int, window: int | None) -> int:
    """Stored tokens that some query of the row sees."""
    return computed + tokens if window is None else min(computed + tokens, window + tokens - 1)


def _layer_costs(layer: Layer, hidden: int) -> LayerCosts:
    parameters = _attention_parameters(layer.attn, hidden)
    mlp = layer.mlp
    if not isinstance(mlp, Moe):
        return LayerCosts(layer.attn, parameters + _mlp_parameters(mlp.width, mlp.gated, hidden))
    parameters += hidden * mlp.num_experts  # the router
    if mlp.shared is not None:
        parameters += _mlp_parameters(mlp.shared.mlp.width, mlp.shared.mlp.gated, hidden)
    expert = _mlp_parameters(mlp.expert.width, mlp.expert.gated, hidden)
    return LayerCosts(layer.attn, parameters, expert, mlp.num_experts, mlp.top_k)


def _mlp_parameters(width: int, gated: bool, hidden: int) -> int:
    return (3 if gated else 2) * width * hidden


def _attention_parameters(attn: Attention | LatentAttention, hidden: int) -> int:
    if isinstance(attn, Attention):
        return 2 * hidden * attn.head_size * (attn.num_heads + attn.num_kv_heads)
    query_size = attn.num_heads * (attn.nope_dim + attn.rope.rotary_dim)
    query = hidden * query_size if attn.q_rank is None else attn.q_rank * (hidden + query_size)
    latent = hidden * (attn.kv_rank + attn.rope.rotary_dim)
    unfolded = attn.kv_rank * attn.num_heads * (attn.nope_dim + attn.v_dim)
    return query + latent + unfolded + hidden * attn.num_heads * attn.v_dim


def _kv_numbers(attn: Attention | LatentAttention | None) -> int:
    """Numbers that a token stores in the layer."""
    match attn:
        case Attention(num_kv_heads=heads, head_size=size):
            return 2 * heads * size
        case LatentAttention(kv_rank=rank, rope=rope):
            return rank + rope.rotary_dim
        case None:
            return 1
