"""Log-probabilities in the two forms that clients know."""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.outputs import Logprob
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer

__all__ = ["ChatLogprobs", "CompletionLogprobs", "prompt_logprobs"]

LEAST = -9999.0  # what JSON has for minus infinity

Alternatives = Mapping[int, Logprob]


class CompletionLogprobs:
    """The four parallel lists of completions, position by position, for a whole text or a piece of a stream.

    A token's own number and its entry among the alternatives are the same float, for clients tell by equality
    whether the likeliest token was taken. Texts of tokens are unique, so no entry hides another.

    Args:
        tokenizer: of the model.
        context: tokens before the first position, which decide whether it begins with a space.
        skip_special_tokens: as in the text, for offsets.
        as_token_ids: name tokens `token_id:7`.

    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int], *, skip_special_tokens: bool, as_token_ids: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids
        self._detokenizer = Detokenizer(tokenizer, context, skip_special_tokens=skip_special_tokens)
        self.offset = 0  # characters of the returned text before the next token

    def take(self, token_ids: Sequence[int], alternatives: Sequence[Alternatives | None]) -> dict[str, Any]:
        """The lists of these further positions; those without alternatives (a prompt's first) are null."""
        tokens: list[str] = []
        own: list[float | None] = []
        best: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, found in zip(token_ids, alternatives, strict=True):
            tokens.append(self._name(token_id))
            offsets.append(self.offset)
            self.offset += len(self._detokenizer.add([token_id]))
            own.append(None if found is None else max(found[token_id].logprob, LEAST))
            best.append(None if found is None else self._best(found))
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": best, "text_offset": offsets}

    def _best(self, found: Alternatives) -> dict[str, float]:
        return {self._name(token_id): max(each.logprob, LEAST) for token_id, each in found.items()}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._tokenizer.token_text(token_id)


class ChatLogprobs:
    """Chat's own form: an entry a token, with its bytes and `num_top` alternatives."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, as_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_token_ids = as_token_ids

    def take(self, token_ids: Sequence[int], alternatives: Sequence[Alternatives]) -> dict[str, Any]:
        """The entries of these further tokens."""
        content = []
        for token_id, found in zip(token_ids, alternatives, strict=True):
            best = [other for other, each in found.items() if each.rank <= self._num_top]
            entry = self._entry(token_id, found[token_id])
            content.append({**entry, "top_logprobs": [self._entry(other, found[other]) for other in best]})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, found: Logprob) -> dict[str, Any]:
        name = f"token_id:{token_id}" if self._as_token_ids else found.decoded_token
        data = list(self._tokenizer.token_bytes(token_id))
        return {"token": name, "logprob": max(found.logprob, LEAST), "bytes": data}


def prompt_logprobs(found: Sequence[Alternatives | None] | None) -> list[dict[str, Any] | None] | None:
    """`prompt_logprobs` of an answer: token id to number, rank and text; null for the first position."""
    return None if found is None else [None if position is None else _by_id(position) for position in found]


def _by_id(found: Alternatives) -> dict[str, Any]:
    return {
        str(token_id): {
            "logprob": max(each.logprob, LEAST),
            "rank": each.rank,
            "decoded_token": each.decoded_token,
        }
        for token_id, each in found.items()
    }
