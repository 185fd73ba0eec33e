"""What a caller gets back."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CompletionOutput", "EmbeddingOutput", "Logprob", "RequestMetrics", "RequestOutput"]


@dataclass(frozen=True)
class Logprob:
    """One alternative at one position.

    Attributes:
        logprob: natural-log probability under the model itself, before temperature, penalties and filters.
        rank: 1 for the most likely token.
        decoded_token: its literal text, special tokens too; bytes that are no text have a form of their own.

    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One sample.

    Attributes:
        index: which of the request's n samples.
        text: everything so far that no stop string can still take back.
        delta: in a stream, what `text` gained since its last output.
        token_ids: tokens so far, the one that ended it included.
        cumulative_logprob: sum over token_ids, where logprobs were asked for.
        logprobs: for each token, token id to alternative: the most likely ones and the chosen one.
        finish_reason: "stop", "length", "abort" or "error"; None while it goes on.
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence.

    """

    index: int
    text: str = ""
    delta: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether it has its finish reason."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """When what happened to a request, in seconds since the epoch; None: it has not (yet). Names are vLLM's.

    Attributes:
        arrival_time: it was queued.
        first_scheduled_time: it was admitted to run.
        first_token_time, last_token_time: it gained its first token, its newest.
        finished_time: it ended.

    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to admission."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass
class RequestOutput:
    """One request, finished or, in a stream, so far.

    Attributes:
        request_id: its name in logs.
        prompt: its text; None where token ids were given.
        prompt_token_ids: what the model read.
        prompt_logprobs: one entry a prompt token, the first None; None where not asked for.
        outputs: the n samples, by index.
        finished: whether every sample has its finish reason.
        num_cached_tokens: prompt tokens that the prefix cache served.
        error: why it failed; the other requests of the call are untouched.
        metrics: when what happened; None where it was refused.
        lora_request: None: no adapters are served. Here because callers of vLLM read it.

    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None
    metrics: RequestMetrics | None = None
    lora_request: None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(output.token_ids) for output in self.outputs)


@dataclass
class EmbeddingOutput:
    """The embedding of one prompt.

    Attributes:
        request_id: its name in logs.
        prompt: its text; None where token ids were given.
        prompt_token_ids: what the model read.
        embedding: H numbers; None where it failed.
        finished: whether there is nothing more to come.
        num_cached_tokens: prompt tokens that the prefix cache served.
        error: why it failed; the other prompts of the call are untouched.

    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def outputs(self) -> "EmbeddingOutput":
        """Itself, so that `output.outputs.embedding` is found where vLLM's users look for it."""
        return self
