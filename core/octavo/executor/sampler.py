"""Chooses tokens from rows of logits. A row's token depends on that row, its parameters and its random number.

Everything is done a row at a time by operations whose result does not depend on where the row lies or what
stands beside it, so a request's tokens are bitwise the same in any batch.

Order: masks, logit_bias, penalties, temperature; then min_p, top_k and top_p, each on what the one before left,
renormalised; then one uniform number through the inverse of the cumulative distribution, in token-id order.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo.contract import Sample
from octavo.errors import RequestError
from octavo.executor.logits import LogitsProcessor
from octavo.executor.philox import uniforms
from octavo.executor.step_rows import NOT_NUMBERS
from octavo.sampling_params import SamplingParams

__all__ = ["Draw", "RowError", "Sampler", "best_ids", "draw_index", "filtered", "sum_bounds", "top_set"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

# Log-probabilities below the best token's where a search for the likeliest tokens looks first, and then further.
# Most rows keep tens of tokens of tens of thousands, so sorting only what lies above a step saves nearly all.
SEARCH_DEPTHS = (4.0, 6.0, 8.0, 10.0, 13.0, 16.0)
CDF_BLOCK = 256
NUM_SMALL = 512  # up to so many values a stable sort of floats is the fastest
ADDENDS = 64  # terms of each float32 sum in `sum_bounds`
# A float32 sum of n terms, none below 0, is off by at most about (n - 1) 2^-24 of itself (Higham 2002, 4.2).
SUM_ERROR = ADDENDS * 2.0**-24
FLAT = 2.5  # of what is wanted, in units of the best token's weight: more lies deeper than the first search looks
UNDECIDED = -1  # by the op
MIN_TEMPERATURE = 1e-30  # its reciprocal is well within float32, and less means nothing else

logger = logging.getLogger(__name__)


class RowError(Exception):
    """A row from which no token can be chosen; ends its own sequence and nothing else.

    `param` names the parameter that leaves none, or is None where it is the model's or our fault.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Draw:
    """One token to choose.

    Attributes:
        logits: [V] float32, at least as long as the tokenizer's vocabulary; not written to.
        params: of the request.
        sample_index: which of its samples.
        position: number of output tokens that the sample has already.
        processor: its masks, biases and penalties, where it has any.
        row: which of the step's logits they are; None: of none.

    """

    logits: Floats
    params: SamplingParams
    sample_index: int
    position: int
    processor: LogitsProcessor | None = None
    row: int | None = None


