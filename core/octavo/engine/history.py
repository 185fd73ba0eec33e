"""What happened to each request, as data: the newest ones, bounded; and counts that outlive an engine process."""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.engine.wire import WireStats
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import Event, RequestUpdate

__all__ = ["History", "Observer", "Origin", "RequestRecord"]

MAX_RECORDS = 1000
MAX_EVENTS = 400  # of one request; from there on its chunks and waits are counted, not listed
RATE_SECONDS = 60.0  # how far back rates can look
SAMPLE_SECONDS = 0.25  # between two points of that look

STATES = {  # where a request stands after an event
    "admitted": "running",
    "resumed": "running",
    "first token": "running",
    "preempted": "waiting",
    "swapped": "swapped",
    "engine died": "waiting",
}

logger = logging.getLogger(__name__)


@dataclass
class RequestRecord:
    """One request: times are seconds since the epoch, as the front saw them.

    Attributes:
        request_id: its name.
        tenant: who sent it, and for which of their users.
        n, max_tokens: as asked for.
        num_prompt_tokens: of the prompt, once tokenised.
        num_prompt_done: those computed or cached so far.
        num_cached_tokens: those that the prefix cache served.
        num_generated_tokens: of all samples.
        num_preemptions: how often it was taken off the device.
        num_dropped_events: events that are counted here and not listed.
        received, admitted, first_token, last_token, finished: when.
        state: "waiting", "running" (until its caller has its end), "swapped" or "finished".
        finish_reason: its samples' reasons, joined; None while it goes on.
        is_late: whether it was not admitted in the time that its origin allows.
        error: why it failed.
        events: its timeline.
        path, trace: of its origin.
        temperature, top_p: as asked for.
        tokenised: when its prompt was.
        has_form: whether its output must have a form, which was compiled before it was queued.
        is_queued: whether the engine has queued it.

    """

    request_id: str
    received: float
    tenant: tuple[str, str] = ("", "")
    n: int = 1
    max_tokens: int | None = None
    num_prompt_tokens: int = 0
    num_prompt_done: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_dropped_events: int = 0
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    state: str = "waiting"
    finish_reason: str | None = None
    is_late: bool = False
    error: str | None = None
    events: list[Event] = field(default_factory=list)
    path: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    temperature: float | None = None
    top_p: float | None = None
    tokenised: float | None = None
    has_form: bool = False
    is_queued: bool = False

    def tell(self, origin: "Origin", params: SamplingParams, tokenised: float) -> None:
        """Where it comes from, what it asks for, and when its prompt was tokenised."""
        self.path, self.trace, self.tokenised = origin.path, origin.trace, tokenised
        self.temperature, self.top_p, self.has_form = params.temperature, params.top_p, params.structured is not None

    def add(self, event: Event) -> None:
        """One more line, and what it says of the state."""
        if event.name in STATES and self.finished is None:
            self.state = STATES[event.name]
        if event.name in ("admitted", "resumed") and self.admitted is None:
            self.admitted = event.time
        self.num_preemptions += event.name == "preempted"
        self.is_queued = self.is_queued or event.name == "queued"
        if len(self.events) < MAX_EVENTS or event.name not in ("chunk", "waiting"):
            self.events.append(event)
        else:
            self.num_dropped_events += 1

    def summary(self) -> dict[str, Any]:
        """The figures, ready for JSON; without the timeline, and without the tenant's name."""
        end = self.finished or time.time()
        return {
            "id": self.request_id,
            "user": self.tenant[1] or None,
            "state": self.state,
            "received": self.received,
            "n": self.n,
            "max_tokens": self.max_tokens,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_prompt_done": self.num_prompt_done,
            "num_cached_tokens": self.num_cached_tokens,
            "num_generated_tokens": self.num_generated_tokens,
            "num_preemptions": self.num_preemptions,
            "queue_seconds": (self.admitted or end) - self.received,
            "first_token_seconds": None if self.first_token is None else self.first_token - self.received,
            "seconds": end - self.received,
            "finish_reason": self.finish_reason,
            "error": self.error,
        }

    def last_line(self) -> str:
        """Its totals, as the log has them when it ends."""
        times = [f"queued {(self.admitted or self.finished or time.time()) - self.received:.3f} s"]
        if self.first_token is not None:
            times.append(f"first token after {self.first_token - self.received:.3f} s")
        times.append(f"{(self.finished or time.time()) - self.received:.3f} s in all")
        error = "" if self.error is None else f"; {self.error}"
        return (
            f"request {self.request_id} ended: {self.finish_reason}; {self.num_prompt_tokens} prompt tokens, "
            f"{self.num_cached_tokens} of them cached; {self.num_generated_tokens} generated; "
            f"preempted {self.num_preemptions} times; {', '.join(times)}{error}"
        )

    def timeline(self) -> dict[str, Any]:
        """The summary with every event: seconds since the request came, what, and why."""
        events = sorted(self.events, key=lambda event: event.time)
        return {
            **self.summary(),
            "num_dropped_events": self.num_dropped_events,
            "events": [
                {"seconds": round(event.time - self.received, 6), "event": event.name, "detail": event.detail}
                for event in events
            ],
        }


