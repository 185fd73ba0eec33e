"""Who runs in a step.

There is no prefill phase and no decode phase. A sequence has tokens known and tokens computed, and a step gives
each some of the token budget; a prompt in chunks, a prefix hit and a resumed request are all the same thing, and
guesses of what comes next are computed behind the known tokens.

Running requests stand in the order of the policy. A step walks them and the waiting ones in that order; where
blocks run out the last one is preempted, which by then has not been given anything in this step.
"""

import itertools
from collections.abc import Iterable

from octavo.cache.manager import BlockChain, BlockManager
from octavo.cache.prefix import root_hash
from octavo.config import SchedulerConfig
from octavo.errors import RequestError
from octavo.scheduler.admission import Admission
from octavo.scheduler.limits import Limits
from octavo.scheduler.messages import (
    ModelRunnerOutput,
    NewSequence,
    RequestUpdate,
    SchedulerOutput,
    SequenceFailure,
)
from octavo.scheduler.request import Request, RequestState, Sequence
from octavo.scheduler.roster import Roster
from octavo.scheduler.speculation import Speculation
from octavo.scheduler.stats import SchedulerStats
from octavo.scheduler.step import Share, Step
from octavo.scheduler.updates import Updates

__all__ = ["Scheduler"]

MAX_FAILED_STEPS = 3  # a request that was in so many failed steps is failed, whoever was beside it


