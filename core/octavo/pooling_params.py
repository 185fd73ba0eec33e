"""How one request's hidden states become its embedding. Checked on construction, as sampling parameters are."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from octavo.errors import RequestError, shown

__all__ = ["Pooling", "PoolingParams"]

Pooling: TypeAlias = Literal["mean", "last", "cls"]


@dataclass(frozen=True)
class PoolingParams:
    """Pooling of one request.

    Attributes:
        pooling: over which of the prompt's final hidden states to take the mean: all ("mean"), that of the last
            token, which in a decoder has seen all others, or that of the first ("cls").
        normalize: make the embedding one of length 1.

    """

    pooling: Pooling = "mean"
    normalize: bool = True

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise RequestError(
                f"pooling is one of {', '.join(get_args(Pooling))}, got {shown(self.pooling)}", "pooling"
            )
        if not isinstance(self.normalize, bool):
            raise RequestError(f"normalize is true or false, got {shown(self.normalize)}", "normalize")

    def positions(self, num_tokens: int) -> range:
        """The positions of a prompt of `num_tokens` whose hidden states count."""
        first = {"mean": 0, "last": num_tokens - 1, "cls": 0}[self.pooling]
        return range(first, 1 if self.pooling == "cls" else num_tokens)
