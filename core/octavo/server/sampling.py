"""From a request's fields to `SamplingParams`: what is given, else what the model's files recommend, else defaults."""

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.errors import shown
from octavo.sampling_params import SamplingParams
from octavo.server.errors import ApiError, unsupported
from octavo.server.protocol import ChunkedRequest, GenerationRequest
from octavo.server.structured import structured_output

__all__ = ["check_absent", "check_served", "sampling_params"]

SAME_NAME = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "seed",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "prompt_logprobs",
)

REFUSED = {
    "use_beam_search": "is not served: there is no beam search",
    "logits_processors": "is not served: a request brings no code",
    "logprob_token_ids": "is not served; logprobs gives the likeliest tokens",
    "prompt_embeds": "is not served: a prompt is text or token ids",
    "kv_transfer_params": "is not served: KV blocks are not moved between servers",
    "repetition_detection": "is not served; repetition_penalty discourages repetition",
    "thinking_token_budget": "is not served; max_tokens bounds the whole output",
}


def check_absent(request: msgspec.Struct, refused: Mapping[str, str]) -> None:
    """Refuse the first of these fields, each with the reason, that asks for something.

    Raises:
        ApiError: names the field.

    """
    for name, why in refused.items():
        if getattr(request, name) not in (None, False, [], {}):
            raise unsupported(name, why)


def check_served(request: ChunkedRequest) -> None:
    """Refuse what is asked for and not served.

    Raises:
        ApiError: names the field.

    """
    check_absent(request, REFUSED)
    if request.length_penalty not in (None, 1.0):
        raise unsupported("length_penalty", "belongs to beam search, which is not served")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "is served only where it equals n")
    if request.stream_options is not None and not request.stream and request.stream_options.include_usage:
        raise ApiError(400, "stream_options is given and stream is not true", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "is not served in a stream; use echo with logprobs, or no stream")
    if request.stream_interval is not None and request.stream_interval < 1:
        raise ApiError(
            400, f"stream_interval must be at least 1, got {shown(request.stream_interval)}", "stream_interval"
        )
    least = -1
    if request.truncate_prompt_tokens is not None and request.truncate_prompt_tokens < least:
        raise ApiError(400, "truncate_prompt_tokens must be at least -1 (all that fits)", "truncate_prompt_tokens")


def sampling_params(
    request: GenerationRequest, recommended: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The parameters of a request.

    Args:
        request: gives what all endpoints spell alike.
        recommended: of the model's files.
        max_tokens: as the endpoint means it; None: as many as fit.
        logprobs: alternatives a token, as the endpoint means it.

    Raises:
        RequestError: a value is out of range.
        ApiError: the form of the output is malformed.

    """
    given = {name: value for name in SAME_NAME if (value := getattr(request, name)) is not None}
    own = {"max_tokens": max_tokens, "logprobs": logprobs, "structured": structured_output(request)}
    return SamplingParams(**{**recommended, **given, **own})
