"""Counts over the scheduler's life."""

from dataclasses import asdict, dataclass

from octavo.scheduler.request import Request, Sequence

__all__ = ["SchedulerStats"]


@dataclass
class SchedulerStats:
    """Counters that only grow.

    Each known token is either computed, taken from the prefix cache, or still to do; what a preemption throws
    away and a prefix hit does not bring back counts as recomputed, never as a hit.

    Attributes:
        num_steps: steps sent to the executor.
        num_computed_tokens: tokens that went through the model, recomputed ones included.
        num_recomputed_tokens: tokens computed again, or to be computed again, after a preemption.
        num_cached_prompt_tokens: prompt tokens that the prefix cache served, each once.
        num_computed_prompt_tokens: prompt tokens that went through the model, each once: a prompt that is done is
            made of these and of cached ones.
        num_prompt_tokens: of admitted requests.
        num_generated_tokens: sampled.
        num_preemptions: requests taken off the device, by either means.
        num_swaps: those that went to host blocks.
        num_failed_steps: steps that the executor could not finish.
        num_drafts: times that a sequence's next tokens were guessed.
        num_draft_tokens: tokens guessed.
        num_accepted_tokens: those that were right; they alone count as computed.
        accepted_at: of these, how many were the first of their guess, the second, and so on.

    """

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_failed_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()

    def counts(self) -> dict[str, int]:
        """All by name; those of `accepted_at` as num_accepted_at_0 and so on."""
        counts = asdict(self)
        accepted = counts.pop("accepted_at")
        return counts | {f"num_accepted_at_{place}": num for place, num in enumerate(accepted)}

    def admitted(self, request: Request, num_hit: int) -> None:
        """A request starts, for the first time or again, with so many of its prompt's tokens in the prefix cache."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_hit
            self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_prompt_tokens += request.advance_prompt(num_hit)

    def embedded(self, request: Request) -> None:
        """An encoder has computed a whole prompt."""
        self.num_computed_tokens += request.num_prompt_tokens
        self.num_computed_prompt_tokens += request.advance_prompt(request.num_prompt_tokens)

    def drafted(self, num_tokens: int, num_accepted: int) -> None:
        """Tokens of a sequence were guessed, and so many of them were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += num_accepted
        accepted = [*self.accepted_at, *[0] * (num_tokens - len(self.accepted_at))]
        for place in range(num_accepted):
            accepted[place] += 1
        self.accepted_at = tuple(accepted)

    def computed(self, request: Request, seq: Sequence, num_tokens: int, num_new: int) -> None:
        """A sequence has computed its next tokens, and its request has so many new ones."""
        start = seq.num_computed
        end = seq.num_computed = start + num_tokens
        self.num_computed_tokens += num_tokens
        self.num_generated_tokens += num_new
        if start < seq.num_once_computed:
            again = min(end, seq.num_once_computed) - start
            request.num_recomputed_tokens += again
            self.num_recomputed_tokens += again
        if end > seq.num_once_computed:
            seq.num_once_computed = end
        if start < request.num_prompt_tokens:
            self.num_computed_prompt_tokens += request.advance_prompt(end)
