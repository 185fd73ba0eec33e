"""Names of metrics: ours, and those of vLLM for the same thing, today's and those of its 0.7."""

from collections.abc import Sequence

__all__ = ["ABSENT", "COUNTERS", "FINISHED", "HISTOGRAMS", "NOT_NUMBERS", "REJECTIONS"]

REJECTIONS = ("queue_requests", "queue_tokens", "deadline")
FINISHED = ("stop", "length", "abort", "error")

FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0, 80.0)
FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    40.0,
    160.0,
)
SLOW = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    960.0,
    7680.0,
)
SIZES = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
FEW = (1.0, 2.0, 5.0, 10.0, 20.0)
STEP = tuple(float(2**power) for power in range(15))

# Our name: what it is, bounds, and vLLM's names for the same.
HISTOGRAMS: dict[str, tuple[str, Sequence[float], tuple[str, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", FIRST, ("time_to_first_token_seconds",)),
    "inter_token_latency_seconds": (
        "Between a request's tokens.",
        FAST,
        ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    ),
    "request_time_per_output_token_seconds": (
        "A request's mean time between tokens.",
        FAST,
        ("request_time_per_output_token_seconds",),
    ),
    "e2e_request_latency_seconds": ("From arrival to the end.", SLOW, ("e2e_request_latency_seconds",)),
    "request_queue_time_seconds": (
        "From arrival to admission.",
        SLOW,
        ("request_queue_time_seconds", "time_in_queue_requests"),
    ),
    "request_inference_time_seconds": ("From admission to the end.", SLOW, ("request_inference_time_seconds",)),
    "request_prefill_time_seconds": ("From admission to the first token.", SLOW, ("request_prefill_time_seconds",)),
    "request_decode_time_seconds": ("From the first token to the last.", SLOW, ("request_decode_time_seconds",)),
    "iteration_tokens_total": ("Tokens that a step computed.", STEP, ("iteration_tokens_total",)),
    "request_prompt_tokens": ("Tokens of prompts.", SIZES, ("request_prompt_tokens",)),
    "request_generation_tokens": ("Tokens generated a request.", SIZES, ("request_generation_tokens",)),
    "request_max_num_generation_tokens": (
        "Tokens generated a sample.",
        SIZES,
        ("request_max_num_generation_tokens",),
    ),
    "request_params_n": ("Samples asked for.", FEW, ("request_params_n",)),
    "request_params_max_tokens": ("max_tokens asked for.", SIZES, ("request_params_max_tokens",)),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens that the prefix cache had not.",
        SIZES,
        ("request_prefill_kv_computed_tokens",),
    ),
    "request_num_preemptions": ("How often a request was preempted.", (0.0, *FEW), ("request_num_preemptions",)),
}

# Our name: what it is, the count of the engine, and vLLM's names.
COUNTERS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "prompt_tokens": (
        "Prompt tokens done: computed or cached.",
        ("num_computed_prompt_tokens", "num_cached_prompt_tokens"),
        ("prompt_tokens",),
    ),
    "prompt_tokens_cached": ("Prompt tokens cached.", ("num_cached_prompt_tokens",), ("prompt_tokens_cached",)),
    "prompt_tokens_computed": ("Prompt tokens computed, each once.", ("num_computed_prompt_tokens",), ()),
    "generation_tokens": ("Tokens generated.", ("num_generated_tokens",), ("generation_tokens",)),
    "tokens": (
        "Prompt tokens done and tokens generated.",
        ("num_computed_prompt_tokens", "num_cached_prompt_tokens", "num_generated_tokens"),
        ("tokens",),
    ),
    "prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache.",
        ("num_computed_prompt_tokens", "num_cached_prompt_tokens"),
        ("prefix_cache_queries",),
    ),
    "prefix_cache_hits": ("Those found.", ("num_cached_prompt_tokens",), ("prefix_cache_hits",)),
    "num_preemptions": ("Requests taken off the device.", ("num_preemptions",), ("num_preemptions",)),
    "num_swaps": ("Those whose blocks went to the host.", ("num_swaps",), ()),
    "computed_tokens": ("Tokens through the model, again or not.", ("num_computed_tokens",), ()),
    "recomputed_tokens": ("Tokens computed again after a preemption.", ("num_recomputed_tokens",), ()),
    "steps": ("Steps.", ("num_steps",), ()),
    "failed_steps": ("Steps that failed.", ("num_failed_steps",), ()),
    "drafts": ("Times that next tokens were guessed.", ("num_drafts",), ("spec_decode_num_drafts",)),
    "draft_tokens": ("Tokens guessed.", ("num_draft_tokens",), ("spec_decode_num_draft_tokens",)),
    "accepted_tokens": ("Those that were right.", ("num_accepted_tokens",), ("spec_decode_num_accepted_tokens",)),
    "emitted_tokens": (
        "Those that were right, and the one that came after each guess.",
        ("num_accepted_tokens", "num_drafts"),
        ("spec_decode_num_emitted_tokens",),
    ),
    "requests_admitted": ("Requests admitted.", ("num_admitted",), ()),
}

ABSENT = (  # counters of what is not there: vLLM's dashboards find a 0
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "mm_cache_queries",
    "mm_cache_hits",
)
NOT_NUMBERS = "that are not numbers"  # in the error of a request whose logits or hidden states were none
