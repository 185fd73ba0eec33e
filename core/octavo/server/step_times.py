"""Step times for people: figures, a table, and a picture that Perfetto and Chrome's tracing page open."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from octavo.engine.history import RequestRecord
from octavo.engine.profiling import PHASES, Profiled, StepProfile
from octavo.engine.stages import stages_of

__all__ = ["picture_of", "summary_of", "table_of"]

BETWEEN = "between"  # two steps, while there was work: the front is heard
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
ENGINE, REQUESTS = 1, 2  # processes, as the picture calls its two parts
MAX_ROWS = 200  # requests in the picture, the newest


def summary_of(profiled: Profiled) -> dict[str, Any]:
    """The figures, ready for JSON; times are seconds."""
    steps = profiled.steps
    seconds = [step.seconds for step in steps]
    between = [after.begin - before.end for before, after in _neighbours(steps)]
    columns = {phase: [of_step[phase] for of_step in seconds] for phase in PHASES}
    whole = [step.end - step.begin for step in steps]
    total = sum(whole) + sum(between)
    return {
        "began": profiled.began,
        "seconds": steps[-1].end - steps[0].begin if steps else 0.0,
        "num_steps": len(steps),
        "num_tokens": sum(step.num_tokens for step in steps),
        "num_generated": sum(step.num_generated for step in steps),
        "phases": {phase: _figures(times, total) for phase, times in columns.items()},
        BETWEEN: _figures(between, total),
        "step": _figures(whole, total),
        "kinds": {
            kind: {"num_steps": len(chosen), **_figures([step.end - step.begin for step in chosen], total)}
            for kind, chosen in _kinds(steps).items()
        },
    }


def table_of(summary: dict[str, Any]) -> str:
    """The figures as lines of text; times are milliseconds."""
    if not summary["num_steps"]:
        return "no step was made: the engine had nothing to do\n"
    rows = [*summary["phases"].items(), ("between steps", summary[BETWEEN]), ("step", summary["step"])]
    kinds = [(f"{kind} ({figures['num_steps']})", figures) for kind, figures in summary["kinds"].items()]
    lines = [
        f"{summary['num_steps']} steps in {summary['seconds']:.3f} s: {summary['num_tokens']} tokens computed, "
        f"{summary['num_generated']} generated",
        f"{'ms':<24}{'share':>8}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}{'total':>12}",
    ]
    for name, figures in [*rows, *kinds]:
        times = "".join(f"{1e3 * figures[column]:>10.3f}" for column in (*QUANTILES, "max"))
        lines.append(f"{name:<24}{figures['share']:>8.1%}{times}{1e3 * figures['total']:>12.1f}")
    return "\n".join(lines) + "\n"


def picture_of(profiled: Profiled, records: Iterable[RequestRecord]) -> dict[str, Any]:
    """Steps, their phases and what lay beside them, as trace events (Chrome's format, which Perfetto reads too).

    The engine's part has a row of steps and curves of tokens, requests and KV blocks; below it each request that was
    there meanwhile has a row of what it was at. Times are microseconds since the profile began.
    """
    summary = summary_of(profiled)
    events = [_name("process_name", ENGINE, 0, "engine"), _name("thread_name", ENGINE, 1, "steps")]
    for number, step in enumerate(profiled.steps):
        events.extend(_step_events(number, step))
    if profiled.steps:
        events.extend(_request_events(profiled, records))
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {"summary": summary, "table": table_of(summary)},
    }


def _figures(times: Sequence[float], total: float) -> dict[str, float]:
    ordered = sorted(times) or [0.0]
    figures = {name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] for name, share in QUANTILES.items()}
    return {"share": sum(ordered) / total if total else 0.0, **figures, "max": ordered[-1], "total": sum(ordered)}


def _neighbours(steps: Sequence[StepProfile]) -> Iterator[tuple[StepProfile, StepProfile]]:
    """Steps that followed one another because there was more to do."""
    for before, after in pairwise(steps):
        if before.num_running or before.num_waiting:
            yield before, after


def _kinds(steps: Sequence[StepProfile]) -> dict[str, list[StepProfile]]:
    """Steps that only went on with outputs, and those in which prompts were computed too."""
    kinds: dict[str, list[StepProfile]] = {"steps of outputs": [], "steps with prompts": []}
    for step in steps:
        kinds["steps of outputs" if step.num_tokens <= step.num_generated else "steps with prompts"].append(step)
    return {kind: chosen for kind, chosen in kinds.items() if chosen}


def _step_events(number: int, step: StepProfile) -> Iterator[dict[str, Any]]:
    figures = {
        "tokens": step.num_tokens,
        "generated": step.num_generated,
        "requests": step.num_seqs,
        "running": step.num_running,
        "waiting": step.num_waiting,
        "KV blocks": step.num_used_blocks,
    }
    yield _slice(f"step {number}", ENGINE, 1, step.begin, step.end, figures)
    ends = [when for _, when in step.marks[1:]] + [step.end]
    for (phase, begin), end in zip(step.marks, ends, strict=True):
        yield _slice(phase, ENGINE, 1, begin, end, {})
    for name, counts in (
        ("tokens a step", {"tokens": step.num_tokens}),
        ("requests", {"running": step.num_running, "waiting": step.num_waiting}),
        ("KV blocks", {"used": step.num_used_blocks}),
    ):
        yield {"name": name, "ph": "C", "pid": ENGINE, "tid": 0, "ts": _microseconds(step.end), "args": counts}


def _request_events(profiled: Profiled, records: Iterable[RequestRecord]) -> Iterator[dict[str, Any]]:
    begin, end = profiled.steps[0].begin, profiled.steps[-1].end
    yield _name("process_name", REQUESTS, 0, "requests")
    row = 0
    for record in records:
        stages = [(s, s.begin - profiled.began, s.end - profiled.began) for s in stages_of(record)]
        seen = [(stage, max(first, begin), min(last, end)) for stage, first, last in stages]
        seen = [(stage, first, last) for stage, first, last in seen if last > first]
        if not seen or row >= MAX_ROWS:
            continue
        row += 1
        yield _name("thread_name", REQUESTS, row, record.request_id)
        for stage, first, last in seen:
            yield _slice(stage.name, REQUESTS, row, first, last, {"why": stage.why} if stage.why else {})


def _slice(name: str, process: int, row: int, begin: float, end: float, figures: dict[str, Any]) -> dict[str, Any]:
    duration = _microseconds(end) - _microseconds(begin)
    place = {"pid": process, "tid": row, "ts": _microseconds(begin), "dur": duration}
    return {"name": name, "ph": "X", **place, "args": figures}


def _name(what: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
