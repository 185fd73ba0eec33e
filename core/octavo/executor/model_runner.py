"""Runs steps: from the scheduler's message to tokens.

A step goes one way: sequences come and go, blocks move, the batch is built, the program computes, tokens are
chosen. When the program raises, what the step had told of sequences and blocks stays, and no token was taken
in; the scheduler removes the sequences or sends them anew.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from octavo.contract import AttentionBackend, KVCache, Program, RowMode, Rows, StepOutput
from octavo.errors import RequestError
from octavo.executor.batch import BatchBuilder, Piece, SequenceStore
from octavo.executor.logits import LogitsProcessor
from octavo.executor.logprobs import from_logits, from_scores
from octavo.executor.sampler import Draw, RowError, Sampler
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import (
    HiddenSum,
    ModelRunnerOutput,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
    SequenceFailure,
    TokenLogprobs,
)
from octavo.text.grammar import GrammarCompiler, GrammarState

__all__ = ["MAX_PROMPT_LOGITS", "KVGroupCaches", "ModelRunner", "RunnerLimits", "scores_prompts"]

MAX_PROMPT_LOGITS = 256  # rows of a whole vocabulary at once, where a program can score prompts no other way


@dataclass(frozen=True)
class KVGroupCaches:
    """The blocks of one KV group on the device and, for swapping, on the host, and who handles them."""

    backend: AttentionBackend
    device: KVCache
    host: KVCache | None = None


@dataclass(frozen=True)
class RunnerLimits:
    """Sizes that the runner's buffers follow.

    Attributes:
        vocab_size: ids from here on are never sampled: the tokenizer's size.
        num_logits: length of a row of logits; more than vocab_size where the head is padded.
        block_size: tokens a KV block.
        max_model_len: tokens of the longest sequence.
        max_num_seqs, max_num_batched_tokens: of a step.
        pinned_memory: whether host buffers may be pinned.
        poison: fill what was never written with garbage, so that a read of it shows (for tests).

    """

    vocab_size: int
    num_logits: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pinned_memory: bool = False
    poison: bool = False


@dataclass(frozen=True)
class _Sequence:
    """What sampling needs of a sequence; its tokens and blocks are in the store."""

    seq_id: int
    origin: NewSequence
    processor: LogitsProcessor | None
    fault: str | None = None  # why no token can be chosen


@dataclass(frozen=True)
class _Share:
    """One sequence's part of a program call: its piece, for whom the last row is, which prompt tokens it scores or
    gives the hidden states of.
    """

    piece: Piece
    sample_for: tuple[int, ...] = ()
    scored: range = range(0)  # prompt positions whose log-probability the piece gives
    pooled: range = range(0)  # prompt positions whose hidden states it sums up


def scores_prompts(program: Program) -> bool:
    """Whether log-probabilities of prompts come without rows of the whole vocabulary."""
    return {RowMode.SCORE, RowMode.TOPK} <= program.modes


class ModelRunner:
    """One program, its KV caches and the sequences whose keys and values lie there.

    Attributes:
        mark: told where a step enters a phase: "build", "program", "sample".

    """

    def __init__(
        self,
        program: Program,
        groups: Sequence[KVGroupCaches],
        limits: RunnerLimits,
        device: torch.device,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._program = program
        self._groups = groups
        self._limits = limits
        self._grammars = grammars
        self._store = SequenceStore(limits.max_num_seqs, limits.max_model_len, limits.block_size, limits.poison)
        self._builder = BatchBuilder(
            self._store,
            num_groups=len(groups),
            max_rows=limits.max_num_seqs,
            max_tokens=limits.max_num_batched_tokens,
            device=device,
            pinned=limits.pinned_memory,
            poison=limits.poison,
        )
        self._sampler = Sampler(limits.vocab_size)
        self._sequences: dict[int, _Sequence] = {}
        # A padded head's best logit may be none of the tokenizer's.
        self._picks_greedy = RowMode.GREEDY in program.modes and limits.vocab_size == limits.num_logits
        self._scores = scores_prompts(program)
        self.mark: Callable[[str], None] = _ignore

    @property
    def num_sequences(self) -> int:
        """Sequences that are held."""
        return len(self._sequences)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step.

        Raises:
            Exception: whatever the program or a backend raised; the sequences may be removed as usual.

        """
        self.mark("build")
        for seq_id in step.removed:
            self._sequences.pop(seq_id, None)
            self._store.remove(seq_id)
        for new in step.new:
            self._add(new)
        self._move_blocks(step)
        for scheduled in step.scheduled:
            self._store.append_blocks(scheduled.seq_id, scheduled.new_block_ids)
            self._store.replace_blocks(scheduled.seq_id, scheduled.replaced_blocks)
        result = _Result()
        for number, shares in enumerate(self._calls(step.scheduled)):
            if number:
                self.mark("build")
            self._compute(shares, result)
        return result.output()

    def _add(self, new: NewSequence) -> None:
        params, num_prompt = new.params, new.num_prompt_tokens
        self._store.add(new.seq_id, new.token_ids, new.block_ids)
        processor = fault = None
        if params.changes_logits:
            prompt, output = new.token_ids[:num_prompt], new.token_ids[num_prompt:]
            try:
                grammar = self._grammar_of(params, output)
            except RequestError as error:
                grammar, fault = None, str(error)
            processor = LogitsProcessor(params, new.eos_token_ids, prompt, output, self._limits.vocab_size, grammar)
        self._sequences[new.seq_id] = _Sequence(new.seq_id, new, processor, fault)

    def _grammar_of(self, params: SamplingParams, output_ids: Sequence[int]) -> GrammarState | None:
        if params.structured is None:
            return None
        if self._grammars is None:
            raise RequestError("this engine was made without a compiler of structured outputs", "structured")
        return self._grammars.compile(params.structured).begin(output_ids)

    def _move_blocks(self, step: SchedulerOutput) -> None:
        for group in self._groups:
            if step.swap_out or step.swap_in:
                if group.host is None:
                    raise ValueError("the step swaps blocks and there are none on the host; set swap_space")
                if step.swap_out:
                    group.backend.swap_blocks(group.device, group.host, step.swap_out)
                if step.swap_in:
                    group.backend.swap_blocks(group.host, group.device, step.swap_in)
            if step.copies:
                group.backend.copy_blocks(group.device, step.copies)

    # What is computed

    def _calls(self, scheduled: Sequence[ScheduledSequence]) -> Iterator[list[_Share]]:
        """The step's shares, in one program call; in several where prompts are scored from rows of logits."""
        call: list[_Share] = []
        room = MAX_PROMPT_LOGITS
        for one in scheduled:
            share = self._share(one)
            while not self._scores and len(share.scored) > room:
                head, share = _split(share, room)
                if head is not None:
                    call.append(head)
                yield call
                call, room = [], MAX_PROMPT_LOGITS
            room -= len(share.scored)
            call.append(share)
        if call:
            yield call

    def _share(self, one: ScheduledSequence) -> _Share:
        origin = self._sequences[one.seq_id].origin
        end = one.num_computed + one.num_tokens
        scored = range(0)
        if origin.prompt_logprobs_from is not None:
            # Position p gives the distribution of token p + 1; the first prompt token has none.
            first = max(origin.prompt_logprobs_from, one.num_computed + 1)
            scored = range(first, max(first, min(end + 1, origin.num_prompt_tokens)))
        first = max(origin.pooled.start, one.num_computed)
        pooled = range(first, max(first, min(end, origin.pooled.stop)))
        return _Share(Piece(one.seq_id, one.num_computed, one.num_tokens), one.sample_for, scored, pooled)

    def _compute(self, shares: Sequence[_Share], result: "_Result") -> None:
        batch = self._builder.build([share.piece for share in shares])
        rows = _RowList()
        scoring: list[tuple[_Share, slice, slice]] = []
        choosing: list[tuple[_Share, RowMode, int]] = []
        pooling: list[tuple[int, slice]] = []
        offset = 0
        for share in shares:
            if share.scored:
                scoring.append((share, *self._ask_scores(rows, share, offset)))
            if share.pooled:
                shift = offset - share.piece.start
                index = range(share.pooled.start + shift, share.pooled.stop + shift)
                pooling.append((share.piece.seq_id, self._ask_hidden(rows, index)))
            offset += share.piece.num_tokens
            if share.sample_for:
                mode = self._sample_mode(share)
                choosing.append((share, mode, rows.add(mode, (offset - 1,)).start))
        self.mark("program")
        output = self._program.submit(batch, rows.rows()).result()
        self.mark("sample")
        for share, first, second in scoring:
            self._take_scores(share, first, second, output, result)
        for seq_id, places in pooling:
            _take_hidden(seq_id, places, output, result)
        self._take_tokens(choosing, output, result)

    def _ask_hidden(self, rows: "_RowList", index: range) -> slice:
        """Request hidden states; returns their places, none where the program has not got them."""
        return rows.add(RowMode.HIDDEN, index) if RowMode.HIDDEN in self._program.modes else slice(0)

    # Log-probabilities of the prompt

    def _ask_scores(self, rows: "_RowList", share: _Share, offset: int) -> tuple[slice, slice]:
        """Request the rows that score `share`; returns their places: of scores (or logits), and of the best."""
        shift = offset - share.piece.start - 1  # the row before a token gives its distribution
        index = range(share.scored.start + shift, share.scored.stop + shift)
        if not self._scores:
            return rows.add(RowMode.LOGITS, index), slice(0)
        targets = self._targets(share)
        scores = rows.add(RowMode.SCORE, index, targets)
        num_top = self._sequences[share.piece.seq_id].origin.params.prompt_logprobs or 0
        return scores, rows.add(RowMode.TOPK, index, k=num_top) if num_top else slice(0)

    def _targets(self, share: _Share) -> list[int]:
        """The prompt tokens that a share scores."""
        known = self._store.known(share.piece.seq_id)
        return [int(token) for token in known[share.scored.start : share.scored.stop]]

    def _take_scores(self, share: _Share, first: slice, second: slice, output: StepOutput, result: "_Result") -> None:
        seq_id = share.piece.seq_id
        num_top = self._sequences[seq_id].origin.params.prompt_logprobs or 0
        targets = self._targets(share)
        try:
            if self._scores:
                found = _scored(targets, first, second, num_top, output)
            else:
                assert output.logits is not None
                logits = output.logits[first].numpy()
                found = [from_logits(row, target, num_top) for row, target in zip(logits, targets, strict=True)]
        except ValueError as error:
            result.failures[seq_id] = str(error)
        else:
            result.prompt_logprobs.setdefault(seq_id, []).extend(found)

    # Tokens

    def _sample_mode(self, share: _Share) -> RowMode:
        params = self._sequences[share.piece.seq_id].origin.params
        plain = params.greedy and not params.changes_logits and params.logprobs is None
        return RowMode.GREEDY if plain and self._picks_greedy else RowMode.LOGITS

    def _take_tokens(
        self, choosing: Sequence[tuple[_Share, RowMode, int]], output: StepOutput, result: "_Result"
    ) -> None:
        draws: list[tuple[_Sequence, Draw]] = []
        for share, mode, place in choosing:
            for seq_id in share.sample_for:
                sequence = self._sequences[seq_id]
                if sequence.fault is not None:
                    result.failures[seq_id] = sequence.fault
                elif mode is RowMode.GREEDY:
                    assert output.greedy_ids is not None
                    self._take(sequence, int(output.greedy_ids[place]), None, result)
                else:
                    assert output.logits is not None
                    draws.append((sequence, self._draw(sequence, output.logits[place].numpy())))
        for (sequence, draw), token_id in zip(draws, self._sampler.sample([d for _, d in draws]), strict=True):
            self._take(sequence, token_id, draw, result)

    def _draw(self, sequence: _Sequence, logits: npt.NDArray[np.float32]) -> Draw:
        origin = sequence.origin
        num_output = len(self._store.known(sequence.seq_id)) - origin.num_prompt_tokens
        return Draw(logits, origin.params, origin.sample_index, num_output, sequence.processor)

    def _take(self, sequence: _Sequence, token_id: int | RowError, draw: Draw | None, result: "_Result") -> None:
        seq_id = sequence.seq_id
        if isinstance(token_id, RowError):
            result.failures[seq_id] = str(token_id)
            return
        if token_id < 0:
            result.failures[seq_id] = "the model gave logits that are not numbers"
            return
        num_top = sequence.origin.params.logprobs
        if draw is not None and num_top is not None:
            try:
                result.logprobs[seq_id] = [from_logits(draw.logits, token_id, num_top)]
            except ValueError as error:
                result.failures[seq_id] = str(error)
                return
        result.token_ids[seq_id] = [token_id]
        self._store.append_tokens(seq_id, (token_id,))
        if sequence.processor is not None:
            sequence.processor.append(token_id)


