"""The tokenizer of a folder in Hugging Face layout, read without the transformers library.

tokenizer.json holds the tokenizer itself; tokenizer_config.json and special_tokens_map.json name the special tokens
and may overrule whether the beginning-of-sequence token is added; chat templates stand in chat_template.jinja,
additional_chat_templates/*.jinja, chat_template.json or tokenizer_config.json, the first of them found.
"""

import json
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from octavo.errors import ModelError
from octavo.text.source import TokenizerSource, library_errors

__all__ = ["read_folder_tokenizer"]

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_MAX_FILE_BYTES = 256 << 20


def read_folder_tokenizer(folder: Path) -> TokenizerSource:
    """Read the tokenizer of a folder.

    Raises:
        ModelError: there is no tokenizer.json, or a file cannot be read or understood.

    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder}: no tokenizer.json; set `tokenizer` to a folder that has one, or save one here with "
            "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    text, config = _text(path), _config(folder)
    special = {role: token for role in _ROLES if (token := _literal(config.get(role))) is not None}
    listed = _listed_tokens(folder, config)
    with library_errors(lambda reason: ModelError(f"{path}: not a tokenizer that works: {reason}")):
        backend = Tokenizer.from_str(text)
        backend.no_truncation()
        backend.no_padding()
        _add_tokens(backend, listed, [*special.values(), *_listed_names(config)])
        special = {role: token for role, token in special.items() if backend.token_to_id(token) is not None}
        prefix, suffix = _affixes(backend)
    return TokenizerSource(
        backend=backend,
        special_tokens=special,
        prefix_ids=_overruled(backend, config.get("add_bos_token"), special.get("bos_token"), prefix),
        suffix_ids=_overruled(backend, config.get("add_eos_token"), special.get("eos_token"), suffix),
        chat_templates=_chat_templates(folder, config),
    )


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ModelError(f"{path}: {path.stat().st_size} bytes; at most {_MAX_FILE_BYTES} are read")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    """An object of a file, empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds {type(value).__name__}, not an object")
    return value


def _config(folder: Path) -> dict[str, Any]:
    return _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")


def _literal(token: object) -> str | None:
    """A special token's text, written as such or as an object with its content."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _listed_tokens(folder: Path, config: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """Ids and properties of the added tokens that the config repeats, in order."""
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping) or not all(key.isdecimal() for key in listed):
        raise ModelError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must map token ids to tokens")
    entries = [(int(key), entry) for key, entry in listed.items() if isinstance(entry, Mapping)]
    return sorted(entries, key=itemgetter(0))


def _listed_names(config: Mapping[str, Any]) -> list[str]:
    """Special tokens without a role."""
    names: list[str] = []
    for key in _LISTS:
        value = config.get(key)
        value = list(value.values()) if isinstance(value, Mapping) else value
        names += filter(None, map(_literal, value if isinstance(value, list) else ()))
    return names


def _add_tokens(backend: Tokenizer, listed: Iterable[tuple[int, Mapping[str, Any]]], special: Iterable[str]) -> None:
    """Add what the config alone holds, and mark what it alone calls special; no token gets an id not its own."""
    for token_id, entry in listed:
        token = _literal(entry)
        if token and backend.token_to_id(token) is None and backend.get_vocab_size() == token_id:
            backend.add_tokens([AddedToken(token, **{flag: bool(entry.get(flag)) for flag in _FLAGS})])
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [
            AddedToken(name, special=True, normalized=False)
            for name in dict.fromkeys(special)
            if name not in marked and backend.token_to_id(name) is not None
        ]
    )


def _affixes(backend: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer's own post-processor puts before and after a text."""
    probe = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for begin in range(len(whole) - len(probe) + 1):
        if whole[begin : begin + len(probe)] == probe:
            return tuple(whole[:begin]), tuple(whole[begin + len(probe) :])
    return (), ()


def _overruled(backend: Tokenizer, flag: object, token: str | None, ids: tuple[int, ...]) -> tuple[int, ...]:
    """The affix that an explicit add_bos_token or add_eos_token asks for, else that of the post-processor."""
    if not isinstance(flag, bool):
        return ids
    token_id = backend.token_to_id(token) if flag and token is not None else None
    return () if token_id is None else (token_id,)


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    templates = {}
    listed = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(listed, str):
        templates["default"] = listed
    elif isinstance(listed, Mapping):
        templates.update({str(name): text for name, text in listed.items() if isinstance(text, str)})
    elif isinstance(listed, list):
        named = [entry for entry in listed if isinstance(entry, Mapping)]
        templates.update({str(e["name"]): str(e["template"]) for e in named if "name" in e and "template" in e})
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _text(path)
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _text(folder / "chat_template.jinja")
    return templates
