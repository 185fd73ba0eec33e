"""Stop strings: find where one ends, and hold back only text that may begin one.

The outcome depends on the text alone, not on how tokens cut it: the stop string that is complete first ends the
output, and of several complete at the same character the longest, which begins first.
"""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["StopChecker", "StopResult"]


class StopResult(NamedTuple):
    """Text that may be shown now, and the stop string that ended the output, if one did."""

    text: str
    stop: str | None


class StopChecker:
    """Watches one sample's text. Make one a sample; call `add` once a token, `finish` once at the end.

    Args:
        stops: texts that end the output, none of them empty.
        include_stop_str_in_output: keep the stop string at the end of the text.
        min_tokens: a stop string that ends within so many first tokens does not count.

    """

    def __init__(self, stops: Sequence[str], *, include_stop_str_in_output: bool = False, min_tokens: int = 0) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self._stop: str | None = None

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._stop

    def add(self, text: str, num_tokens: int = 1) -> StopResult:
        """Take the text that one more token brought (maybe none). After a stop nothing more is shown."""
        self._num_tokens += num_tokens
        if self._stop is not None:
            return StopResult("", self._stop)
        if not self._matchers:
            return StopResult(text, None)
        counts = self._num_tokens > self._min_tokens
        known = len(self._held)
        text = self._held + text
        for end in range(known + 1, len(text) + 1):
            found = self._advance(text[end - 1])
            if found and counts:
                self._stop, self._held = found, ""
                return StopResult(text[:end] if self._include else text[: end - len(found)], found)
        shown = len(text) - max(matcher.matched for matcher in self._matchers)
        self._held = text[shown:]
        return StopResult(text[:shown], None)

    def finish(self) -> str:
        """The text still held back, when the output ends for another reason."""
        text, self._held = self._held, ""
        return text

    def _advance(self, char: str) -> str | None:
        """Step every matcher; returns the longest stop string that this character completes."""
        found = None
        for matcher in self._matchers:
            if matcher.advance(char) and (found is None or len(matcher.stop) > len(found)):
                found = matcher.stop
        return found


class _Matcher:
    """Knuth, Morris and Pratt's automaton: linear however repetitive stop string and text are."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # length of the longest beginning of `stop`, short of all of it, that the text ends with
        self._borders = _borders(stop)

    def advance(self, char: str) -> bool:
        """Take a character; returns whether the text now ends with the stop string."""
        stop, matched = self.stop, self.matched
        while matched and stop[matched] != char:
            matched = self._borders[matched]
        if stop[matched] == char:
            matched += 1
        complete = matched == len(stop)
        self.matched = self._borders[matched] if complete else matched
        return complete


def _borders(text: str) -> list[int]:
    """For each length, that of the longest proper beginning which is also an ending of text[:length]."""
    borders = [0] * (len(text) + 1)
    length = 0
    for end in range(1, len(text)):
        while length and text[length] != text[end]:
            length = borders[length]
        if text[length] == text[end]:
            length += 1
        borders[end + 1] = length
    return borders
