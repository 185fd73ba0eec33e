"""The engine for many callers at once: requests in, streams out, over an engine process that may die.

The front keeps every token that it received. When the process dies or stalls, another is started and goes on with
each live request from there; seeds were drawn at admission, so the rest is what it would have been. Requests of
the fatal step go on alone and after the others; one that was there at two deaths is failed.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from octavo import errors
from octavo.config import EngineConfig
from octavo.engine.history import History, Observer, Origin, RequestRecord
from octavo.engine.inputs import NO_OUTPUT, Conversation, Inputs, Prompt, TokenizedPrompt
from octavo.engine.output_processor import Output, OutputProcessor
from octavo.engine.outputs import EmbeddingOutput, RequestOutput
from octavo.engine.supervisor import EngineProcess
from octavo.engine.wire import (
    Abort,
    AddRequest,
    Failed,
    FinishSample,
    FromEngine,
    Gained,
    Ready,
    Refused,
    ResetPrefixCache,
    WireStats,
)
from octavo.errors import (
    DeadlineError,
    EngineDeadError,
    OctavoError,
    RequestError,
    RequestFailedError,
    UnsupportedError,
)
from octavo.pooling_params import Pooling, PoolingParams
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import RequestUpdate
from octavo.structured_output import StructuredOutput
from octavo.text.grammar import GrammarCompiler

__all__ = ["AsyncEngine", "EngineState"]

EngineState = Literal["loading", "ready", "restarting", "dead", "stopped"]

MAX_DEATHS_OF_REQUEST = 2  # a request that was in so many fatal steps is failed
MAX_UNEXPLAINED_DEATHS = 3  # so many in a row without a request that was in all of them end the engine
CALM_SECONDS = 600.0  # after so long without a death the count begins anew
MAX_GRAMMAR_SECONDS = 20.0  # in which the form of a structured output must be compiled, the wait for others included

ANYWHERE = Origin()

logger = logging.getLogger(__name__)


@dataclass
class _Live:
    """A request under way: all that is needed to go on with it in another process."""

    number: int
    message: AddRequest
    record: RequestRecord
    outputs: dict[int, list[int]]
    finished: set[int] = field(default_factory=set)
    num_prompt_logprobs: int = 0
    num_deaths: int = 0
    num_restarts: int = 0
    latest: Output | None = None
    error: OctavoError | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)


class AsyncEngine:
    """Made by `start`; ended by `stop`. All calls are from one event loop.

        engine = await AsyncEngine.start(EngineConfig.of(model="demo"))
        async for output in engine.generate("The capital of France is", SamplingParams(temperature=0)):
            print(output.outputs[0].text)
        await engine.stop()

    Attributes:
        config: as settled by the engine once it is ready.
        description, tokenizer: of the model.
        facts, memory: lines that say what is served on what, once ready.
        stats: the engine at a glance, of its latest step.
        num_restarts: engine processes that had to be replaced.
        gate: asked before a request is queued; what it raises is the request's error.
        history: what happened to each of the newest requests, and what the engine's counts have grown to.

    """

    def __init__(self, config: EngineConfig, *, stall_timeout: float = 60.0) -> None:
        self.config = config
        self.facts: dict[str, str] = {}
        self.memory: list[tuple[str, str]] = []
        self.stats = WireStats()
        self.num_restarts = 0
        self.failure: OctavoError | None = None
        self.history = History()
        self.gate: Callable[[RequestRecord], None] | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="octavo-tokenize")
        self._grammar_threads = ThreadPoolExecutor(2, thread_name_prefix="octavo-grammar")
        self._stall_timeout = stall_timeout
        self._live: dict[str, _Live] = {}
        self._numbers = itertools.count(1)
        self._state: EngineState = "loading"
        self._changed = asyncio.Event()
        self._deaths: list[tuple[float, frozenset[int]]] = []
        self._process: EngineProcess | None = None
        self._keeper: asyncio.Task[None] | None = None

    def _describe(self) -> None:
        """Read what the front needs of the model's files."""
        # Imported late, for that takes seconds, in which the engine's process is starting already.
        from octavo.engine.assembly import describe, tokenizer_of

        self.description = describe(self.config, progress=False)
        self.tokenizer = tokenizer_of(self.config, self.description)
        self._inputs = Inputs(self.tokenizer, self.description.vocab_size, self.config.model.seed)
        self._outputs = OutputProcessor(self.tokenizer)
        self._grammars = GrammarCompiler(self.tokenizer, self.description.eos_token_ids)

    @classmethod
    async def start(cls, config: EngineConfig, *, stall_timeout: float = 60.0, wait: bool = True) -> "AsyncEngine":
        """Start the engine process, describe the model and, with `wait`, return when the engine is ready.

        Raises:
            OctavoError: the model, a setting or the platform cannot serve.

        """
        engine = cls(config, stall_timeout=stall_timeout)
        engine._keeper = asyncio.create_task(engine._keep())
        try:
            await asyncio.to_thread(engine._describe)
            if wait:
                await engine.wait_ready()
        except BaseException:
            await engine.stop()
            raise
        return engine

    @property
    def state(self) -> EngineState:
        """Whether requests are served now."""
        return self._state

    @property
    def pid(self) -> int:
        """Of the engine process."""
        assert self._process is not None, "no process was started"
        return self._process.pid

    @property
    def num_live(self) -> int:
        """Requests under way."""
        return len(self._live)

    async def wait_ready(self) -> None:
        """Return once requests are served.

        Raises:
            OctavoError: that will not happen (any more), and why.

        """
        while self._state not in ("ready", "dead", "stopped"):
            self._changed.clear()
            await self._changed.wait()
        if self._state != "ready":
            raise self._gone()

    async def wait_dead(self) -> str:
        """Return, with the reason, once the engine has ended for good."""
        while self._state not in ("dead", "stopped"):
            self._changed.clear()
            await self._changed.wait()
        return str(self._gone())

    # Requests

    async def tokenize(
        self, prompt: Prompt | Conversation, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> TokenizedPrompt:
        """The token ids of a prompt, computed off the event loop.

        `add_special_tokens` is for texts: ids are taken as they are, a conversation says itself. A text that cannot
        fit in `max_tokens`, whatever they are, is refused unread.

        Raises:
            RequestError: it cannot be served.

        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._inputs.tokenize, prompt, add_special_tokens, max_tokens)

    async def generate(
        self,
        prompt: Prompt | Conversation | TokenizedPrompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: bytes = b"",
        origin: Origin = ANYWHERE,
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt, yielding the output as it grows (the same object each time, `delta` renewed).

        Whoever stops listening ends the request. Requests of different `salt` never share cached prefixes.

        Raises:
            RequestError: it cannot be served.
            RequestFailedError: it failed while it ran, or the engine died each time that it ran.
            DeadlineError: it has waited as long as its origin allows, and nothing was computed for it.
            UnsupportedError: the model generates no text.
            EngineDeadError: the engine has ended for good.

        """
        if self.description.embeds_as:
            raise UnsupportedError(
                f"{self.description.files.name} is {self.description.embeds_as}: it generates no text"
            )
        num_told: dict[int, int] = {}
        async with aclosing(self._run(prompt, params, request_id, priority, salt, origin)) as outputs:
            async for output in outputs:
                assert isinstance(output, RequestOutput)
                for sample in output.outputs:
                    sample.delta = sample.text[num_told.get(sample.index, 0) :]
                    num_told[sample.index] = len(sample.text)
                yield output

    async def embed(
        self,
        prompt: Prompt | TokenizedPrompt,
        pooling: Pooling | None = None,
        normalize: bool = True,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: bytes = b"",
        origin: Origin = ANYWHERE,
    ) -> EmbeddingOutput:
        """Turn one prompt into a vector by its final hidden states; as `LLM.embed`, with the errors of `generate`."""
        from octavo.model.sentence import own_pooling

        own = own_pooling(self.description.files)
        wanted = PoolingParams(pooling or own or "mean", normalize)
        async with aclosing(self._run(prompt, NO_OUTPUT, request_id, priority, salt, origin, wanted)) as outputs:
            async for output in outputs:
                if output.finished:
                    assert isinstance(output, EmbeddingOutput)
                    return output
        raise RequestFailedError("the request ended without an embedding")

    async def _run(
        self,
        prompt: Prompt | Conversation | TokenizedPrompt,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        salt: bytes,
        origin: Origin,
        pooling: PoolingParams | None = None,
    ) -> AsyncGenerator[Output]:
        """A request from its admission to its end, whatever it asks for."""
        received = time.time() if origin.received is None else origin.received
        deadline = None if origin.max_wait is None else time.monotonic() + origin.max_wait
        tokenized = prompt if isinstance(prompt, TokenizedPrompt) else await self.tokenize(prompt)
        if params.structured is not None:
            await self._check_structured(params.structured)
        completed = self._inputs.complete(params)
        number = next(self._numbers)
        request_id = request_id or f"request-{number}"
        if request_id in self._live:
            raise RequestError(f"a request with id {request_id!r} is under way", "request_id")
        if self._state in ("dead", "stopped"):
            raise self._gone()
        eos_token_ids = sorted(self.description.eos_token_ids)
        message = AddRequest(request_id, number, tokenized.token_ids, completed, eos_token_ids, priority, salt, pooling)
        message = msgspec.structs.replace(message, tenant=origin.tenant)
        num_prompt, max_tokens = len(tokenized.token_ids), completed.max_tokens
        record = RequestRecord(request_id, received, origin.tenant, completed.n, max_tokens, num_prompt)
        if self.gate is not None:
            self.gate(record)
        self.history.begin(record)
        live = self._live[request_id] = _Live(number, message, record, {i: [] for i in range(completed.n)})
        if pooling is None:
            self._outputs.add(request_id, tokenized, completed)
        else:
            self._outputs.add_embedding(request_id, tokenized)
        try:
            if self._state == "ready" and self._process is not None:
                self._process.send(message)
            while True:
                await self._news_of(live, deadline)
                live.news.clear()
                if live.error is not None:
                    raise live.error
                assert live.latest is not None
                yield live.latest
                if live.latest.finished:
                    return
        except OctavoError as error:
            self.history.end(record, "error", str(error))
            raise
        finally:
            self.history.end(record, _reason(live.latest))
            self._outputs.drop(request_id)
            if self._live.pop(request_id, None) is not None and not (live.latest and live.latest.finished):
                self._send(Abort([request_id]))

    async def _news_of(self, live: _Live, deadline: float | None) -> None:
        """Return when there is news of a request; until it is admitted that must be before the deadline."""
        if deadline is not None and live.record.admitted is None:
            try:
                await asyncio.wait_for(live.news.wait(), deadline - time.monotonic())
            except TimeoutError:
                if live.record.admitted is None:
                    live.record.is_late = True
                    waited = time.time() - live.record.received
                    raise DeadlineError(
                        f"the request waited {waited:.1f} s and was not admitted within the time that it allows; "
                        "send it again later, or allow more"
                    ) from None
        await live.news.wait()

    def requests(self) -> list[dict[str, Any]]:
        """The newest requests, those under way among them, in figures; the newest first."""
        return [record.summary() for record in self.history.records()]

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        """One request's figures and everything that happened to it; None: it is not known, or forgotten."""
        record = self.history.get(request_id)
        return None if record is None else record.timeline()

    def observe(self, observer: Observer) -> None:
        """Tell somebody of steps, tokens and ends of requests, from now on."""
        self.history.observers.append(observer)

    async def _check_structured(self, structured: StructuredOutput) -> None:
        """Compile the form off the loop, to refuse it here if it is none; the engine compiles its own."""
        work = asyncio.get_running_loop().run_in_executor(self._grammar_threads, self._grammars.compile, structured)
        try:
            await asyncio.wait_for(work, MAX_GRAMMAR_SECONDS)
        except TimeoutError:
            kind = structured.kind
            raise RequestError(f"the {kind} took over {MAX_GRAMMAR_SECONDS:g} s to compile", kind) from None

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests; their streams end with finish reason "abort"."""
        self._send(Abort(list(request_ids)))

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        self._send(ResetPrefixCache())

    # Life

    async def drain(self, seconds: float) -> bool:
        """Wait until no request is under way, at most so long; whether that was reached."""
        end = time.monotonic() + seconds
        while self._live and time.monotonic() < end:
            await asyncio.sleep(0.05)
        return not self._live

    async def stop(self) -> None:
        """End the engine process; requests under way fail."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        if self._process is not None:
            await self._process.stop()
            self._process = None
        if self._state != "dead":
            self._enter("stopped")
        self._fail_all("the engine was stopped")
        self._threads.shutdown(wait=False)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)

    async def _keep(self) -> None:
        """Run one engine process after another, until one ends for good."""
        while self._state not in ("dead", "stopped"):
            process = EngineProcess(
                self.config, max_requests=self.config.scheduler.max_num_seqs, stall_timeout=self._stall_timeout
            )
            self._process = process
            await process.start(self._take)
            reason = await process.death
            fatal = process.in_step
            await process.release()
            self._mourn(reason, fatal)

    def _mourn(self, reason: str, fatal: frozenset[int]) -> None:
        """An engine process has died: decide what becomes of its requests, and whether another is started."""
        if self._state == "dead":
            return
        now = time.monotonic()
        was_ready = self._state == "ready"
        logger.error("the engine process died: %s; %d requests were in its step", reason, len(fatal))
        self._deaths = [(when, who) for when, who in self._deaths if now - when < CALM_SECONDS] + [(now, fatal)]
        for live in self._live.values():
            live.num_restarts += 1
            note = reason if live.number in fatal else f"{reason}; this request was not in its step"
            self.history.note(live.record, "engine died", note)
        for live in [live for live in self._live.values() if live.number in fatal]:
            live.num_deaths += 1
            if live.num_deaths >= MAX_DEATHS_OF_REQUEST:
                how_often = f"the engine died {live.num_deaths} times while it ran this request"
                self._fail(live, RequestFailedError(f"{how_often}: {reason}"))
        recent = [who for _, who in self._deaths[-MAX_UNEXPLAINED_DEATHS:]]
        unexplained = len(recent) == MAX_UNEXPLAINED_DEATHS and not frozenset.intersection(*recent)
        if unexplained or (not was_ready and len(self._deaths) > 1):
            count = f"{len(self._deaths)} times"
            self._die(EngineDeadError(f"the engine died {count} and no request explains it; last: {reason}"))
            return
        self.num_restarts += 1
        self._enter("restarting")

    def _die(self, failure: OctavoError) -> None:
        self.failure = failure
        logger.critical("%s", failure)
        self._enter("dead")
        self._fail_all(str(failure))

    def _gone(self) -> OctavoError:
        return self.failure or EngineDeadError("the engine was stopped")

    def _enter(self, state: EngineState) -> None:
        self._state = state
        self._changed.set()

    def _send(self, message: Abort | FinishSample | ResetPrefixCache) -> None:
        if self._state == "ready" and self._process is not None:
            self._process.send(message)

    # What the engine says

    async def _take(self, message: FromEngine) -> None:
        if isinstance(message, Gained):
            self.stats = message.stats
            self.history.step(message.stats)
            for update in message.updates:
                await self._take_update(update)
        elif isinstance(message, Refused):
            if (live := self._live.get(message.request_id)) is not None:
                live.error = RequestError(message.message, message.param)
                live.news.set()
        elif isinstance(message, Ready):
            self.config = EngineConfig.of(**message.settings)
            self.facts, self.memory, self.stats = message.facts, message.memory, message.stats
            self.history.new_engine()
            await self._resume()
            self._enter("ready")
        elif isinstance(message, Failed):
            self._die(getattr(errors, message.kind, EngineDeadError)(message.message))

    async def _take_update(self, update: RequestUpdate) -> None:
        self.history.hear(update)
        live = self._live.get(update.request_id)
        if live is None:
            return
        for sample in update.samples:
            live.outputs[sample.index].extend(sample.token_ids)
            if sample.finish_reason is not None:
                live.finished.add(sample.index)
        live.num_prompt_logprobs += len(update.prompt_logprobs)
        try:
            output, stopped = self._outputs.take(update)
        except Exception as error:  # a fault of ours in one request's text is no reason to end the others
            logger.exception("the output of request %s failed", update.request_id)
            self._fail(live, RequestFailedError(f"its output failed: {error}"[:500]))
            self._send(Abort([update.request_id]))
            return
        for index in stopped:
            live.finished.add(index)
            self._send(FinishSample(update.request_id, index))
        if update.error is not None:
            live.error = RequestFailedError(update.error)
        if output is not None and update.has_output:
            live.latest = output
            live.news.set()

    async def _resume(self) -> None:
        """Send every live request to a fresh engine: those of fatal steps last, to run alone."""
        assert self._process is not None
        for live in sorted(self._live.values(), key=lambda live: (live.num_deaths > 0, live.number)):
            done = live.message
            if live.num_restarts:
                num_outputs = sum(map(len, live.outputs.values()))
                self.history.note(live.record, "sent again", f"with the {num_outputs} tokens that it had")
            self._process.send(
                AddRequest(
                    done.request_id,
                    done.number,
                    done.token_ids,
                    done.params,
                    done.eos_token_ids,
                    done.priority,
                    done.salt,
                    done.pooling,
                    live.outputs,
                    sorted(live.finished),
                    live.num_prompt_logprobs,
                    live.num_deaths > 0,
                    done.tenant,
                    live.record.num_prompt_done,
                )
            )

    def _fail(self, live: _Live, error: OctavoError) -> None:
        logger.warning("request %s failed: %s", live.message.request_id, error)
        live.error = error
        live.news.set()
        self._live.pop(live.message.request_id, None)

    def _fail_all(self, reason: str) -> None:
        for live in list(self._live.values()):
            self._fail(live, EngineDeadError(reason))


def _reason(output: Output | None) -> str:
    """The finish reasons of a request's samples; whoever leaves before they have one aborts."""
    if output is None or not output.finished:
        return "abort"
    if isinstance(output, EmbeddingOutput):
        return "stop" if output.error is None else "error"
    return ", ".join(dict.fromkeys(sample.finish_reason or "" for sample in output.outputs))
