"""From what a caller passes to a request the engine can run: tokens, checked parameters, a seed."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from octavo.errors import RequestError, shown
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer

__all__ = [
    "NO_OUTPUT",
    "Conversation",
    "Inputs",
    "Message",
    "Prompt",
    "TokenizedPrompt",
    "as_conversations",
    "as_prompts",
]

Message: TypeAlias = Mapping[str, Any]
TokenIds: TypeAlias = Sequence[int]
Prompt: TypeAlias = str | TokenIds | Mapping[str, Any]

NO_OUTPUT = SamplingParams(temperature=0, max_tokens=0, detokenize=False)  # of a prompt that is only embedded


@dataclass(frozen=True)
class Conversation:
    """A prompt that the model's chat template writes; see `ChatTemplate.render`.

    `add_special_tokens` puts the tokenizer's own around what the template wrote, which most templates did already.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_special_tokens: bool = False


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as the model reads it, with its text where it came as one."""

    token_ids: list[int]
    text: str | None = None


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list: a text, token ids or a mapping is one prompt."""
    if isinstance(prompts, np.ndarray):  # of one prompt's token ids, or a row for each
        prompts = prompts.tolist()
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"a prompt is a text, token ids or a mapping, got {type(prompts).__name__}", "prompt")
    if prompts and all(_is_id(item) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Any]:
    """One conversation or many, as a list: whatever is no list of lists is one conversation, right or wrong."""
    several = isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple)
    return list(messages) if several else [messages]


class Inputs:
    """Turns prompts into token ids and completes parameters; raises `RequestError` for what cannot be served."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._num_ids = min(tokenizer.vocab_size, vocab_size)
        self._seeds = random.Random(seed)

    def tokenize(
        self, prompt: Prompt | Conversation, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> TokenizedPrompt:
        """The token ids of a conversation, a text, ids as they are, {"prompt": ...} or {"prompt_token_ids": ...}.

        A text that is too long for `max_tokens` of the longest tokens is refused without the work of tokenising it.
        """
        if not isinstance(prompt, Conversation):
            return self._tokenize(prompt, add_special_tokens, max_tokens)
        text = self._tokenizer.render_chat(
            prompt.messages,
            tools=prompt.tools,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            chat_template=prompt.chat_template,
            chat_template_kwargs=prompt.chat_template_kwargs,
        )
        self._check_length(text, max_tokens)
        token_ids = self._tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens)
        if not token_ids:
            raise RequestError("the chat template makes an empty prompt of these messages", "messages")
        return TokenizedPrompt(token_ids)

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is not None and len(text) > max_tokens * self._tokenizer.longest_token:
            raise RequestError(
                f"This model's maximum context length is {max_tokens} tokens, and the prompt is too long: {len(text)} "
                "characters are more than so many tokens can hold; shorten the prompt or raise max_model_len",
                "prompt",
            )

    def _tokenize(self, prompt: Prompt, add_special_tokens: bool, max_tokens: int | None) -> TokenizedPrompt:
        if isinstance(prompt, str):
            self._check_length(prompt, max_tokens)
            token_ids = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            if not token_ids:
                raise RequestError("the prompt is empty, and this model has no token to begin from", "prompt")
            return TokenizedPrompt(token_ids, prompt)
        if isinstance(prompt, Mapping):
            inner = [prompt[key] for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
            if len(inner) != 1 or isinstance(inner[0], Mapping):
                keys = ", ".join(sorted(map(repr, prompt)))[:200]
                raise RequestError(
                    f"a prompt mapping has 'prompt' or 'prompt_token_ids', got {keys or 'nothing'}", "prompt"
                )
            if isinstance(prompt.get("prompt_token_ids"), str):
                raise RequestError(
                    f"prompt_token_ids are integers, got {shown(inner[0])}; a text goes under 'prompt'", "prompt"
                )
            return self._tokenize(inner[0], add_special_tokens, max_tokens)
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise RequestError(f"a prompt is a text, token ids or a mapping, got {type(prompt).__name__}", "prompt")
        if not prompt:
            raise RequestError("the prompt has no tokens; at least one is needed", "prompt")
        given: list[Any] = list(prompt)
        self._check_ids(given, "prompt")
        return TokenizedPrompt(list(map(int, given)))

    def complete(self, params: SamplingParams) -> SamplingParams:
        """The parameters with a seed and the ids of bad words, checked against the vocabulary."""
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}", "sampling_params"
            )
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
            ids = getattr(params, name)
            if ids:
                self._check_ids(ids, name)
        changes: dict[str, Any] = {}
        if params.seed is None:
            changes["seed"] = self._seeds.getrandbits(64)
        if params.bad_words:
            changes["bad_words_token_ids"] = self._tokenizer.encode_bad_words(params.bad_words)
        return params.but(**changes) if changes else params

    def _check_ids(self, ids: Iterable[object], name: str) -> None:
        for token_id in ids:
            if not _is_id(token_id) or not 0 <= token_id < self._num_ids:
                raise RequestError(
                    f"{name} holds {shown(token_id)}; token ids are integers from 0 to {self._num_ids - 1}", name
                )


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)