class Sampler:
    """Chooses tokens below `vocab_size`, the tokenizer's: rows of a padded head are longer.

    Its scratch rows are reused from call to call; nothing else is kept. `op` draws where it can, the same tokens.
    """

    def __init__(self, vocab_size: int, op: Callable[[Sample], torch.Tensor] | None = None) -> None:
        self._vocab_size = vocab_size
        self._op = op
        self._processed = np.empty(vocab_size, np.float32)
        self._scaled = np.empty(vocab_size, np.float32)
        self._weights = np.empty(vocab_size, np.float32)

    def sample(self, draws: Sequence[Draw], logits: torch.Tensor | None = None) -> list[int | RowError]:
        """A token id for each draw, or what is wrong with its row. Never raises for one of them.

        `logits` [L, V] float32 are those of the step, in which the rows of draws lie.
        """
        if not draws:
            return []
        numbers = uniforms(
            np.asarray([(draw.params.seed or 0) % 2**64 for draw in draws], np.uint64),
            np.asarray([draw.position for draw in draws], np.uint64),
            np.asarray([draw.sample_index for draw in draws], np.uint64),
        )
        tokens: list[int | RowError] = [UNDECIDED] * len(draws)
        if self._op is not None and logits is not None:
            asked = [i for i, draw in enumerate(draws) if draw.row is not None and _is_plain(draw)]
            rows = [draws[i].row for i in asked]
            found = self._by_op(logits, rows, [draws[i].params for i in asked], numbers[asked])
            for i, token_id in zip(asked, found, strict=True):
                tokens[i] = token_id
        with np.errstate(over="ignore"):
            return [
                self._guarded(draw, number) if token_id == UNDECIDED else token_id
                for draw, number, token_id in zip(draws, numbers.tolist(), tokens, strict=True)
            ]

    def _by_op(
        self,
        logits: torch.Tensor,
        rows: Sequence[int | None],
        params: Sequence[SamplingParams],
        numbers: npt.NDArray[np.float64],
    ) -> list[int]:
        """What the op draws from rows of logits; UNDECIDED where it leaves it to us."""
        if self._op is None or not rows:
            return [UNDECIDED] * len(rows)
        whole = torch.from_numpy(np.asarray([rows, [p.top_k for p in params]], np.int64))
        wishes = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params], numbers]
        temperature, top_p, min_p, uniform = torch.from_numpy(np.asarray(wishes, np.float64))
        args = Sample(logits[:, : self._vocab_size], whole[0], temperature, whole[1], top_p, min_p, uniform)
        try:
            found: list[int] = self._op(args).tolist()
        except Exception:
            logger.exception("the platform's op sample failed; tokens are drawn without it from now on")
            self._op = None
            return [UNDECIDED] * len(rows)
        return found

    def _guarded(self, draw: Draw, number: float) -> int | RowError:
        try:
            return self._choose(draw, number)
        except RowError as error:
            return error
        except RequestError as error:
            return RowError(str(error), error.param)
        except Exception as error:
            logger.exception("sampling failed")
            return RowError(f"sampling failed: {error}")

    def _choose(self, draw: Draw, number: float) -> int:
        logits, params = draw.logits[: self._vocab_size], draw.params
        if draw.processor is not None:
            draw.processor.apply(logits, self._processed)
            logits = self._processed
        best = int(logits.argmax())  # the first NaN where there is one, else the lowest id of equals
        top = logits[best]
        if not math.isfinite(top):
            masks = params.masks
            if top == -np.inf:
                named = ", ".join(masks) or "the request has none"
                raise RowError(f"masks leave no token that may be sampled ({named})", masks[0] if masks else None)
            raise RowError(NOT_NUMBERS)
        if params.greedy:
            return best
        if params.seed is None:
            raise RowError("the request has no seed; one is drawn at admission")
        if draw.processor is not None and self._op is not None:
            (token_id,) = self._by_op(torch.from_numpy(logits)[None], [0], [params], np.asarray([number]))
            if token_id != UNDECIDED:
                return token_id
        # At most 0, so that nothing overflows; -inf stays and weighs nothing.
        scaled = np.subtract(logits, top, out=self._scaled)
        if params.temperature != 1:
            scaled *= np.float32(1 / max(params.temperature, MIN_TEMPERATURE))
        top_k = params.top_k if 0 < params.top_k < len(logits) else 0
        if not top_k and params.top_p >= 1 and not params.min_p:
            return draw_index(np.exp(scaled, out=self._weights), number)
        ids = filtered(scaled, top_k, params.top_p, params.min_p, self._weights)
        return int(ids[draw_index(np.exp(scaled[ids]), number)])


def _is_plain(draw: Draw) -> bool:
    """Whether the row is drawn from as it is."""
    return draw.processor is None and not draw.params.greedy and draw.params.seed is not None


def filtered(scaled: Floats, top_k: int, top_p: float, min_p: float, scratch: Floats) -> Ints:
    """Ids that min_p, then top_k, then top_p keep, ascending. Of equal tokens the lower id is kept first.

    Args:
        scaled: [V] float32 logits over temperature, less the highest: the best is 0, masked ones -inf.
        top_k: keep so many; 0: all.
        top_p: keep the smallest set of the likeliest whose probability reaches this.
        min_p: keep what is at least this fraction as likely as the best.
        scratch: [V] float32, overwritten.

    """
    floor = math.log(min_p) if min_p else -math.inf
    if top_k:
        ids = top_set(scaled, top_k, floor)
        ids = ids[best_ids(scaled[ids], top_k)]
        if top_p >= 1:
            return np.sort(ids)
        weights = np.exp(scaled[ids])
        wanted = top_p * float(weights.sum(dtype=np.float64))
    elif top_p < 1:
        return _nucleus(scaled, floor, top_p, scratch)
    else:
        return np.flatnonzero(scaled >= floor)
    reached = int(np.searchsorted(np.cumsum(weights, dtype=np.float64), wanted))
    return np.sort(ids[: reached + 1])


