"""The truth of the op `sample`: a token from a row of logits, defined to the bit and independent of any library.

Scores are float32, each operation rounded by itself, in units of ln 2:

    score = (logit - highest) * float32(log2(e) / max(temperature, 1e-30))

A weight is 2^40 times 2^score, rounded to the nearest whole number, to even; the best token's is 2^40 itself:

    x = max(score, -64);  n = x rounded to the nearest whole number, to even;  f = x - n
    weight = round((((((C5 * f + C4) * f + C3) * f + C2) * f + C1) * f + 1) * 2^(n + 40))

Products and sums are float32, none fused; the powers of two are exact. The polynomial is within 2^-22 of 2^f, as much
as rounding moves a score. Below 2^-41 a weight is 0. Sums of whole numbers are the same in any order, so whoever does
the same gets the same token, however it adds and however wide its vectors are: no bounds, nothing undecided.

Filters, each on what the one before left:

    min_p   weights of at least min_p * 2^40, and at least 1
    top_k   so many of the best: by score, of equals the lower id first
    top_p   the fewest of the best whose weights together reach the share top_p of those left

The token is the first, in order of id, at which the running sum of the weights kept exceeds the share `uniform` of
their sum. Of both shares the first 53 binary places count, and they are taken without rounding.
"""

import math

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_VOCAB", "best_ids", "draw", "top_set", "weigh"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

MAX_VOCAB = 1 << 22  # the sum of a row's weights is below 2^63
ONE = 1 << 40  # the weight of the best
LOG2_E = float.fromhex("0x1.71547652b82fep0")
MIN_TEMPERATURE = 1e-30  # its reciprocal is well within float32, and less means nothing else
LOWEST = np.float32(-64)
MAGIC = np.float32(1.5 * 2**23)  # leaves the nearest whole number in the low bits of a sum
COEFFICIENTS = tuple(
    np.float32(float.fromhex(c) * ONE)
    for c in ("0x1.5bba14p-10", "0x1.3cea88p-7", "0x1.c6b752p-5", "0x1.ebf9bcp-3", "0x1.62e42ap-1", "1")
)
SHARE_BITS = 53

# How far below the best a search for the likeliest looks first, and then further. Most rows keep tens of tokens of
# tens of thousands, so sorting only what lies above a step saves nearly all.
SEARCH_DEPTHS = (6.0, 9.0, 12.0, 15.0, 19.0, 24.0)
FLAT = ONE * 5 // 2  # who wants more finds it deeper than the first search looks (by trial)
NUM_SMALL = 512  # up to so many values a stable sort of floats is the fastest
SUM_BLOCK = 256


