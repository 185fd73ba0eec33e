"""The tokenizer inside a GGUF file, rebuilt for the tokenizers library.

Two kinds are read: "gpt2", byte-level merges with a split named in `tokenizer.ggml.pre`, and "llama", sentencepiece
vocabularies, where the score of a piece stands for the order of merges. Of the latter, a space goes before a text
and before what follows a special token, as in llama's own tokenizer.json.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from octavo.errors import ModelError, UnsupportedError
from octavo.gguf_file import GGUFFile
from octavo.text.source import TokenizerSource, library_errors
from octavo.text.splits import SPLITS, Split

__all__ = ["read_gguf_tokenizer"]

_KEY = "tokenizer.ggml."
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_ROLES: Mapping[str, str] = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # as the format spells it
    "mask_token": "mask_token_id",
}
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {  # kinds that are read, and ids that a file need not spell out
    "gpt2": {},
    "llama": {"unk_token": 0, "bos_token": 1, "eos_token": 2},
}
_MAX_PIECE_CHARS = 512  # no vocabulary has longer ones, and looking for their parts would take long
_TEMPLATE = "tokenizer.chat_template"


class _Type(IntEnum):
    """Token types of the format."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_gguf_tokenizer(path: Path) -> TokenizerSource:
    """Read the tokenizer of a GGUF file.

    Raises:
        ModelError: the file is broken, holds no tokenizer, or its parts contradict each other.
        UnsupportedError: a kind of vocabulary or split that is not known here.

    """
    return _Reader(path).read()


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata = GGUFFile(path).metadata
        self._tokens = self._vocabulary()
        self._types = self._numbers("token_type", _Type.NORMAL)
        self._drop_padding()
        self._ids = {token: token_id for token_id, token in enumerate(self._tokens)}

    def read(self) -> TokenizerSource:
        kind = self._get("model", str, "")
        if kind not in _DEFAULT_IDS:
            raise UnsupportedError(
                f"{self._path}: tokenizer kind {kind!r:.40}; {' and '.join(_DEFAULT_IDS)} are read; "
                "give the folder of the original model with its tokenizer.json as `tokenizer`"
            )
        ids = {role: self._token_id(key, _DEFAULT_IDS[kind].get(role)) for role, key in _ROLES.items()}
        with library_errors(lambda reason: ModelError(f"{self._path}: its tokenizer cannot be built: {reason}")):
            if kind == "gpt2":
                split = self._split()
                backend, add_bos = self._byte_level(split), split.add_bos
            else:
                backend, add_bos = self._sentencepiece(ids["unk_token"]), True
            self._add_tokens(backend)
        special = {role: self._tokens[token_id] for role, token_id in ids.items() if token_id is not None}
        bos, eos = ids["bos_token"], ids["eos_token"]
        return TokenizerSource(
            backend=backend,
            special_tokens=special,
            prefix_ids=(bos,) if bos is not None and self._get("add_bos_token", bool, add_bos) else (),
            suffix_ids=(eos,) if eos is not None and self._get("add_eos_token", bool, False) else (),
            chat_templates=self._chat_templates(),
        )

    def _get(self, key: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(_KEY + key, default)
        if value is not default and not isinstance(value, kind):
            raise ModelError(f"{self._path}: {_KEY}{key} is {value!r:.60}, not of type {kind.__name__}")
        return value

    def _texts(self, key: str) -> list[str]:
        texts: list[str] = self._get(key, list, [])
        if texts and not isinstance(texts[0], str):
            raise ModelError(f"{self._path}: {_KEY}{key} is not a list of texts")
        return texts

    def _numbers(self, key: str, default: int) -> list[Any]:
        """One number a token."""
        numbers: list[Any] = self._get(key, list, [default] * len(self._tokens))
        if len(numbers) < len(self._tokens) or isinstance(numbers[0], str):
            raise ModelError(f"{self._path}: {_KEY}{key} has {len(numbers)} numbers for {len(self._tokens)} tokens")
        return numbers

    def _vocabulary(self) -> list[str]:
        """Token texts by id, made unique: an id whose text is empty or taken can be decoded but never encoded."""
        tokens = self._texts("tokens")
        if not tokens:
            raise ModelError(f"{self._path}: holds no tokenizer ({_KEY}tokens); set `tokenizer` to a folder that does")
        seen: set[str] = set()
        for token_id, token in enumerate(tokens):
            if not token or token in seen:
                tokens[token_id] = f"[UNREACHABLE_{token_id}]"
            seen.add(tokens[token_id])
        return tokens

    def _drop_padding(self) -> None:
        """Tokens that only fill the table up to the width of the output layer are no tokens."""
        size = len(self._tokens)
        while size > 1 and self._types[size - 1] == _Type.UNUSED and self._tokens[size - 1].startswith("[PAD"):
            size -= 1
        del self._tokens[size:]

    def _token_id(self, key: str, default: int | None) -> int | None:
        token_id = self._get(key, int, default)
        return token_id if token_id is not None and 0 <= token_id < len(self._tokens) else None

    def _split(self) -> Split:
        name = self._get("pre", str, "default")
        split = SPLITS.get(name)
        if split is None:
            raise UnsupportedError(
                f"{self._path}: unknown split {name!r:.60} in {_KEY}pre; known are {', '.join(sorted(SPLITS))}; "
                "give the folder of the original model with its tokenizer.json as `tokenizer`"
            )
        return split

    def _byte_level(self, split: Split) -> Tokenizer:
        merges = []
        for merge in self._texts("merges"):
            first, _, second = merge[1:].partition(" ")  # a piece is never empty, but may begin with a space
            merges.append((merge[:1] + first, second))
        backend = Tokenizer(self._bpe(merges, ignore_merges=split.whole_words_first))
        backend.pre_tokenizer = split.pre_tokenizer()
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self, unknown: int | None) -> Tokenizer:
        backend = Tokenizer(
            self._bpe(
                self._merges_by_score(),
                unk_token=None if unknown is None else self._tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
        undo: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._get("add_space_prefix", bool, True):
            steps.insert(0, normalizers.Prepend(_SPACE))
            undo.append(decoders.Strip(" ", 1, 0))
        backend.normalizer = normalizers.Sequence(steps)
        backend.decoder = decoders.Sequence(undo)
        return backend

    def _bpe(self, merges: Sequence[tuple[str, str]], **settings: Any) -> models.BPE:
        ids = self._ids
        known = [(a, b) for a, b in merges if a in ids and b in ids and a + b in ids]
        return models.BPE(ids, known, **settings)

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Every way to make a piece of two others, pieces of the highest score first.

        Sentencepiece joins the two neighbours whose joined piece scores best, so the score is the order of merges.
        Equal scores go as in the converter of the transformers library: longest first part, longest second part.
        """
        scores = self._numbers("scores", 0)
        mergeable = {
            token: token_id
            for token, token_id in self._ids.items()
            if len(token) <= _MAX_PIECE_CHARS
            and (self._types[token_id] == _Type.NORMAL or self._is_run_of_spaces(token_id))
        }
        merges = []
        for whole, token_id in mergeable.items():
            for cut in range(1, len(whole)):
                first, second = whole[:cut], whole[cut:]
                if first in mergeable and second in mergeable:
                    merges.append((scores[token_id], cut, len(whole), first, second))
        merges.sort(key=itemgetter(0, 1, 2), reverse=True)
        return [(first, second) for *_, first, second in merges]

    def _is_run_of_spaces(self, token_id: int) -> bool:
        """Whether a token written with U+2581 was given by the vocabulary's maker: gemma lists runs of spaces so."""
        return bool(self._types[token_id] == _Type.USER_DEFINED and not self._tokens[token_id].strip(_SPACE))

    def _add_tokens(self, backend: Tokenizer) -> None:
        """Name the tokens that are matched in a text before anything else; control tokens are the special ones."""
        special, plain = [], []
        for token_id, (token, kind) in enumerate(zip(self._tokens, self._types, strict=False)):
            if kind in (_Type.CONTROL, _Type.UNKNOWN):
                special.append(AddedToken(token, special=True, normalized=False))
            elif kind == _Type.USER_DEFINED and not self._is_run_of_spaces(token_id):
                plain.append(AddedToken(token, special=False, normalized=False))
        backend.add_special_tokens(special)
        backend.add_tokens(plain)

    def _chat_templates(self) -> dict[str, str]:
        templates = {}
        for key in self._metadata:
            if key.startswith(_TEMPLATE):
                template = self._metadata[key]
                if isinstance(template, str):
                    templates[key.removeprefix(_TEMPLATE).lstrip(".") or "default"] = template
        return templates
