"""What a chunk of a prompt gives besides keys and values: log-probabilities of its tokens, sums of hidden states."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from octavo.contract import Program, RowMode, StepOutput
from octavo.executor.batch import SequenceStore
from octavo.executor.held import HeldSequence
from octavo.executor.logprobs import from_logits, from_scores
from octavo.executor.step_rows import RowList, StepResult
from octavo.scheduler.messages import HiddenSum, ScheduledSequence, TokenLogprobs

__all__ = ["MAX_PROMPT_LOGITS", "PromptRows", "scores_prompts", "split_calls"]

MAX_PROMPT_LOGITS = 256  # rows of a whole vocabulary at once, where a program can score prompts no other way


def scores_prompts(program: Program) -> bool:
    """Whether log-probabilities of prompts come without rows of the whole vocabulary."""
    return {RowMode.SCORE, RowMode.TOPK} <= program.modes


def split_calls(
    scheduled: Sequence[ScheduledSequence], held: dict[int, HeldSequence]
) -> Iterator[list[ScheduledSequence]]:
    """A step in several program calls, none of which scores more prompt tokens than rows of logits may be asked for."""
    call: list[ScheduledSequence] = []
    room = MAX_PROMPT_LOGITS
    for piece in scheduled:
        scored = held[piece.seq_id].scored(piece.num_computed, piece.num_tokens)
        while len(scored) > room:
            cut = scored.start - 1 + room - piece.num_computed  # tokens of `room` scored rows and all before
            if cut > 0:
                head, piece = _split(piece, cut)
                call.append(head)
            yield call
            call, room = [], MAX_PROMPT_LOGITS
            scored = held[piece.seq_id].scored(piece.num_computed, piece.num_tokens)
        room -= len(scored)
        call.append(piece)
    if call:
        yield call


def _split(piece: ScheduledSequence, cut: int) -> tuple[ScheduledSequence, ScheduledSequence]:
    seq_id, start, num_tokens = piece.seq_id, piece.num_computed, piece.num_tokens
    rest = ScheduledSequence(seq_id, start + cut, num_tokens - cut, (), (), piece.sample_for, piece.draft_token_ids)
    return ScheduledSequence(seq_id, start, cut), rest


@dataclass
class _Scoring:
    held: HeldSequence
    targets: list[int]
    scores: slice  # places of scores, or of logits
    best: slice


@dataclass
class PromptRows:
    """The rows that the prompts of one program call ask for."""

    program: Program
    store: SequenceStore
    rows: RowList
    _scoring: list[_Scoring] = field(default_factory=list)
    _pooling: list[tuple[int, slice]] = field(default_factory=list)

    def ask(self, held: HeldSequence, piece: ScheduledSequence, offset: int) -> None:
        """Ask for what a piece, whose first token is token `offset` of the call, is to give."""
        scored = held.scored(piece.num_computed, piece.num_tokens)
        if scored:
            self._ask_scores(held, scored, offset - piece.num_computed)
        pooled = held.pooled(piece.num_computed, piece.num_tokens)
        if pooled:
            shift = offset - piece.num_computed
            index = range(pooled.start + shift, pooled.stop + shift)
            has_hidden = RowMode.HIDDEN in self.program.modes
            self._pooling.append((held.seq_id, self.rows.add(RowMode.HIDDEN, index) if has_hidden else slice(0)))

    def take(self, output: StepOutput, result: StepResult) -> None:
        """Read what the program gave."""
        for one in self._scoring:
            num_top = one.held.params.prompt_logprobs or 0
            try:
                found = self._scores(one, num_top, output)
            except ValueError as error:
                result.fail(one.held.seq_id, str(error))
            else:
                result.prompt_logprobs.setdefault(one.held.seq_id, []).extend(found)
        for seq_id, places in self._pooling:
            _take_hidden(seq_id, places, output, result)

    def _ask_scores(self, held: HeldSequence, scored: range, shift: int) -> None:
        index = range(
            scored.start + shift - 1, scored.stop + shift - 1
        )  # the row before a token gives its distribution
        targets = self.store.known(held.seq_id)[scored.start : scored.stop].tolist()
        if not scores_prompts(self.program):
            self._scoring.append(_Scoring(held, targets, self.rows.add(RowMode.LOGITS, index), slice(0)))
            return
        num_top = held.params.prompt_logprobs or 0
        scores = self.rows.add(RowMode.SCORE, index, targets)
        best = self.rows.add(RowMode.TOPK, index, k=num_top) if num_top else slice(0)
        self._scoring.append(_Scoring(held, targets, scores, best))

    def _scores(self, one: _Scoring, num_top: int, output: StepOutput) -> list[TokenLogprobs]:
        if scores_prompts(self.program):
            return _scored(one.targets, one.scores, one.best, num_top, output)
        assert output.logits is not None
        logits = output.logits[one.scores].numpy()
        return [from_logits(row, target, num_top) for row, target in zip(logits, one.targets, strict=True)]


def _take_hidden(seq_id: int, places: slice, output: StepOutput, result: StepResult) -> None:
    """The sum of a sequence's hidden states, in float64, so that chunks make no difference worth speaking of."""
    if output.hidden is None or places.stop == 0:
        result.fail(seq_id, "this platform's program of the model gives no hidden states to make embeddings of")
        return
    total = output.hidden[places].sum(0, dtype=torch.float64).numpy()
    if not np.isfinite(total).all():
        result.fail(seq_id, "the model gave hidden states that are not numbers")
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
