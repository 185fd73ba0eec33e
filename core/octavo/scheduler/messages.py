"""What the scheduler sends to an executor each step, and what comes back: plain messages, no shared objects.

A sequence is known to the executor by `seq_id`, unique for the engine's life. The executor keeps, for each
sequence it was told of, the token ids, the block table and the sampling state; the scheduler sends the whole
once and then changes only. Preemption and the end of a sequence both come as a removal; a sequence that
resumes comes as a new one, with the tokens it had.
"""

from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.sampling_params import SamplingParams

__all__ = [
    "Event",
    "HiddenSum",
    "ModelRunnerOutput",
    "NewSequence",
    "RequestUpdate",
    "SampleUpdate",
    "ScheduledSequence",
    "SchedulerOutput",
    "SequenceFailure",
    "TokenLogprobs",
]


@dataclass(frozen=True)
class NewSequence:
    """A sequence that the executor has not got: just admitted, forked, or resumed after a preemption.

    Attributes:
        seq_id: how later messages name it.
        sample_index: which of the request's n samples it is; with the seed it keys the random numbers.
        token_ids: prompt and whatever was generated before.
        num_prompt_tokens: how many of them are the prompt.
        params: of the request, with seed and the ids of bad words filled in.
        eos_token_ids: ids that min_tokens holds off and ignore_eos ignores.
        block_ids: the block table so far.
        prompt_logprobs_from: first prompt position whose log-probability is still wanted, or None.
        pooled: prompt positions whose hidden states are still to be summed up, for an embedding.

    """

    seq_id: int
    sample_index: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    eos_token_ids: frozenset[int]
    block_ids: list[int]
    prompt_logprobs_from: int | None = None
    pooled: range = range(0)


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """A sequence that computes in this step.

    Attributes:
        seq_id: the sequence.
        num_computed: tokens in the KV cache before the step.
        num_tokens: known tokens that this step computes: positions num_computed to num_computed + num_tokens - 1.
        new_block_ids: appended to its block table before the step.
        replaced_blocks: (index in the block table, new block id), copy-on-write.
        sample_for: sequences whose next token is drawn from the last known token's row: itself, with its forks at
            the end of a prompt of n > 1; empty while more known tokens remain to compute.
        draft_token_ids: guesses of what follows, computed behind the known tokens. While the token drawn from a row
            is the guess behind it, the guess's own row gives one more. Only where the sequence alone draws.

    """

    seq_id: int
    num_computed: int
    num_tokens: int
    new_block_ids: tuple[int, ...] = ()
    replaced_blocks: tuple[tuple[int, int], ...] = ()
    sample_for: tuple[int, ...] = ()
    draft_token_ids: tuple[int, ...] = ()


class SchedulerOutput(msgspec.Struct, frozen=True):
    """One step. The executor applies removals, then additions, then swap-outs, swap-ins, copies, then computes.

    Attributes:
        step: counts from 0.
        scheduled: who computes, in the order of the batch's rows.
        new: sequences to add; may include some that compute nothing in this step (forks).
        removed: seq_ids to forget.
        swap_out: (device block, host block).
        swap_in: (host block, device block).
        copies: (device block, device block).

    """

    step: int
    scheduled: tuple[ScheduledSequence, ...]
    new: tuple[NewSequence, ...] = ()
    removed: tuple[int, ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, guesses included."""
        return sum(s.num_tokens + len(s.draft_token_ids) for s in self.scheduled)


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one position, of the model's raw distribution.

    Attributes:
        token_id: the token that stands there.
        logprob: its natural-log probability.
        rank: its rank, 1 for the most likely.
        top_ids, top_logprobs: the most likely tokens, best first, the lower id of equals first.

    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class HiddenSum:
    """Final hidden states of some tokens, as one sum.

    Attributes:
        num_tokens: how many.
        total: [H] float64.

    """

    num_tokens: int
    total: npt.NDArray[np.float64]


@dataclass(frozen=True)
class SequenceFailure:
    """A sequence whose part of the step failed (NaN logits, a sampler's error); the others go on.

    Attributes:
        seq_id: the sequence.
        message: why.
        param: the field of its request that asks for what cannot be; None: the fault is not the request's.

    """

    seq_id: int
    message: str
    param: str | None = None


@dataclass(frozen=True)
class ModelRunnerOutput:
    """What a step gave.

    Attributes:
        token_ids: seq_id to its new tokens, for every sequence of a `sample_for`: one, and one more for each guess
            that was right.
        logprobs: seq_id to the log-probabilities of each new token, where asked for.
        prompt_logprobs: seq_id to those of the prompt positions whose targets this chunk scored, in order.
        hidden_sums: seq_id to the sum over those of its `pooled` positions that this chunk computed.
        failures: sequences that must end with an error.

    """

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    hidden_sums: dict[int, HiddenSum] = field(default_factory=dict)
    failures: tuple[SequenceFailure, ...] = ()


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One line of a request's history: seconds since the epoch, what happened, and why."""

    time: float
    name: str
    detail: str = ""


class SampleUpdate(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What one sample gained in a step.

    Attributes:
        index: which of the request's n samples.
        token_ids: new tokens.
        logprobs: one for each new token, where asked for.
        finish_reason: "stop", "length", "abort" or "error" once it has ended.
        stop_reason: the stop token id that ended it; None for an end-of-sequence id.

    """

    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | None = None


class RequestUpdate(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What one request gained in a step, or what happened to it; the front hears of nothing else.

    Attributes:
        request_id: the request.
        samples: those that gained something.
        prompt_logprobs: of further prompt positions, in order; position 0 has none and is not sent.
        embedding: H numbers, once they are complete, where the request asked for an embedding.
        num_cached_tokens: prompt tokens served by the prefix cache.
        error: why it failed, where a finish reason is "error".
        error_param: the field of the request that is at fault for it, if one is.
        is_finished: whether this is the last update.
        events: what happened to it since the last update.
        num_prompt_done: prompt tokens computed or taken from the prefix cache so far, once.

    """

    request_id: str
    samples: tuple[SampleUpdate, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: tuple[float, ...] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    is_finished: bool = False
    events: tuple[Event, ...] = ()
    num_prompt_done: int = 0
    error_param: str | None = None

    @property
    def has_output(self) -> bool:
        """Whether there is more to it than events."""
        return bool(self.samples or self.prompt_logprobs or self.is_finished or self.embedding or self.error)
