"""Every unfinished request and where it stands: it waits, runs, is swapped out, has ended; and how it moves."""

import bisect

from octavo.cache.manager import BlockManager
from octavo.cache.prefix import PrefixMatch
from octavo.config import SchedulerConfig
from octavo.scheduler.fair import queue_of
from octavo.scheduler.policy import POLICIES
from octavo.scheduler.request import FinishReason, Request, RequestState, Sequence
from octavo.scheduler.stats import SchedulerStats
from octavo.scheduler.step import Step
from octavo.scheduler.updates import Updates

__all__ = ["Roster"]


class Roster:
    """Moves requests between their states, with their blocks, and says so to the executor and to the front.

    Attributes:
        requests: all unfinished ones, by id.
        running: those on the device, in the order of the policy.
        waiting: those that wait in the queue, swapped out or not.
        suspects: those that wait apart, each for a step of its own.
        sent: sequences that the executor holds.
        removed: sequences that the executor is to forget with the next step.
        step: the step under way.

    """

    def __init__(self, config: SchedulerConfig, manager: BlockManager, updates: Updates, stats: SchedulerStats) -> None:
        self.policy = POLICIES[config.scheduling_policy]
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = queue_of(config)
        self.suspects: dict[str, Request] = {}
        self.sent: set[int] = set()
        self.removed: list[int] = []
        self.step = Step(0)
        self._manager = manager
        self._swaps = config.preemption_mode == "swap"
        self._updates = updates
        self._stats = stats

    @property
    def num_running_seqs(self) -> int:
        """Samples of running requests."""
        return sum([len(request.live) for request in self.running])

    def turn(self, request: Request) -> int:
        """Where a request stands, or would stand, among those that run."""
        return bisect.bisect_left(self.running, self.policy(request), key=self.policy)

    def add(self, request: Request) -> None:
        """A request begins to wait."""
        self.requests[request.request_id] = request
        if request.runs_alone:
            self.waiting.admit(request)  # it has its turn from now on
            self.suspects[request.request_id] = request
        else:
            self.waiting.push(request)

    # Onto the device

    def place(self, request: Request, match: PrefixMatch) -> None:
        """A waiting request runs from now on: with what was swapped out, or behind a prefix hit."""
        self.waiting.admit(request)
        self.running.insert(self.turn(request), request)
        resumed = request.state is RequestState.SWAPPED or request.num_preemptions > 0
        tables = {seq.seq_id: seq.swapped for seq in request.live if seq.swapped is not None}
        if tables:
            num_computed = self._manager.swap_in(tables)
            self.step.swapped_in.append(request)
            for seq in request.live:
                if seq.swapped is not None:
                    seq.num_computed, seq.swapped = num_computed[seq.seq_id], None
        else:
            self._start(request.live[0], match)
        request.from_cache = bool(tables) or match.num_tokens > 0
        request.state = RequestState.RUNNING
        if request.num_cached_tokens is None:
            self.waiting.charge(request, request.num_prompt_tokens - match.num_tokens)
        self._stats.admitted(request, match.num_tokens)
        request.waits_for = ""
        self._updates.placed(request, match, resumed=resumed, swapped_in=bool(tables))

    def match(self, request: Request, seq: Sequence) -> PrefixMatch:
        """What the prefix cache has of a sequence that is about to start."""
        if request.needs_whole_prompt:
            return PrefixMatch((), 0, "disabled", 0)
        return self._manager.match(seq.token_ids, seq.chain)

    def open_tables(self, request: Request) -> None:
        """Let samples share the prompt that another sample has computed again."""
        live = request.live
        leader = next((seq for seq in live if self._manager.has_table(seq.seq_id)), None)
        if leader is None:  # it finished before the others could share with it
            match = self.match(request, live[0])
            request.from_cache |= match.num_tokens > 0
            self._start(live[0], match)
            return
        if leader.num_computed < request.num_prompt_tokens:
            return
        for seq in live:
            if not self._manager.has_table(seq.seq_id) and (seq.num_output_tokens or leader.num_output_tokens):
                self.fork(request, leader, seq)
                # One that has no token yet computes the prompt's last row again, to draw its first from.
                seq.num_computed = request.num_prompt_tokens - (not seq.num_output_tokens)

    def fork(self, request: Request, leader: Sequence, seq: Sequence) -> None:
        """Give a sample the blocks of the prompt that another has computed."""
        self._manager.fork(leader.seq_id, seq.seq_id, request.num_prompt_tokens)
        seq.chain.share(leader.chain, request.num_prompt_tokens)

    def _start(self, seq: Sequence, match: PrefixMatch) -> None:
        self._manager.start(seq.seq_id, match)
        seq.num_computed = match.num_tokens

    # Off the device

    def preempt(self, request: Request, reason: str, *, swap: bool = True) -> None:
        """Take a running request off the device, with all its samples."""
        self.running.remove(request)
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        held = [seq for seq in request.live if self._manager.has_table(seq.seq_id)]
        tables = None
        is_suspect = request.request_id in self.suspects  # these wait apart, for a step of their own
        wants_swap = swap and self._swaps and not is_suspect
        if wants_swap:
            tables = self._manager.swap_out((seq.seq_id, seq.chain, seq.num_computed) for seq in held)
        for seq in held:
            self._forget(seq)
            if tables is not None:
                seq.swapped = tables[seq.seq_id]
            else:
                self._manager.free(seq.seq_id)
                seq.num_computed = 0
        request.state = RequestState.WAITING if tables is None else RequestState.SWAPPED
        if tables is not None:
            self._stats.num_swaps += 1
            self.step.swapped_out.append(request)
        if not is_suspect:
            self.waiting.push(request)
        self._updates.preempted(request, reason, tables, wants_swap=wants_swap)

    def drop_swapped(self, request: Request) -> None:
        """Give up what a request has on the host."""
        for seq in request.live:
            if seq.swapped is not None:
                self._manager.drop_swapped(seq.swapped)
                seq.swapped, seq.num_computed = None, 0
        if request.state is RequestState.SWAPPED:
            request.state = RequestState.WAITING

    def finish(self, request: Request, seq: Sequence, reason: FinishReason, stop_reason: int | None = None) -> None:
        """End a sample, and with the last one its request."""
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        request.live = [other for other in request.live if other is not seq]
        self._forget(seq)
        self._manager.free(seq.seq_id)
        if seq.swapped is not None:
            self._manager.drop_swapped(seq.swapped)
            seq.swapped = None
        self._updates.finish(request, seq)
        if not request.live:
            if request.state is RequestState.RUNNING:
                self.running.remove(request)
            self.waiting.remove(request)
            self.suspects.pop(request.request_id, None)
            del self.requests[request.request_id]
            request.end()

    def finish_all(self, request: Request, reason: FinishReason) -> None:
        """End all samples of a request."""
        for seq in request.live:
            self.finish(request, seq, reason)

    def fail(self, request: Request, message: str, param: str | None = None) -> None:
        """End a request with an error, for which a field of its own may be at fault."""
        request.error, request.error_param = message, param
        self.finish_all(request, "error")

    def _forget(self, seq: Sequence) -> None:
        if seq.seq_id in self.sent:
            self.sent.remove(seq.seq_id)
            self.removed.append(seq.seq_id)