@dataclass
class _Result:
    """What the step has given so far."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    hidden_sums: dict[int, HiddenSum] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def output(self) -> ModelRunnerOutput:
        failures = tuple(SequenceFailure(seq_id, message) for seq_id, message in self.failures.items())
        return ModelRunnerOutput(self.token_ids, self.logprobs, self.prompt_logprobs, self.hidden_sums, failures)


class _RowList:
    """The rows of a step as they are asked for; knows where each will stand in its mode's output."""

    def __init__(self) -> None:
        self._index: list[int] = []
        self._mode: list[int] = []
        self._target: list[int] = []
        self._counts: dict[RowMode, int] = {}
        self._k = 0

    def add(self, mode: RowMode, index: Sequence[int], targets: Sequence[int] | None = None, k: int = 0) -> slice:
        """Ask `mode` of tokens `index`; returns their places among the entries of that mode."""
        start, num = self._counts.get(mode, 0), len(index)
        self._counts[mode] = start + num
        self._index.extend(index)
        self._mode.extend([mode] * num)
        self._target.extend([0] * num if targets is None else targets)
        self._k = max(self._k, k)
        return slice(start, start + num)

    def rows(self) -> Rows:
        """All of them."""
        index, target = np.asarray(self._index, np.int64), np.asarray(self._target, np.int64)
        return Rows(index, np.asarray(self._mode, np.uint8), self._k, target)


