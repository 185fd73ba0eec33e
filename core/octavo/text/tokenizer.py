"""Text to token ids and back.

A `Tokenizer` is made once a model and never changes, so that any number of threads may share it.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from octavo.errors import ModelError, RequestError
from octavo.text.chat import ChatTemplate
from octavo.text.detokenizer import PieceStream
from octavo.text.folder import read_folder_tokenizer
from octavo.text.gguf_vocab import read_gguf_tokenizer
from octavo.text.pieces import piece_table
from octavo.text.source import TokenizerSource, library_errors

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """Load the tokenizer of a folder with a tokenizer.json, or that of a .gguf file.

    Raises:
        ModelError: nothing is there, or it is broken.
        UnsupportedError: a kind of tokenizer that is not known here.

    """
    path = Path(path)
    if path.is_dir():
        return Tokenizer(read_folder_tokenizer(path))
    if path.name == "tokenizer.json":
        return Tokenizer(read_folder_tokenizer(path.parent))
    if not path.exists():
        raise ModelError(
            f"{path}: no such file or folder; `tokenizer` takes a folder with a tokenizer.json or a .gguf file"
        )
    return Tokenizer(read_gguf_tokenizer(path))


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        backend: the library's tokenizer.
        pieces: token by token decoding, or None where the decoder needs the library.
        special_token_ids: ids that `skip_special_tokens` leaves out.
        special_tokens: role ("bos_token", ...) to literal text, as chat templates name them.
        vocab_size: ids from 0 up to this are the tokenizer's; a model's output layer may be wider.
        bos_token_id: of the beginning-of-sequence token, or None.
        eos_token_id: of the end-of-sequence token, or None; the model's own list may hold more.
        chat_template: renders messages.

    """

    def __init__(self, source: TokenizerSource) -> None:
        self.backend = source.backend
        self.special_tokens: Mapping[str, str] = source.special_tokens
        added = source.backend.get_added_tokens_decoder()
        self.vocab_size = max(source.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.pieces = piece_table(source.backend, self.vocab_size)
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_token_id = self._role("bos_token")
        self.eos_token_id = self._role("eos_token")
        self.chat_template = ChatTemplate(source.chat_templates, source.special_tokens)
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._prefix_ids = source.prefix_ids
        self._suffix_ids = source.suffix_ids

    def _role(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        token_id: int | None = None if token is None else self.backend.token_to_id(token)
        return token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens that stand in it literally become their ids.

        Lone surrogates, which are no characters, count as U+FFFD.

        Raises:
            RequestError: the vocabulary cannot write the text.

        """
        with library_errors(lambda reason: RequestError(f"the model's tokenizer cannot take this text: {reason}")):
            # The plain call keeps Python's lock for as long as it takes, and finds offsets that nobody reads.
            ids: list[int] = self.backend.encode_batch_fast([_sound(text)], add_special_tokens=False)[0].ids
        return [*self._prefix_ids, *ids, *self._suffix_ids] if add_special_tokens else ids

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token, which says how long a text may be that fits in so many tokens."""
        return max((len(self.token_bytes(token_id)) for token_id in range(self.vocab_size)), default=1) or 1

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids from its beginning: no spaces around special tokens, runs of spaces kept.

        Broken UTF-8 shows as U+FFFD. Where the vocabulary has single-byte tokens (sentencepiece), the characters next
        to a broken one stay whole; the library would break the run of bytes to the last token without one.

        Raises:
            RequestError: an id is no integer from 0 up to the vocabulary's size.

        """
        ids = [self._checked(token_id) for token_id in token_ids]
        if self.pieces is None:
            return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))
        stream = PieceStream(self.pieces, self.special_token_ids if skip_special_tokens else frozenset())
        return stream.add(ids) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; of a special token, its literal text; of no token, none."""
        self._checked(token_id, beyond=True)
        if self.pieces is None:
            token = self.backend.id_to_token(token_id) if token_id < self.vocab_size else None
            return (token or "").encode("utf-8", "replace")
        piece = self.pieces[token_id]
        return piece if isinstance(piece, bytes) else piece.encode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        r"""A text that names one token: never empty, never that of another token.

        That is the text it adds, a special token's literal text, `bytes:\xf0\x9f` for a part of a character, and
        `token_id:7` where another token already has the text, or for a row of the output layer beyond the vocabulary.
        """
        data = self.token_bytes(token_id)
        try:
            text = "" if self._is_single_byte(token_id) else data.decode()
        except UnicodeDecodeError:
            text = ""
        if text and self._added_ids.get(text, token_id) == token_id:  # an added token goes before one of the vocabulary
            return text
        return f"token_id:{token_id}" if text or not data else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _is_single_byte(self, token_id: int) -> bool:
        pieces = self.pieces
        return pieces is not None and pieces.bytewise and isinstance(pieces[token_id], bytes)

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that write any of the words, at the beginning of a text, within it, and after a space.

        Raises:
            RequestError: a word has no tokens.

        """
        sequences: dict[tuple[int, ...], None] = {}
        line_break = self.encode("\n", add_special_tokens=False)
        for word in words:
            bare = word.lstrip() or word
            found = [self.encode(text, add_special_tokens=False) for text in (word, bare, " " + bare)]
            within = self.encode("\n" + bare, add_special_tokens=False)
            if within[: len(line_break)] == line_break:  # vocabularies that put a space before a text have it bare here
                found.append(within[len(line_break) :])
            if not any(found):
                raise RequestError(f"bad_words: {word!r:.80} has no tokens in this model's vocabulary", "bad_words")
            sequences.update((tuple(ids), None) for ids in found if ids)
        return tuple(sequences)

    def render_chat(self, messages: Any, **options: Any) -> str:
        """The prompt text of a conversation; see `ChatTemplate.render` for the options and errors."""
        return self.chat_template.render(messages, **options)

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        """The prompt ids of a conversation.

        The template writes its own beginning-of-sequence token if the model wants one, so none is added here.
        """
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def _checked(self, token_id: int, beyond: bool = False) -> int:
        is_id = isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0
        if not is_id or (token_id >= self.vocab_size and not beyond):
            raise RequestError(f"token ids are integers from 0 to {self.vocab_size - 1}, got {token_id!r:.40}")
        return token_id


def _sound(text: str) -> str:
    """The text with each lone surrogate as U+FFFD, and the two of a pair as their one character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
