"""What the front is told of a step."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.cache.manager import SwappedTable
from octavo.cache.prefix import PrefixMatch
from octavo.scheduler.messages import RequestUpdate, SampleUpdate, TokenLogprobs
from octavo.scheduler.request import FinishReason, Request, Sequence

__all__ = ["Updates", "finish_reason_of"]

WAIT_LOG_SECONDS = 5.0  # at least so long between two lines that say that requests wait

logger = logging.getLogger(__name__)


def finish_reason_of(request: Request, seq: Sequence) -> tuple[FinishReason | None, int | None]:
    """Why a sample ends with its newest token, and the stop token id where one ended it; (None, None): it goes on.

    min_tokens needs no look here: until then the sampler never draws a token that ends.
    """
    token_id = seq.token_ids[-1]
    ignores_eos = request.params.ignore_eos and request.params.structured is None
    if token_id in request.eos_token_ids and not ignores_eos:
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
        self._last_wait_log = float("-inf")

    def __bool__(self) -> bool:
        return bool(self._updates)

    def of(self, request: Request) -> _Update:
        """The gathering update of a request."""
        return self._updates.setdefault(request.request_id, _Update(request))

    def record(self, request: Request, name: str, detail: str = "") -> None:
        """Something happened to a request."""
        request.record(name, detail)
        self.of(request)

    def placed(self, request: Request, match: PrefixMatch, *, resumed: bool, swapped_in: bool) -> None:
        """A request has its place on the device, for the first time or again, and so much of it was there."""
        if swapped_in:
            found = "swapped in"
        elif request.needs_whole_prompt:
            found = "prefix hit 0 tokens: every row of its prompt is wanted"
        else:
            found = f"prefix hit {match.num_tokens} tokens, then {match.reason} at {match.position}"
        self.record(request, "resumed" if resumed else "admitted", found)

    def preempted(
        self, request: Request, reason: str, tables: Mapping[int, SwappedTable] | None, *, wants_swap: bool
    ) -> None:
        """A request was taken off the device; its block tables are on the host now, or None."""
        if tables is None:
            why = ", for the host has no room for its blocks" if wants_swap else ""
            self.record(request, "preempted", f"{reason}; to be computed again{why}")
            return
        blocks = {block for table in tables.values() for _, block in table.entries if block is not None}
        self.record(request, "preempted", f"{reason}; swapped out")
        self.record(request, "swapped", f"{len(blocks)} blocks to the host")

    def waits(self, request: Request, reason: str, num_waiting: int) -> None:
        """The first of those that wait cannot be admitted: said once for each reason; logged while it lasts."""
        if request.waits_for != reason:
            request.waits_for = reason
            self.record(request, "waiting", reason)
        if time.monotonic() - self._last_wait_log > WAIT_LOG_SECONDS:
            self._last_wait_log = time.monotonic()
            logger.info("%d requests wait, the first of them, %s, for %s", num_waiting, request.request_id, reason)

    def chunk(self, request: Request, seq: Sequence, num_tokens: int) -> None:
        """A part of several known tokens was computed: of a prompt, or of what a preemption threw away."""
        if num_tokens > 1 or seq.num_computed < request.num_prompt_tokens:
            request.record("chunk", f"{num_tokens} tokens, {seq.num_computed} of {len(seq.token_ids)} computed")

    def add_token(self, request: Request, seq: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """A sample has a new token."""
        if not request.has_output:
            request.has_output = True
            request.record("first token")
        sample = self.of(request).samples.setdefault(seq.sample_index, _Sample())
        sample.token_ids.append(token_id)
        if logprobs is not None:
            sample.logprobs.append(logprobs)

    def finish(self, request: Request, seq: Sequence) -> None:
        """A sample has ended."""
        sample = self.of(request).samples.setdefault(seq.sample_index, _Sample())
        sample.finish_reason, sample.stop_reason = seq.finish_reason, seq.stop_reason

    def take(self) -> list[RequestUpdate]:
        """Everything gathered, as messages."""
        updates, self._updates = self._updates, {}
        return [message for update in updates.values() if (message := self._message(update)) is not None]

    def _message(self, update: _Update) -> RequestUpdate | None:
        events = update.request.take_events()
        if not (update.samples or update.prompt_logprobs or events):
            return None
        return RequestUpdate(
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
            events,
            update.request.num_prompt_done,
        )
