"""Token ids to text as they come, with never half a character in between.

What `add` and `flush` return, joined, is one decode of all ids. Each token costs the same, however long the output.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import tokenizers

from octavo.text.pieces import PieceTable

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "PieceStream"]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONE_BYTE = re.compile("[\udc80-\udcff]")
_NUM_CONTEXT_TOKENS = 5  # of the prompt, for decoders that look at neighbours
_MAX_HELD_TOKENS = 8  # no character is made of more; what ends in U+FFFD after so many really is broken


class _Stream(Protocol):
    def add(self, token_ids: Iterable[int]) -> str: ...
    def flush(self) -> str: ...


class Detokenizer:
    """The text of one sample, in pieces.

    Text is that of the output alone, with one choice where the vocabulary is a sentencepiece one: a space that
    begins the output is kept if it continues visible prompt text and dropped if the text begins with it, which is
    what decoding prompt and output together gives.

    Args:
        tokenizer: whose ids these are.
        prompt_ids: the prompt's; only whether they show any text matters, and rarely the last few of them.
        skip_special_tokens: leave special tokens out; otherwise they stand literally, no spaces around them.

    """

    def __init__(
        self, tokenizer: "Tokenizer", prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._stream: _Stream
        if tokenizer.pieces is None:
            self._stream = _WindowStream(tokenizer.backend, prompt_ids, skip_special_tokens)
        else:
            pieces = tokenizer.pieces
            begins = not any(pieces[i] for i in prompt_ids if i not in skipped)
            self._stream = PieceStream(pieces, skipped, begins)

    def add(self, token_ids: Iterable[int]) -> str:
        """Take the next ids; returns the text that is now certain, "" while a character is incomplete."""
        return self._stream.add(token_ids)

    def flush(self) -> str:
        """At the end: what an incomplete character leaves, as a decode of all ids shows it."""
        return self._stream.flush()


class PieceStream:
    """Joins pieces; holds the bytes of a character until it is complete.

    Args:
        pieces: of the vocabulary.
        skipped: ids that add nothing.
        begins: whether the text begins here, so that leading spaces may be dropped.

    """

    def __init__(self, pieces: PieceTable, skipped: frozenset[int], begins: bool = True) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._bytewise = pieces.bytewise
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape" if pieces.bytewise else "replace")
        self._num_spaces_to_drop = pieces.num_leading_spaces if begins else 0

    def add(self, token_ids: Iterable[int]) -> str:
        text = ""
        for token_id in token_ids:
            if token_id in self._skipped:
                continue
            piece = self._pieces[token_id]
            if isinstance(piece, bytes):
                text += self._decode(piece)
            elif piece:
                text += self._decode(b"", final=True) + piece
        return self._trim(text) if self._num_spaces_to_drop else text

    def flush(self) -> str:
        return self._trim(self._decode(b"", final=True))

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        return _LONE_BYTE.sub(_BROKEN, text) if self._bytewise else text

    def _trim(self, text: str) -> str:
        if not text or not self._num_spaces_to_drop:
            return text
        kept = text.lstrip(" ")
        num_dropped = min(len(text) - len(kept), self._num_spaces_to_drop)
        self._num_spaces_to_drop = 0 if kept else self._num_spaces_to_drop - num_dropped
        return text[num_dropped:]


class _WindowStream:
    """For any decoder: decodes new tokens behind a few of context, and takes what the context alone does not give."""

    def __init__(self, backend: tokenizers.Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        self._shown = list(prompt_ids[-_NUM_CONTEXT_TOKENS:])
        self._held: list[int] = []

    def add(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self._add, token_ids))

    def _add(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith(_BROKEN) and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        if text:  # tokens that show nothing stay in the window with the next that does
            self._shown, self._held = (self._shown + self._held)[-_NUM_CONTEXT_TOKENS:], []
        elif len(self._held) >= _MAX_HELD_TOKENS:
            self._held = []
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._shown, self._held = (self._shown + self._held)[-_NUM_CONTEXT_TOKENS:], []
        return text

    def _new_text(self) -> str:
        if not self._held:
            return ""
        before = self._backend.decode(self._shown, skip_special_tokens=self._skip)
        after = self._backend.decode(self._shown + self._held, skip_special_tokens=self._skip)
        return str(after[len(before) :])
