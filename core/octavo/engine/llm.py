"""Offline use: a model in this process, prompts in, outputs out."""

import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from octavo.config import EngineConfig
from octavo.engine.inputs import Inputs, Prompt, TokenizedPrompt, as_prompts
from octavo.engine.loop import EngineCore
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.engine.settle import settle
from octavo.engine.terminal import progress_wanted
from octavo.errors import RequestError
from octavo.executor.local import LocalExecutor
from octavo.hardware.choose import choose_platform
from octavo.hardware.registry import discover
from octavo.model.describe import describe_model
from octavo.model.files import resolve_model
from octavo.sampling_params import SamplingParams
from octavo.scheduler.request import Request
from octavo.text.tokenizer import load_tokenizer

__all__ = ["LLM"]

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


class LLM:
    """A model, ready to generate.

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
        registry = discover()
        platform_info = choose_platform(registry, given.platform.platform)
        files = resolve_model(given.model.model, progress=progress)
        description = describe_model(files, given.model.max_model_len)
        self.config = settle(given, description, platform_info.create(given.platform.device))
        self.description = description
        self.tokenizer = load_tokenizer(files.tokenizer)
        self.executor = LocalExecutor(
            self.config,
            description,
            platform_info,
            registry,
            vocab_size=self.tokenizer.vocab_size,
            progress=progress,
        )
        self._engine = EngineCore(self.config, self.executor)
        self._inputs = Inputs(self.tokenizer, description.spec.vocab_size, self.config.model.seed)
        self._outputs = OutputProcessor(self.tokenizer)
        self._request_ids = itertools.count()

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
        many = as_prompts(prompts)
        params = self._params_for(many, sampling_params)
        if priority is not None and len(priority) != len(many):
            raise RequestError(f"{len(many)} prompts and {len(priority)} priorities: give one for each", "priority")
        priorities = priority or [0] * len(many)
        ids = [str(next(self._request_ids)) for _ in many]
        done: dict[str, RequestOutput] = {}
        for request_id, prompt, one, rank in zip(ids, many, params, priorities, strict=True):
            try:
                self._add(request_id, self._inputs.tokenize(prompt), one, rank)
            except RequestError as error:
                done[request_id] = self._refused(request_id, prompt, one, error)
        wanted = progress_wanted() if use_tqdm is None else use_tqdm
        with tqdm(total=len(many), desc="Generating", unit="request", disable=not wanted) as bar:
            bar.update(len(done))
            for output in self._run(set(ids) - set(done)):
                if output.finished:
                    done[output.request_id] = output
                    bar.update()
        return [done[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, one or many, through the model's own chat template.

        Raises:
            RequestError: a conversation is empty or malformed, or the model has no chat template.

        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = [{"prompt_token_ids": self._chat_ids(one, tools, add_generation_prompt)} for one in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding the output as it grows; `outputs[i].delta` is the newest text.

        Leaving the loop early ends the request.
        """
        (one,) = as_prompts(prompt)
        params = sampling_params or self.default_sampling_params()
        request_id = str(next(self._request_ids))
        self._add(request_id, self._inputs.tokenize(one), params, 0)
        yield from self._run({request_id})

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one conversation, yielding the output as it grows."""
        yield from self.stream({"prompt_token_ids": self._chat_ids(messages, None, True)}, sampling_params)

    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config asks for."""
        return SamplingParams(**self.description.sampling_defaults)

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        self._engine.reset_prefix_cache()

    # Life

    def close(self) -> None:
        """Give the device's memory back. The object is of no use afterwards."""
        self.executor.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    def _params_for(
        self, prompts: Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            given = self.default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * len(prompts)
        if len(given) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts and {len(given)} sampling_params: give one for all or one for each",
                "sampling_params",
            )
        return list(given)

    def _chat_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
    ) -> list[int]:
        return list(self.tokenizer.encode_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt))

    def _add(self, request_id: str, prompt: TokenizedPrompt, params: SamplingParams, priority: int) -> None:
        completed = self._inputs.complete(params)
        request = Request(
            request_id,
            prompt.token_ids,
            completed,
            eos_token_ids=self.description.eos_token_ids,
            priority=priority,
        )
        self._engine.add_request(request)
        self._outputs.add(request_id, prompt, completed)

    def _run(self, request_ids: set[str]) -> Iterator[RequestOutput]:
        """Step until these requests have finished; whoever stops listening ends those that have not."""
        left = set(request_ids)
        try:
            while left:
                for update in self._engine.step():
                    output, stopped = self._outputs.take(update)
                    for index in stopped:
                        self._engine.finish_sample(update.request_id, index)
                    if output is None or output.request_id not in left:
                        continue
                    if output.finished:
                        left.remove(output.request_id)
                    yield output
        finally:
            if left:
                self._engine.abort(left)
                for request_id in left:
                    self._outputs.drop(request_id)

    def _refused(self, request_id: str, prompt: Prompt, params: SamplingParams, error: RequestError) -> RequestOutput:
        logger.warning("request %s refused: %s", request_id, error)
        text = prompt if isinstance(prompt, str) else None
        samples = [CompletionOutput(i, finish_reason="error") for i in range(getattr(params, "n", 1))]
        return RequestOutput(request_id, text, [], samples, finished=True, error=str(error))
