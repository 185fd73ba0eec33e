"""Guesses of the next tokens, from the sequence's own text.

Where its last few tokens stand earlier in prompt or output, what stood behind them is likely to come again. The
guesses are computed in the same step as the last known token, and kept as far as they are what would have been
chosen anyhow, so they change how fast tokens come and never which.
"""

from octavo.cache.manager import BlockManager
from octavo.config import SchedulerConfig
from octavo.scheduler.ngrams import NgramIndex
from octavo.scheduler.step import Share, Step

__all__ = ["Speculation"]


class Speculation:
    """Puts guesses into steps that are otherwise complete."""

    def __init__(self, config: SchedulerConfig, manager: BlockManager) -> None:
        self._manager = manager
        self._num_tokens = config.num_speculative_tokens
        self._smallest, self._largest = config.prompt_lookup_min, config.prompt_lookup_max

    @classmethod
    def of(cls, config: SchedulerConfig, manager: BlockManager) -> "Speculation | None":
        """What the settings ask for; None: nothing is guessed."""
        return cls(config, manager) if config.speculative_method == "ngram" else None

    def extend(self, step: Step, num_running: int) -> None:
        """Put guesses behind those who draw a token, out of what the step leaves: nobody waits or goes for them."""
        for share in step.shares:
            request, seq = share.request, share.seq
            if len(share.samples) != 1:
                continue
            start = len(seq.token_ids)
            num_left = request.max_output_tokens - seq.num_output_tokens  # the last one needs no computing
            most = min(self._num_tokens, step.budget, num_left - 1)
            if most <= 0:
                continue
            if seq.ngrams is None:
                seq.ngrams = NgramIndex(self._smallest, self._largest)
            drafts = seq.ngrams.propose(seq.token_ids, most)
            if drafts and self._find_blocks(share, start, len(drafts), num_running):
                share.draft_token_ids = drafts
                step.budget -= len(drafts)

    def _find_blocks(self, share: Share, start: int, num_drafts: int, num_running: int) -> bool:
        """Blocks for guesses, as long as each who runs finds one to grow into."""
        seq_id = share.seq.seq_id
        needed = self._manager.num_needed(seq_id, start, num_drafts)
        if needed and needed + num_running > self._manager.num_free:
            return False
        new, replaced = self._manager.allocate(seq_id, start, num_drafts)
        share.new_blocks += new
        share.replaced_blocks += replaced
        return True