@dataclass(frozen=True)
class Origin:
    """Where a request comes from.

    Attributes:
        tenant: who sent it, and for which of their users.
        received: when, in seconds since the epoch; None: now.
        max_wait: for how many seconds from now it may wait until it is admitted; None: for as long as it takes.
        path: of the endpoint that it came to.
        trace: headers of the trace that it is part of (W3C traceparent, tracestate).

    """

    tenant: tuple[str, str] = ("", "")
    received: float | None = None
    max_wait: float | None = None
    path: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)


class Observer(Protocol):
    """Whoever counts along (metrics). What it raises is logged and goes no further."""

    def on_step(self, stats: WireStats, gained: Mapping[str, int]) -> None:
        """The engine made a step; `gained` is what its counts grew by."""

    def on_tokens(self, record: RequestRecord, num_tokens: int, seconds: float | None) -> None:
        """A request has new tokens, so long after the ones before; None: they are its first."""

    def on_end(self, record: RequestRecord) -> None:
        """A request has ended, one way or another."""


class History:
    """Records of the newest requests, those under way among them, and the engine's counts over all its processes.

    Attributes:
        observers: told of everything, in order.
        totals: what each count has grown to since the front started; "num_admitted" is counted here.
        num_received, num_finished: requests that came, and those of them that ended.
        num_in: the others, by their state; they add up at any time.
        num_unqueued: those of them that the engine has not queued yet (their output's form is being compiled, or the
            engine is in a step, or not there).
        num_waiting, num_waiting_tokens: requests that were never admitted yet, and the tokens of their prompts.

    """

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self.observers: list[Observer] = []
        self.totals: dict[str, int] = {}
        self.num_received = self.num_finished = self.num_unqueued = 0
        self.num_in = {"waiting": 0, "running": 0, "swapped": 0}
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self._max_records = max_records
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._ended: deque[RequestRecord] = deque()  # those of them that are over, the first to end first
        self._last: Mapping[str, int] = {}
        self._samples: deque[tuple[float, dict[str, int]]] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def begin(self, record: RequestRecord) -> None:
        """A request came, and was tokenised; where its output must have a form, that was compiled since."""
        self._records[record.request_id] = record
        self._records.move_to_end(record.request_id)
        self.num_waiting += 1
        self.num_waiting_tokens += record.num_prompt_tokens
        self.num_received += 1
        self.num_unqueued += 1
        self.num_in[record.state] += 1
        self.note(record, "received", record.path, record.received)
        self.note(record, "tokenised", f"{record.num_prompt_tokens} tokens", record.tokenised)
        if record.has_form:
            self.note(record, "compiled", "the form of its output")
        # Those under way stay, and are bounded by whoever bounds them.
        while self._ended and max(len(self._records), len(self._ended)) > self._max_records:
            ended = self._ended.popleft()
            if self._records.get(ended.request_id) is ended:  # else another took its name
                del self._records[ended.request_id]

    def get(self, request_id: str) -> RequestRecord | None:
        """The record of a request, if it is not forgotten."""
        return self._records.get(request_id)

    def records(self) -> list[RequestRecord]:
        """All, the newest first."""
        return list(reversed(self._records.values()))

    def note(self, record: RequestRecord, name: str, detail: str = "", when: float | None = None) -> None:
        """Something happened to a request at the front."""
        self._add(record, Event(when or time.time(), name, detail))
        logger.debug("request %s: %s%s", record.request_id, name, f": {detail}" if detail else "")

    def hear(self, update: RequestUpdate) -> None:
        """The engine says what happened to a request."""
        record = self._records.get(update.request_id)
        if record is None:
            return
        is_new = record.admitted is None
        for event in update.events:
            self._add(record, event)
        if is_new and record.admitted is not None and record.finished is None:
            self._leave_queue(record)
            self.totals["num_admitted"] = self.totals.get("num_admitted", 0) + 1
        record.num_prompt_done = update.num_prompt_done
        record.num_cached_tokens = max(update.num_cached_tokens, record.num_cached_tokens)
        num_tokens = 0
        for sample in update.samples:  # not a sum of a generator: this is run for every token
            num_tokens += len(sample.token_ids)
        if num_tokens and record.finished is None:
            now = time.time()
            before, record.last_token = record.last_token, now
            record.first_token = record.first_token or now
            record.num_generated_tokens += num_tokens
            self._tell("on_tokens", record, num_tokens, None if before is None else now - before)

    def end(self, record: RequestRecord, reason: str, error: str | None = None) -> None:
        """A request has ended for its caller."""
        if record.finished is not None:
            return
        if record.admitted is None:
            self._leave_queue(record)
        self.num_in[record.state] -= 1
        self.num_finished += 1
        self.num_unqueued -= not record.is_queued
        record.finish_reason, record.error = reason, error
        record.state, record.finished = "finished", time.time()
        self._ended.append(record)
        if not any(event.name == "finished" for event in record.events):
            record.add(Event(record.finished, "finished", f"{reason}: {error}" if error else reason))
        logger.log(logging.INFO if error is None else logging.WARNING, "%s", record.last_line())
        self._tell("on_end", record)

    def _add(self, record: RequestRecord, event: Event) -> None:
        """One more line of a record, which may have another state then."""
        before, was_queued = record.state, record.is_queued
        record.add(event)
        if record.finished is None:
            self.num_in[before] -= 1
            self.num_in[record.state] += 1
            self.num_unqueued -= record.is_queued and not was_queued

    def _leave_queue(self, record: RequestRecord) -> None:
        self.num_waiting -= 1
        self.num_waiting_tokens -= record.num_prompt_tokens

    def new_engine(self, counts: dict[str, int]) -> None:
        """Another engine process goes on counting from these."""
        self._last = counts

    def step(self, stats: WireStats) -> None:
        """The engine made a step."""
        gained = {name: count - self._last.get(name, 0) for name, count in stats.counts.items()}
        self._last = stats.counts
        for name, count in gained.items():
            self.totals[name] = self.totals.get(name, 0) + count
        now = time.monotonic()
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_SECONDS:
            self._samples.append((now, dict(self.totals)))
            while now - self._samples[0][0] > RATE_SECONDS:
                self._samples.popleft()
        self._tell("on_step", stats, gained)

    def rate(self, name: str, seconds: float = 10.0) -> float:
        """By how much a count has grown a second, of late."""
        now = time.monotonic()
        first = next(((when, totals) for when, totals in self._samples if now - when <= seconds), None)
        if first is None or now - first[0] < SAMPLE_SECONDS:
            return 0.0
        return (self.totals.get(name, 0) - first[1].get(name, 0)) / (now - first[0])

    def _tell(self, method: str, *what: Any) -> None:
        for observer in self.observers:
            try:
                getattr(observer, method)(*what)
            except Exception:
                logger.exception("an observer of requests failed; it counts no more of this")
