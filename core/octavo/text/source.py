"""What a model's files say about its tokenizer, however they say it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers

__all__ = ["TokenizerSource"]


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
