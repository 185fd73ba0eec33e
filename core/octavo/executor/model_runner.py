"""Runs steps: from the scheduler's message to tokens.

A step goes one way: sequences come and go, blocks move, the batch is built, the program computes, tokens are
chosen. When the program raises, what the step had told of sequences and blocks stays, and no token was taken
in; the scheduler removes the sequences or sends them anew.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from octavo.contract import AttentionBackend, KVCache, Program, RowMode, Sample, reference
from octavo.executor.batch import BatchBuilder, SequenceStore
from octavo.executor.choosing import Choosing
from octavo.executor.held import HeldSequence
from octavo.executor.prompts import PromptRows, scores_prompts, split_calls
from octavo.executor.sampler import Sampler
from octavo.executor.step_rows import RowList, StepResult
from octavo.scheduler.messages import ModelRunnerOutput, ScheduledSequence, SchedulerOutput
from octavo.text.grammar import GrammarCompiler

__all__ = ["KVGroupCaches", "ModelRunner", "RunnerLimits"]


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
        sample: Callable[[Sample], torch.Tensor] = reference.sample,
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
        self._sampler = Sampler(limits.vocab_size, sample)
        self._sequences: dict[int, HeldSequence] = {}
        self._asking: set[int] = set()  # sequences whose prompts are scored or pooled
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
            self._asking.discard(seq_id)
            self._store.remove(seq_id)
        for new in step.new:
            self._store.add(new.seq_id, new.token_ids, new.block_ids)
            held = HeldSequence(new, self._limits.vocab_size, picks_greedy=self._picks_greedy, grammars=self._grammars)
            self._sequences[new.seq_id] = held
            if held.asks_of_prompt:
                self._asking.add(new.seq_id)
        self._move_blocks(step)
        for piece in step.scheduled:
            if piece.new_block_ids:
                self._store.append_blocks(piece.seq_id, piece.new_block_ids)
            if piece.replaced_blocks:
                self._store.replace_blocks(piece.seq_id, piece.replaced_blocks)
            if piece.draft_token_ids:
                self._store.guess_tokens(piece.seq_id, piece.draft_token_ids)
        result = StepResult()
        for number, pieces in enumerate(self._calls(step.scheduled)):
            if number:
                self.mark("build")
            self._compute(pieces, result)
        return result.output()

    def _move_blocks(self, step: SchedulerOutput) -> None:
        if not (step.swap_out or step.swap_in or step.copies):
            return
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

    def _calls(self, scheduled: Sequence[ScheduledSequence]) -> Iterable[Sequence[ScheduledSequence]]:
        """The step in one program call; in several where prompts are scored from rows of logits."""
        if self._asking and not self._scores:
            return split_calls(scheduled, self._sequences)
        return (scheduled,) if scheduled else ()

    def _compute(self, pieces: Sequence[ScheduledSequence], result: StepResult) -> None:
        batch = self._builder.build(pieces)
        sequences, rows = self._sequences, RowList()
        prompts = PromptRows(self._program, self._store, rows)
        choosing = Choosing(self._store, self._sampler, rows)
        offset = 0
        for piece in pieces:
            if piece.seq_id in self._asking:
                prompts.ask(sequences[piece.seq_id], piece, offset)
            offset += piece.num_tokens
            if piece.sample_for:
                choosing.ask(piece, [sequences[seq_id] for seq_id in piece.sample_for], offset - 1)
                offset += len(piece.draft_token_ids)
        self.mark("program")
        output = self._program.submit(batch, rows.rows()).result()
        self.mark("sample")
        prompts.take(output, result)
        choosing.take(output, result)


def _ignore(phase: str) -> None:
    """Nobody wants to know."""
