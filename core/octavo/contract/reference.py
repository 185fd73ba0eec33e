"""The truth of each op in plain torch: slow, obvious, on any device that torch reaches.

Every faster implementation is tested against these, run in float32 or float64.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from octavo.contract.drawing import draw
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
    Sample,
)
from octavo.contract.quantized import WEIGHT_FORMATS, QuantizedWeight
from octavo.contract.support import Support
from octavo.contract.version import API_VERSION

__all__ = ["ACTIVATIONS", "GATED_ACTIVATIONS", "by_element", "reference_ops"]

LANES = 64  # elements of the widest vector register, twice
PIECE = 16384  # elements; torch splits work over threads from 32768 on


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def by_element(fn: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """fn(*inputs) for an fn of elements; each one's bits are the same wherever it lies and however many there are.

    In host memory torch computes most elements in vector registers and what is left over one by one, with an exp
    of other bits; who is left over depends on the number of elements and threads. Here nobody is: each piece fills
    whole registers and is too small to be split.
    """
    shape, count = inputs[0].shape, inputs[0].numel()
    padded = [F.pad(x.flatten(), (0, -count % LANES)) for x in inputs]
    pieces = zip(*(torch.split(x, PIECE) for x in padded), strict=True)
    return torch.cat([fn(*piece) for piece in pieces])[:count].view(shape)


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
    return by_element(ACTIVATIONS[args.activation], _wide(args.x)).to(args.x.dtype)


def act_and_mul(args: ActAndMul) -> torch.Tensor:
    """See `ActAndMul`."""
    gate, up = _wide(args.x).chunk(2, -1)
    if args.activation in GATED_ACTIVATIONS:
        return by_element(GATED_ACTIVATIONS[args.activation], gate, up).to(args.x.dtype)
    return (by_element(ACTIVATIONS[args.activation], gate) * up).to(args.x.dtype)


def linear(args: Linear) -> torch.Tensor:
    """See `Linear`. Quantised weights are dequantised at each call, and multiplied in float32 (or float64)."""
    if not isinstance(args.weight, QuantizedWeight):
        return F.linear(args.x, args.weight, args.bias)
    x = _wide(args.x)
    bias = None if args.bias is None else args.bias.to(x.dtype)
    return F.linear(x, args.weight.dequantize().to(x.dtype), bias).to(args.x.dtype)


def embedding(args: Embedding) -> torch.Tensor:
    """See `Embedding`."""
    if not isinstance(args.weight, QuantizedWeight):
        return F.embedding(args.token_ids, args.weight)
    rows = args.weight[args.token_ids].dequantize()
    return rows if args.dtype is None else rows.to(args.dtype)


def sample(args: Sample) -> torch.Tensor:
    """See `Sample` and `drawing.py`."""
    logits = args.logits.numpy()
    fields = args.rows, args.temperature, args.top_k, args.top_p, args.min_p, args.uniform
    wishes = zip(*(field.tolist() for field in fields), strict=True)
    return torch.tensor([draw(logits[row], *wish) for row, *wish in wishes], dtype=torch.int64)


def _known_format(signature: OpSignature) -> Support:
    weight_format = signature.trait("weight_format", "dense")
    if weight_format not in ("dense", *WEIGHT_FORMATS):
        known = ", ".join(WEIGHT_FORMATS)
        return Support.no(f"weight format {weight_format}, torch's {signature.op} takes dense weights, {known}")
    return Support.yes()


def reference_ops() -> list[OpImpl]:
    """The reference tier of every op."""
    alone = Support.yes()
    summed = Support.yes("rows of up to 32767 elements: torch splits the sum of a longer one when it is alone")
    tiles = Support.no("torch's matrix product picks its tiling by the number of rows")

    def impl(fn: Callable[..., object], row_invariant: Support) -> OpImpl:
        return OpImpl(fn.__name__, "torch", "reference", fn, row_invariant=row_invariant, api_version=API_VERSION)

    return [
        *(impl(fn, summed) for fn in (rms_norm, fused_add_rms_norm, layer_norm)),
        *(impl(fn, alone) for fn in (rotary_embedding, activation, act_and_mul)),
        replace(impl(sample, alone), provider="numpy"),
        replace(impl(linear, tiles), supports=_known_format),
        replace(impl(embedding, alone), supports=_known_format),
    ]
