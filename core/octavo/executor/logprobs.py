"""Log-probabilities of the model's own distribution: before masks, penalties, temperature and filters."""

import numpy as np
import numpy.typing as npt

from octavo.contract.drawing import best_ids, top_set
from octavo.scheduler.messages import TokenLogprobs

__all__ = ["from_logits", "from_scores"]


def from_logits(logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    """What the row logits [V] says of `token_id` and of the `num_top` likeliest tokens.

    Exponentials are float32, their sum float64. The rank counts equal logits of lower ids as better, so that
    it agrees with the order of the likeliest.

    Raises:
        ValueError: the row holds NaN, or nothing finite.

    """
    top = logits.max()
    if not np.isfinite(top):
        raise ValueError("the model gave logits that are not numbers")
    scaled = logits - top
    candidates = top_set(scaled, num_top) if num_top else np.zeros(0, np.int64)
    best = candidates[best_ids(logits[candidates], num_top)]
    log_sum = float(top) + float(np.log(np.exp(scaled, out=scaled).sum(dtype=np.float64)))
    own = logits[token_id]
    better = int(np.count_nonzero(logits > own)) + int(np.count_nonzero(logits[:token_id] == own))
    return TokenLogprobs(
        token_id=int(token_id),
        logprob=float(own) - log_sum,
        rank=better + 1,
        top_ids=tuple(best.tolist()),
        top_logprobs=tuple((logits[best].astype(np.float64) - log_sum).tolist()),
    )


def from_scores(
    token_id: int,
    logprob: float,
    rank: int,
    top_ids: npt.NDArray[np.int64],
    top_logprobs: npt.NDArray[np.float32],
    num_top: int,
) -> TokenLogprobs:
    """The same from a program's SCORE and TOPK outputs for one row; `top_ids` and `top_logprobs` may be longer.

    Raises:
        ValueError: the score is not a number.

    """
    if np.isnan(logprob):
        raise ValueError("the model gave logits that are not numbers")
    return TokenLogprobs(
        token_id=int(token_id),
        logprob=float(logprob),
        rank=int(rank),
        top_ids=tuple(top_ids[:num_top].tolist()),
        top_logprobs=tuple(top_logprobs[:num_top].tolist()),
    )
