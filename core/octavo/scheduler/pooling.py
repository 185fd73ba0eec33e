"""A prompt's hidden states become its embedding, chunk by chunk: what is kept of them is one sum."""

import numpy as np
import numpy.typing as npt

from octavo.pooling_params import PoolingParams
from octavo.scheduler.messages import HiddenSum

__all__ = ["Pool"]

MIN_NORM = 1e-12  # so that a vector of zeros stays one


class Pool:
    """What has been pooled of one prompt.

    Attributes:
        positions: those whose hidden states count.

    """

    def __init__(self, params: PoolingParams, num_prompt_tokens: int) -> None:
        self.positions = params.positions(num_prompt_tokens)
        self._normalize = params.normalize
        self._num_tokens = 0
        self._total: npt.NDArray[np.float64] | None = None

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether positions count that the prefix cache could serve: it has keys and values, no hidden states."""
        return self.positions.start == 0

    def left(self, num_computed: int) -> range:
        """The positions that count still, once the first `num_computed` have been computed and taken in."""
        return range(max(self.positions.start, num_computed), max(self.positions.stop, num_computed))

    def add(self, part: HiddenSum | None) -> None:
        """Take in what a chunk gave, if anything."""
        if part is not None:
            self._num_tokens += part.num_tokens
            self._total = part.total if self._total is None else self._total + part.total

    def embedding(self) -> tuple[float, ...] | None:
        """H numbers of float32's precision, of length 1 where that was asked for; None: some positions are left."""
        if self._total is None or self._num_tokens != len(self.positions):
            return None
        mean = self._total / self._num_tokens
        if self._normalize:
            mean = mean / max(float(np.linalg.norm(mean)), MIN_NORM)
        return tuple(mean.astype(np.float32).tolist())
