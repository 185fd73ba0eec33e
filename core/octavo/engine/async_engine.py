"""The engine for many callers at once: requests in, streams out, over an engine process that may die.

The front keeps every token that it received. When the process dies or stalls, another is started and goes on with
each live request from there; seeds were drawn at admission, so the rest is what it would have been. Requests of
the fatal step go on alone and after the others; one that was there at two deaths is failed.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, cast

from octavo.config import EngineConfig
from octavo.engine.history import History, Observer, Origin, RequestRecord
from octavo.engine.inputs import NO_OUTPUT, Conversation, Inputs, Prompt, TokenizedPrompt
from octavo.engine.keeper import EngineState, Keeper
from octavo.engine.live import LiveRequest
from octavo.engine.output_processor import Output, OutputProcessor
from octavo.engine.outputs import EmbeddingOutput, RequestOutput
from octavo.engine.profiling import Profiled
from octavo.engine.wire import Abort, AddRequest, ResetPrefixCache, WireStats
from octavo.errors import DeadlineError, OctavoError, RequestError, RequestFailedError, UnsupportedError, shown
from octavo.pooling_params import Pooling, PoolingParams
from octavo.sampling_params import SamplingParams
from octavo.structured_output import StructuredOutput
from octavo.text.grammar import GrammarCompiler

__all__ = ["AsyncEngine", "EngineState"]

MIN_PRIORITY, MAX_PRIORITY = -(2**63), 2**63 - 1
MAX_GRAMMAR_SECONDS = 20.0  # in which the form of a structured output must be compiled, the wait for others included

ANYWHERE = Origin()


class AsyncEngine:
    """Made by `start`; ended by `stop`. All calls are from one event loop.

        engine = await AsyncEngine.start(EngineConfig.of(model="demo"))
        async for output in engine.generate("The capital of France is", SamplingParams(temperature=0)):
            print(output.outputs[0].text)
        await engine.stop()

    Attributes:
        description, tokenizer: of the model.
        gate: asked before a request is queued; what it raises is the request's error.
        history: what happened to each of the newest requests, and what the engine's counts have grown to.

    """

    def __init__(self, config: EngineConfig, *, stall_timeout: float = 60.0) -> None:
        self.history = History()
        self.gate: Callable[[RequestRecord], None] | None = None
        self._keeper = Keeper(config, self.history, stall_timeout=stall_timeout)
        self._requests = self._keeper.requests
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="octavo-tokenize")
        self._grammar_threads = ThreadPoolExecutor(2, thread_name_prefix="octavo-grammar")
        self._numbers = itertools.count(1)

    def _describe(self) -> None:
        """Read what the front needs of the model's files."""
        # Imported late, for that takes seconds, in which the engine's process is starting already.
        from octavo.engine.assembly import describe, tokenizer_of

        self.description = describe(self.config, progress=False)
        self.tokenizer = tokenizer_of(self.config, self.description)
        self._inputs = Inputs(self.tokenizer, self.description.vocab_size, self.config.model.seed)
        self._requests.outputs = OutputProcessor(self.tokenizer)
        self._grammars = GrammarCompiler(self.tokenizer, self.description.eos_token_ids)

    # Life

    @classmethod
    async def start(cls, config: EngineConfig, *, stall_timeout: float = 60.0, wait: bool = True) -> "AsyncEngine":
        """Start the engine process, describe the model and, with `wait`, return when the engine is ready.

        Raises:
            OctavoError: the model, a setting or the platform cannot serve.

        """
        engine = cls(config, stall_timeout=stall_timeout)
        engine._keeper.start()
        try:
            await asyncio.to_thread(engine._describe)
            if wait:
                await engine.wait_ready()
        except BaseException:
            await engine.stop()
            raise
        return engine

    async def wait_ready(self) -> None:
        """Return once requests are served.

        Raises:
            OctavoError: that will not happen (any more), and why.

        """
        await self._keeper.wait_ready()

    async def wait_dead(self) -> str:
        """Return, with the reason, once the engine has ended for good."""
        return await self._keeper.wait_dead()

    async def drain(self, seconds: float) -> bool:
        """Wait until no request is under way, at most so long; whether that was reached."""
        end = time.monotonic() + seconds
        while self._requests and time.monotonic() < end:
            await asyncio.sleep(0.05)
        return not self._requests

    async def stop(self) -> None:
        """End the engine process; requests under way fail."""
        await self._keeper.stop()
        self._threads.shutdown(wait=False)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)

    # What is there

    @property
    def state(self) -> EngineState:
        """Whether requests are served now."""
        return self._keeper.state

    @property
    def failure(self) -> OctavoError | None:
        """Why the engine has ended for good, if it has."""
        return self._keeper.failure

    @property
    def config(self) -> EngineConfig:
        """As settled by the engine once it is ready."""
        return self._keeper.config

    @property
    def facts(self) -> dict[str, str]:
        """What is served on what, once ready."""
        return self._keeper.facts

    @property
    def memory(self) -> list[tuple[str, str]]:
        """Lines that say what the memory goes to, once ready."""
        return self._keeper.memory

    @property
    def stats(self) -> WireStats:
        """The engine at a glance, of its latest step."""
        return self._requests.stats

    @property
    def num_restarts(self) -> int:
        """Engine processes that had to be replaced."""
        return self._keeper.num_restarts

    @property
    def num_live(self) -> int:
        """Requests under way."""
        return len(self._requests)

    @property
    def pid(self) -> int:
        """Of the engine process."""
        assert self._keeper.process is not None, "no process was started"
        return self._keeper.process.pid

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

    def generate(
        self,
        prompt: Prompt | Conversation | TokenizedPrompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: bytes = b"",
        origin: Origin = ANYWHERE,
    ) -> AsyncGenerator[RequestOutput]:
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
        return cast(AsyncGenerator[RequestOutput], self._run(prompt, params, request_id, priority, salt, origin))

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
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            allowed = f"an integer from {MIN_PRIORITY} to {MAX_PRIORITY}"
            raise RequestError(f"priority must be {allowed}, got {shown(priority)}", "priority")
        tokenized = prompt if isinstance(prompt, TokenizedPrompt) else await self.tokenize(prompt)
        when_tokenized = time.time()
        if params.structured is not None:
            await self._check_structured(params.structured)
        completed = self._inputs.complete(params)
        number = next(self._numbers)
        request_id = request_id or f"request-{number}"
        if request_id in self._requests:
            raise RequestError(f"a request with id {request_id!r} is under way", "request_id")
        self._keeper.check_alive()
        message = AddRequest(
            request_id,
            number,
            tokenized.token_ids,
            completed,
            sorted(self.description.eos_token_ids),
            priority,
            salt,
            pooling,
            tenant=origin.tenant,
        )
        num_prompt, max_tokens = len(tokenized.token_ids), completed.max_tokens
        record = RequestRecord(request_id, received, origin.tenant, completed.n, max_tokens, num_prompt)
        record.tell(origin, completed, when_tokenized)
        if self.gate is not None:
            self.gate(record)
        live = self._requests.begin(message, tokenized, record)
        num_told = [0] * completed.n  # characters of each sample
        try:
            while True:
                await _news_of(live, deadline)
                if live.error is not None:
                    raise live.error
                output = live.latest
                assert output is not None
                if isinstance(output, RequestOutput):
                    for sample in output.outputs:
                        sample.delta = sample.text[num_told[sample.index] :]
                        num_told[sample.index] = len(sample.text)
                yield output
                if output.finished:
                    return
        except OctavoError as error:
            self.history.end(record, "error", str(error))
            raise
        finally:
            self.history.end(record, _reason(live.latest))
            self._requests.leave(live)

    async def _check_structured(self, structured: StructuredOutput) -> None:
        """Compile the form off the loop, to refuse it here if it is none; the engine compiles its own."""
        work = asyncio.get_running_loop().run_in_executor(self._grammar_threads, self._grammars.compile, structured)
        try:
            await asyncio.wait_for(work, MAX_GRAMMAR_SECONDS)
        except TimeoutError:
            kind = structured.kind
            raise RequestError(f"the {kind} took over {MAX_GRAMMAR_SECONDS:g} s to compile", kind) from None

    async def profile(self, num_steps: int, seconds: float) -> Profiled:
        """Take the times of the engine's next steps; see `Profiles.take`."""
        return await self._keeper.profiles.take(num_steps, seconds)

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests; their streams end with finish reason "abort"."""
        self._keeper.send(Abort(list(request_ids)))

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        self._keeper.send(ResetPrefixCache())


async def _news_of(live: LiveRequest, deadline: float | None) -> None:
    """Return when there is news of a request; until it is admitted that must be before the deadline."""
    if deadline is not None and live.record.admitted is None:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await live.news.wait()
                return
        except TimeoutError:
            if live.record.admitted is None:
                live.record.is_late = True
                waited = time.time() - live.record.received
                raise DeadlineError(
                    f"the request waited {waited:.1f} s and was not admitted within the time that it allows; "
                    "send it again later, or allow more"
                ) from None
    await live.news.wait()


def _reason(output: Output | None) -> str:
    """The finish reasons of a request's samples; whoever leaves before they have one aborts."""
    if output is None or not output.finished:
        return "abort"
    if isinstance(output, EmbeddingOutput):
        return "stop" if output.error is None else "error"
    return ", ".join(dict.fromkeys(sample.finish_reason or "" for sample in output.outputs))