class Scheduler:
    """Holds every unfinished request and decides, step by step, who computes what in which blocks."""

    def __init__(self, config: SchedulerConfig, manager: BlockManager, max_model_len: int) -> None:
        assert config.max_num_batched_tokens is not None, "settle the config first"
        self.manager = manager
        self.stats = SchedulerStats()
        self._updates = Updates()
        self.roster = Roster(config, manager, self._updates, self.stats)
        self.requests, self.running, self.waiting = self.roster.requests, self.roster.running, self.roster.waiting
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._chunks = config.enable_chunked_prefill
        self._admission = Admission(self.roster, manager, self._updates, self._max_num_seqs)
        self._limits = Limits(max_model_len, self._max_num_seqs, manager.pool.num_blocks, manager.block_size)
        self._speculation = Speculation.of(config, manager)
        self._arrivals = itertools.count()
        self._seq_ids = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether a call of `schedule` can lead anywhere, or updates wait to be taken."""
        return bool(self.requests or self.roster.removed or self._updates)

    @property
    def num_running_seqs(self) -> int:
        """Samples of running requests."""
        return self.roster.num_running_seqs

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks are on the host."""
        return sum(request.state is RequestState.SWAPPED for request in self.requests.values())

    @property
    def in_step(self) -> list[str]:
        """Ids of the requests that compute in the step under way."""
        return [request.request_id for request in self.roster.step.requests]

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
            if not seq.is_finished:
                request.live.append(seq)
        self.roster.add(request)
        num_running, num_waiting = len(self.running), len(self.requests) - len(self.running) - 1
        alone = ", and it runs alone after them" if request.runs_alone else ""
        self._updates.record(request, "queued", f"{num_running} run and {num_waiting} wait before it{alone}")

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests at once; unknown ids are ignored. Their blocks are free before the next step."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self.roster.finish_all(request, "abort")

    def finish_sample(self, request_id: str, index: int) -> None:
        """End one sample that the front has seen enough of (a stop string)."""
        request = self.requests.get(request_id)
        if request is not None and not request.sequences[index].is_finished:
            self.roster.finish(request, request.sequences[index], "stop")

    # A step

    def schedule(self) -> SchedulerOutput | None:
        """The next step; None if there is nothing to compute and nothing to tell the executor."""
        roster = self.roster
        roster.step = step = Step(self._max_num_batched_tokens)
        suspect = min(roster.suspects.values(), key=roster.policy) if roster.suspects else None
        if suspect is not None and self._is_next(suspect):
            self._schedule_alone(suspect, step)
        else:
            self._schedule_in_turn(step)
        if not step.shares and not self.running and not step.swapped_out and (head := self.waiting.peek()):
            roster.fail(head, "no step can be formed with this request although nothing else runs")
        if self._speculation is not None:
            self._speculation.extend(step, len(self.running))
        moves = self.manager.take_step()
        if not (step.shares or roster.removed or moves.swap_out):
            return None
        new = tuple([self._introduce(request, seq) for request, seq in step.new.values()])
        scheduled = tuple([share.message(share.seq.seq_id in step.new) for share in step.shares])
        roster.sent.update(step.new)
        step.removed = tuple(roster.removed)
        roster.removed.clear()
        self.stats.num_steps += 1
        return SchedulerOutput(
            self.stats.num_steps - 1,
            scheduled,
            new,
            step.removed,
            tuple(moves.swap_out),
            tuple(moves.swap_in),
            tuple(moves.copies),
        )

    def update(self, result: ModelRunnerOutput) -> list[RequestUpdate]:
        """Take in what the step gave: tokens, finish reasons, published blocks."""
        self.manager.end_step()
        roster = self.roster
        step, roster.step = roster.step, Step(0)
        if result.failures:
            self._fail_sequences(result, step)
        for share in step.shares:
            if share.request.state is not RequestState.RUNNING:
                continue
            if roster.suspects:
                roster.suspects.pop(share.request.request_id, None)
            if not share.seq.is_finished:
                self._advance(share, result)
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
                self.roster.fail(request, message)
            else:
                self.roster.suspects[request.request_id] = request
                self.roster.preempt(request, f"a step failed: {message}", swap=False)
        return self.take_updates()

    def abandon_step(self) -> None:
        """The step was cut off from outside (Ctrl-C): nothing of it counts, and no request is to blame."""
        for request in self._undo_step("interrupted"):
            self.roster.preempt(request, "a step was interrupted", swap=False)

    def forget_before(self, other: "Scheduler") -> None:
        """Follow one that was cut off within its own work: whatever the executor has of it is to go, counts go on."""
        vars(self.stats).update(vars(other.stats))
        self.roster.removed.extend(range(next(other._seq_ids)))

    def take_updates(self) -> list[RequestUpdate]:
        """What the front has not heard yet."""
        return self._updates.take()

    def check(self) -> None:
        """Assert the invariants (for tests)."""
        self.manager.check()
        keys = [self.roster.policy(request) for request in self.running]
        assert keys == sorted(keys), "running requests are out of turn"
        assert self.num_running_seqs <= self._max_num_seqs
        for request in self.requests.values():
            holds = [seq for seq in request.sequences if self.manager.has_table(seq.seq_id)]
            assert not holds or request.state is RequestState.RUNNING, f"{request.request_id} holds blocks but waits"
            assert all(not seq.is_finished for seq in holds), "a finished sample holds blocks"
            assert request.live == [seq for seq in request.sequences if not seq.is_finished]
        if not self.requests:
            self.manager.end_step()
            assert self.manager.pool.num_used == self.manager.host_pool.num_used == 0, "a block leaked"
            assert not self.running
            assert not len(self.waiting)

    def _undo_step(self, message: str) -> list[Request]:
        """Forget the step, of which the executor did nobody knows how much; returns the requests that computed."""
        self.manager.end_step()
        roster = self.roster
        step, roster.step = roster.step, Step(0)
        roster.removed.extend(step.removed)  # to remove a sequence again does no harm
        computing = step.requests
        for request in step.swapped_in:  # whether their blocks arrived on the device is unknown
            if request not in computing:
                roster.preempt(request, f"a step failed: {message}", swap=False)
        for request in step.swapped_out:  # whether their blocks arrived on the host is unknown
            roster.drop_swapped(request)
        return computing

    # Walking the queue

    def _schedule_in_turn(self, step: Step) -> None:
        index, admitting, running, policy = 0, True, self.running, self.roster.policy
        while step.budget > 0:
            request = running[index] if index < len(running) else None
            head = self.waiting.peek() if admitting else None
            if head is not None and (request is None or policy(head) < policy(request)):
                num_running = len(running)
                if not self._admission.admit(head, index):
                    admitting = False
                    continue
                admitting = len(running) == num_running + 1  # who made room does not come back at once
                request = head
            if request is None:
                break
            num_running = len(running)
            if self._give_tokens(request, index, step, admitting):
                index += 1
            if len(running) < num_running:
                admitting = False
        if step.budget <= 0 and admitting and (head := self.waiting.peek()):
            self._admission.wait(head, f"a share of max_num_batched_tokens = {self._max_num_batched_tokens}")

    def _is_next(self, request: Request) -> bool:
        """Whether nobody who runs or waits goes before it."""
        policy, head = self.roster.policy, self.waiting.peek()
        key = policy(request)
        return (not self.running or key < policy(self.running[0])) and (head is None or key < policy(head))

    def _schedule_alone(self, request: Request, step: Step) -> None:
        turn = self.roster.turn(request)
        if request.state is RequestState.RUNNING or self._admission.admit(request, turn, force=True):
            self._give_tokens(request, self.roster.turn(request), step, admitting=False)

    # One request's share

    def _give_tokens(self, request: Request, index: int, step: Step, admitting: bool) -> bool:
        """Schedule a running request; False if it had to be preempted itself."""
        manager, budget = self.manager, step.budget
        if len(request.live) > 1 or not manager.has_table(request.live[0].seq_id):
            self.roster.open_tables(request)
        shares: list[Share] = []
        lacks_blocks = False
        for seq in request.live:
            left = len(seq.token_ids) - seq.num_computed
            if budget > 0 and manager.has_table(seq.seq_id):
                num_tokens = 1 if left == 1 else self._chunk(left, budget, index, admitting)
                if num_tokens:
                    shares.append(Share(request, seq, num_tokens))
                    budget -= num_tokens
                    lacks_blocks = lacks_blocks or not manager.is_writable(seq.seq_id, seq.num_computed, num_tokens)
        if lacks_blocks and not self._find_blocks(request, shares):
            return False
        for share in shares:
            self._schedule(share, step, lacks_blocks)
        return True

    def _chunk(self, left: int, budget: int, index: int, admitting: bool) -> int:
        """How many of several known tokens a sequence computes: all it has left, or what it may take of the budget."""
        if not self._chunks:
            return left if left <= budget else 0
        later = [len(seq.token_ids) - seq.num_computed for other in self.running[index + 1 :] for seq in other.live]
        num_decoding = later.count(1)
        room = max(budget - num_decoding, 0)
        if len(later) > num_decoding or (admitting and len(self.waiting) > 0):
            # Others have prompts too: half each time, so that a long prompt does not keep short ones waiting.
            room = max(room // 2, min(room, self.manager.block_size))
        return min(left, room)

    def _find_blocks(self, request: Request, shares: list[Share]) -> bool:
        """Preempt until the shares' blocks are free; False if the request had to go itself."""
        needs = [(share.seq.seq_id, share.seq.num_computed, share.num_tokens) for share in shares]
        while sum(self.manager.num_needed(*need) for need in needs) > self.manager.num_free:
            victim = self.running[-1]
            if len(self.running) == 1:
                self.roster.fail(request, f"it needs more than all {self.manager.pool.num_blocks} KV blocks")
                return False
            self.roster.preempt(victim, "no KV block is free")
            if victim is request:
                return False
        return True

    def _schedule(self, share: Share, step: Step, lacks_blocks: bool) -> None:
        seq, request, num_tokens, manager = share.seq, share.request, share.num_tokens, self.manager
        start, end = seq.num_computed, seq.num_computed + num_tokens
        if lacks_blocks:
            share.new_blocks, share.replaced_blocks = manager.allocate(seq.seq_id, start, num_tokens)
        if end // manager.block_size > start // manager.block_size:
            step.computing.update(manager.completed_by(seq.token_ids, seq.chain, start, num_tokens))
        if seq.seq_id not in self.roster.sent:
            step.new[seq.seq_id] = (request, seq)
        if end == len(seq.token_ids) and request.max_output_tokens:
            share.samples = (seq,)
            if len(request.live) > 1 and end == seq.num_prompt_tokens:
                share.samples += tuple(self._forks(request, seq, step))
        step.shares.append(share)
        step.budget -= num_tokens

    def _forks(self, request: Request, seq: Sequence, step: Step) -> list[Sequence]:
        """The other samples, which begin where `seq` ends its prompt."""
        forks = []
        for other in request.live:
            if other is not seq and not self.manager.has_table(other.seq_id) and not other.num_output_tokens:
                self.roster.fork(request, seq, other)
                step.new[other.seq_id] = (request, other)
                forks.append(other)
        return forks

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

    def _fail_sequences(self, result: ModelRunnerOutput, step: Step) -> None:
        failed = {failure.seq_id: failure for failure in result.failures}
        for share in step.shares:
            for seq in (share.seq, *share.samples):
                if seq.seq_id in failed and share.request.state is RequestState.RUNNING:
                    self._fail_sequence(share.request, failed[seq.seq_id])

    def _fail_sequence(self, request: Request, failure: SequenceFailure) -> None:
        """A token that is no number makes keys and values before it in its step such, in blocks that were published.

        So nobody is to find the request's blocks any more; and one that went on from such blocks is computed again
        without them, for the fault may be that of whoever wrote them.
        """
        if failure.param is not None:
            return self.roster.fail(request, failure.message, failure.param)
        for seq in request.live:
            self.manager.forget(seq.seq_id)
        request.num_failed_steps += 1
        if request.from_cache and request.num_failed_steps < MAX_FAILED_STEPS:
            return self.roster.preempt(request, f"{failure.message}; cached blocks are not trusted", swap=False)
        return self.roster.fail(request, failure.message)

    def _advance(self, share: Share, result: ModelRunnerOutput) -> None:
        """A sequence has computed its share; those who draw have their tokens."""
        request, seq, start, num_tokens = share.request, share.seq, share.seq.num_computed, share.num_tokens
        if num_tokens > 1 or start + 1 < request.num_prompt_tokens:
            self._updates.chunk(request, num_tokens, start + num_tokens, len(seq.token_ids))
        if result.prompt_logprobs or request.pool:
            self._take_prompt(request, seq, result)
        num_new, ended = 0, []
        for sample in share.samples:
            taken, reason, stop_reason = request.cut(sample, result.token_ids[sample.seq_id])
            sample.token_ids += taken
            num_new += len(taken)
            self._updates.gain(request, sample, taken, result.logprobs.get(sample.seq_id, ()))
            if reason is not None:
                ended.append((sample, reason, stop_reason))
        if share.draft_token_ids:  # of its tokens all but the last were guessed, and so they are computed
            num_tokens += num_new - 1
            self.stats.drafted(len(share.draft_token_ids), num_new - 1)
        self.stats.computed(request, seq, num_tokens, num_new)
        self.waiting.charge(request, num_new)
        for sample in share.samples:
            sample.num_computed = sample.num_once_computed = seq.num_computed
        if seq.num_computed // self.manager.block_size > start // self.manager.block_size:
            self.manager.publish(seq.seq_id, seq.token_ids, seq.chain, start, seq.num_computed)
        for sample, reason, stop_reason in ended:
            self.roster.finish(request, sample, reason, stop_reason)
        if not request.max_output_tokens and not seq.num_left:
            self.roster.finish_all(request, "length")

    def _take_prompt(self, request: Request, seq: Sequence, result: ModelRunnerOutput) -> None:
        """What a chunk of a prompt gives besides keys and values: log-probabilities, or a part of the embedding."""
        scored = result.prompt_logprobs.get(seq.seq_id, [])
        request.num_prompt_logprobs += len(scored)
        if scored:
            self._updates.scored(request, scored)
        if request.pool:
            request.pool.add(result.hidden_sums.get(seq.seq_id))
            self._updates.tell(request)
