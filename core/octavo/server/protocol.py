"""What clients send. Every field is optional but a few; a null is an absent one (see `body`).

Fields that are known and not served are here too, so that they are refused by name (`sampling`).
"""

from typing import Any, Literal, TypeAlias

import msgspec

__all__ = [
    "ChatRequest",
    "ChunkedRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Effort",
    "EmbeddingRequest",
    "Extras",
    "GenerationRequest",
    "ServiceTier",
    "StreamOptions",
    "TokenizeRequest",
    "generation_of",
]

PromptField: TypeAlias = str | list[str | int | list[int]]
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ServiceTier: TypeAlias = Literal["auto", "default", "flex", "scale", "priority"]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What else a stream tells.

    Attributes:
        include_usage: end with a chunk of no choices that has the usage.
        continuous_usage_stats: with it, the usage so far in every chunk.

    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Extras(msgspec.Struct, kw_only=True):
    """What every endpoint that generates takes. Meanings are those of `SamplingParams` where the names are."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None

    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    timeout: float | None = None


class GenerationRequest(Extras, kw_only=True):
    """What the engine is asked for, in the words that completions and chat share."""

    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    prompt_logprobs: int | None = None
    user: str | None = None

    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None


class ChunkedRequest(GenerationRequest, kw_only=True):
    """What else completions and chat share."""

    stream_options: StreamOptions | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    stream_interval: int | None = None

    # Of no effect here.
    session_id: str | None = None
    metadata: Any = None
    store: bool | None = None
    service_tier: ServiceTier | None = None
    vllm_xargs: Any = None

    # Refused, where they ask for something.
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    prompt_embeds: Any = None
    kv_transfer_params: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None


class CompletionRequest(ChunkedRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: PromptField
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class ChatRequest(ChunkedRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None

    modalities: list[str] | None = None
    audio: Any = None
    mm_processor_kwargs: Any = None


def generation_of(body: Extras, **own: Any) -> GenerationRequest:
    """What another protocol's request asks of the engine: the fields that all have, and its own under these names."""
    return GenerationRequest(**{name: getattr(body, name) for name in Extras.__struct_fields__}, **own)


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings."""

    input: PromptField
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    pooling: Literal["mean", "last", "cls"] | None = None
    normalize: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
