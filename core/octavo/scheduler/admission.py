"""Whether a waiting request can run: its places, its blocks, and who makes room for it."""

from octavo.cache.manager import BlockManager
from octavo.cache.prefix import PrefixMatch
from octavo.scheduler.request import Request
from octavo.scheduler.roster import Roster
from octavo.scheduler.updates import Updates

__all__ = ["Admission"]

KV_BLOCKS = "free KV blocks"


class Admission:
    """Decides who joins those that run."""

    def __init__(self, roster: Roster, manager: BlockManager, updates: Updates, max_num_seqs: int) -> None:
        self._roster = roster
        self._manager = manager
        self._updates = updates
        self._max_num_seqs = max_num_seqs

    def admit(self, request: Request, index: int, *, force: bool = False) -> bool:
        """Make a waiting request run at its turn, preempting later ones (with `force`, any) where it must."""
        roster, manager = self._roster, self._manager
        running, seats = roster.running, len(request.live)
        later = [r for r in (running if force else running[index:]) if r is not request]
        match, needed = self._needs(request)
        if self._is_computing(request, match):
            return self.wait(request, "its prefix, which this step computes")
        held = sum(len(manager.table(s.seq_id)) for r in later for s in r.live if manager.has_table(s.seq_id))
        if needed > manager.num_free + held and len(running) > 0:
            return self.wait(request, KV_BLOCKS)
        while later and (
            roster.num_running_seqs + seats > self._max_num_seqs or needed + len(running) > manager.num_free
        ):
            roster.preempt(later.pop(), f"{request.request_id} goes first and needs its place")
            match, needed = self._needs(request)
        if roster.num_running_seqs + seats > self._max_num_seqs:
            return self.wait(request, f"one of max_num_seqs = {self._max_num_seqs} places")
        if running and needed + len(running) > manager.num_free:  # one block each to grow into
            return self.wait(request, KV_BLOCKS)
        roster.place(request, match)
        return True

    def wait(self, request: Request, reason: str) -> bool:
        """Say why the first of those that wait goes on waiting; False."""
        self._updates.waits(request, reason, len(self._roster.requests) - len(self._roster.running))
        return False

    def _is_computing(self, request: Request, match: PrefixMatch) -> bool:
        """Whether the block after the prefix hit is computed in this very step: a step later it is a hit too."""
        seq, index = request.live[0], len(match.blocks)
        usable = (len(seq.token_ids) - 1) // self._manager.block_size
        return match.reason == "differs" and index < usable and seq.chain.hashes[index] in self._roster.step.computing

    def _needs(self, request: Request) -> tuple[PrefixMatch, int]:
        """The prefix hit of a waiting request's first sample, and the free blocks that all samples take."""
        tables = [seq.swapped for seq in request.live if seq.swapped is not None]
        if tables:
            return PrefixMatch((), 0, "disabled", 0), self._manager.num_needed_to_swap_in(tables) + len(tables)
        first, *others = request.live
        match = self._roster.match(request, first)
        needed = self._manager.num_needed_to_start(len(first.token_ids), match)
        shared = request.num_prompt_tokens // self._manager.block_size
        return match, needed + sum(self._manager.num_blocks_for(len(seq.token_ids)) - shared for seq in others)
