"""What the server is told, beside the engine's own settings."""

from dataclasses import dataclass

__all__ = ["ServerOptions"]


@dataclass(frozen=True)
class ServerOptions:
    """Settings of the app. The command has a flag for each.

    Attributes:
        served_model_names: names that clients may ask for, the first one shown in answers; empty: the model's own.
        api_keys: any of them opens the paths that need one; empty: all paths are open.
        max_body_bytes: a longer request is answered with 413.
        allowed_origins: web pages of these origins may call from a browser; "*" is all.
        max_waiting_requests: more than so many that wait are answered with 503.
        max_waiting_tokens: the same, by the tokens of their prompts.
        with_vllm_metrics: show metrics under vLLM's names too.
        otlp_traces_endpoint: URL to which a span of each request goes, by OTLP over HTTP; unset: none is made.
        trust_request_chat_template: let requests bring a chat template, which is a program, of their own.
        tool_parser: how the model writes tool calls: hermes, llama3, mistral or none; unset: as its template shows.
        reasoning_parser: how the model marks its reasoning: think, deepseek_r1 or none; unset: as its template shows.

    """

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    allowed_origins: tuple[str, ...] = ()
    trust_request_chat_template: bool = False
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 4 << 20
    with_vllm_metrics: bool = True
    otlp_traces_endpoint: str | None = None
