"""Quantised weights for cases, what they are in float64, and how far a kernel that rounds activations may be off."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.contract import GROUP_SIZE, WEIGHT_FORMATS, QuantizedWeight

__all__ = ["allowed_rounding", "dequantized", "random_weight"]

Array = npt.NDArray[np.float64]

STANDARD_DEVIATIONS = 6.0  # a sum of independent roundings is beyond it once in 10^9


def random_weight(
    integers: Callable[..., torch.Tensor], num_rows: int, num_columns: int, weight_format: str, *, mins: bool = False
) -> QuantizedWeight:
    """Codes over their whole range, scales of both signs and some of zero; `integers(high, *shape)` draws."""
    bits = WEIGHT_FORMATS[weight_format]
    num_groups = -(-num_columns // GROUP_SIZE)
    codes = integers(1 << bits, num_rows, num_groups * GROUP_SIZE).to(torch.uint8)
    codes[:, num_columns:] = 0 if mins else 1 << (bits - 1)
    packed = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    scales = ((integers(41, num_rows, num_groups) - 20) / 20 / (1 << (bits - 1))).half()
    lowest = ((integers(41, num_rows, num_groups) - 20) / 20).half() if mins else None
    return QuantizedWeight((num_rows, num_columns), bits, packed.contiguous(), scales, lowest)


def dequantized(weight: QuantizedWeight) -> Array:
    """[N, K], by the formula of the class, without its code."""
    codes = weight.codes.cpu().numpy()
    if weight.bits == 4:
        unpacked = np.empty((len(codes), codes.shape[1] * 2), np.uint8)
        unpacked[:, ::2], unpacked[:, 1::2] = codes % 16, codes // 16
        codes = unpacked
    group = np.arange(codes.shape[1]) // 32
    values = codes.astype(np.float64)
    scales = weight.scales.cpu().double().numpy()[:, group]
    if weight.mins is None:
        values = (values - (128 if weight.bits == 8 else 8)) * scales
    else:
        values = values * scales + weight.mins.cpu().double().numpy()[:, group]
    found: Array = values[:, : weight.shape[1]]
    return found


def allowed_rounding(args: Any) -> Array:
    """[T, N]: what a product may be off by where activations are rounded to int8, in groups with a scale each.

    The steps of a row's group are its largest activation / 127; a rounding is off by a twelfth of a step's square on
    average, and roundings are independent.
    """
    x, weight = args.x.detach().cpu().double().numpy(), dequantized(args.weight)
    num_groups = -(-x.shape[1] // GROUP_SIZE)
    padding = ((0, 0), (0, num_groups * GROUP_SIZE - x.shape[1]))
    x_groups = np.pad(np.abs(x), padding).reshape(len(x), num_groups, GROUP_SIZE)
    w_groups = np.pad(weight, padding).reshape(len(weight), num_groups, GROUP_SIZE)
    steps = x_groups.max(-1) / 127
    variance = np.einsum("tg,ng->tn", steps**2 / 12, (w_groups**2).sum(-1))
    found: Array = STANDARD_DEVIATIONS * np.sqrt(variance)
    return found
