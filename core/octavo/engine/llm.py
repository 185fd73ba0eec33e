"""Offline use: a model in this process, prompts in, outputs out."""

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

from tqdm import tqdm

from octavo.config import EngineConfig
from octavo.engine.assembly import load_engine, prepare
from octavo.engine.inputs import NO_OUTPUT, Conversation, Inputs, Message, Prompt, as_conversations, as_prompts
from octavo.engine.loop import EngineCore, EngineStats
from octavo.engine.output_processor import Output, OutputProcessor
from octavo.engine.outputs import CompletionOutput, EmbeddingOutput, RequestOutput
from octavo.engine.terminal import progress_wanted
from octavo.errors import RequestError, UnsupportedError, shown
from octavo.executor.base import Executor
from octavo.model.sentence import own_pooling
from octavo.pooling_params import Pooling, PoolingParams
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import RequestUpdate
from octavo.scheduler.request import Request
from octavo.text.tokenizer import Tokenizer

__all__ = ["LLM"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Wish:
    """What a caller wants of one prompt: samples, or with `pooling` an embedding."""

    prompt: Prompt | Conversation
    params: SamplingParams
    priority: int = 0
    pooling: PoolingParams | None = None


class LLM:
    """A model, ready to generate. Threads may share it: their requests run in the same steps.

        with LLM(model="demo", dtype="float32") as llm:
            for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
                print(output.outputs[0].text)

    Args:
        model: `demo`, a folder in Hugging Face layout, a .gguf file or a hub name.
        config: a whole `EngineConfig`, in place of keyword settings.
        settings: any setting of `EngineConfig` by name (dtype, max_model_len, block_size, ...).

    Raises:
        OctavoError: the model, a setting or the platform cannot serve; one line says why.

    """

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, config: EngineConfig | None = None, **settings: Any
    ):
        if model is not None:
            settings["model"] = os.fspath(model)
        given = config.but(**settings) if config is not None else EngineConfig.load(**settings)
        progress = progress_wanted()
        prepared = prepare(given, progress=progress)
        self.config, self.description, self.tokenizer = prepared.config, prepared.description, prepared.tokenizer
        self._grammars = prepared.grammars
        self._engine = load_engine(prepared, progress=progress)
        self._inputs = Inputs(self.tokenizer, self.description.vocab_size, self.config.model.seed)
        self._outputs = OutputProcessor(self.tokenizer)
        self._request_ids = itertools.count()
        self._lock = threading.Lock()  # over the engine and what follows
        self._news: dict[str, Output] = {}  # outputs that whoever asked has not taken yet
        self._updates: deque[RequestUpdate] = deque()  # of a step, that are still to be taken
        self._abandoned: list[str] = []  # requests that nobody waits for any more
        self._is_closed = False

    # Generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; results stand in their order.

        Args:
            prompts: one or many of: a text, token ids, {"prompt": text}, {"prompt_token_ids": ids}.
            sampling_params: one for all or one for each; unset: the model's own defaults.
            priority: one for each prompt, lower first, under scheduling_policy "priority".
            use_tqdm: a progress bar; unset: where the standard error is a terminal.

        A prompt that cannot be served fails alone: its output has `error` set, finish_reason "error".

        """
        return self._generate(as_prompts(prompts), sampling_params, priority, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, one or many, through the model's own chat template, or the one given.

        A conversation that is malformed or that the template refuses fails alone, as prompts do in `generate`.
        """
        how = (tools, add_generation_prompt, continue_final_message, chat_template, chat_template_kwargs)
        conversations = [Conversation(one, *how) for one in as_conversations(messages)]
        return self._generate(conversations, sampling_params, priority, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding the output as it grows; `outputs[i].delta` is the newest text.

        Leaving the loop early ends the request.

        Raises:
            RequestError: the prompt cannot be served, or there are several.

        """
        prompts = as_prompts(prompt)
        if len(prompts) != 1:
            raise RequestError(f"a stream is of one prompt, got {len(prompts)}", "prompt")
        yield from self._stream(prompts[0], sampling_params)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one conversation, yielding the output as it grows; see `stream`."""
        yield from self._stream(Conversation(messages), sampling_params)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling | None = None,
        normalize: bool = True,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[EmbeddingOutput]:
        """Turn prompts into vectors, by their final hidden states; results stand in the order of the prompts.

        Args:
            prompts: as in `generate`.
            pooling: the mean over all tokens ("mean"), the last token ("last") or the first ("cls"); unset: what
                the model's files say, or else the mean.
            normalize: make each vector one of length 1, so that a product of two is their cosine.
            priority: as in `generate`.
            use_tqdm: as in `generate`.

        A prompt that cannot be served fails alone: its output has `error` set and no embedding.

        Raises:
            RequestError: a pooling that is none.
            UnsupportedError: the model's files ask for a pooling, or for something after it, that is not known.

        """
        own = own_pooling(self.description.files)
        params = PoolingParams(pooling or own or "mean", normalize)
        given = as_prompts(prompts)
        ranks = self._priorities_for(given, priority)
        wishes = [_Wish(prompt, NO_OUTPUT, rank, params) for prompt, rank in zip(given, ranks, strict=True)]
        return cast(list[EmbeddingOutput], self._complete(wishes, "Embedding", use_tqdm))

    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config asks for."""
        return SamplingParams(**self.description.sampling_defaults)

    def get_default_sampling_params(self) -> SamplingParams:
        """The same, under the name that vLLM's users know."""
        return self.default_sampling_params()

    def get_tokenizer(self) -> Tokenizer:
        """What turns text into this model's token ids and back."""
        return self.tokenizer

    @property
    def executor(self) -> Executor:
        """What runs the steps: its memory plan, its op table, its facts."""
        if not isinstance(self._engine, EngineCore):
            raise UnsupportedError(f"{self.description.files.name} is an encoder, which has no executor")
        return self._engine.executor

    def wrap_executor(self, wrap: Callable[[Executor], Executor]) -> None:
        """Put something around what runs the steps, before the first request: to record them, say."""
        if not isinstance(self._engine, EngineCore):
            raise UnsupportedError(f"{self.description.files.name} is an encoder, which has no executor")
        self._engine.executor = wrap(self._engine.executor)

    @property
    def stats(self) -> EngineStats:
        """Queues, blocks, and counts of tokens, steps and preemptions."""
        return self._engine.stats

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        with self._lock:
            self._engine.reset_prefix_cache()

    # Life

    def close(self) -> None:
        """Give the device's memory back. The object is of no use afterwards."""
        with self._lock:
            self._is_closed = True
            self._engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    def _generate(
        self,
        prompts: Sequence[Prompt | Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        self._check_generates()
        params = self._params_for(prompts, sampling_params)
        priorities = self._priorities_for(prompts, priority)
        wishes = [_Wish(*each) for each in zip(prompts, params, priorities, strict=True)]
        return cast(list[RequestOutput], self._complete(wishes, "Generating", use_tqdm))

    def _complete(self, wishes: Sequence[_Wish], doing: str, use_tqdm: bool | None) -> list[Output]:
        """An output for each wish, of the kind that it asks for."""
        ids = [str(next(self._request_ids)) for _ in wishes]
        done: dict[str, Output] = {}
        wanted = progress_wanted() if use_tqdm is None else use_tqdm
        try:
            for request_id, wish in zip(ids, wishes, strict=True):
                try:
                    self._begin(request_id, wish)
                except RequestError as error:
                    done[request_id] = _refused(request_id, wish, error)
            with tqdm(total=len(wishes), desc=doing, unit="request", disable=not wanted) as bar:
                bar.update(len(done))
                for output in self._run(set(ids) - set(done)):
                    if output.finished:
                        done[output.request_id] = output
                        bar.update()
        finally:
            self._leave(set(ids) - set(done))
        return [done[request_id] for request_id in ids]

    def _stream(self, prompt: Prompt | Conversation, sampling_params: SamplingParams | None) -> Iterator[RequestOutput]:
        self._check_generates()
        request_id = str(next(self._request_ids))
        self._begin(request_id, _Wish(prompt, sampling_params or self.default_sampling_params()))
        num_told: dict[int, int] = {}  # characters of each sample
        try:
            for output in cast(Iterator[RequestOutput], self._run({request_id})):
                for sample in output.outputs:
                    sample.delta = sample.text[num_told.get(sample.index, 0) :]
                    num_told[sample.index] = len(sample.text)
                yield output
        finally:
            self._leave([request_id])

    def _params_for(
        self, prompts: Sequence[object], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            given = self.default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * len(prompts)
        if not isinstance(given, Sequence) or len(given) != len(prompts):
            what = f"{len(given)} sampling_params" if isinstance(given, Sequence) else f"a {type(given).__name__}"
            raise RequestError(
                f"{len(prompts)} prompts and {what}: give one SamplingParams for all or a list of one for each",
                "sampling_params",
            )
        return list(given)

    def _priorities_for(self, prompts: Sequence[object], given: Sequence[int] | None) -> list[int]:
        if given is not None and not isinstance(given, Sequence):
            raise RequestError(f"priority is a list with one integer for each prompt, got {shown(given)}", "priority")
        priorities = [0] * len(prompts) if given is None else list(given)
        if len(priorities) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts and {len(priorities)} priorities: give one for each", "priority"
            )
        for priority in priorities:
            if not isinstance(priority, int):
                raise RequestError(f"a priority is an integer, got {shown(priority)}", "priority")
        return priorities

    def _check_generates(self) -> None:
        """Whoever waits for text of a model that has none to give learns it at once."""
        if self.description.embeds_as:
            raise UnsupportedError(
                f"{self.description.files.name} is {self.description.embeds_as}: it gives embeddings (LLM.embed) and "
                "generates no text"
            )

    def _begin(self, request_id: str, wish: _Wish) -> None:
        """Queue a request, or say in the log why not and raise."""
        if self._is_closed:
            raise RuntimeError("this LLM was closed; make another")
        try:
            tokenized = self._inputs.tokenize(wish.prompt)
            completed = self._inputs.complete(wish.params)
            request = Request(
                request_id,
                tokenized.token_ids,
                completed,
                pooling=wish.pooling,
                eos_token_ids=self.description.eos_token_ids,
                priority=wish.priority,
                grammar=None if completed.structured is None else self._grammars.compile(completed.structured),
            )
            with self._lock:
                self._engine.add_request(request)
                if wish.pooling is None:
                    self._outputs.add(request_id, tokenized, completed)
                else:
                    self._outputs.add_embedding(request_id, tokenized)
        except RequestError as error:
            logger.warning("request %s refused: %s", request_id, error)
            raise

    def _run(self, request_ids: Collection[str]) -> Iterator[Output]:
        """Step until these requests have finished, yielding their outputs as they gain something.

        A step serves the requests of all callers; what others gained waits until they ask.
        """
        left = set(request_ids)
        while left:
            with self._lock:
                ready = [request_id for request_id in self._news if request_id in left]
                if not ready:
                    if not (self._engine.has_work or self._updates):  # a fault of ours, and better said than waited for
                        raise RuntimeError(f"requests {', '.join(sorted(left))} are gone and never ended")
                    self._step()
                outputs = [self._news.pop(request_id) for request_id in ready]
            for output in outputs:
                if output.finished:
                    left.remove(output.request_id)
                    with self._lock:  # another caller's step may have ended it since it was taken: that is no more news
                        self._news.pop(output.request_id, None)
                yield output

    def _step(self) -> None:
        self._drop_abandoned()
        if not self._updates:
            self._updates.extend(self._engine.step())
        while self._updates:
            self._take(self._updates.popleft())

    def _take(self, update: RequestUpdate) -> None:
        try:
            output, stopped = self._outputs.take(update)
        except Exception as error:  # a fault of ours in one request's text is no reason to end the others
            logger.exception("the output of request %s failed", update.request_id)
            self._fail(update, str(error))
            return
        except BaseException:  # Ctrl-C: nobody knows how much of the update is in the output
            self._fail(update, "it was interrupted")
            raise
        for index in stopped:
            self._engine.finish_sample(update.request_id, index)
        if output is not None and update.has_output:
            self._news[output.request_id] = output

    def _fail(self, update: RequestUpdate, reason: str) -> None:
        self._engine.abort([update.request_id])
        output = self._outputs.fail(update.request_id, f"its output failed: {reason}"[:500])
        if output is not None:
            self._news[output.request_id] = output

    def _leave(self, request_ids: Collection[str]) -> None:
        """Nobody waits for these any more: end those that have not ended.

        Where the engine is at work, also in this thread (a stream may be collected as garbage at any time), that
        is left to its next step.
        """
        self._abandoned.extend(request_ids)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_abandoned()
            finally:
                self._lock.release()

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned.pop()
            self._engine.abort([request_id])
            self._outputs.drop(request_id)
            self._news.pop(request_id, None)


def _refused(request_id: str, wish: _Wish, error: RequestError) -> Output:
    text = wish.prompt if isinstance(wish.prompt, str) else None
    if wish.pooling is not None:
        return EmbeddingOutput(request_id, text, [], finished=True, error=str(error))
    samples = [CompletionOutput(i, finish_reason="error") for i in range(getattr(wish.params, "n", 1))]
    return RequestOutput(request_id, text, [], samples, finished=True, error=str(error))
