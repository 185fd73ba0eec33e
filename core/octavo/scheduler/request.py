"""A request and its samples, as the scheduler knows them."""

import logging
import time
from collections.abc import Collection, Mapping
from collections.abc import Sequence as TokenIds
from enum import Enum
from typing import Literal

from octavo.cache.manager import BlockChain, SwappedTable
from octavo.pooling_params import PoolingParams
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import Event, SampleUpdate, TokenLogprobs
from octavo.scheduler.ngrams import NgramIndex
from octavo.scheduler.pooling import Pool

__all__ = ["FinishReason", "Request", "RequestState", "Sequence"]

FinishReason = Literal["stop", "length", "abort", "error"]

logger = logging.getLogger(__name__)


class RequestState(Enum):
    """Where a request stands."""

    WAITING = "waiting"  # nothing on the device
    RUNNING = "running"
    SWAPPED = "swapped"  # waits with blocks on the host
    FINISHED = "finished"


class Sequence:
    """One of a request's n samples: its tokens, and how many of them are in the KV cache."""

    def __init__(self, seq_id: int, sample_index: int, prompt_token_ids: TokenIds[int], chain: BlockChain) -> None:
        self.seq_id = seq_id
        self.sample_index = sample_index
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed = 0
        self.num_once_computed = 0  # the most that num_computed has been
        self.chain = chain
        self.swapped: SwappedTable | None = None
        self.ngrams: NgramIndex | None = None  # once its next tokens were guessed
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None

    def resume(self, output_token_ids: TokenIds[int], is_finished: bool) -> None:
        """Begin with tokens that an engine before this one generated."""
        self.token_ids.extend(output_token_ids)
        if is_finished:
            self.finish_reason = "stop"

    @property
    def is_finished(self) -> bool:
        """Whether it has its finish reason."""
        return self.finish_reason is not None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Known tokens that are not in the KV cache yet."""
        return len(self.token_ids) - self.num_computed


class Request:
    """What a client sent: one prompt, n samples, one place in the queue.

    Attributes:
        request_id: the client's name for it, unique among live requests.
        arrival: counts requests; never changes, so that a preempted request keeps its turn.
        priority: lower goes first under the priority policy.
        tenant: who sent it, and for which of their users; shares are kept between them under the fair policy.
        turn: counts admissions under the fair policy; -1 before the first.
        eos_token_ids: the model's ids that end an output.
        max_output_tokens: max_tokens, cut to what the model's length and the KV blocks allow.
        known_outputs, known_finished: samples' tokens from an engine that died, and which samples had ended.
        runs_alone: whether its first step is its own, after all others that are there (it may be at fault).
        num_prompt_done: prompt tokens that were computed or found in the prefix cache, each counted once,
            whatever a preemption or the death of an engine threw away since.
        gained, gained_logprobs: what its samples have, and its prompt's log-probabilities, until the front is told.
        sequences, live: its samples, and those that go on; a new list whenever one ends.
        grammar: its structured output, compiled: held here, so that whoever samples finds it ready; or None.
        pool: what has been pooled, where an embedding is wanted (then max_tokens is 0 and n is 1); or None.

    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: TokenIds[int],
        params: SamplingParams,
        *,
        pooling: PoolingParams | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        tenant: tuple[str, str] = ("", ""),
        salt: bytes = b"",
        arrival_time: float | None = None,
        known_outputs: Mapping[int, TokenIds[int]] | None = None,
        known_finished: Collection[int] = (),
        num_prompt_logprobs: int = 0,
        num_prompt_done: int = 0,
        runs_alone: bool = False,
        grammar: object = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.params = params
        self.eos_token_ids = eos_token_ids
        ends_by_form = params.structured is not None and params.structured.within is None
        ignores_eos = params.ignore_eos and not ends_by_form
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if ignores_eos else eos_token_ids)
        self._eos = frozenset() if ignores_eos else eos_token_ids
        self.priority = priority
        self.tenant = tenant
        self.turn = -1
        self.salt = salt
        self.arrival = -1
        self.arrival_time = time.time() if arrival_time is None else arrival_time
        self.max_output_tokens = 0
        self.state = RequestState.WAITING
        self.sequences: list[Sequence] = []
        self.live: list[Sequence] = []
        self.pool = Pool(pooling, len(self.prompt_token_ids)) if pooling else None
        self.known_outputs = dict(known_outputs or {})
        self.known_finished = frozenset(known_finished)
        self.runs_alone = runs_alone
        self.grammar = grammar
        self.num_prompt_logprobs = num_prompt_logprobs  # positions scored so far
        self.num_prompt_done = num_prompt_done
        self.from_cache = False  # it goes on from blocks that may be others' work
        self.num_cached_tokens: int | None = None  # of the prompt, by prefix hits at the first admission
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_failed_steps = 0
        self.error: str | None = None
        self.error_param: str | None = None  # the field at fault for it
        self.events: list[Event] = []
        self.has_output = any(self.known_outputs.values())
        self.waits_for = ""  # why it could not be admitted when it was last the first of those that wait
        self.gained: list[SampleUpdate] = []
        self.gained_logprobs: list[TokenLogprobs] = []
        self._num_told = 0

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether rows are wanted that the prefix cache could serve, so that every one must be computed."""
        return self.params.prompt_logprobs is not None or (self.pool is not None and self.pool.needs_whole_prompt)

    @property
    def is_finished(self) -> bool:
        """Whether every sample has its finish reason."""
        return self.state is RequestState.FINISHED

    def cut(self, seq: Sequence, token_ids: list[int]) -> tuple[list[int], FinishReason | None, int | None]:
        """New tokens of a sample up to the one that ends it, why that one does, and the stop token id where it is one.

        min_tokens needs no look here: until then the sampler never draws a token that ends.
        """
        num_left = self.max_output_tokens - seq.num_output_tokens
        for place, token_id in enumerate(token_ids, 1):
            if token_id in self._ends:
                return token_ids[:place], "stop", None if token_id in self._eos else token_id
            if place >= num_left:
                return token_ids[:place], "length", None
        return token_ids, None, None

    def record(self, name: str, detail: str = "") -> None:
        """Add a line to the history."""
        self.events.append(Event(time.time(), name, detail))
        logger.debug("request %s: %s%s", self.request_id, name, f": {detail}" if detail else "")

    def take_events(self) -> tuple[Event, ...]:
        """The lines since the last call."""
        if len(self.events) == self._num_told:
            return ()
        new, self._num_told = tuple(self.events[self._num_told :]), len(self.events)
        return new

    def advance_prompt(self, position: int) -> int:
        """The prompt is in the KV cache up to `position`; how many of those tokens were never there before."""
        gained = max(min(position, self.num_prompt_tokens) - self.num_prompt_done, 0)
        self.num_prompt_done += gained
        return gained

    def end(self, reason: FinishReason | None = None) -> None:
        """It has ended, each sample for its own reason or the whole for one: a line in the history, one in the log."""
        self.state = RequestState.FINISHED
        reasons = reason or ", ".join(dict.fromkeys(seq.finish_reason or "" for seq in self.sequences))
        self.record("finished", reasons)
        logger.log(
            logging.INFO if self.error is None else logging.WARNING,
            "request %s ended: %s; %d prompt tokens, %d of them cached; %d generated; preempted %d times; %.3f s%s",
            self.request_id,
            reasons,
            self.num_prompt_tokens,
            self.num_cached_tokens or 0,
            sum(seq.num_output_tokens for seq in self.sequences),
            self.num_preemptions,
            time.time() - self.arrival_time,
            "" if self.error is None else f"; {self.error}",
        )
