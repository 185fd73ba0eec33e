"""What comes back, for the OpenAPI document: endpoints build these by hand, and tests hold them to it."""

from typing import Any, Literal, NotRequired, TypedDict

__all__ = ["EVENTS", "SHAPES", "ErrorAnswer", "MessagesErrorAnswer"]


class Error(TypedDict):
    """What went wrong; `param` is the field at fault, `code` the status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(TypedDict):
    """An error, also as the last event of a stream that fails."""

    error: Error


class MessagesError(TypedDict):
    """The same in Anthropic's words."""

    type: str
    message: str
    param: str | None


class MessagesErrorAnswer(TypedDict):
    """An error of /v1/messages."""

    type: Literal["error"]
    error: MessagesError


class PromptTokensDetails(TypedDict):
    """Prompt tokens by where they came from."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Generated tokens by what they say."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Tokens of a request, each prompt counted once; those of reasoning where the model thinks before it speaks."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class CompletionLogprobs(TypedDict):
    """Four lists of equal length; the first token of an echoed prompt has nulls."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One sample of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: str | int | None
    prompt_logprobs: list[dict[str, Any] | None] | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class CompletionAnswer(TypedDict):
    """Prompt i has the choices i * n to i * n + n - 1."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(TypedDict):
    """A token that might have stood there."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token, and the likeliest in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Of the tokens of a turn."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(TypedDict):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]


class ChatChoice(TypedDict):
    """One sample."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ChatAnswer(TypedDict):
    """The turns of a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: NotRequired[list[int]]


class InputTokensDetails(TypedDict):
    """Tokens of the input by where they came from."""

    cached_tokens: int


class OutputTokensDetails(TypedDict):
    """Tokens of the output by what they say."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    """Why a response was cut."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(TypedDict):
    """The assistant's turn in items: reasoning, messages, function calls. Most of the rest is the request's own."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["completed", "incomplete"]
    incomplete_details: IncompleteDetails | None
    output: list[dict[str, Any]]
    usage: ResponseUsage
    background: Literal[False]
    error: None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class MessageUsage(TypedDict):
    """Tokens, those of the prompt that the cache served counted apart."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(TypedDict):
    """The assistant's turn in Anthropic's shape."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class CountTokensAnswer(TypedDict):
    """How long a prompt is."""

    input_tokens: int


class Embedding(TypedDict):
    """A vector, as numbers or as base64 of 32-bit floats."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(TypedDict):
    """A vector for each input, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class Model(TypedDict):
    """A name under which the model is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(TypedDict):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class TokenizeAnswer(TypedDict):
    """Token ids of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(TypedDict):
    """The text of token ids."""

    prompt: str


class Health(TypedDict):
    """The engine's state; requests are served while it is ready."""

    status: Literal["loading", "ready", "restarting", "dead", "stopped"]


class Version(TypedDict):
    """Of Octavo."""

    version: str


class Load(TypedDict):
    """Requests under way."""

    server_load: int


class RequestSummary(TypedDict):
    """A request's figures; times are in seconds."""

    id: str
    user: str | None
    state: Literal["waiting", "running", "swapped", "finished"]
    received: float
    n: int
    max_tokens: int | None
    num_prompt_tokens: int
    num_prompt_done: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    queue_seconds: float
    first_token_seconds: float | None
    seconds: float
    finish_reason: str | None
    error: str | None


class TimelineEvent(TypedDict):
    """Something that happened to a request, so many seconds after it came."""

    seconds: float
    event: str
    detail: str


class RequestTimeline(RequestSummary):
    """A request's figures and events."""

    num_dropped_events: int
    events: list[TimelineEvent]


class RequestList(TypedDict):
    """The engine at a glance, and the newest requests, those under way first."""

    engine: dict[str, Any]
    data: list[RequestSummary]


# By method and path: the type of a JSON answer, or the media type of another.
SHAPES: dict[tuple[str, str], Any] = {
    ("POST", "/v1/completions"): CompletionAnswer,
    ("POST", "/v1/chat/completions"): ChatAnswer,
    ("POST", "/v1/responses"): ResponseAnswer,
    ("POST", "/v1/messages"): MessageAnswer,
    ("POST", "/v1/messages/count_tokens"): CountTokensAnswer,
    ("POST", "/v1/embeddings"): EmbeddingAnswer,
    ("GET", "/v1/models"): ModelList,
    ("GET", "/v1/models/{name}"): Model,
    ("POST", "/tokenize"): TokenizeAnswer,
    ("POST", "/detokenize"): DetokenizeAnswer,
    ("GET", "/health"): Health,
    ("GET", "/ping"): Health,
    ("POST", "/ping"): Health,
    ("GET", "/version"): Version,
    ("GET", "/load"): Load,
    ("GET", "/metrics"): "text/plain",
    ("GET", "/requests"): RequestList,
    ("GET", "/requests/{request_id}"): RequestTimeline,
    ("GET", "/"): "text/html",
    ("GET", "/static/{name}"): "*/*",
}

# What answers in events where `stream` is true.
EVENTS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"})
