"""Guesses of the next tokens from the sequence's own text: what followed when it last ended the same way.

Prompt lookup (Saxena 2023): where the last n tokens stand earlier in prompt or output, what stood behind them is
likely to come again. The guesses are computed in the same step as the last known token, and kept as far as they are
what would have been chosen anyhow, so they change how fast tokens come and never which.
"""

from collections.abc import Sequence

from octavo.config import SchedulerConfig

__all__ = ["NgramIndex", "Speculation"]


class NgramIndex:
    """Where each run of a few tokens last stood in one sequence, kept up to date in O(1) a token.

    `smallest` and `largest` are the lengths of the runs; the longest one that is found decides.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest = smallest
        self._sizes = range(largest, smallest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}  # a run -> the position behind its last place
        self._num_indexed = smallest  # runs that end before this position are known

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """`num_tokens` guesses of what comes behind `token_ids`, or none. The ids only ever grow."""
        num_known = len(token_ids)
        for end in range(self._num_indexed, num_known):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(num_known, self._smallest)
        for size in self._sizes:
            start = self._after.get(tuple(token_ids[-size:])) if size < num_known else None
            if start is not None:
                found = tuple(token_ids[start : start + num_tokens])
                # Behind the last token the text goes on as it did from `start`: a loop is guessed to last.
                return (found * (num_tokens // len(found) + 1))[:num_tokens]
        return ()


class Speculation:
    """The settings of speculation.

    Attributes:
        num_tokens: most guesses a sequence and step.

    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.num_tokens = config.num_speculative_tokens
        self._smallest, self._largest = config.prompt_lookup_min, config.prompt_lookup_max

    @classmethod
    def of(cls, config: SchedulerConfig) -> "Speculation | None":
        """What the settings ask for; None: nothing is guessed."""
        return cls(config) if config.speculative_method == "ngram" else None

    def index(self) -> NgramIndex:
        """For a sequence that begins."""
        return NgramIndex(self._smallest, self._largest)
