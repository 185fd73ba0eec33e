"""The truth of each op in plain torch: slow, obvious, on any device that torch reaches.

Every faster implementation is tested against these, run in float32 or float64.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from octavo.contract.ops import (
    ActAndMul,
    Activation,
    Embedding,
    FusedAddRMSNorm,
    LayerNorm,
    Linear,
    OpImpl,
    OpSignature,
    RMSNorm,
    RotaryEmbedding,
)
from octavo.contract.support import Support

__all__ = ["ACTIVATIONS", "GATED_ACTIVATIONS", "reference_ops"]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _scale(y: torch.Tensor, weight: torch.Tensor | None, offset: float) -> torch.Tensor:
    return y if weight is None else y * (weight.to(y.dtype) + offset)


def rms_norm(args: RMSNorm) -> torch.Tensor:
    """See `RMSNorm`."""
    x = _wide(args.x)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + args.eps)
    return _scale(y, args.weight, args.weight_offset).to(args.x.dtype)


def fused_add_rms_norm(args: FusedAddRMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """See `FusedAddRMSNorm`."""
    residual = args.x + args.residual
    return rms_norm(RMSNorm(residual, args.weight, args.eps, args.weight_offset)), residual


def layer_norm(args: LayerNorm) -> torch.Tensor:
    """See `LayerNorm`."""
    x = _wide(args.x)
    x = x - x.mean(-1, keepdim=True)
    y = _scale(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + args.eps), args.weight, args.weight_offset)
    return (y if args.bias is None else y + args.bias.to(y.dtype)).to(args.x.dtype)


def rotary_embedding(args: RotaryEmbedding) -> tuple[torch.Tensor, torch.Tensor]:
    """See `RotaryEmbedding`."""
    cos, sin = args.cos_sin[args.positions].unsqueeze(1).chunk(2, -1)
    for x in (args.query, args.key):
        turned = _wide(x[..., : 2 * cos.shape[-1]])
        if args.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
            y = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        x[..., : y.shape[-1]] = y.to(x.dtype)
    return args.query, args.key


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu2": _relu2,
}


def _swiglu_clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gate of gpt_oss: alpha 1.702, limit 7."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


GATED_ACTIVATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "swiglu_clamped": _swiglu_clamped,
}


def activation(args: Activation) -> torch.Tensor:
    """See `Activation`."""
    return ACTIVATIONS[args.activation](_wide(args.x)).to(args.x.dtype)


def act_and_mul(args: ActAndMul) -> torch.Tensor:
    """See `ActAndMul`."""
    gate, up = _wide(args.x).chunk(2, -1)
    if args.activation in GATED_ACTIVATIONS:
        return GATED_ACTIVATIONS[args.activation](gate, up).to(args.x.dtype)
    return (ACTIVATIONS[args.activation](gate) * up).to(args.x.dtype)


def linear(args: Linear) -> torch.Tensor:
    """See `Linear`."""
    return F.linear(args.x, args.weight, args.bias)


def embedding(args: Embedding) -> torch.Tensor:
    """See `Embedding`."""
    return F.embedding(args.token_ids, args.weight)


def _dense_only(signature: OpSignature) -> Support:
    weight_format = signature.trait("weight_format", "dense")
    if weight_format != "dense":
        return Support.no(f"weight format {weight_format}, torch's linear takes dense weights")
    return Support.yes()


def reference_ops() -> list[OpImpl]:
    """The reference tier of every op."""
    by_row = Support.yes()
    tiles = Support.no("torch's matrix product picks its tiling by the number of rows")

    def impl(fn: Callable[..., object], row_invariant: Support = by_row) -> OpImpl:
        return OpImpl(fn.__name__, "torch", "reference", fn, row_invariant=row_invariant)

    ops = (rms_norm, fused_add_rms_norm, layer_norm, rotary_embedding, activation, act_and_mul, embedding)
    dense = OpImpl("linear", "torch", "reference", linear, _dense_only, row_invariant=tiles)
    return [*(impl(fn) for fn in ops), dense]
