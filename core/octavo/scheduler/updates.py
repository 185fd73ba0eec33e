"""What the front is told of a step."""

import logging
import time
from collections.abc import Iterable, Mapping

from octavo.cache.manager import SwappedTable
from octavo.cache.prefix import PrefixMatch
from octavo.scheduler.messages import RequestUpdate, SampleUpdate, TokenLogprobs
from octavo.scheduler.request import Request, Sequence

__all__ = ["Updates"]

WAIT_LOG_SECONDS = 5.0  # at least so long between two lines that say that requests wait

logger = logging.getLogger(__name__)


class Updates:
    """Gathers what requests gain until the front takes it."""

    def __init__(self) -> None:
        self._updates: dict[str, Request] = {}  # those that have news
        self._last_wait_log = float("-inf")

    def __bool__(self) -> bool:
        return bool(self._updates)

    def tell(self, request: Request) -> None:
        """The front is to hear of a request."""
        self._updates[request.request_id] = request

    def record(self, request: Request, name: str, detail: str = "") -> None:
        """Something happened to a request."""
        request.record(name, detail)
        self.tell(request)

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

    def chunk(self, request: Request, num_tokens: int, num_computed: int, num_known: int) -> None:
        """A part of several known tokens was computed: of a prompt, or of what a preemption threw away."""
        self.record(request, "chunk", f"{num_tokens} tokens, {num_computed} of {num_known} computed")

    def gain(self, request: Request, seq: Sequence, token_ids: list[int], logprobs: Iterable[TokenLogprobs]) -> None:
        """A sample has new tokens."""
        if not request.has_output:
            request.has_output = True
            request.record("first token")
        self._add(request, SampleUpdate(seq.sample_index, tuple(token_ids), tuple(logprobs)))

    def finish(self, request: Request, seq: Sequence) -> None:
        """A sample has ended."""
        self._add(request, SampleUpdate(seq.sample_index, (), (), seq.finish_reason, seq.stop_reason))

    def scored(self, request: Request, logprobs: list[TokenLogprobs]) -> None:
        """Further prompt positions have their log-probabilities."""
        request.gained_logprobs += logprobs
        self.tell(request)

    def _add(self, request: Request, gained: SampleUpdate) -> None:
        """Put what a sample has behind what it gained before."""
        self._updates[request.request_id] = request
        if not request.gained:
            request.gained.append(gained)
            return
        for place, before in enumerate(request.gained):
            if before.index == gained.index:
                request.gained[place] = SampleUpdate(
                    gained.index,
                    before.token_ids + gained.token_ids,
                    before.logprobs + gained.logprobs,
                    gained.finish_reason,
                    gained.stop_reason,
                )
                return
        request.gained.append(gained)

    def take(self) -> list[RequestUpdate]:
        """Everything gathered, as messages."""
        requests, self._updates = self._updates.values(), {}
        return [message for request in requests if (message := _message(request)) is not None]


def _message(request: Request) -> RequestUpdate | None:
    events, samples, logprobs = request.take_events(), request.gained, request.gained_logprobs
    if not (samples or logprobs or events):
        return None
    if len(samples) > 1:
        samples.sort(key=lambda sample: sample.index)
    message = RequestUpdate(
        request.request_id,
        tuple(samples),
        tuple(logprobs),
        request.pool.embedding() if request.pool else None,
        request.num_cached_tokens or 0,
        request.error,
        not request.live,
        events,
        request.num_prompt_done,
        request.error_param,
    )
    samples.clear()
    logprobs.clear()
    return message
