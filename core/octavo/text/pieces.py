"""What each token id adds to a text, as bytes or characters, so that decoding can go token by token.

Two ways of decoding cover language models of today, and both work piece by piece:

- byte-level: a token is a run of bytes, the text is their UTF-8; each broken sequence becomes one U+FFFD;
- sentencepiece: a token is text in which U+2581 is a space, or "<0x..>", one byte of a character that has no token;
  each byte of a broken character becomes one U+FFFD, and a leading space of the whole text may be dropped.

Any other decoder of a tokenizer.json is run by the library itself, over a short window of ids (`detokenizer`).
"""

import json
import re
from abc import ABC, abstractmethod
from typing import Any

import tokenizers

__all__ = ["ByteLevel", "PieceTable", "SentencePiece", "piece_table"]

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_alphabet() -> dict[str, int]:
    """Character to byte, as byte-level vocabularies write them (GPT-2's table).

    Printable bytes of Latin-1 stand for themselves, the others follow in order from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


class PieceTable(ABC):
    """Token id to piece: bytes that join with their neighbours, or text that stands by itself.

    Pieces are made when first asked for. Threads may share a table: making one twice gives the same.

    Attributes:
        num_leading_spaces: spaces dropped, at most, where a text begins.
        bytewise: broken UTF-8 becomes one U+FFFD a byte, not one a sequence; then a piece of bytes is a single byte.

    """

    num_leading_spaces = 0
    bytewise = False

    def __init__(self, backend: tokenizers.Tokenizer, size: int) -> None:
        self._backend = backend
        self._pieces: list[bytes | str | None] = [None] * size

    def __getitem__(self, token_id: int) -> bytes | str:
        """The piece of an id; empty for an id that no token has, as the library skips it."""
        if not 0 <= token_id < len(self._pieces):
            return ""
        piece = self._pieces[token_id]
        if piece is None:
            token = self._backend.id_to_token(token_id)
            piece = self._pieces[token_id] = "" if token is None else self.piece(token)
        return piece

    @abstractmethod
    def piece(self, token: str) -> bytes | str:
        """The piece of a token as the vocabulary spells it."""


class ByteLevel(PieceTable):
    """Pieces of a byte-level vocabulary: bytes, all of them."""

    def __init__(self, backend: tokenizers.Tokenizer, size: int) -> None:
        super().__init__(backend, size)
        self._byte_of = _byte_alphabet()

    def piece(self, token: str) -> bytes:
        try:
            return bytes(map(self._byte_of.__getitem__, token))
        except KeyError:  # an added token in plain text, beyond the alphabet
            return token.encode("utf-8", "replace")


class SentencePiece(PieceTable):
    """Pieces of a sentencepiece vocabulary: text, or one byte."""

    bytewise = True

    def __init__(self, backend: tokenizers.Tokenizer, size: int, space: str, num_leading_spaces: int) -> None:
        super().__init__(backend, size)
        self._space = space
        self.num_leading_spaces = num_leading_spaces

    def piece(self, token: str) -> bytes | str:
        token = token.replace(self._space, " ")
        return bytes([int(token[1:5], 16)]) if _BYTE_TOKEN.fullmatch(token) else token


def piece_table(backend: tokenizers.Tokenizer, size: int) -> PieceTable | None:
    """The table for a tokenizer's decoder, or None where the decoder does not work piece by piece."""
    if backend.decoder is None:
        return None
    steps = _flat(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevel(backend, size)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return None
    space, num_leading = steps[0]["pattern"].get("String"), 0
    plain = bool(space) and steps[0]["content"] == " "
    for strip in steps[3:]:
        plain = plain and strip["content"] == " " and not strip["stop"]
        num_leading = int(strip["start"])
    return SentencePiece(backend, size, space, num_leading) if plain else None


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """A decoder's steps, sequences within sequences laid out in one."""
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flat(inner)]
    return [decoder]
