"""The lines of each benchmark's report."""

from collections.abc import Sequence

from octavo.cli.bench.measure import Run, block_use, percentiles
from octavo.cli.bench.report import Figure, share_of_limit
from octavo.cli.bench.session import Result

__all__ = ["latency_figures", "throughput_figures"]


def latency_figures(result: Result) -> list[Figure]:
    """Of one request at a time."""
    runs = result.runs
    first = [run.first_token_seconds[0] for run in runs]
    rest = [run.seconds - seconds for run, seconds in zip(runs, first, strict=True)]
    num_first = [run.first_step_with_token for run in runs]
    gaps = [gap for run in runs for gap in run.gap_seconds]
    found = [
        Figure("first token", "ms", [1e3 * seconds for seconds in first]),
        Figure(
            "prompt tokens a second",
            "",
            [run.num_input_tokens / seconds for run, seconds in zip(runs, first, strict=True)],
        ),
    ]
    if any(run.num_cached_tokens for run in runs):
        found.append(Figure("prompt tokens from the prefix cache", "", [run.num_cached_tokens for run in runs]))
    first_steps = [run.steps[:count] for run, count in zip(runs, num_first, strict=True)]
    found += share_of_limit(result, "first token, share", first, first_steps)
    if gaps:
        found += [Figure(f"further tokens, {q}", "ms", [1e3 * value]) for q, value in percentiles(gaps).items()]
        found.append(
            Figure(
                "further tokens a second",
                "",
                [(run.num_output_tokens - 1) / seconds for run, seconds in zip(runs, rest, strict=True)],
            )
        )
        further_steps = [run.steps[count:] for run, count in zip(runs, num_first, strict=True)]
        found += share_of_limit(result, "further tokens, share", rest, further_steps)
    found.append(Figure("whole request", "ms", [1e3 * run.seconds for run in runs]))
    found.append(_outside(runs))
    return found


def throughput_figures(result: Result) -> list[Figure]:
    """Of many requests at once."""
    runs = result.runs
    num_tokens = [run.num_input_tokens + run.num_output_tokens for run in runs]
    found = [
        Figure("output tokens a second", "", [run.num_output_tokens / run.seconds for run in runs]),
        Figure("all tokens a second", "", [tokens / run.seconds for run, tokens in zip(runs, num_tokens, strict=True)]),
        Figure("requests a second", "", [run.num_requests / run.seconds for run in runs]),
        Figure("seconds", "", [run.seconds for run in runs]),
    ]
    found += share_of_limit(result, "share", [run.seconds for run in runs], [run.steps for run in runs])
    firsts = [seconds for run in runs for seconds in run.first_token_seconds]
    gaps = [seconds for run in runs for seconds in run.gap_seconds]
    found += [Figure(f"first token, {q}", "ms", [1e3 * value]) for q, value in percentiles(firsts).items()]
    found += [Figure(f"further tokens, {q}", "ms", [1e3 * value]) for q, value in percentiles(gaps).items()]
    found += [
        Figure("steps", "", [len(run.steps) for run in runs]),
        Figure("tokens a step", "", [_mean([step.sent.num_tokens for step in run.steps]) for run in runs]),
        Figure(
            "prompt tokens from the prefix cache",
            "%",
            [100 * run.num_cached_tokens / run.num_input_tokens for run in runs],
        ),
        Figure("preemptions", "", [run.num_preemptions for run in runs]),
        *_kv_figures(runs, result.engine.block_size),
        _outside(runs),
    ]
    return found


def _kv_figures(runs: Sequence[Run], block_size: int) -> list[Figure]:
    uses = [block_use(run.steps, block_size) for run in runs]
    return [
        Figure("KV blocks allocated but unused", "% of those in use", [100 * use.empty_share for use in uses]),
        Figure("room for tokens in them that holds none", "%", [100 * use.empty_slot_share for use in uses]),
    ]


def _outside(runs: Sequence[Run]) -> Figure:
    """What scheduling, detokenising and the rest of the engine's loop take."""
    return Figure("outside the steps", "us a step", [1e6 * (r.seconds - r.step_seconds) / len(r.steps) for r in runs])


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)
