"""What the front is told of a step."""

from dataclasses import dataclass, field

from octavo.scheduler.messages import RequestUpdate, SampleUpdate, TokenLogprobs
from octavo.scheduler.request import FinishReason, Request, Sequence

__all__ = ["Updates", "finish_reason_of"]


def finish_reason_of(request: Request, seq: Sequence) -> tuple[FinishReason | None, int | None]:
    """Why a sample ends with its newest token, and the stop token id where one ended it; (None, None): it goes on.

    min_tokens needs no look here: until then the sampler never draws a token that ends.
    """
    token_id = seq.token_ids[-1]
    if token_id in request.eos_token_ids and not request.params.ignore_eos:
        return "stop", None
    if token_id in request.params.stop_token_ids:
        return "stop", token_id
    if seq.num_output_tokens >= request.max_output_tokens:
        return "length", None
    return None, None


@dataclass
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass
class _Update:
    request: Request
    samples: dict[int, _Sample] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class Updates:
    """Gathers what requests gain until the front takes it."""

    def __init__(self) -> None:
        self._updates: dict[str, _Update] = {}

    def __bool__(self) -> bool:
        return bool(self._updates)

    def of(self, request: Request) -> _Update:
        """The gathering update of a request."""
        return self._updates.setdefault(request.request_id, _Update(request))

    def add_token(self, request: Request, seq: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """A sample has a new token."""
        sample = self.of(request).samples.setdefault(seq.sample_index, _Sample())
        sample.token_ids.append(token_id)
        if logprobs is not None:
            sample.logprobs.append(logprobs)

    def finish(self, request: Request, seq: Sequence) -> None:
        """A sample has ended."""
        sample = self.of(request).samples.setdefault(seq.sample_index, _Sample())
        sample.finish_reason, sample.stop_reason = seq.finish_reason, seq.stop_reason

    def take(self) -> list[RequestUpdate]:
        """Everything gathered, as messages; a request whose only news is a computed chunk is left out."""
        updates, self._updates = self._updates, {}
        return [
            RequestUpdate(
                update.request.request_id,
                tuple(
                    SampleUpdate(index, tuple(s.token_ids), tuple(s.logprobs), s.finish_reason, s.stop_reason)
                    for index, s in sorted(update.samples.items())
                ),
                tuple(update.prompt_logprobs),
                update.request.pool.embedding() if update.request.pool else None,
                update.request.num_cached_tokens or 0,
                update.request.error,
                not update.request.live,
            )
            for update in updates.values()
            if update.samples or update.prompt_logprobs
        ]
