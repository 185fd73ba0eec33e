"""How one request's tokens are chosen. Checked on construction, so that a bad value never reaches the engine."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from octavo.errors import RequestError, shown
from octavo.structured_output import StructuredOutput

__all__ = ["MAX_LOGPROBS", "SamplingParams"]

MAX_LOGPROBS = 20  # alternatives a position that a request may ask for
MAX_SEED = 2**64 - 1

NUMBERS = (
    *("n", "top_k", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "seed"),
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
)
PLAIN = (int, float, bool, type(None))


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. Names and defaults are those that vLLM's users know.

    Attributes:
        n: samples of the one prompt.
        temperature: 0 is greedy; equals go to the lowest token id.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this.
        min_p: keep tokens at least this fraction as likely as the most likely one.
        repetition_penalty: over 1 discourages tokens of prompt and output (logits divided or multiplied).
        presence_penalty: subtracted from the logit of each token of the output.
        frequency_penalty: subtracted once for each time the token stands in the output.
        logit_bias: token id to a number added to its logit, -100 to 100.
        allowed_token_ids: if given, only these are ever sampled.
        bad_words: texts never produced.
        min_tokens: end-of-sequence, stop ids and stop strings are held off until so many tokens.
        max_tokens: tokens to generate at most; None: as many as max_model_len leaves.
        stop: texts that end the output; left out of it unless include_stop_str_in_output.
        stop_token_ids: token ids that end the output.
        ignore_eos: go on past the model's own end-of-sequence ids.
        logprobs: for each output token, so many most likely alternatives; 0: the chosen one alone.
        prompt_logprobs: the same for each prompt token but the first.
            Log-probabilities are those of the model itself, before temperature, penalties and filters.
        seed: fixes the outcome; None: one is drawn at admission.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: make text at all.
        structured: the form that the output must have; it ends where the form is complete, ignore_eos or not, and
            min_tokens holds the end off only while the form allows something else.

    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    structured: StructuredOutput | None = None
    # What the text fields mean in token ids, filled at admission by whoever has the tokenizer.
    bad_words_token_ids: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in NUMBERS:
            if type(value := getattr(self, name)) not in PLAIN:
                object.__setattr__(self, name, _plain(value))
        for name in ("stop", "bad_words"):
            texts = self._as_tuple(name, "texts of at least one character")
            if not all(isinstance(text, str) and text for text in texts):
                raise RequestError(f"{name} must be texts of at least one character, got {shown(texts)}", name)
        for name in ("stop_token_ids", "allowed_token_ids"):
            if getattr(self, name) is not None or name == "stop_token_ids":
                ids = self._as_tuple(name, "token ids (integers from 0)")
                if not all(_is_int(i) and i >= 0 for i in ids):
                    raise RequestError(f"{name} must be token ids (integers from 0), got {shown(ids)}", name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty, so no token could be sampled", "allowed_token_ids")
        self._check_integers()
        self._check_numbers()
        self._check_bias()
        if not isinstance(self.structured, StructuredOutput | None):
            raise RequestError(f"structured must be a StructuredOutput, got {shown(self.structured)}", "structured")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is over max_tokens {self.max_tokens}", "min_tokens")
        if self.n > 1 and self.temperature == 0:
            raise RequestError(
                f"n is {self.n} with temperature 0: every sample would be the same; raise temperature or set n to 1",
                "n",
            )

    def _as_tuple(self, name: str, what: str) -> tuple[Any, ...]:
        """The field as a tuple: of one text, of several values, empty where it is None."""
        value = getattr(self, name)
        if not isinstance(value, str | Iterable | None) or isinstance(value, bytes | Mapping):
            raise RequestError(f"{name} must be {what}, got {shown(value)}", name)
        values = (value,) if isinstance(value, str) else () if value is None else tuple(map(_plain, value))
        object.__setattr__(self, name, values)
        return values

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias maps token ids to numbers, got {shown(self.logit_bias)}", "logit_bias")
        bias = {_plain(token_id): _plain(value) for token_id, value in self.logit_bias.items()}
        for token_id, value in bias.items():
            if not _is_int(token_id) or token_id < 0 or not _is_number(value) or not -100 <= value <= 100:
                raise RequestError(
                    "logit_bias maps token ids to numbers from -100 to 100, got "
                    f"{shown(token_id, 40)}: {shown(value, 40)}",
                    "logit_bias",
                )
        object.__setattr__(self, "logit_bias", bias)

    def _check_integers(self) -> None:
        ranges: list[tuple[str, int, int, bool]] = [
            ("n", 1, 128, False),
            ("top_k", -1, 2**31 - 1, False),
            ("min_tokens", 0, 2**31 - 1, False),
            ("max_tokens", 0, 2**31 - 1, True),
            ("logprobs", 0, MAX_LOGPROBS, True),
            ("prompt_logprobs", 0, MAX_LOGPROBS, True),
            ("seed", -(2**63), MAX_SEED, True),
        ]
        for name, low, high, optional in ranges:
            value = getattr(self, name)
            if value is None and optional:
                continue
            if not _is_int(value) or not low <= value <= high:
                raise RequestError(f"{name} must be an integer from {low} to {high}, got {shown(value)}", name)

    def _check_numbers(self) -> None:
        ranges = [
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.0, 100.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ]
        above_zero = {"top_p", "repetition_penalty"}
        for name, low, high in ranges:
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high or (name in above_zero and value == 0):
                bounds = f"over {low:g} and at most {high:g}" if name in above_zero else f"from {low:g} to {high:g}"
                raise RequestError(f"{name} must be a number {bounds}, got {shown(value)}", name)

    @property
    def greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def changes_logits(self) -> bool:
        """Whether penalties, biases or masks apply, so that the plain best logit is not enough."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words_token_ids
            or self.min_tokens
            or self.structured is not None
        )

    @property
    def masks(self) -> list[str]:
        """Which of these parameters forbid tokens, the names of fields; of a structured output, its kind."""
        kind = [self.structured.kind] if self.structured is not None else []
        given = ("allowed_token_ids", self.allowed_token_ids is not None), ("bad_words", self.bad_words_token_ids)
        return [*(name for name, is_given in given if is_given), *kind, *(["min_tokens"] if self.min_tokens else [])]

    def but(self, **changes: Any) -> "SamplingParams":
        """A copy with fields replaced, checked again."""
        return replace(self, **changes)


def _plain(value: Any) -> Any:
    """A number of another library (numpy's scalars) as Python's own, the only kind that is checked and sent."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return _is_int(value)  # however large: bounds are checked next
