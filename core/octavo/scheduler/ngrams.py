"""Prompt lookup: what followed when the text last ended the same way (Saxena 2023)."""

from collections.abc import Sequence

__all__ = ["NgramIndex"]


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
