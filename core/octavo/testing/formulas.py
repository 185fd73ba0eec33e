"""What each op computes, once more: in float64, on numpy, written from the papers and not from the code."""

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.contract import QuantizedWeight
from octavo.testing.quantized import dequantized

__all__ = ["ACTIVATION_FORMULAS", "FORMULAS", "attention"]

Array = npt.NDArray[np.float64]


def wide(x: torch.Tensor) -> Array:
    """As float64."""
    return x.detach().cpu().double().numpy().copy()


def _scaled(y: Array, args: Any) -> Array:
    return y if args.weight is None else y * (wide(args.weight) + args.weight_offset)


def rms_norm(args: Any) -> tuple[Array, ...]:
    x = wide(args.x)
    size = max(x.shape[-1], 1)
    return (_scaled(x / np.sqrt((x**2).sum(-1, keepdims=True) / size + args.eps), args),)


def fused_add_rms_norm(args: Any) -> tuple[Array, ...]:
    residual = wide((args.x.double() + args.residual.double()).to(args.x.dtype))
    root = np.sqrt((residual**2).mean(-1, keepdims=True) + args.eps)
    return _scaled(residual / root, args), residual


def layer_norm(args: Any) -> tuple[Array, ...]:
    x = wide(args.x)
    y = _scaled((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + args.eps), args)
    return (y if args.bias is None else y + wide(args.bias),)


def rotary_embedding(args: Any) -> tuple[Array, ...]:
    """Each pair of dims is a complex number, turned by an angle."""
    half = args.cos_sin.shape[1] // 2
    table = wide(args.cos_sin)[args.positions.numpy()]
    turn = (table[:, :half] + 1j * table[:, half:])[:, None, :]
    first = np.arange(half) * 2 if args.interleaved else np.arange(half)
    second = first + 1 if args.interleaved else first + half
    rotated = []
    for x in (wide(args.query), wide(args.key)):
        y = (x[..., first] + 1j * x[..., second]) * turn
        x[..., first], x[..., second] = y.real, y.imag
        rotated.append(x)
    return tuple(rotated)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATION_FORMULAS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def activation(args: Any) -> tuple[Array, ...]:
    return (ACTIVATION_FORMULAS[args.activation](wide(args.x)),)


def act_and_mul(args: Any) -> tuple[Array, ...]:
    gate, up = np.split(wide(args.x), 2, axis=-1)
    if args.activation == "swiglu_clamped":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return ((up + 1) * gate * _sigmoid(1.702 * gate),)
    return (ACTIVATION_FORMULAS[args.activation](gate) * up,)


def _matrix(weight: torch.Tensor | QuantizedWeight) -> Array:
    return dequantized(weight) if isinstance(weight, QuantizedWeight) else wide(weight)


def linear(args: Any) -> tuple[Array, ...]:
    y = np.einsum("tk,nk->tn", wide(args.x), _matrix(args.weight))
    return (y if args.bias is None else y + wide(args.bias),)


def embedding(args: Any) -> tuple[Array, ...]:
    table = _matrix(args.weight)
    rows = [table[token_id] for token_id in args.token_ids]
    return (np.array(rows).reshape(len(rows), args.weight.shape[1]),)


def sample(args: Any) -> tuple[Array, ...]:
    fields = args.rows, args.temperature, args.top_k, args.top_p, args.min_p, args.uniform
    wishes = zip(*(field.tolist() for field in fields), strict=True)
    return (np.array([_drawn(args.logits[row].cpu().numpy(), *wish) for row, *wish in wishes], np.float64),)


def _drawn(row: Array, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """One id, by whole numbers and fractions: nothing is rounded but what the definition rounds."""
    if not np.isfinite(row.max()):
        return -1
    with np.errstate(over="ignore"):
        scores = (row - row.max()) * np.float32(1.4426950408889634 / max(temperature, 1e-30))
    x = np.maximum(scores, np.float32(-64))
    power, f = np.zeros_like(x), x - np.rint(x)
    for coefficient in ("0x1.5bba14p-10", "0x1.3cea88p-7", "0x1.c6b752p-5", "0x1.ebf9bcp-3", "0x1.62e42ap-1", "1"):
        power = power * f + np.float32(float.fromhex(coefficient))
    weights = [round(math.ldexp(p, int(n) + 40)) for p, n in zip(power.tolist(), np.rint(x).tolist(), strict=True)]
    kept = [i for i, weight in enumerate(weights) if weight > 0 and weight >= Fraction(min_p) * 2**40]
    kept.sort(key=lambda i: (-scores[i], i))
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        running = list(accumulate(weights[i] for i in kept))
        kept = kept[: next(i for i, sum_ in enumerate(running) if sum_ >= _share(top_p) * running[-1]) + 1]
    kept.sort()
    running = list(accumulate(weights[i] for i in kept))
    return next(i for i, sum_ in zip(kept, running, strict=True) if sum_ > _share(uniform) * running[-1])


def _share(share: float) -> Fraction:
    return Fraction(int(math.ldexp(share, 53)), 2**53)


FORMULAS: dict[str, Callable[[Any], tuple[Array, ...]]] = {
    f.__name__: f
    for f in (
        rms_norm,
        fused_add_rms_norm,
        layer_norm,
        rotary_embedding,
        activation,
        act_and_mul,
        linear,
        embedding,
        sample,
    )
}


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> Array:
    """Causal attention of the last T of L tokens, one query and head at a time, on dense keys and values.

    query [T, Hq, D], key [L, Hkv, D], value [L, Hkv, Dv]; query head h reads KV head h // (Hq / Hkv).
    """
    q, k, v = wide(query), wide(key), wide(value)
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for t in range(len(q)):
        position = len(k) - len(q) + t
        seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k.shape[1])
            scores = k[seen, kv_head] @ q[t, head] * scale
            if softcap is not None:
                scores = np.tanh(scores / softcap) * softcap
            sink = -np.inf if sinks is None else float(sinks[head])
            best = max(scores.max(), sink)
            weights = np.exp(scores - best)
            out[t, head] = weights @ v[seen, kv_head] / (weights.sum() + np.exp(sink - best))
    return out
