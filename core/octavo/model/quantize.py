"""From a float matrix to one of small integers in groups: scales, and mins, of the least squared error.

A chunk's groups lie side by side, [32, groups], so that what is summed over a group is a sum of long rows.
"""

import torch

from octavo.contract import GROUP_SIZE, WEIGHT_FORMATS, QuantizedWeight

__all__ = ["quantize"]

CHUNK_GROUPS = 4096  # at a time, so that what lies between stays in the cache
# Of the range of a group, tried for 4 bits: a smaller one rounds most numbers finer and cuts the largest off.
SHRINKS = (1.0, 0.92, 0.84)
# Where columns count differently, narrower ones may be right too, and each fit is followed by fits to its own codes.
WEIGHTED_SHRINKS, WEIGHTED_ROUNDS = (*SHRINKS, 0.75, 0.65), 3
LEAST_IMPORTANCE = 1e-3  # of a column, in parts of the mean's: what no text showed may come all the same
LARGEST = 65504.0  # float16
TINY = 1e-30


def quantize(weight: torch.Tensor, weight_format: str, importance: torch.Tensor | None = None) -> QuantizedWeight:
    """A matrix [N, K] of any float dtype in a format of `WEIGHT_FORMATS`; 4 bits get mins.

    Codes are chosen for the scale as it is stored, in float16. 8 bits: the largest of a group is +-127, so that codes
    run from 1 to 255. 4 bits: of ranges a little smaller than the group's, each followed by the scale and min that fit
    its codes best, the one of the least squared error.

    Args:
        weight: the matrix.
        weight_format: "int8" or "int4".
        importance: [K], not negative: what a squared error counts in each column, best the mean square of what the
            column is multiplied by. None: all alike. 8 bits have no use for it.

    """
    num_rows, num_columns = weight.shape
    num_groups = -(-num_columns // GROUP_SIZE)
    bits = WEIGHT_FORMATS[weight_format]
    codes = torch.empty(num_rows, num_groups * GROUP_SIZE * bits // 8, dtype=torch.uint8)
    scales = torch.empty(num_rows, num_groups, dtype=torch.float16)
    mins = torch.empty_like(scales) if bits == 4 else None
    filling = -num_columns % GROUP_SIZE
    step = max(1, CHUNK_GROUPS // max(num_groups, 1))
    counts = None if importance is None else _by_group(importance, filling)
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
            code, scale, low = _of_4_bits(groups, None if counts is None else counts.repeat(1, len(part)))
            _last(code, num_groups, filling).zero_()
            mins[rows] = low.view(len(part), -1)
            codes[rows] = (code[::2] | code[1::2] << 4).t().reshape(len(part), -1)
        scales[rows] = scale.view(len(part), -1)
    return QuantizedWeight((num_rows, num_columns), bits, codes, scales, mins)


def _by_group(importance: torch.Tensor, filling: int) -> torch.Tensor:
    """[32, groups of a row] from [K]; those of a group add up to 1, and what fills the last one is worth nothing."""
    counts = importance.float() + LEAST_IMPORTANCE * importance.float().mean().clamp(min=TINY)
    groups = torch.nn.functional.pad(counts, (0, filling)).view(-1, GROUP_SIZE).t()
    groups = groups + LEAST_IMPORTANCE * groups.mean(0) * (groups > 0)
    return groups / groups.sum(0)


def _last(codes: torch.Tensor, num_groups: int, filling: int) -> torch.Tensor:
    """Of codes [32, G], the last `filling` of each row's last group."""
    return codes.view(GROUP_SIZE, -1, num_groups)[GROUP_SIZE - filling :, :, -1]


def _of_8_bits(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [32, G] and float16 [G]."""
    scale = (groups.abs().amax(0) / 127).clamp_(max=LARGEST).half()
    codes = (groups * _inverse(scale.float())).round_().clamp_(-127, 127).add_(128)
    return codes.to(torch.uint8), scale


def _of_4_bits(groups: torch.Tensor, counts: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """uint8 [32, G], and scale and min, float16 [G]. `counts` [32, G]: of squared errors, adding up to 1 in a group."""
    low, high = groups.amin(0), groups.amax(0)
    middle, half = (low + high) / 2, (high - low) / 2
    fit = _Fit(groups, counts)
    best_error = torch.full_like(low, torch.inf)
    best_scale, best_min = torch.zeros_like(low), torch.zeros_like(low)
    codes = torch.empty_like(groups)
    shrinks, rounds = (SHRINKS, 1) if counts is None else (WEIGHTED_SHRINKS, WEIGHTED_ROUNDS)
    for shrink in shrinks:
        scale, start = half * (shrink * 2 / 15), middle - half * shrink
        for _ in range(rounds):
            _round(groups, scale, start, codes)
            scale, start, error = fit(codes)
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


class _Fit:
    """Least squares over groups [32, G]: called with codes [32, G], it gives the scale and min [G] that fit them best,
    and the squared error less that of a scale of 0 (a constant a group).
    """

    def __init__(self, groups: torch.Tensor, counts: torch.Tensor | None) -> None:
        self._counts = 1 / GROUP_SIZE if counts is None else counts
        self._mean = (groups * self._counts).sum(0)
        self._off_mean = (groups - self._mean) * self._counts  # so that no small difference of large sums is taken
        self._counted, self._product = torch.empty_like(groups), torch.empty_like(groups)

    def __call__(self, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        counted = torch.mul(codes, self._counts, out=self._counted)
        mean_code = counted.sum(0)
        spread = torch.mul(counted, codes, out=self._product).sum(0) - mean_code * mean_code
        mixed = torch.mul(self._off_mean, codes, out=self._product).sum(0)
        scale = mixed / spread.clamp(min=TINY)
        return scale, self._mean - scale * mean_code, -scale * mixed


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale; 0 where a group is all alike."""
    return torch.where(scale == 0, 0.0, 1.0 / scale)
