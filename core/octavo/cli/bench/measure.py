"""Running a workload, and what a run comes to: rates, latencies, and how the KV blocks were used."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from octavo.cli.bench.recorder import Recorder, Step
from octavo.cli.bench.workload import WorkRequest
from octavo.engine.llm import LLM
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams

__all__ = ["BATCHINGS", "Batching", "BlockUse", "Run", "block_use", "percentiles", "run_workload", "touched_blocks"]

Batching = Literal["padded", "static", "continuous"]
BATCHINGS: tuple[Batching, ...] = get_args(Batching)

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Run:
    """One repeat. All requests are there at `begin`; times are seconds of `time.perf_counter`.

    Attributes:
        begin, end: of the whole.
        steps: in order.
        first_token_seconds: for each request, from `begin`.
        gap_seconds: between a request's tokens, of all requests.
        num_input_tokens, num_cached_tokens: of all prompts; those that the prefix cache served.
        num_output_tokens: that were asked for; a padded batch computes more.
        num_preemptions: requests that had to make room.

    """

    begin: float
    end: float
    steps: list[Step]
    first_token_seconds: list[float]
    gap_seconds: list[float]
    num_requests: int
    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int

    @property
    def seconds(self) -> float:
        """From the first request's arrival to the last one's end."""
        return self.end - self.begin

    @property
    def step_seconds(self) -> float:
        """In the executor; the rest is scheduling and text."""
        return sum(step.seconds for step in self.steps)

    @property
    def first_step_with_token(self) -> int:
        """Number of steps up to the one that gave the first token, that one included."""
        return 1 + next(i for i, step in enumerate(self.steps) if step.num_new_tokens)


def run_workload(
    llm: LLM,
    recorder: Recorder,
    requests: Sequence[WorkRequest],
    params: SamplingParams,
    batching: Batching,
    max_num_seqs: int,
) -> Run:
    """Serve the requests once.

    `continuous` hands all of them to the engine. `static` serves them in groups of `max_num_seqs`, the next group
    once the last request of the one before has ended. `padded` does that as a fixed tensor would: every prompt of a
    group as long as its longest, every row computed until the longest output is done.

    Raises:
        RequestError: a request failed.

    """
    size = len(requests) if batching == "continuous" else max_num_seqs
    groups = [requests[i : i + size] for i in range(0, len(requests), size)]
    if batching == "padded":
        groups = [_padded(group) for group in groups]
    recorder.take()
    before = llm.stats.counts
    begin = time.perf_counter()
    for number, group in enumerate(groups):
        prompts = [{"prompt_token_ids": request.token_ids} for request in group]
        wanted = [_asking(params, request, number * size + i) for i, request in enumerate(group)]
        outputs = llm.generate(prompts, wanted, use_tqdm=False)
        for output in outputs:
            if output.error is not None:
                raise RequestError(f"a request of the benchmark failed: {output.error}")
    end = time.perf_counter()
    after, steps = llm.stats.counts, recorder.take()
    first, gaps = _latencies(steps, begin)
    return Run(
        begin,
        end,
        steps,
        first,
        gaps,
        num_requests=len(requests),
        num_input_tokens=sum(len(request.token_ids) for request in requests),
        num_cached_tokens=after.num_cached_prompt_tokens - before.num_cached_prompt_tokens,
        num_output_tokens=sum(request.num_output_tokens for request in requests),
        num_preemptions=after.num_preemptions - before.num_preemptions,
    )


def _asking(params: SamplingParams, request: WorkRequest, number: int) -> SamplingParams:
    seed = None if params.temperature == 0 else number
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        seed=seed,
        max_tokens=request.num_output_tokens,
        ignore_eos=True,
    )


def _padded(group: Sequence[WorkRequest]) -> list[WorkRequest]:
    """Prompts of one length, by repeating their own ids in front; outputs of one length."""
    longest = max(len(request.token_ids) for request in group)
    num_out = max(request.num_output_tokens for request in group)
    return [
        WorkRequest((request.token_ids * (longest // len(request.token_ids) + 1))[-longest:], num_out)
        for request in group
    ]


def _latencies(steps: Iterable[Step], begin: float) -> tuple[list[float], list[float]]:
    last: dict[int, float] = {}
    first: list[float] = []
    gaps: list[float] = []
    for step in steps:
        for seq_id, count in step.num_new_tokens.items():
            if seq_id in last:
                gaps.append(step.end - last[seq_id])
            else:
                first.append(step.end - begin)
            gaps.extend([0.0] * (count - 1))  # tokens that came with another, by speculation
            last[seq_id] = step.end
    return first, gaps


def percentiles(values: Sequence[float], at: Sequence[int] = PERCENTILES) -> dict[str, float]:
    """p50, p90 and p99; nothing of nothing."""
    return {f"p{q}": float(np.percentile(values, q)) for q in at} if values else {}


@dataclass(frozen=True)
class BlockUse:
    """KV blocks over a run, summed over its steps.

    Attributes:
        num_used: blocks that sequences held.
        num_empty: of them, those without a token in them: allocated and unused.
        num_empty_slots, num_slots: places for a token in the blocks that were held, and of them the empty ones.

    """

    num_used: int
    num_empty: int
    num_empty_slots: int
    num_slots: int

    @property
    def empty_share(self) -> float:
        """Blocks allocated but unused, as a share of those in use."""
        in_use = self.num_used - self.num_empty
        return self.num_empty / in_use if in_use else 0.0

    @property
    def empty_slot_share(self) -> float:
        """Room for tokens that holds none, as a share of all room in the blocks that were held."""
        return self.num_empty_slots / self.num_slots if self.num_slots else 0.0


def block_use(steps: Iterable[Step], block_size: int) -> BlockUse:
    """Play back the block tables, and count after each step what they held."""
    num_used = num_empty = num_empty_slots = 0
    for tables, num_computed in _tables(steps):
        filled: Counter[int] = Counter()  # block -> tokens in it; one that samples share counts once
        for seq_id, table in tables.items():
            for index, block in enumerate(table):
                in_block = min(max(num_computed.get(seq_id, 0) - index * block_size, 0), block_size)
                filled[block] = max(filled[block], in_block)
        num_used += len(filled)
        num_empty += sum(count == 0 for count in filled.values())
        num_empty_slots += sum(block_size - count for count in filled.values())
    return BlockUse(num_used, num_empty, num_empty_slots, num_used * block_size)


def touched_blocks(steps: Iterable[Step]) -> set[int]:
    """Ids of the blocks that some sequence held."""
    touched: set[int] = set()
    for step in steps:
        for new in step.sent.new:
            touched.update(new.block_ids)
        for scheduled in step.sent.scheduled:
            touched.update(scheduled.new_block_ids)
            touched.update(block for _, block in scheduled.replaced_blocks)
    return touched


def _tables(steps: Iterable[Step]) -> Iterator[tuple[dict[int, list[int]], dict[int, int]]]:
    """After each step: sequence to block table, and sequence to computed tokens."""
    tables: dict[int, list[int]] = {}
    num_computed: dict[int, int] = {}
    for step in steps:
        for seq_id in step.sent.removed:
            tables.pop(seq_id, None)
            num_computed.pop(seq_id, None)
        for new in step.sent.new:
            tables[new.seq_id] = list(new.block_ids)
        for scheduled in step.sent.scheduled:
            table = tables[scheduled.seq_id]
            table.extend(scheduled.new_block_ids)
            for index, block in scheduled.replaced_blocks:
                table[index] = block
            computed = scheduled.num_computed + scheduled.num_tokens
            for seq_id in {scheduled.seq_id, *scheduled.sample_for}:
                num_computed[seq_id] = computed
        yield tables, num_computed
