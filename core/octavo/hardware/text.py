"""Pieces of the sentences that a user reads about plugins."""

import difflib
from collections.abc import Iterable

__all__ = ["nearest", "one_line"]


def one_line(error: BaseException) -> str:
    """Type and message, without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause for the end of "unknown ...": the known name that is close, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
