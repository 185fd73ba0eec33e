"""The requests under way: what each has received, what the engine's messages mean to them, how they go on."""

import asyncio
import logging
from collections.abc import Callable, Iterator

import msgspec

from octavo.engine.history import History, RequestRecord
from octavo.engine.inputs import TokenizedPrompt
from octavo.engine.output_processor import Output, OutputProcessor
from octavo.engine.wire import Abort, AddRequest, FinishSample, Gained, Refused, ToEngine, WireStats, encode
from octavo.errors import EngineDeadError, OctavoError, RequestError, RequestFailedError
from octavo.scheduler.messages import RequestUpdate

__all__ = ["LiveRequest", "LiveRequests", "News"]

MAX_DEATHS_OF_REQUEST = 2  # a request that was in so many fatal steps is failed

logger = logging.getLogger(__name__)


class News:
    """Wakes the one who waits; it is there once for each token, and lighter than an `asyncio.Event`."""

    __slots__ = ("_is_there", "_waiter")

    def __init__(self) -> None:
        self._is_there = False
        self._waiter: asyncio.Future[None] | None = None

    def tell(self) -> None:
        """There is news."""
        self._is_there = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return once there is news since the last time."""
        if not self._is_there:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_there = False


class LiveRequest:
    """A request under way: all that is needed to go on with it in another process.

    Attributes:
        number: of the request, for the engine's board.
        message: as it was sent at first.
        record: what happened to it.
        outputs: token ids that each sample has received.
        finished: samples that have ended.
        num_prompt_logprobs: prompt positions that were scored.
        num_restarts: engines that died while it was under way.
        num_deaths: those that died in a step that it was in.
        latest: its output so far.
        error: why it fails.
        news: told when one of the last two has changed.

    """

    def __init__(self, message: AddRequest, record: RequestRecord) -> None:
        self.number = message.number
        self.message = message
        self.record = record
        self.outputs: dict[int, list[int]] = {index: [] for index in range(message.params.n)}
        self.finished: set[int] = set()
        self.num_prompt_logprobs = 0
        self.num_restarts = 0
        self.num_deaths = 0
        self.latest: Output | None = None
        self.error: OctavoError | None = None
        self.news = News()

    def take(self, update: RequestUpdate) -> None:
        """Keep what the engine gave."""
        for sample in update.samples:
            self.outputs[sample.index].extend(sample.token_ids)
            if sample.finish_reason is not None:
                self.finished.add(sample.index)
        self.num_prompt_logprobs += len(update.prompt_logprobs)

    def to_go_on(self) -> AddRequest:
        """The message that makes a fresh engine go on with it."""
        return msgspec.structs.replace(
            self.message,
            outputs=self.outputs,
            finished=sorted(self.finished),
            num_prompt_logprobs=self.num_prompt_logprobs,
            runs_alone=self.num_deaths > 0,
            num_prompt_done=self.record.num_prompt_done,
        )

    def fail(self, error: OctavoError) -> None:
        """Tell its caller."""
        self.error = error
        self.news.tell()


class LiveRequests:
    """All of them, by their ids.

    Args:
        history: is told what happens to each.
        send: takes messages to the engine.

    Attributes:
        outputs: makes text of tokens; set before the first request begins.
        stats: the engine at a glance, of its latest step.

    """

    outputs: OutputProcessor

    def __init__(self, history: History, send: Callable[[ToEngine], None]) -> None:
        self.stats = WireStats()
        self._history = history
        self._send = send
        self._requests: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._requests.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def begin(self, message: AddRequest, prompt: TokenizedPrompt, record: RequestRecord) -> LiveRequest:
        """A request begins, and is sent to the engine if that is there; otherwise with the others, once it is.

        Raises:
            RequestError: it holds what no message can; nothing has begun.

        """
        try:
            encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(f"the request cannot be sent to the engine: {error}") from error
        self._history.begin(record)
        live = self._requests[message.request_id] = LiveRequest(message, record)
        if message.pooling is None:
            self.outputs.add(message.request_id, prompt, message.params)
        else:
            self.outputs.add_embedding(message.request_id, prompt)
        self._send(message)
        return live

    def leave(self, live: LiveRequest) -> None:
        """Nobody waits for a request any more: the engine ends what has not ended."""
        request_id = live.message.request_id
        self.outputs.drop(request_id)
        if self._requests.pop(request_id, None) is not None and not (live.latest and live.latest.finished):
            self._send(Abort([request_id]))

    # What the engine says

    def take(self, message: Gained | Refused) -> None:
        """A step's gains, or a refusal."""
        if isinstance(message, Gained):
            self.stats = message.stats
            self._history.step(message.stats)
            for update in message.updates:
                self._take_update(update)
        elif (live := self._requests.get(message.request_id)) is not None:
            live.fail(RequestError(message.message, message.param))

    def _take_update(self, update: RequestUpdate) -> None:
        self._history.hear(update)
        live = self._requests.get(update.request_id)
        if live is None:
            return
        live.take(update)
        try:
            output, stopped = self.outputs.take(update)
        except Exception as error:  # a fault of ours in one request's text is no reason to end the others
            logger.exception("the output of request %s failed", update.request_id)
            self.fail(live, RequestFailedError(f"its output failed: {error}"[:500]))
            self._send(Abort([update.request_id]))
            return
        for index in stopped:
            live.finished.add(index)
            self._send(FinishSample(update.request_id, index))
        if update.error is not None:
            refused = update.error_param is not None
            live.error = RequestError(update.error, update.error_param) if refused else RequestFailedError(update.error)
        if output is not None and update.has_output:
            live.latest = output
            live.news.tell()

    # What becomes of the engine

    def bury(self, reason: str, fatal: frozenset[int]) -> list[int]:
        """An engine has died with these in its step; those that were in too many fatal steps fail, and are returned."""
        failed = []
        for live in list(self):
            is_in_step = live.number in fatal
            live.num_restarts += 1
            note = reason if is_in_step else f"{reason}; this request was not in its step"
            self._history.note(live.record, "engine died", note)
            live.num_deaths += is_in_step
            if is_in_step and live.num_deaths >= MAX_DEATHS_OF_REQUEST:
                how_often = f"the engine died {live.num_deaths} times while it ran this request"
                self.fail(live, RequestFailedError(f"{how_often}: {reason}"))
                failed.append(live.number)
        return failed

    def resume(self, stats: WireStats, send: Callable[[ToEngine], None]) -> None:
        """Send every request to a fresh engine: those of fatal steps last, to run alone."""
        self.stats = stats
        self._history.new_engine(stats.counts)
        for live in sorted(self, key=lambda live: (live.num_deaths > 0, live.number)):
            if live.num_restarts:
                num_outputs = sum(map(len, live.outputs.values()))
                self._history.note(live.record, "sent again", f"with the {num_outputs} tokens that it had")
            send(live.to_go_on())

    def fail(self, live: LiveRequest, error: OctavoError) -> None:
        """End a request for its caller."""
        logger.warning("request %s failed: %s", live.message.request_id, error)
        self._requests.pop(live.message.request_id, None)
        live.fail(error)

    def fail_all(self, reason: str) -> None:
        """End them all."""
        for live in list(self):
            self.fail(live, EngineDeadError(reason))
