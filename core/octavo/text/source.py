"""What a model's files say about its tokenizer, however they say it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import tokenizers

from octavo.errors import OctavoError

__all__ = ["TokenizerSource", "library_errors"]

_MAX_REASON = 300


@dataclass(frozen=True)
class TokenizerSource:
    """A tokenizer as read from a folder or a GGUF file.

    Attributes:
        backend: the library's tokenizer; never changed once it is here, so that threads may share it.
        special_tokens: role to literal text: "bos_token", "eos_token", "unk_token", "pad_token", ...
        prefix_ids: put before a text that is encoded with its special tokens.
        suffix_ids: put after it.
        chat_templates: name to Jinja source; the usual one is "default".

    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def library_errors(make_error: Callable[[str], OctavoError]) -> Iterator[None]:
    """Turn whatever the tokenizers library raises into the error made from the reason, one short line.

    The library raises bare `Exception`, and on data that it does not foresee a panic, which is not even one.
    """
    try:
        yield
    except OctavoError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise make_error(" ".join(str(error).split())[:_MAX_REASON]) from error
