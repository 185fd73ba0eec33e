"""Counts over the scheduler's life."""

from dataclasses import dataclass

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
        num_cached_prompt_tokens: prompt tokens that the prefix cache served at a first admission.
        num_prompt_tokens: of admitted requests.
        num_generated_tokens: sampled.
        num_preemptions: requests taken off the device, by either means.
        num_swaps: those that went to host blocks.
        num_failed_steps: steps that the executor could not finish.

    """

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_failed_steps: int = 0
