"""Reads one tool call, {"name": ..., "arguments": {...}}, while it is being written."""

import json

__all__ = ["CallScanner"]

ARGUMENTS = ("arguments", "parameters")
_CLOSER = {"{": "}", "[": "]"}
_SPACE = " \t\r\n"


class CallScanner:
    """Takes the text of a JSON object as it comes.

    Attributes:
        raw: what was taken so far.
        name: the tool's, once it is known.
        is_complete: whether the object is closed.
        is_broken: whether the text is no object of this kind; nothing more is taken.

    """

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.is_complete = False
        self.is_broken = False
        self._closers: list[str] = []
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._value: list[str] | None = None  # characters of the key or value under way, at the object's own level
        self._expects = "key"
        self._arguments: list[str] = []  # not yet told

    @property
    def begun_name(self) -> str | None:
        """As much of the name as there is while it is being written; None: it is not."""
        if self._key != "name" or self._expects == "comma":
            return None
        return "".join(self._value or []).removeprefix('"')

    def take_arguments(self) -> str:
        """The arguments' text since the last call, as it was written."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str) -> int:
        """Take text up to the end of the object; how many characters were taken."""
        for position, char in enumerate(text):
            if self.is_complete or self.is_broken:
                return position
            self.raw += char
            self._take(char)
        return len(text)

    def _take(self, char: str) -> None:
        if self._in_string:
            self._take_in_string(char)
        elif len(self._closers) > 1:
            self._take_within(char)
        elif not self._closers:
            self._closers.append("}")
            self.is_broken = char != "{"
        else:
            self._take_at_top(char)

    def _take_in_string(self, char: str) -> None:
        self._add(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if len(self._closers) == 1:
                self._end_string()

    def _take_within(self, char: str) -> None:
        self._add(char)
        if char == '"':
            self._in_string = True
        elif char in _CLOSER:
            self._closers.append(_CLOSER[char])
        elif char in "}]":
            self.is_broken = self._closers.pop() != char
            if len(self._closers) == 1:
                self._end_value()

    def _take_at_top(self, char: str) -> None:
        """At the object's own level: its keys, its simple values and what stands between them."""
        if self._expects == "scalar" and char in ",}" + _SPACE:
            self._end_value()
        if char in _SPACE and self._expects != "scalar":
            return
        if char == "}" and self._expects in ("key", "comma"):
            self._closers.pop()
            self.is_complete = True
        elif char == '"' and self._expects in ("key", "value"):
            self._in_string = True
            self._value = ['"']
        elif char == ":" and self._expects == "colon":
            self._expects = "value"
        elif char == "," and self._expects == "comma":
            self._expects = "key"
        elif self._expects == "value" and char in _CLOSER:
            self._value = []
            self._closers.append(_CLOSER[char])
            self._add(char)
        elif self._expects in ("value", "scalar") and (char.isalnum() or char in "-+."):
            self._expects, self._value = "scalar", [*(self._value or []), char]
        else:
            self.is_broken = True

    def _add(self, char: str) -> None:
        if self._streams:
            self._arguments.append(char)
        elif self._value is not None:
            self._value.append(char)

    @property
    def _streams(self) -> bool:
        return self._key in ARGUMENTS and len(self._closers) > 1

    def _end_string(self) -> None:
        try:
            text = json.loads("".join(self._value or []), strict=False)
        except ValueError:
            self.is_broken = True
            return
        if self._expects == "key":
            self._key, self._value, self._expects = text, None, "colon"
            return
        if self._key == "name":
            self.name = text
        elif self._key in ARGUMENTS:  # some models write them as a text of JSON
            self._arguments.append(text)
        self._end_value()

    def _end_value(self) -> None:
        self._value, self._key, self._expects = None, None, "comma"
