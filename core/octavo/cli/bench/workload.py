"""What a benchmark sends: prompts of random token ids, reproducible from a seed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.errors import ConfigError

__all__ = ["Length", "Shape", "WorkRequest", "make_requests"]


@dataclass(frozen=True)
class Length:
    """A number of tokens, or a range to draw it from.

    Attributes:
        low, high: inclusive.
        log: draw the logarithm evenly, so that short ones are common and long ones rare, as in chats.

    """

    low: int
    high: int
    log: bool = False

    @classmethod
    def parse(cls, text: str) -> "Length":
        """`128`, `32:512` (evenly drawn) or `16:1024:log`.

        Raises:
            ConfigError: it is none of these.

        """
        low, _, rest = text.partition(":")
        high, _, kind = rest.partition(":")
        try:
            length = cls(int(low), int(high or low), kind == "log")
        except ValueError:
            length = cls(0, 0)
        if not 0 < length.low <= length.high or kind not in ("", "log"):
            raise ConfigError(
                f"a length is a number of tokens (128), a range (32:512) or a range with many short ones "
                f"(16:1024:log), got {text!r}"
            )
        return length

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """So many lengths."""
        if self.log:
            drawn = np.exp(rng.uniform(np.log(self.low), np.log(self.high + 1), count)).astype(np.int64)
            return list(map(int, np.clip(drawn, self.low, self.high)))
        return list(map(int, rng.integers(self.low, self.high + 1, count)))

    def __str__(self) -> str:
        if self.low == self.high:
            return str(self.low)
        return f"{self.low} to {self.high}" + (" (log)" if self.log else "")


@dataclass(frozen=True)
class Shape:
    """What is asked for, whatever the token ids.

    Attributes:
        num_prompts: requests.
        input_len: tokens of a prompt beyond the shared prefix.
        output_len: tokens to generate; the model's end of sequence is ignored.
        prefix_len: tokens that all prompts begin with.
        new_prefix: draw the prefix anew for each repeat, so that each computes it once.
        seed: of lengths and ids.

    """

    num_prompts: int
    input_len: Length
    output_len: Length
    prefix_len: int = 0
    new_prefix: bool = False
    seed: int = 0

    def __str__(self) -> str:
        shared = f"{self.prefix_len} shared and " if self.prefix_len else ""
        requests = "1 request" if self.num_prompts == 1 else f"{self.num_prompts} requests"
        return f"{requests}, {shared}{self.input_len} tokens in, {self.output_len} out"


@dataclass(frozen=True)
class WorkRequest:
    """One prompt and how many tokens to generate."""

    token_ids: list[int] = field(repr=False)
    num_output_tokens: int


def make_requests(shape: Shape, repeat: int, vocab_size: int, avoid: Sequence[int] = ()) -> list[WorkRequest]:
    """The requests of one repeat.

    Lengths are the same in every repeat; ids are not, so that only the shared prefix can be found in a cache.
    `avoid` are ids that no prompt holds, as those that end a sequence.
    """
    usable = np.setdiff1d(np.arange(vocab_size), np.asarray(avoid, np.int64))
    lengths = np.random.default_rng([shape.seed, 0])
    num_in = shape.input_len.draw(lengths, shape.num_prompts)
    num_out = shape.output_len.draw(lengths, shape.num_prompts)
    prefix_rng = np.random.default_rng([shape.seed, 1, repeat if shape.new_prefix else 0])
    own_rng = np.random.default_rng([shape.seed, 2, repeat])
    prefix = prefix_rng.choice(usable, shape.prefix_len).tolist()
    return [
        WorkRequest(prefix + own_rng.choice(usable, length).tolist(), out)
        for length, out in zip(num_in, num_out, strict=True)
    ]
