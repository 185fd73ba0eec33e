"""From a float matrix to one of small integers in groups: scales, and mins, of the least squared error.

A chunk's groups lie side by side, [32, groups], so that what is summed over a group is a sum of long rows.
"""

import torch

from octavo.contract import GROUP_SIZE, WEIGHT_FORMATS, QuantizedWeight

__all__ = ["quantize"]

CHUNK_GROUPS = 4096  # at a time, so that what lies between stays in the cache
# Of the range of a group, tried for 4 bits: a smaller one rounds most numbers finer and cuts the largest off.
SHRINKS = (1.0, 0.92, 0.84)
LARGEST = 65504.0  # float16
TINY = 1e-30


def quantize(weight: torch.Tensor, weight_format: str) -> QuantizedWeight:
    """A matrix [N, K] of any float dtype in a format of `WEIGHT_FORMATS`; 4 bits get mins.

    Codes are chosen for the scale as it is stored, in float16. 8 bits: the largest of a group is +-127, so that codes
    run from 1 to 255. 4 bits: of ranges a little smaller than the group's, each followed by the scale and min that fit
    its codes best, the one of the least squared error.
    """
    num_rows, num_columns = weight.shape
    num_groups = -(-num_columns // GROUP_SIZE)
    bits = WEIGHT_FORMATS[weight_format]
    codes = torch.empty(num_rows, num_groups * GROUP_SIZE * bits // 8, dtype=torch.uint8)
    scales = torch.empty(num_rows, num_groups, dtype=torch.float16)
    mins = torch.empty_like(scales) if bits == 4 else None
    filling = -num_columns % GROUP_SIZE
    step = max(1, CHUNK_GROUPS // max(num_groups, 1))
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        part = weight[rows].float()
        if filling:  # more of the last number, so that a part group keeps its range
            part = torch.cat((part, part[:, -1:].expand(-1, filling)), 1)
        groups = part.reshape(-1, GROUP_SIZE).t().contiguous()
        if mins is None:
            code, scale = _of_8_bits(groups)
            _last(code, num_groups, filling).fill_(128)
            codes[rows] = code.t().reshape(len(part), -1)
        else:
            code, scale, low = _of_4_bits(groups)
            _last(code, num_groups, filling).zero_()
            mins[rows] = low.view(len(part), -1)
            codes[rows] = (code[::2] | code[1::2] << 4).t().reshape(len(part), -1)
        scales[rows] = scale.view(len(part), -1)
    return QuantizedWeight((num_rows, num_columns), bits, codes, scales, mins)


def _last(codes: torch.Tensor, num_groups: int, filling: int) -> torch.Tensor:
    """Of codes [32, G], the last `filling` of each row's last group."""
    return codes.view(GROUP_SIZE, -1, num_groups)[GROUP_SIZE - filling :, :, -1]


def _of_8_bits(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [32, G] and float16 [G]."""
    scale = (groups.abs().amax(0) / 127).clamp_(max=LARGEST).half()
    codes = (groups * _inverse(scale.float())).round_().clamp_(-127, 127).add_(128)
    return codes.to(torch.uint8), scale


def _of_4_bits(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """uint8 [32, G], and scale and min, float16 [G]."""
    low, high = groups.amin(0), groups.amax(0)
    middle, half = (low + high) / 2, (high - low) / 2
    total = groups.sum(0)
    best_error = torch.full_like(low, torch.inf)
    best_scale, best_min = torch.zeros_like(low), torch.zeros_like(low)
    codes, product = torch.empty_like(groups), torch.empty_like(groups)
    for shrink in SHRINKS:
        scale, start = half * (shrink * 2 / 15), middle - half * shrink
        _round(groups, scale, start, codes)
        scale, start, error = _fit(groups, codes, product, total)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale, best_min = torch.where(better, scale, best_scale), torch.where(better, start, best_min)
    scale16 = best_scale.clamp(-LARGEST, LARGEST).half()
    min16 = best_min.clamp(-LARGEST, LARGEST).half()
    _round(groups, scale16.float(), min16.float(), codes)
    return codes.to(torch.uint8), scale16, min16


def _round(groups: torch.Tensor, scale: torch.Tensor, start: torch.Tensor, out: torch.Tensor) -> None:
    """The nearest codes of 4 bits, as floats."""
    inverse = _inverse(scale)
    torch.addcmul(-start * inverse, groups, inverse, out=out)
    out.round_().clamp_(0, 15)


def _fit(
    groups: torch.Tensor, codes: torch.Tensor, product: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scale and min that fit given codes best, and the squared error less that of zeros (a constant a group)."""
    sum_codes = codes.sum(0)
    squares = torch.mul(codes, codes, out=product).sum(0)
    mixed = torch.mul(groups, codes, out=product).sum(0)
    spread = GROUP_SIZE * squares - sum_codes * sum_codes
    scale = (GROUP_SIZE * mixed - sum_codes * total) / spread.clamp(min=TINY)
    start = (total - scale * sum_codes) / GROUP_SIZE
    # At the best fit the error is what the numbers have less what the fit explains.
    return scale, start, -(scale * mixed + start * total)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale; 0 where a group is all alike."""
    return torch.where(scale == 0, 0.0, 1.0 / scale)