def _nucleus(scaled: Floats, floor: float, top_p: float, scratch: Floats) -> Ints:
    """Ids that top_p keeps of those not below the floor, ascending.

    What all weigh is first known within bounds, which a sum in float32 gives at a fifth of the time; where both
    bounds end the set at the same token, and they nearly always do, the exact sum would do so too.
    """
    weights = np.exp(scaled, out=scratch)
    if floor > -math.inf:
        weights[scaled < floor] = 0
    low, high = sum_bounds(weights)
    if top_p * high <= 1:  # the best token alone, which weighs 1
        return np.asarray([scaled.argmax()])
    ids = _heaviest(scaled, floor, weights, top_p * high)
    ids = ids[best_ids(scaled[ids], len(ids))]
    running = np.cumsum(weights[ids], dtype=np.float64)
    first, last = running.searchsorted((top_p * low, top_p * high)).tolist()
    if first != last:
        first = int(running.searchsorted(top_p * float(weights.sum(dtype=np.float64))))
    kept = ids[: first + 1]
    kept.sort()
    return kept


def sum_bounds(weights: Floats) -> tuple[float, float]:
    """Between what the sum of weights [n], none below 0, lies."""
    num = len(weights) // ADDENDS * ADDENDS
    columns = weights[:num].reshape(ADDENDS, -1).sum(axis=0)  # row by row, so it adds whole vectors
    total = float(columns.sum(dtype=np.float64))
    if num < len(weights):
        total += float(weights[num:].sum(dtype=np.float64))
    return total * (1 - SUM_ERROR), total * (1 + SUM_ERROR)


def top_set(scaled: Floats, num: int, floor: float = -math.inf) -> Ints:
    """Ids that hold the `num` best of scaled [V] and not many more, ascending; fewer if the floor leaves fewer.

    The best of `scaled` is 0; ids at -inf are left out.
    """
    for depth in SEARCH_DEPTHS:
        if -depth <= floor:
            break
        above = scaled >= -depth
        if np.count_nonzero(above) >= num:
            return np.flatnonzero(above)
    return np.flatnonzero((scaled >= floor) & (scaled > -np.inf))


def _heaviest(scaled: Floats, floor: float, weights: Floats, wanted: float) -> Ints:
    """Ids of a top set, ascending: so many that their weights reach `wanted`, or all not below the floor."""
    for depth in SEARCH_DEPTHS[_first_depth(wanted) :]:
        if -depth <= floor:
            break
        ids = np.flatnonzero(scaled >= -depth)
        if float(weights[ids].sum(dtype=np.float64)) >= wanted:
            return ids
    return np.flatnonzero((scaled >= floor) & (scaled > -np.inf))


def _first_depth(wanted: float) -> int:
    """Where the search begins, so that it need not begin in vain: the more the rest weighs, the deeper (by trial)."""
    return 0 if wanted < FLAT else 1


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


def draw_index(weights: Floats, number: float) -> int:
    """The index at which the running sum of weights [n], not all 0, first exceeds `number` of the whole.

    `number` is in [0, 1). Sums are in float64, by blocks and then within one, which is exact enough and spares
    a running sum over the whole vocabulary. An index of weight 0 is never returned.
    """
    block, before = 0, 0.0
    if len(weights) > CDF_BLOCK:
        sums = np.add.reduceat(weights, np.arange(0, len(weights), CDF_BLOCK), dtype=np.float64)
        ends = sums.cumsum()
        total = ends[-1]
        block = int(ends.searchsorted(number * total, side="right"))
        if block == len(ends):  # the product was rounded up to the whole
            block = int(np.flatnonzero(sums)[-1])
        before = ends[block] - sums[block]
    inside = weights[block * CDF_BLOCK : (block + 1) * CDF_BLOCK]
    running = inside.cumsum(dtype=np.float64)
    if len(weights) > CDF_BLOCK:
        running += before
    else:
        total = running[-1]
    index = int(running.searchsorted(number * total, side="right"))
    if index == len(inside) or inside[index] == 0:  # the sums differ in the last bit
        index = int(np.flatnonzero(inside)[-1])
    return block * CDF_BLOCK + index
