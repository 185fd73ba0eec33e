"""Packed weights by the definitions of their formats, and the dense weights that they stand for.

Nothing here shares code, or a way of going about it, with what unpacks: bits are laid out one by one in numpy.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["awq", "compressed", "fp8", "gptq", "mxfp4", "stream"]

Codes = npt.NDArray[np.int64]
Tensors = dict[str, torch.Tensor]


def stream(codes: Codes, bits: int) -> torch.Tensor:
    """Words int32 [ceil(n * bits / 32), m] of codes [n, m]: each column a stream of bits, lowest first."""
    one_by_one = (codes[:, None, :] >> np.arange(bits)[None, :, None] & 1).reshape(-1, codes.shape[1])
    padded = np.zeros((-(-len(one_by_one) // 32) * 32, codes.shape[1]), np.uint8)
    padded[: len(one_by_one)] = one_by_one
    in_bytes = np.packbits(padded, axis=0, bitorder="little")
    words = np.ascontiguousarray(in_bytes.T).view("<i4").T
    return torch.from_numpy(np.ascontiguousarray(words).astype(np.int32))


def codes_of(weight: torch.Tensor, group: Codes, bits: int, symmetric: bool) -> tuple[Codes, Codes, torch.Tensor]:
    """Codes [K, N], zeros [G, N] and float16 scales [G, N] that come near a weight [N, K]."""
    values, top = weight.double().numpy().T, 2**bits - 1
    num_groups = int(group.max()) + 1
    zeros, scales = np.zeros((num_groups, len(weight)), np.int64), np.zeros((num_groups, len(weight)), np.float16)
    codes = np.zeros(values.shape, np.int64)
    for g in range(num_groups):
        rows = values[group == g]
        if symmetric:
            scales[g] = (2 * abs(rows).max(0) / top).astype(np.float16)
            zeros[g] = 2 ** (bits - 1)
        else:
            low, high = rows.min(0), rows.max(0)
            scales[g] = ((high - low) / top).astype(np.float16)
            zeros[g] = np.clip(np.round(-low / scales[g]), 0, top)
            zeros[g, :3] = 0, top, 1  # the ends of the range, where conventions of zeros differ
        codes[group == g] = np.clip(np.round(rows / scales[g]) + zeros[g], 0, top)
    return codes, zeros, torch.from_numpy(scales)


def dense_of(codes: Codes, zeros: Codes, scales: torch.Tensor, group: Codes) -> torch.Tensor:
    values = (codes - zeros[group]) * scales.double().numpy()[group]
    return torch.from_numpy(np.ascontiguousarray(values.T)).float()


def gptq(
    weight: torch.Tensor,
    *,
    bits: int = 4,
    group_size: int = 32,
    act_order: bool = False,
    version: int = 1,
    symmetric: bool = False,
    borrows: bool = False,
) -> tuple[Tensors, torch.Tensor]:
    """Tensors of a GPTQ module (less its name) and the dense weight, for a weight [N, K].

    Version 1 of the layout has its zeros less one: each alone, or with `borrows` all of a word at once.
    """
    num_inputs = weight.shape[1]
    group = np.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)
    if act_order:
        group = np.random.default_rng(num_inputs).permutation(group)
    codes, zeros, scales = codes_of(weight, group, bits, symmetric)
    stored = zeros if version == 2 else (zeros - 1) % 2**bits
    words = stream(stored.T, bits).T.contiguous()
    if borrows:
        whole = stream(zeros.T, bits).T.numpy().astype(np.int64) - int("1".rjust(bits, "0") * (32 // bits), 2)
        words = torch.from_numpy(np.ascontiguousarray(whole % 2**32).astype(np.uint32).view(np.int32))
    tensors = {
        "qweight": stream(codes, bits),
        "qzeros": words,
        "scales": scales,
        "g_idx": torch.from_numpy(group).int(),
    }
    return tensors, dense_of(codes, zeros, scales, group)


def awq(weight: torch.Tensor, *, group_size: int = 32) -> tuple[Tensors, torch.Tensor]:
    """Tensors of an AWQ module and the dense weight."""
    num_inputs = weight.shape[1]
    group = np.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)
    codes, zeros, scales = codes_of(weight, group, 4, symmetric=False)

    def words(values: Codes) -> torch.Tensor:
        packed = np.zeros((len(values), values.shape[1] // 8), np.uint32)
        for word in range(packed.shape[1]):
            for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                packed[:, word] |= values[:, 8 * word + output].astype(np.uint32) << np.uint32(4 * nibble)
        return torch.from_numpy(packed.view(np.int32))

    return {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}, dense_of(codes, zeros, scales, group)


def compressed(
    weight: torch.Tensor, *, bits: int = 4, group_size: int = 32, act_order: bool = False, symmetric: bool = True
) -> tuple[Tensors, torch.Tensor]:
    """Tensors of a compressed-tensors module with integers packed in words, and the dense weight."""
    num_inputs = weight.shape[1]
    group = np.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)
    if act_order:
        group = np.random.default_rng(num_inputs).permutation(group)
    codes, zeros, scales = codes_of(weight, group, bits, symmetric)
    tensors = {
        "weight_packed": stream(codes, bits).T.contiguous(),
        "weight_scale": scales.T.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = stream(zeros.T, bits)
    if act_order:
        tensors["weight_g_idx"] = torch.from_numpy(group).int()
    return tensors, dense_of(codes, zeros, scales, group)


def fp8(
    weight: torch.Tensor, *, by: str, block: tuple[int, int] | None = None, suffix: str = "weight_scale"
) -> tuple[Tensors, torch.Tensor]:
    """Tensors of a module in float8, its scales `by` "tensor", "channel", "row" (a vector) or "block", and dense."""
    num_outputs, num_inputs = weight.shape
    rows, columns = block or ((num_outputs, num_inputs) if by == "tensor" else (1, num_inputs))
    factors = torch.empty_like(weight)
    scales = torch.empty(-(-num_outputs // rows), -(-num_inputs // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[part].abs().max() / 448
            factors[part] = scales[i, j]
    values = (weight / factors).to(torch.float8_e4m3fn)
    shapes: Mapping[str, tuple[int, ...]] = {"tensor": (), "row": (num_outputs,)}
    stored = scales.reshape(shapes.get(by, scales.shape))
    return {"weight": values, suffix: stored}, values.float() * factors


def mxfp4(shape: tuple[int, int, int], seed: int) -> tuple[Tensors, torch.Tensor]:
    """Blocks and scales at random for [E, N, K], and the dense tensor."""
    rng = np.random.default_rng(seed)
    experts, num_outputs, num_inputs = shape
    blocks = rng.integers(0, 256, (experts, num_outputs, num_inputs // 32, 16), dtype=np.uint8)
    scales = rng.integers(120, 126, blocks.shape[:-1], dtype=np.uint8)
    codes = np.stack((blocks & 15, blocks >> 4), -1).reshape(*blocks.shape[:-1], 32)
    sign, exponent, mantissa = codes >> 3, (codes >> 1 & 3).astype(int), codes & 1
    magnitude = np.where(exponent == 0, mantissa * 0.5, (1 + mantissa * 0.5) * 2.0 ** (exponent - 1))
    values = np.where(sign, -magnitude, magnitude) * 2.0 ** (scales[..., None].astype(int) - 127)
    dense = torch.from_numpy(values.reshape(shape)).float()
    return {"_blocks": torch.from_numpy(blocks), "_scales": torch.from_numpy(scales)}, dense
