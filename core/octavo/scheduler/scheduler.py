"""Who runs in a step.

There is no prefill phase and no decode phase. A sequence has tokens known and tokens computed, and a step gives
each some of the token budget; a prompt in chunks, a prefix hit and a resumed request are all the same thing.

Running requests stand in the order of the policy. A step walks them and the waiting ones in that order; where
blocks run out the last one is preempted, which by then has not been given anything in this step.
"""

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.cache.manager import BlockChain, BlockManager
from octavo.cache.prefix import PrefixMatch, root_hash
from octavo.config import SchedulerConfig
from octavo.errors import RequestError
from octavo.scheduler.fair import queue_of
from octavo.scheduler.limits import Limits
from octavo.scheduler.messages import ModelRunnerOutput, NewSequence, RequestUpdate, ScheduledSequence, SchedulerOutput
from octavo.scheduler.policy import POLICIES
from octavo.scheduler.request import FinishReason, Request, RequestState, Sequence
from octavo.scheduler.stats import SchedulerStats
from octavo.scheduler.updates import Updates, finish_reason_of

__all__ = ["Scheduler"]

KV_BLOCKS = "free KV blocks"
MAX_FAILED_STEPS = 3  # a request that was in so many failed steps is failed, whoever was beside it


@dataclass
class _Item:
    """One sequence's share of the step."""

    request: Request
    seq: Sequence
    num_tokens: int
    samples: list[Sequence] = field(default_factory=list)


@dataclass
class _Step:
    """The step being put together."""

    budget: int
    items: list[_Item] = field(default_factory=list)
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    new: dict[int, tuple[Request, Sequence]] = field(default_factory=dict)
    swapped_out: list[Request] = field(default_factory=list)
    swapped_in: list[Request] = field(default_factory=list)
    removed: tuple[int, ...] = ()
    computing: set[bytes] = field(default_factory=set)  # chain hashes of the full blocks that this step completes