def _ignore(phase: str) -> None:
    """Nobody wants to know."""


def _take_hidden(seq_id: int, places: slice, output: StepOutput, result: _Result) -> None:
    """The sum of a sequence's hidden states, in float64, so that chunks make no difference worth speaking of."""
    if output.hidden is None or places.stop == 0:
        result.failures[seq_id] = "this platform's program of the model gives no hidden states to make embeddings of"
        return
    total = output.hidden[places].sum(0, dtype=torch.float64).numpy()
    if not np.isfinite(total).all():
        result.failures[seq_id] = "the model gave hidden states that are not numbers"
        return
    result.hidden_sums[seq_id] = HiddenSum(places.stop - places.start, total)


def _scored(
    targets: Sequence[int], scores: slice, best: slice, num_top: int, output: StepOutput
) -> list[TokenLogprobs]:
    assert output.target_logprobs is not None and output.target_ranks is not None
    logprobs, ranks = output.target_logprobs[scores].tolist(), output.target_ranks[scores].tolist()
    top_ids: npt.NDArray[np.int64] = np.zeros((len(targets), 0), np.int64)
    top_logprobs: npt.NDArray[np.float32] = np.zeros((len(targets), 0), np.float32)
    if num_top:
        assert output.topk_ids is not None and output.topk_logprobs is not None
        top_ids, top_logprobs = output.topk_ids[best], output.topk_logprobs[best]
    columns = zip(targets, logprobs, ranks, top_ids, top_logprobs, strict=True)
    return [from_scores(*column, num_top) for column in columns]


def _split(share: _Share, room: int) -> tuple[_Share | None, _Share]:
    """Cut a share before the first token whose row would be one of logits too many; the head is None if empty."""
    piece, scored = share.piece, share.scored
    cut = scored.start - 1 + room - piece.start  # tokens of the head: those of `room` scored rows and all before
    if cut <= 0:
        return None, share
    head = _Share(Piece(piece.seq_id, piece.start, cut), (), scored[:room])
    rest = Piece(piece.seq_id, piece.start + cut, piece.num_tokens - cut)
    return head, _Share(rest, share.sample_for, scored[room:])  # nothing that is scored is pooled
