"""An executor in plain Python over a paged store of tokens: what the scheduler says is all that it knows.

A sequence's next token is a hash of its own ids, its sample index and its seed, read back through the block
table; a read of anything but the sequence's own tokens at their positions is an error.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import ModelRunnerOutput, NewSequence, ScheduledSequence, SchedulerOutput

__all__ = ["PagedExecutor", "StepError", "expected_tokens", "next_token"]

VOCABULARY = 50

Slot = tuple[int, int] | None  # token id and position


class StepError(RuntimeError):
    """A step that was told to fail."""


def next_token(token_ids: Sequence[int], sample_index: int, seed: int | None, memory: int = 0) -> int:
    """The token that must follow: by all ids, or by the last `memory` of them, which makes texts that repeat."""
    text = f"{list(token_ids[-memory:])} {sample_index} {seed}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest()) % VOCABULARY


def expected_tokens(
    prompt: Sequence[int],
    params: SamplingParams,
    index: int,
    limit: int,
    eos: frozenset[int] = frozenset(),
    memory: int = 0,
) -> list[int]:
    """What sample `index` must give alone: up to `limit` tokens, or the first that ends it."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        ids.append(next_token(ids, index, params.seed, memory))
        if (ids[-1] in eos and not params.ignore_eos) or ids[-1] in params.stop_token_ids:
            break
    return ids[len(prompt) :]


@dataclass
class _State:
    told: NewSequence
    token_ids: list[int]
    table: list[int]


@dataclass
class PagedExecutor:
    """Runs scheduler outputs.

    `memory`: see `next_token`. `fail_on`: a step that computes a sequence whose prompt begins so raises;
    `fail_next`: so does the next one.
    """

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    fail_on: int | None = None
    fail_next: bool = False
    memory: int = 0
    num_steps: int = 0
    max_rows: int = 0
    num_drafts: int = 0
    sequences: dict[int, _State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device: list[list[Slot]] = [[None] * self.block_size for _ in range(self.num_blocks)]
        self.host: list[list[Slot]] = [[None] * self.block_size for _ in range(self.num_host_blocks)]

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Apply one step in the order that the messages promise."""
        self.num_steps += 1
        self.max_rows = max(self.max_rows, len(step.scheduled))
        for seq_id in step.removed:
            self.sequences.pop(seq_id, None)
        for new in step.new:
            assert new.seq_id not in self.sequences, f"sequence {new.seq_id} is introduced twice"
            self.sequences[new.seq_id] = _State(new, list(new.token_ids), list(new.block_ids))
        if step.scheduled and self.fail_next:
            raise StepError("asked to fail once")
        if any(self.sequences[s.seq_id].token_ids[0] == self.fail_on for s in step.scheduled):
            raise StepError("asked to fail")
        for device, host in step.swap_out:
            self.host[host] = list(self.device[device])
        for host, device in step.swap_in:
            self.device[device] = list(self.host[host])
        targets = [target for _, target in step.copies]
        assert not set(targets) & {source for source, _ in step.copies}
        for source, target in step.copies:
            self.device[target] = list(self.device[source])
        for scheduled in step.scheduled:
            self._write(scheduled)
        tokens: dict[int, list[int]] = {}
        for scheduled in step.scheduled:
            ids, drafts = self._read(scheduled), scheduled.draft_token_ids
            assert not drafts or scheduled.sample_for == (scheduled.seq_id,)
            self.num_drafts += len(drafts)
            for seq_id in scheduled.sample_for:
                sample = self.sequences[seq_id]
                known = ids[: len(ids) - len(drafts)]
                assert known == sample.token_ids, "a token is drawn before all known ones are computed"
                tokens[seq_id] = drawn = []
                for guess in (*drafts, None):
                    told = sample.told
                    drawn.append(next_token([*known, *drawn], told.sample_index, told.params.seed, self.memory))
                    if drawn[-1] != guess:
                        break
        for seq_id, drawn in tokens.items():
            self.sequences[seq_id].token_ids.extend(drawn)
        return ModelRunnerOutput(tokens)

    def _write(self, scheduled: ScheduledSequence) -> None:
        state = self.sequences[scheduled.seq_id]
        for index, block in scheduled.replaced_blocks:
            state.table[index] = block
        state.table.extend(scheduled.new_block_ids)
        assert scheduled.num_tokens > 0
        for position, token_id in enumerate(self._ids(scheduled)):
            if position >= scheduled.num_computed:
                block = state.table[position // self.block_size]
                self.device[block][position % self.block_size] = (token_id, position)

    def _ids(self, scheduled: ScheduledSequence) -> list[int]:
        """The sequence's ids up to the end of what the step computes, guesses included."""
        known = self.sequences[scheduled.seq_id].token_ids[: scheduled.num_computed + scheduled.num_tokens]
        return [*known, *scheduled.draft_token_ids]

    def _read(self, scheduled: ScheduledSequence) -> list[int]:
        """The ids in the cache, read after all writes of the step: a write into a shared block shows."""
        table, ids = self.sequences[scheduled.seq_id].table, self._ids(scheduled)
        for position, token_id in enumerate(ids):
            slot = self.device[table[position // self.block_size]][position % self.block_size]
            assert slot == (token_id, position), f"position {position} holds {slot}"
        return ids