def draw(logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """The token of one row.

    Args:
        logits: [V] float32, V at most MAX_VOCAB; not written to.
        temperature: above 0, at most 1e30: beyond, scores could be multiplied by 0, and masked ones be no numbers.
        top_k: 0 or less: all.
        top_p: in (0, 1]; 1: all.
        min_p: in [0, 1]; 0: all.
        uniform: in [0, 1).

    Returns:
        Its id; -1 where the row holds NaN or its highest logit is infinite.

    """
    top = logits.max()
    if not math.isfinite(top):
        return -1
    scores, weights = weigh(logits, top, temperature)
    least = max(1, math.ceil(min_p * ONE))
    if top_k <= 0 and top_p >= 1:
        if least > 1:
            weights[weights < least] = 0
        return _walk(weights, uniform)
    ids: Ints | None = None
    if least > 1:
        ids = np.flatnonzero(weights >= least)
        scores, weights = scores[ids], weights[ids]
    kept = _likeliest(scores, weights, top_k, top_p)
    place = int(kept[_walk(weights[kept], uniform)])
    return place if ids is None else int(ids[place])


def weigh(logits: Floats, top: np.floating, temperature: float) -> tuple[Floats, Ints]:
    """Scores [V], none below -64, and weights [V] of logits [V] whose highest, `top`, is finite."""
    with np.errstate(over="ignore"):
        scores = logits - np.float32(top)
        scores *= np.float32(LOG2_E / max(temperature, MIN_TEMPERATURE))
    np.maximum(scores, LOWEST, out=scores)
    shifted = scores + MAGIC
    f = shifted - MAGIC
    np.subtract(scores, f, out=f)
    power = f * COEFFICIENTS[0]
    for coefficient in COEFFICIENTS[1:-1]:
        power += coefficient
        power *= f
    power += COEFFICIENTS[-1]
    exponents = shifted.view(np.int32)
    exponents <<= 23  # the whole number, where a float has its exponent
    bits = power.view(np.int32)
    bits += exponents
    return scores, np.rint(power, out=power).astype(np.int64)


def _likeliest(scores: Floats, weights: Ints, top_k: int, top_p: float) -> Ints:
    """Indices that top_k, then top_p keep, ascending; those that weigh nothing may be among them or not."""
    num = top_k if top_k > 0 else len(scores)
    wanted = _ceil_share(int(weights.sum()), min(1.0, top_p)) if top_k <= 0 else 0
    ids = np.arange(0)
    for depth in SEARCH_DEPTHS[int(wanted > FLAT) :]:
        ids = np.flatnonzero(scores >= -depth)
        if len(ids) >= num if top_k > 0 else int(weights[ids].sum()) >= wanted:
            break
    else:
        ids = np.flatnonzero(weights)
    ids = ids[best_ids(scores[ids], num)]
    if top_p < 1:
        running = weights[ids].cumsum()
        if top_k > 0:
            wanted = _ceil_share(int(running[-1]), top_p)
        ids = ids[: int(running.searchsorted(wanted)) + 1]
    return np.sort(ids)


def _walk(weights: Ints, uniform: float) -> int:
    """The first index at which the running sum of weights [n], not all 0, exceeds the share `uniform` of it all."""
    if len(weights) <= SUM_BLOCK:
        running = weights.cumsum()
        return int(running.searchsorted(_floor_share(int(running[-1]), uniform), side="right"))
    ends = np.add.reduceat(weights, np.arange(0, len(weights), SUM_BLOCK)).cumsum()  # spares a sum over everything
    drawn = _floor_share(int(ends[-1]), uniform)
    block = int(ends.searchsorted(drawn, side="right"))
    running = weights[block * SUM_BLOCK : (block + 1) * SUM_BLOCK].cumsum()
    before = int(ends[block]) - int(running[-1])
    return block * SUM_BLOCK + int(running.searchsorted(drawn - before, side="right"))


def _floor_share(whole: int, share: float) -> int:
    return whole * int(math.ldexp(share, SHARE_BITS)) >> SHARE_BITS


def _ceil_share(whole: int, share: float) -> int:
    return -(-whole * int(math.ldexp(share, SHARE_BITS)) >> SHARE_BITS)


def top_set(scores: Floats, num: int) -> Ints:
    """Ids that hold the `num` best of scores [V] and not many more, ascending.

    The best of `scores` is 0; ids at -inf are left out.
    """
    for depth in SEARCH_DEPTHS:
        above = scores >= -depth
        if np.count_nonzero(above) >= num:
            return np.flatnonzero(above)
    return np.flatnonzero(scores > -np.inf)


def best_ids(values: Floats, num: int) -> Ints:
    """Indices of the `num` highest of values [n] (all, where n is less), best first, the lower index of equals first.

    The values hold no NaN.
    """
    if len(values) <= NUM_SMALL:
        return np.negative(values).argsort(kind="stable")[:num]
    if num >= len(values):
        return _ranked(values, np.arange(len(values)))
    lowest = np.partition(values, len(values) - num)[len(values) - num]
    kept = np.flatnonzero(values >= lowest)
    return _ranked(values[kept], kept)[:num]


def _ranked(values: Floats, ids: Ints) -> Ints:
    """The ids, each below 2^32, by value from the highest, then by id.

    Value and id are packed into one integer, the value's bits as an integer that sorts likewise: sorting those
    is many times as fast as a stable sort of floats.
    """
    bits = (values + np.float32(0)).view(np.int32).astype(np.int64)  # the sum makes -0 equal to 0
    descending = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    keys = (descending << 32) | ids
    keys.sort()
    return keys & 0xFFFFFFFF
