"""Small integers packed in 32-bit words, in groups that share a zero and a scale."""

from collections.abc import Callable, Sequence
from math import gcd

import torch

from octavo.errors import ModelError
from octavo.model.checkpoint import SafetensorsCheckpoint

__all__ = ["CHUNK_ELEMENTS", "dequantize", "group_of_inputs", "num_unpacked", "unpack"]

WORD = 32
CHUNK_ELEMENTS = 1 << 18  # at a time, so that what lies between stays in the cache, and is small


def num_unpacked(num_words: int, bits: int) -> int | None:
    """How many values of `bits` lie in so many words; None where values would end amid a word's bits."""
    return None if num_words * WORD % (bits * _period(bits)) else num_words * WORD // bits


def unpack(words: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """The values in words, along their first axis.

    The words are a stream of bits that begins with the lowest bit of the first word; value j has the `bits` bits from
    j * bits on, so one of 3 bits may begin in one word and end in the next. Values repeat their layout each `period`
    (as few as end with a word); `order` says at which place of its period the j-th value of a period belongs.

    Args:
        words: int32 [n, m].
        bits: of a value, at most 8.
        order: a permutation of a period's places; None for as they lie.

    Returns:
        uint8 [n * 32 / bits, m].

    """
    period = _period(bits)
    num_words = period * bits // WORD
    words = words.reshape(-1, num_words, words.shape[1])
    mask = (1 << bits) - 1
    values = torch.empty(len(words), period, words.shape[2], dtype=torch.uint8)
    for j in range(period):
        word, shift = divmod(j * bits, WORD)
        value = (words[:, word] >> shift) & (mask & (1 << (WORD - shift)) - 1)  # the shift copies the sign's bit
        if shift + bits > WORD:
            value |= (words[:, word + 1] << (WORD - shift)) & mask
        values[:, order[j] if order else j] = value
    return values.view(-1, words.shape[2])


def dequantize(
    codes: Callable[[slice], torch.Tensor], zeros: torch.Tensor, scales: torch.Tensor, group: torch.Tensor
) -> torch.Tensor:
    """A weight, each value (code - zero) * scale by the zero and the scale of its group.

    Args:
        codes: from a range of inputs, which begins and ends at multiples of 32 or at the last, to uint8 [n, N].
        zeros: uint8 [G, N].
        scales: any float type [G, N].
        group: of each input, int64 [K].

    Returns:
        float32 [N, K], outputs by inputs.

    """
    zeros, scales = zeros.float(), scales.float()
    (num_inputs,), num_outputs = group.shape, zeros.shape[1]
    out = torch.empty(num_outputs, num_inputs)
    step = max(1, CHUNK_ELEMENTS // (num_outputs * WORD)) * WORD
    for start in range(0, num_inputs, step):
        rows = slice(start, min(start + step, num_inputs))
        values = codes(rows).contiguous().float().sub_(zeros[group[rows]]).mul_(scales[group[rows]])
        out[:, rows] = values.t().contiguous()  # turned in the cache: several times as fast as on the way to `out`
    return out


def group_of_inputs(
    num_inputs: int, group_size: int | None, name: str | None, stored: SafetensorsCheckpoint
) -> torch.Tensor:
    """The group of each input.

    Args:
        num_inputs: K.
        group_size: inputs in a group; None for all.
        name: of the tensor that lists groups, int [K]; None where they are of neighbours. One that nobody filled in
            (all 0, or all -1) stands for neighbours too.
        stored: the checkpoint.

    Returns:
        int64 [K].

    Raises:
        ModelError: the list has numbers of no group.

    """
    neighbours = torch.arange(num_inputs) // (group_size or num_inputs)
    if name is None:
        return neighbours
    listed = stored.read(name).long()
    low, high, last = int(listed.min()), int(listed.max()), int(neighbours[-1])
    if low == high and low <= 0:
        return neighbours
    if low < 0 or high > last:
        raise ModelError(f"{stored.where}: {name} has groups {low} to {high}, its scales are of groups 0 to {last}")
    return listed


def _period(bits: int) -> int:
    return WORD // gcd(bits, WORD)
