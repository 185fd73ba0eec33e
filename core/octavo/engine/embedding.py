"""The engine of encoders: whole prompts in turn, as many side by side as the token budget takes.

There is no KV cache, so nothing is chunked, preempted or found in a prefix cache; a step is one call of the model.
"""

import bisect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from octavo.config import EngineConfig
from octavo.contract import Platform
from octavo.engine.loop import EngineStats
from octavo.engine.settle import torch_dtype
from octavo.errors import ConfigError, RequestError
from octavo.model.encoder import Encoder, EncoderModel, load_encoder
from octavo.scheduler.messages import HiddenSum, RequestUpdate
from octavo.scheduler.policy import POLICIES
from octavo.scheduler.request import Request
from octavo.scheduler.stats import SchedulerStats

__all__ = ["EmbeddingEngine"]

logger = logging.getLogger(__name__)


def _ignore(phase: str) -> None:
    """Nobody wants to know."""


class EmbeddingEngine:
    """An encoder and the requests that wait for it. Single-threaded, as `EngineCore` is."""

    def __init__(self, config: EngineConfig, encoder: Encoder) -> None:
        assert config.scheduler.max_num_batched_tokens is not None, "settle the config first"
        assert config.model.max_model_len is not None, "settle the config first"
        self._encoder: Encoder | None = encoder
        self._policy = POLICIES[config.scheduler.scheduling_policy]
        self._max_model_len = config.model.max_model_len
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._max_num_tokens = config.scheduler.max_num_batched_tokens
        self._waiting: list[Request] = []  # in their turn
        self._arrived: list[Request] = []  # of them, those that the front has not heard of
        self._arrivals = itertools.count()
        self._counts = SchedulerStats()
        self._mark: Callable[[str], None] = _ignore

    @classmethod
    def create(
        cls, config: EngineConfig, description: EncoderModel, platform: Platform, *, progress: bool = False
    ) -> "EmbeddingEngine":
        """Load the encoder onto the platform's device.

        Raises:
            ConfigError: `deterministic` is set.
            ModelError: the weights are missing, broken, or do not fit the config.

        """
        if config.platform.deterministic:
            raise ConfigError(
                "deterministic is set, and an encoder's rows depend on their batch mates, to whose length they are "
                "filled up; unset deterministic"
            )
        if config.platform.num_threads is not None:
            platform.set_num_threads(config.platform.num_threads)
        encoder = load_encoder(
            description,
            dtype=torch_dtype(config.model.dtype),
            device=platform.device,
            progress=progress,
            seed_dummy=config.model.seed if config.model.load_format == "dummy" else None,
        )
        return cls(config, encoder)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._waiting)

    @property
    def stats(self) -> EngineStats:
        """The queue, and counts; there are no blocks."""
        counts = self._counts
        return EngineStats(0, len(self._waiting), 0, 0, 0, 0, replace(counts))

    def add_request(self, request: Request) -> None:
        """Queue a request for an embedding.

        Raises:
            RequestError: it can never be served.

        """
        assert request.pool is not None, "an encoder generates nothing"
        if request.num_prompt_tokens > self._max_model_len:
            raise RequestError(
                f"the prompt has {request.num_prompt_tokens} tokens and max_model_len is {self._max_model_len}; "
                "shorten the prompt or raise max_model_len",
                "prompt",
            )
        request.arrival = next(self._arrivals)
        request.record("queued", f"{len(self._waiting)} wait before it")
        bisect.insort(self._waiting, request, key=self._policy)
        self._arrived.append(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests."""
        gone = set(request_ids)
        for request in self._waiting:
            if request.request_id in gone:
                request.end("abort")
        self._drop_ended()

    def finish_sample(self, request_id: str, index: int) -> None:
        """Nothing: an embedding comes whole."""

    def reset_prefix_cache(self) -> None:
        """Nothing: there is none."""

    def close(self) -> None:
        """Let go of the weights."""
        self._encoder = None

    def on_progress(self, beat: Callable[[], None]) -> None:
        """Nothing: a step is one call of the model."""

    def on_phase(self, mark: Callable[[str], None] | None) -> None:
        """Call `mark` where a step enters a phase: schedule, program, update; None: no more."""
        self._mark = mark or _ignore

    def step(self, on_begin: Callable[[Sequence[str]], None] | None = None) -> list[RequestUpdate]:
        """Embed the prompts whose turn it is. A fault of the model ends the requests that cause it alone.

        `on_begin` is told the ids of the requests in the step, before they compute.
        """
        self._mark("schedule")
        batch = self._next_batch()
        for request in batch:
            request.record("admitted", f"{len(batch)} prompts side by side; an encoder has no prefix cache")
            self._counts.admitted(request, 0)
        if on_begin is not None:
            on_begin([request.request_id for request in batch])
        self._counts.num_steps += 1
        updates = list(self._embed(batch))
        self._drop_ended()  # only now: an interrupted step leaves them in the queue
        arrived, self._arrived = self._arrived, []
        waits = [request for request in arrived if not request.is_finished]
        return updates + [RequestUpdate(request.request_id, events=request.take_events()) for request in waits]

    def _drop_ended(self) -> None:
        self._waiting = [request for request in self._waiting if not request.is_finished]

    def _next_batch(self) -> list[Request]:
        """The first in turn, and those beside it that waste the least on being filled up to the longest."""
        head, *others = self._waiting[: self._max_num_seqs]
        batch, longest = [head], head.num_prompt_tokens
        for request in sorted(others, key=lambda other: abs(other.num_prompt_tokens - head.num_prompt_tokens)):
            longest = max(longest, request.num_prompt_tokens)
            if longest * (len(batch) + 1) > self._max_num_tokens:
                break
            batch.append(request)
        return batch

    def _embed(self, batch: Sequence[Request]) -> Iterator[RequestUpdate]:
        assert self._encoder is not None, "the engine is closed"
        self._mark("program")
        try:
            states = self._encoder.hidden([request.prompt_token_ids for request in batch])
        except Exception as error:
            logger.exception("an encoder failed with %d prompts", len(batch))
            self._counts.num_failed_steps += 1
            if len(batch) > 1:  # whoever is at fault fails alone
                for request in batch:
                    yield from self._embed([request])
                return
            yield self._end(batch[0], f"the model failed: {type(error).__name__}: {error}"[:500])
            return
        self._mark("update")
        for request, hidden in zip(batch, states, strict=True):
            yield self._take(request, hidden)

    def _take(self, request: Request, hidden: torch.Tensor) -> RequestUpdate:
        """Pool a prompt's hidden states [its tokens, H]."""
        assert request.pool is not None
        self._counts.embedded(request)
        request.record("chunk", f"{request.num_prompt_tokens} tokens, all of its prompt")
        at = request.pool.positions
        total = hidden[at.start : at.stop].sum(0, dtype=torch.float64)
        if not total.isfinite().all():
            return self._end(request, "the model gave hidden states that are not numbers")
        request.pool.add(HiddenSum(len(at), total.numpy()))
        return self._end(request, None)

    def _end(self, request: Request, error: str | None) -> RequestUpdate:
        request.error = error
        request.end("stop" if error is None else "error")
        return RequestUpdate(
            request.request_id,
            embedding=request.pool.embedding() if request.pool else None,
            error=error,
            is_finished=True,
            events=request.take_events(),
            num_prompt_done=request.num_prompt_done,
        )
