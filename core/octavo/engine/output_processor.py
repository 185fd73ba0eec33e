"""The front's half of a request: tokens become text, stop strings end it, outputs are put together."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from octavo.engine.inputs import TokenizedPrompt
from octavo.engine.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestMetrics, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import RequestUpdate, SampleUpdate, TokenLogprobs
from octavo.text.detokenizer import Detokenizer
from octavo.text.stop import StopChecker
from octavo.text.tokenizer import Tokenizer

__all__ = ["Output", "OutputProcessor"]

Output: TypeAlias = RequestOutput | EmbeddingOutput


class _Sample:
    """Text state of one sample. It never leaves the front."""

    def __init__(self, index: int, prompt: TokenizedPrompt, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.output = CompletionOutput(index)
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt.token_ids, skip_special_tokens=params.skip_special_tokens)
        self._stops: StopChecker | None = None
        if params.stop:
            self._stops = StopChecker(
                params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

    def take(self, update: SampleUpdate) -> bool:
        """Add what a step gave; returns whether a stop string ended the sample before the engine did."""
        output, token_ids, reason = self.output, update.token_ids, update.finish_reason
        if output.finish_reason is not None:
            return False
        shown = token_ids
        if not self._params.detokenize:
            shown = ()
        elif reason == "stop" and not self._params.include_stop_str_in_output:
            shown = token_ids[:-1]
        if self._stops is None:
            output.token_ids += token_ids
            for logprobs in update.logprobs:
                self._take_logprobs(logprobs)
            if shown:
                output.text += self._detokenizer.add(shown)
        else:
            for i, token_id in enumerate(token_ids):
                output.token_ids.append(token_id)
                if update.logprobs:
                    self._take_logprobs(update.logprobs[i])
                if i < len(shown) and self._is_stopped(self._detokenizer.add((token_id,))):
                    return reason is None
        if reason is not None:
            self._finish(reason, update.stop_reason)
        return False

    def _is_stopped(self, text: str, num_tokens: int = 1) -> bool:
        """Show what no stop string can take back of a text; whether one ended the sample."""
        assert self._stops is not None
        result = self._stops.add(text, num_tokens)
        output = self.output
        output.text += result.text
        if result.stop is not None:
            output.finish_reason, output.stop_reason = "stop", result.stop
        return result.stop is not None

    def _finish(self, reason: str, stop_reason: int | None) -> None:
        output = self.output
        output.finish_reason, output.stop_reason = reason, stop_reason
        if not self._params.detokenize:
            return
        rest = self._detokenizer.flush()
        if self._stops is None:
            output.text += rest
        elif not self._is_stopped(rest, num_tokens=0):
            output.text += self._stops.finish()

    def _take_logprobs(self, logprobs: TokenLogprobs) -> None:
        output = self.output
        assert output.logprobs is not None
        assert output.cumulative_logprob is not None
        output.logprobs.append(_alternatives(logprobs, self._tokenizer))
        output.cumulative_logprob += logprobs.logprob


@dataclass
class _FrontRequest:
    samples: list[_Sample]
    output: RequestOutput
    metrics: RequestMetrics

    def note(self, update: RequestUpdate) -> None:
        """Keep the times that callers ask for."""
        metrics = self.metrics
        for event in update.events:
            if event.name == "admitted" and metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = event.time
        if update.samples:
            metrics.last_token_time = now = time.time()
            if metrics.first_token_time is None:
                metrics.first_token_time = now
        if update.is_finished:
            metrics.finished_time = time.time()


class OutputProcessor:
    """Text state of every live request, and their outputs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _FrontRequest] = {}
        self._embeddings: dict[str, EmbeddingOutput] = {}

    def __len__(self) -> int:
        return len(self._requests) + len(self._embeddings)

    def add(self, request_id: str, prompt: TokenizedPrompt, params: SamplingParams) -> None:
        """Begin a request."""
        samples = [_Sample(i, prompt, params, self._tokenizer) for i in range(params.n)]
        output = RequestOutput(request_id, prompt.text, prompt.token_ids, [sample.output for sample in samples])
        output.metrics = metrics = RequestMetrics(time.time())
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        self._requests[request_id] = _FrontRequest(samples, output, metrics)

    def add_embedding(self, request_id: str, prompt: TokenizedPrompt) -> None:
        """Begin a request for an embedding."""
        self._embeddings[request_id] = EmbeddingOutput(request_id, prompt.text, prompt.token_ids)

    def drop(self, request_id: str) -> None:
        """Forget a request whose caller left."""
        self._requests.pop(request_id, None)
        self._embeddings.pop(request_id, None)

    def take(self, update: RequestUpdate) -> tuple[Output | None, list[int]]:
        """The request's output after an update, and the samples that a stop string ended.

        The output is the same object each time. None: the request is not known any more.
        """
        request = self._requests.get(update.request_id)
        if request is None:
            return self._take_embedding(update), []
        output = request.output
        output.num_cached_tokens = update.num_cached_tokens
        output.error = update.error
        request.note(update)
        if output.prompt_logprobs is not None:
            output.prompt_logprobs.extend(_alternatives(lp, self._tokenizer) for lp in update.prompt_logprobs)
        stopped, has_ended = [], update.is_finished
        for change in update.samples:
            sample = request.samples[change.index]
            if sample.take(change):
                stopped.append(change.index)
            has_ended = has_ended or sample.output.finish_reason is not None
        if has_ended:
            output.finished = all(sample.output.finish_reason is not None for sample in request.samples)
            if output.finished:
                del self._requests[update.request_id]
        return output, stopped

    def _take_embedding(self, update: RequestUpdate) -> EmbeddingOutput | None:
        output = self._embeddings.get(update.request_id)
        if output is None:
            return None
        output.num_cached_tokens, output.error = update.num_cached_tokens, update.error
        if update.is_finished:
            del self._embeddings[update.request_id]
            output.finished = True
            if update.embedding is not None and update.error is None:
                output.embedding = list(update.embedding)
            elif update.error is None:
                output.error = "it was ended before all of the prompt was computed"
        return output

    def fail(self, request_id: str, message: str) -> Output | None:
        """End a request whose update could not be taken. None: it is not known any more."""
        embedding = self._embeddings.pop(request_id, None)
        if embedding is not None:
            embedding.error, embedding.finished = message, True
            return embedding
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        for sample in request.samples:
            sample.output.finish_reason = sample.output.finish_reason or "error"
        request.output.error, request.output.finished = message, True
        return request.output


def _alternatives(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> Mapping[int, Logprob]:
    found = {
        token_id: Logprob(logprob, rank, tokenizer.token_text(token_id))
        for rank, (token_id, logprob) in enumerate(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True), start=1)
    }
    if logprobs.token_id not in found:
        chosen = Logprob(logprobs.logprob, logprobs.rank, tokenizer.token_text(logprobs.token_id))
        found[logprobs.token_id] = chosen
    return found
