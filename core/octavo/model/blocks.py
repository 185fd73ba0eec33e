"""The parts of the generic program, each settled when the model loads: which function serves, with which weights.

T tokens of a step, H hidden size, D head size. A block is called with activations and returns activations.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from octavo.contract import (
    ActAndMul,
    Activation,
    Embedding,
    FusedAddRMSNorm,
    LayerNorm,
    Linear,
    Mlp,
    Norm,
    OpSignature,
    QKNorm,
    QuantizedWeight,
    RMSNorm,
    Rope,
    RotaryEmbedding,
    Support,
    Weight,
)
from octavo.contract.rope import rope_table
from octavo.hardware.resolve import OpResolver, ResolvedOp

__all__ = ["Blocks", "EmbeddingBlock", "LinearBlock", "MlpBlock", "NormBlock", "QKNormBlock", "RopeBlock"]

Op = Callable[[Any], Any]


class Blocks:
    """Makes blocks: asks the resolver, packs weights, and remembers what cannot keep rows apart."""

    def __init__(
        self,
        weights: Mapping[str, Weight],
        resolver: OpResolver,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self.weights = weights
        self.dtype = dtype
        self.device = device
        self._limits: dict[str, None] = {}  # reasons, each once, in order
        self._resolver = resolver
        self._max_model_len = max_model_len
        self._cos_sin: dict[Rope, torch.Tensor] = {}

    @property
    def row_invariant(self) -> Support:
        """Whether everything made so far gives a row the same bits whatever the other rows."""
        return Support.no(*self._limits) if self._limits else Support.yes()

    def limit(self, what: str, answer: Support) -> None:
        """Take the answer of a part of the program into account."""
        if not answer:
            self._limits |= dict.fromkeys(f"{what}: {reason}" for reason in answer.reasons)

    def op(self, op: str, **traits: int | float | bool | str) -> Op:
        """The function that serves an op."""
        return self._resolve(op, traits).fn

    def tensor(self, slot: str) -> torch.Tensor:
        """The weight of a slot that is never quantised."""
        weight = self.weights[slot]
        assert isinstance(weight, torch.Tensor), f"{slot} is quantised"
        return weight

    def bias(self, slot: str) -> torch.Tensor | None:
        """The bias of a slot; None where it has none."""
        return self.tensor(f"{slot}.bias") if f"{slot}.bias" in self.weights else None

    def linear(self, slot: str) -> "LinearBlock":
        """The matrix of a slot, packed as its implementation wants it, with its bias if it has one."""
        return self.matrix(self.weights[slot], self.bias(slot))

    def matrix(self, weight: Weight, bias: torch.Tensor | None = None) -> "LinearBlock":
        """A matrix [N, K], packed as its implementation wants it."""
        num_out, num_in = weight.shape
        traits: dict[str, int | str] = {
            "weight_format": _format(weight),
            "in_features": num_in,
            "out_features": num_out,
        }
        resolved = self._resolve("linear", traits)
        packed = resolved.impl.prepare(weight) if resolved.impl.prepare else weight
        return LinearBlock(resolved.fn, packed, bias)

    def experts(self, slot: str, num_experts: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """The product by one of a slot's matrices: (expert, x [T, K]) -> [T, N]."""
        weight, bias = self.weights[slot], self.bias(slot)
        if isinstance(weight, QuantizedWeight):  # each expert's rows are a matrix for the linear op
            num_rows = weight.shape[0] // num_experts
            matrices = [
                self.matrix(weight[i * num_rows : (i + 1) * num_rows], None if bias is None else bias[i])
                for i in range(num_experts)
            ]
            return lambda expert, x: matrices[expert](x)
        dense = weight
        return lambda expert, x: F.linear(x, dense[expert], None if bias is None else bias[expert])

    def norm(self, slot: str, norm: Norm | None) -> "NormBlock | None":
        """The norm of a slot; None where the spec has none there."""
        if norm is None:
            return None
        weight = self.tensor(slot) if norm.weighted else None
        size = self.weights[slot].shape[-1] if norm.weighted else self.weights["embedding"].shape[1]
        return NormBlock(self, norm, weight, self.bias(slot), size)

    def qk_norm(self, slot: str, qk_norm: QKNorm | None) -> "QKNormBlock | None":
        """The norm of queries or keys; None where the spec has none."""
        if qk_norm is None:
            return None
        return QKNormBlock(self, qk_norm, self.tensor(slot), self.bias(slot))

    def mlp(self, at: str, mlp: Mlp) -> "MlpBlock":
        """The MLP whose slots are `at`.up and `at`.down."""
        return MlpBlock(self.linear(f"{at}.up"), self.activation(mlp), self.linear(f"{at}.down"))

    def activation(self, mlp: Mlp) -> Callable[[torch.Tensor], torch.Tensor]:
        """What stands between an MLP's products."""
        name = mlp.activation
        if mlp.gated:
            act_and_mul = self.op("act_and_mul", activation=name, width=mlp.width)
            return lambda x: act_and_mul(ActAndMul(x, name))
        activation = self.op("activation", activation=name)
        return lambda x: activation(Activation(x, name))

    def rope(self, rope: Rope | None, head_size: int) -> "RopeBlock | None":
        """The rotation of a layer; None where positions are not rotary."""
        if rope is None:
            return None
        fn = self.op("rotary_embedding", head_size=head_size, rotary_dim=rope.rotary_dim, interleaved=rope.interleaved)
        if rope not in self._cos_sin:
            self._cos_sin[rope] = rope_table(rope, self._max_model_len).to(self.device)
        return RopeBlock(fn, self._cos_sin[rope], rope.interleaved)

    def embedding(self, slot: str) -> "EmbeddingBlock":
        """The table of a slot."""
        weight = self.weights[slot]
        fn = self.op("embedding", hidden_size=weight.shape[1], weight_format=_format(weight))
        return EmbeddingBlock(fn, weight, self.dtype if isinstance(weight, QuantizedWeight) else None)

    def _resolve(self, op: str, traits: Mapping[str, int | float | bool | str]) -> ResolvedOp:
        resolved = self._resolver.resolve(OpSignature(op, self.dtype, self.device.type, tuple(traits.items())))
        self.limit(f"{op} ({resolved.impl.provider})", resolved.impl.row_invariant)
        return resolved