class Scheduler:
    """Holds every unfinished request and decides, step by step, who computes what in which blocks."""

    def __init__(self, config: SchedulerConfig, manager: BlockManager, max_model_len: int) -> None:
        assert config.max_num_batched_tokens is not None, "settle the config first"
        self.manager = manager
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self._config = config
        self._policy = POLICIES[config.scheduling_policy]
        self.waiting = queue_of(config)
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._limits = Limits(max_model_len, self._max_num_seqs, manager.pool.num_blocks, manager.block_size)
        self._arrivals = itertools.count()
        self._seq_ids = itertools.count()
        self.stats = SchedulerStats()
        self._sent: set[int] = set()  # sequences that the executor holds
        self._removed: list[int] = []
        self._suspects: dict[str, Request] = {}
        self._step = _Step(0)
        self._updates = Updates()

    @property
    def has_work(self) -> bool:
        """Whether a call of `schedule` can lead anywhere, or updates wait to be taken."""
        return bool(self.requests or self._removed or self._updates)

    @property
    def num_running_seqs(self) -> int:
        """Samples of running requests."""
        return sum(len(request.live) for request in self.running)

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks are on the host."""
        return sum(request.state is RequestState.SWAPPED for request in self.requests.values())

    @property
    def in_step(self) -> list[str]:
        """Ids of the requests that compute in the step under way."""
        return list(dict.fromkeys(item.request.request_id for item in self._step.items))

    # Requests come and go

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it could never be served: what was asked, what fits, which settings change it.

        """
        if request.request_id in self.requests:
            raise RequestError(f"a request with id {request.request_id!r} is under way", "request_id")
        request.max_output_tokens = self._limits.max_output_tokens(request.num_prompt_tokens, request.params)
        request.arrival = next(self._arrivals)
        for index in range(request.params.n):
            chain = BlockChain(root_hash(request.salt), self.manager.block_size)
            seq = Sequence(next(self._seq_ids), index, request.prompt_token_ids, chain)
            seq.resume(request.known_outputs.get(index, ()), index in request.known_finished)
            request.sequences.append(seq)
        self.requests[request.request_id] = request
        if request.runs_alone:
            self.waiting.admit(request)  # it has its turn from now on
            self._suspects[request.request_id] = request
        else:
            self.waiting.push(request)
        num_running, num_waiting = len(self.running), len(self.requests) - len(self.running) - 1
        alone = ", and it runs alone after them" if request.runs_alone else ""
        self._updates.record(request, "queued", f"{num_running} run and {num_waiting} wait before it{alone}")

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests at once; unknown ids are ignored. Their blocks are free before the next step."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish_all(request, "abort")

    def finish_sample(self, request_id: str, index: int) -> None:
        """End one sample that the front has seen enough of (a stop string)."""
        request = self.requests.get(request_id)
        if request is not None and not request.sequences[index].is_finished:
            self._finish(request, request.sequences[index], "stop", None)

    # A step

    def schedule(self) -> SchedulerOutput | None:
        """The next step; None if there is nothing to compute and nothing to tell the executor."""
        self._step = step = _Step(self._max_num_batched_tokens)
        suspect = min(self._suspects.values(), key=self._policy, default=None)
        if suspect is not None and self._is_next(suspect):
            self._schedule_alone(suspect, step)
        else:
            self._schedule_in_turn(step)
        if not step.items and not self.running and not step.swapped_out and (head := self.waiting.peek()):
            self._fail(head, "no step can be formed with this request although nothing else runs")
        moves = self.manager.take_step()
        if not (step.items or self._removed or moves.swap_out):
            return None
        new = tuple(self._introduce(request, seq) for request, seq in step.new.values())
        self._sent.update(step.new)
        step.removed, self._removed = tuple(self._removed), []
        self.stats.num_steps += 1
        return SchedulerOutput(
            self.stats.num_steps - 1,
            tuple(step.scheduled),
            new,
            step.removed,
            tuple(moves.swap_out),
            tuple(moves.swap_in),
            tuple(moves.copies),
        )

    def update(self, result: ModelRunnerOutput) -> list[RequestUpdate]:
        """Take in what the step gave: tokens, finish reasons, published blocks."""
        self.manager.end_step()
        failed = {failure.seq_id: failure.message for failure in result.failures}
        for item in self._step.items:
            for seq in (item.seq, *item.samples):
                if seq.seq_id in failed and not item.request.is_finished:
                    self._fail(item.request, failed[seq.seq_id])
        for item in self._step.items:
            if not item.request.is_finished:
                self._suspects.pop(item.request.request_id, None)
                self._advance(item, result)
        self._step = _Step(0)
        return self.take_updates()

    def fail_step(self, message: str) -> list[RequestUpdate]:
        """The executor raised: nothing of the step counts.

        A request that was alone in the step fails with `message`. Several are computed again from what was
        published before, one at a time, so that the one at fault is found and the others go on.
        """
        self.stats.num_failed_steps += 1
        requests = self._undo_step(message)
        for request in requests:
            request.num_failed_steps += 1
            if len(requests) == 1 or request.num_failed_steps >= MAX_FAILED_STEPS:
                self._fail(request, message)
            else:
                self._suspects[request.request_id] = request
                self._preempt(request, f"a step failed: {message}", swap=False)
        return self.take_updates()

    def abandon_step(self) -> None:
        """The step was cut off from outside (Ctrl-C): nothing of it counts, and no request is to blame."""
        for request in self._undo_step("interrupted"):
            self._preempt(request, "a step was interrupted", swap=False)

    def take_updates(self) -> list[RequestUpdate]:
        """What the front has not heard yet."""
        return self._updates.take()

    def check(self) -> None:
        """Assert the invariants (for tests)."""
        self.manager.check()
        keys = [self._policy(request) for request in self.running]
        assert keys == sorted(keys), "running requests are out of turn"
        assert self.num_running_seqs <= self._max_num_seqs
        for request in self.requests.values():
            holds = [seq for seq in request.sequences if self.manager.has_table(seq.seq_id)]
            assert not holds or request.state is RequestState.RUNNING, f"{request.request_id} holds blocks but waits"
            assert all(not seq.is_finished for seq in holds), "a finished sample holds blocks"
        if not self.requests:
            self.manager.end_step()
            assert self.manager.pool.num_used == self.manager.host_pool.num_used == 0, "a block leaked"
            assert not self.running
            assert not len(self.waiting)

    def _undo_step(self, message: str) -> list[Request]:
        """Forget the step, of which the executor did nobody knows how much; returns the requests that computed."""
        self.manager.end_step()
        step, self._step = self._step, _Step(0)
        self._removed.extend(step.removed)  # to remove a sequence again does no harm
        computing = {item.request.request_id: item.request for item in step.items}
        for request in step.swapped_in:  # whether their blocks arrived on the device is unknown
            if request.request_id not in computing:
                self._preempt(request, f"a step failed: {message}", swap=False)
        for request in step.swapped_out:  # whether their blocks arrived on the host is unknown
            self._drop_swapped(request)
        return list(computing.values())

    # Walking the queue

    def _schedule_in_turn(self, step: _Step) -> None:
        index = 0
        admitting = True
        while step.budget > 0:
            request = self.running[index] if index < len(self.running) else None
            head = self.waiting.peek() if admitting else None
            if head is not None and (request is None or self._policy(head) < self._policy(request)):
                num_running = len(self.running)
                if not self._admit(head, index):
                    admitting = False
                    continue
                admitting = len(self.running) == num_running + 1  # who made room does not come back at once
                request = head
            if request is None:
                break
            num_running = len(self.running)
            if self._give_tokens(request, index, step, admitting):
                index += 1
            if len(self.running) < num_running:
                admitting = False
        if step.budget <= 0 and admitting and (head := self.waiting.peek()):
            self._wait(head, f"a share of max_num_batched_tokens = {self._max_num_batched_tokens}")

    def _is_next(self, request: Request) -> bool:
        """Whether nobody who runs or waits goes before it."""
        key, head = self._policy(request), self.waiting.peek()
        return (not self.running or key < self._policy(self.running[0])) and (head is None or key < self._policy(head))

    def _schedule_alone(self, request: Request, step: _Step) -> None:
        if request.state is not RequestState.RUNNING and not self._admit(request, self._turn(request), force=True):
            return
        self._give_tokens(request, self._turn(request), step, admitting=False)

    def _turn(self, request: Request) -> int:
        return bisect.bisect_left(self.running, self._policy(request), key=self._policy)

    def _admit(self, request: Request, index: int, *, force: bool = False) -> bool:
        """Make a waiting request run at its turn, preempting later ones (with `force`, any) where it must."""
        seats = len(request.live)
        later = [r for r in (self.running if force else self.running[index:]) if r is not request]
        match, needed = self._admission(request)
        if self._is_computing(request, match):
            return self._wait(request, "its prefix, which this step computes")
        held = sum(len(self.manager.table(s.seq_id)) for r in later for s in r.live if self.manager.has_table(s.seq_id))
        if needed > self.manager.num_free + held and len(self.running) > 0:
            return self._wait(request, KV_BLOCKS)
        while later and (
            self.num_running_seqs + seats > self._max_num_seqs or needed + len(self.running) > self.manager.num_free
        ):
            self._preempt(later.pop(), f"{request.request_id} goes first and needs its place")
            match, needed = self._admission(request)
        if self.num_running_seqs + seats > self._max_num_seqs:
            return self._wait(request, f"one of max_num_seqs = {self._max_num_seqs} places")
        if self.running and needed + len(self.running) > self.manager.num_free:  # one block each to grow into
            return self._wait(request, KV_BLOCKS)
        self.waiting.admit(request)
        self.running.insert(self._turn(request), request)
        self._place(request, match)
        return True

    def _wait(self, request: Request, reason: str) -> bool:
        self._updates.waits(request, reason, len(self.requests) - len(self.running))
        return False

    def _is_computing(self, request: Request, match: PrefixMatch) -> bool:
        """Whether the block after the prefix hit is computed in this very step: a step later it is a hit too."""
        seq, index = request.live[0], len(match.blocks)
        usable = (len(seq.token_ids) - 1) // self.manager.block_size
        return match.reason == "differs" and index < usable and seq.chain.hashes[index] in self._step.computing

    def _admission(self, request: Request) -> tuple[PrefixMatch, int]:
        """The prefix hit of a waiting request's first sample, and the free blocks that all samples take."""
        tables = [seq.swapped for seq in request.live if seq.swapped is not None]
        if tables:
            return PrefixMatch((), 0, "disabled", 0), self.manager.num_needed_to_swap_in(tables) + len(tables)
        first, *others = request.live
        match = self._match(request, first)
        needed = self.manager.num_needed_to_start(len(first.token_ids), match)
        shared = request.num_prompt_tokens // self.manager.block_size
        return match, needed + sum(self.manager.num_blocks_for(len(seq.token_ids)) - shared for seq in others)

    def _match(self, request: Request, seq: Sequence) -> PrefixMatch:
        if request.needs_whole_prompt:
            return PrefixMatch((), 0, "disabled", 0)
        return self.manager.match(seq.token_ids, seq.chain)

    def _place(self, request: Request, match: PrefixMatch) -> None:
        resumed = request.state is RequestState.SWAPPED or request.num_preemptions > 0
        tables = {seq.seq_id: seq.swapped for seq in request.live if seq.swapped is not None}
        if tables:
            num_computed = self.manager.swap_in(tables)
            self._step.swapped_in.append(request)
            for seq in request.live:
                if seq.swapped is not None:
                    seq.num_computed, seq.swapped = num_computed[seq.seq_id], None
        else:
            self._start(request, request.live[0], match)
        request.state = RequestState.RUNNING
        if request.num_cached_tokens is None:
            self.waiting.charge(request, request.num_prompt_tokens - match.num_tokens)
        self.stats.admitted(request, match.num_tokens)
        request.waits_for = ""
        self._updates.placed(request, match, resumed=resumed, swapped_in=bool(tables))

    def _start(self, request: Request, seq: Sequence, match: PrefixMatch) -> None:
        self.manager.start(seq.seq_id, match)
        seq.num_computed = match.num_tokens

    # One request's share

    def _give_tokens(self, request: Request, index: int, step: _Step, admitting: bool) -> bool:
        """Schedule a running request; False if it had to be preempted itself."""
        self._open_tables(request)
        budget, reserved, others_wait = step.budget, 0, False
        if any(seq.num_left > 1 for seq in request.live):
            later = [seq.num_left for other in self.running[index + 1 :] for seq in other.live]
            reserved = later.count(1)
            others_wait = len(later) > reserved or (admitting and len(self.waiting) > 0)
        shares: list[tuple[Sequence, int]] = []
        for seq in request.live:
            if budget > 0 and self.manager.has_table(seq.seq_id):
                num_tokens = self._chunk(seq, budget, reserved, others_wait)
                if num_tokens:
                    shares.append((seq, num_tokens))
                    budget -= num_tokens
        while sum(self.manager.num_needed(s.seq_id, s.num_computed, n) for s, n in shares) > self.manager.num_free:
            victim = self.running[-1]
            if len(self.running) == 1:
                self._fail(request, f"it needs more than all {self.manager.pool.num_blocks} KV blocks")
                return False
            self._preempt(victim, "no KV block is free")
            if victim is request:
                return False
        for seq, num_tokens in shares:
            self._schedule_sequence(request, seq, num_tokens, step)
        return True

    def _chunk(self, seq: Sequence, budget: int, reserved: int, others_wait: bool) -> int:
        """How many tokens a sequence computes: all it has left, or what it may take of the budget."""
        left = seq.num_left
        if left == 1 or not self._config.enable_chunked_prefill:
            return left if left <= budget else 0
        room = max(budget - reserved, 0)
        if others_wait:  # half each time, so that a long prompt does not keep short ones waiting
            room = max(room // 2, min(room, self.manager.block_size))
        return min(left, room)

    def _open_tables(self, request: Request) -> None:
        """Give resumed samples their share of the prompt that another sample has computed again."""
        live = request.live
        leader = next((seq for seq in live if self.manager.has_table(seq.seq_id)), None)
        if leader is None:  # it finished before the others could share with it
            self._start(request, live[0], self._match(request, live[0]))
            return
        if leader.num_computed < request.num_prompt_tokens:
            return
        for seq in live:
            if not self.manager.has_table(seq.seq_id) and (seq.num_output_tokens or leader.num_output_tokens):
                self._fork(request, leader, seq)
                # One that has no token yet computes the prompt's last row again, to draw its first from.
                seq.num_computed = request.num_prompt_tokens - (not seq.num_output_tokens)

    def _schedule_sequence(self, request: Request, seq: Sequence, num_tokens: int, step: _Step) -> None:
        appended, replaced = self.manager.allocate(seq.seq_id, seq.num_computed, num_tokens)
        step.computing.update(self.manager.completed_by(seq.token_ids, seq.chain, seq.num_computed, num_tokens))
        samples: list[Sequence] = []
        if num_tokens == seq.num_left and request.max_output_tokens:
            samples.append(seq)
            for other in request.live if not seq.num_output_tokens else ():
                if other is not seq and not self.manager.has_table(other.seq_id) and not other.num_output_tokens:
                    self._fork(request, seq, other)
                    step.new[other.seq_id] = (request, other)
                    samples.append(other)
        is_new = seq.seq_id not in self._sent
        if is_new:
            step.new[seq.seq_id] = (request, seq)
        step.scheduled.append(
            ScheduledSequence(
                seq.seq_id,
                seq.num_computed,
                num_tokens,
                () if is_new else appended,
                () if is_new else replaced,
                tuple(s.seq_id for s in samples),
            )
        )
        step.items.append(_Item(request, seq, num_tokens, samples))
        step.budget -= num_tokens

    def _fork(self, request: Request, leader: Sequence, seq: Sequence) -> None:
        self.manager.fork(leader.seq_id, seq.seq_id, request.num_prompt_tokens)
        seq.chain.share(leader.chain, request.num_prompt_tokens)

    def _introduce(self, request: Request, seq: Sequence) -> NewSequence:
        wants_prompt = request.params.prompt_logprobs is not None and seq is request.sequences[0]
        return NewSequence(
            seq.seq_id,
            seq.sample_index,
            list(seq.token_ids),
            seq.num_prompt_tokens,
            request.params,
            request.eos_token_ids,
            list(self.manager.table(seq.seq_id)),
            request.num_prompt_logprobs + 1 if wants_prompt else None,
            request.pool.left(seq.num_once_computed) if request.pool else range(0),
        )

    # After the step

    def _advance(self, item: _Item, result: ModelRunnerOutput) -> None:
        request, seq = item.request, item.seq
        if seq.is_finished:
            return
        start = seq.num_computed
        self.stats.computed(request, seq, item.num_tokens, len(item.samples))
        self.waiting.charge(request, len(item.samples))
        self._updates.chunk(request, seq, item.num_tokens)
        self.manager.publish(seq.seq_id, seq.token_ids, seq.chain, start, seq.num_computed)
        scored = result.prompt_logprobs.get(seq.seq_id, [])
        request.num_prompt_logprobs += len(scored)
        self._updates.of(request).prompt_logprobs.extend(scored)
        if request.pool:
            request.pool.add(result.hidden_sums.get(seq.seq_id))
        for sample in item.samples:
            sample.num_computed = sample.num_once_computed = seq.num_computed
            token_id = result.token_ids[sample.seq_id]
            sample.token_ids.append(token_id)
            self._updates.add_token(request, sample, token_id, result.logprobs.get(sample.seq_id))
            reason, stop_reason = finish_reason_of(request, sample)
            if reason is not None:
                self._finish(request, sample, reason, stop_reason)
        if not request.max_output_tokens and not seq.num_left:
            self._finish_all(request, "length")

    def _preempt(self, request: Request, reason: str, *, swap: bool = True) -> None:
        """Take a running request off the device, with all its samples."""
        self.running.remove(request)
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        held = [seq for seq in request.live if self.manager.has_table(seq.seq_id)]
        tables = None
        is_suspect = request.request_id in self._suspects  # these wait apart, for a step of their own
        wants_swap = swap and self._config.preemption_mode == "swap" and not is_suspect
        if wants_swap:
            tables = self.manager.swap_out((seq.seq_id, seq.chain, seq.num_computed) for seq in held)
        for seq in held:
            self._forget(seq)
            if tables is not None:
                seq.swapped = tables[seq.seq_id]
            else:
                self.manager.free(seq.seq_id)
                seq.num_computed = 0
        request.state = RequestState.WAITING if tables is None else RequestState.SWAPPED
        if tables is not None:
            self.stats.num_swaps += 1
            self._step.swapped_out.append(request)
        if not is_suspect:
            self.waiting.push(request)
        self._updates.preempted(request, reason, tables, wants_swap=wants_swap)

    def _drop_swapped(self, request: Request) -> None:
        for seq in request.live:
            if seq.swapped is not None:
                self.manager.drop_swapped(seq.swapped)
                seq.swapped, seq.num_computed = None, 0
        if request.state is RequestState.SWAPPED:
            request.state = RequestState.WAITING

    def _forget(self, seq: Sequence) -> None:
        if seq.seq_id in self._sent:
            self._sent.remove(seq.seq_id)
            self._removed.append(seq.seq_id)

    def _finish(self, request: Request, seq: Sequence, reason: FinishReason, stop_reason: int | None) -> None:
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        self._forget(seq)
        self.manager.free(seq.seq_id)
        if seq.swapped is not None:
            self.manager.drop_swapped(seq.swapped)
            seq.swapped = None
        self._updates.finish(request, seq)
        if not request.live:
            if request.state is RequestState.RUNNING:
                self.running.remove(request)
            self.waiting.remove(request)
            self._suspects.pop(request.request_id, None)
            del self.requests[request.request_id]
            request.end()

    def _finish_all(self, request: Request, reason: FinishReason) -> None:
        for seq in request.live:
            self._finish(request, seq, reason, None)

    def _fail(self, request: Request, message: str) -> None:
        request.error = message
        self._finish_all(request, "error")