def _format(weight: Weight) -> str:
    return weight.format if isinstance(weight, QuantizedWeight) else "dense"


class LinearBlock:
    """x [T, K] -> [T, N]."""

    def __init__(self, fn: Op, weight: Any, bias: torch.Tensor | None) -> None:
        self._fn, self._weight, self._bias = fn, weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._fn(Linear(x, self._weight, self._bias))
        return y


class NormBlock:
    """A norm over the last axis."""

    def __init__(
        self, blocks: Blocks, norm: Norm, weight: torch.Tensor | None, bias: torch.Tensor | None, size: int
    ) -> None:
        self._norm, self._weight, self._bias = norm, weight, bias
        self._is_rms = norm.kind == "rms"
        self._fn = blocks.op("rms_norm" if self._is_rms else "layer_norm", hidden_size=size)
        self._fused = blocks.op("fused_add_rms_norm", hidden_size=size) if self._is_rms else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm = self._norm
        y: torch.Tensor
        if self._is_rms:
            y = self._fn(RMSNorm(x, self._weight, norm.eps, norm.weight_offset))
        else:
            y = self._fn(LayerNorm(x, self._weight, self._bias, norm.eps, norm.weight_offset))
        return y

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); neither input may be used again."""
        if self._fused is None:
            residual = residual + x
            return self(residual), residual
        norm = self._norm
        y: tuple[torch.Tensor, torch.Tensor] = self._fused(
            FusedAddRMSNorm(x, residual, self._weight, norm.eps, norm.weight_offset)
        )
        return y


class QKNormBlock:
    """A norm of queries or keys [T, heads, D]."""

    def __init__(self, blocks: Blocks, qk_norm: QKNorm, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._over = qk_norm.over
        # The op has one weight for all that it norms: where each head has its own, they are applied after it.
        size = weight.shape[-1]
        self._weight = self._bias = None
        if self._over == "each_head":
            self._weight, self._bias = weight + qk_norm.norm.weight_offset, bias
            self._norm = NormBlock(blocks, qk_norm.norm, None, None, size)
        else:
            self._norm = NormBlock(blocks, qk_norm.norm, weight, bias, size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._over == "all_heads":
            return self._norm(x.flatten(1)).view(x.shape)
        y = self._norm(x)
        if self._weight is not None:
            y = y * self._weight
        return y if self._bias is None else y + self._bias


class RopeBlock:
    """Rotates query [T, Hq, D] and key [T, Hkv, D] in place."""

    def __init__(self, fn: Op, cos_sin: torch.Tensor, interleaved: bool) -> None:
        self._fn, self._cos_sin, self._interleaved = fn, cos_sin, interleaved

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y: tuple[torch.Tensor, torch.Tensor] = self._fn(
            RotaryEmbedding(query, key, positions, self._cos_sin, self._interleaved)
        )
        return y


class EmbeddingBlock:
    """ids [T] int64 -> [T, H]."""

    def __init__(self, fn: Op, weight: Weight, dtype: torch.dtype | None) -> None:
        self._fn, self._weight, self._dtype = fn, weight, dtype

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._fn(Embedding(ids, self._weight, self._dtype))
        return y


class MlpBlock:
    """x [T, H] -> [T, H]."""

    def __init__(self, up: LinearBlock, activation: Callable[[torch.Tensor], torch.Tensor], down: LinearBlock) -> None:
        self._up, self._activation, self._down = up, activation, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._activation(self._up(x)))
