"""What a benchmark prints, and the JSON that says the same and more."""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.cli.bench.memory import peak_resident_bytes
from octavo.cli.bench.options import shape_of, variants_of
from octavo.cli.bench.session import Result, Session
from octavo.cli.bench.workload import Shape
from octavo.cli.options import settings_of
from octavo.errors import ConfigError

__all__ = ["Figure", "bench", "share_of_limit"]

MIB = 1 << 20

Figures = Callable[[Result], "list[Figure]"]


@dataclass(frozen=True)
class Figure:
    """One line of the report.

    Attributes:
        name: in the report; with underscores for blanks it is its key in JSON.
        unit: after the number; empty for counts.
        values: one a repeat.

    """

    name: str
    unit: str
    values: list[float]

    @property
    def median(self) -> float:
        """Of the repeats."""
        return statistics.median(self.values)

    @property
    def key(self) -> str:
        """In JSON."""
        return "_".join(self.name.replace(",", "").replace("-", " ").split())

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        spread = f" ({_number(min(self.values))} to {_number(max(self.values))})" if len(set(self.values)) > 1 else ""
        return f"{_number(self.median)}{unit}{spread}"


def share_of_limit(result: Result, name: str, seconds: Sequence[float], steps: Sequence[Sequence[Any]]) -> list[Figure]:
    """How near some steps of each run came to the least time that the device could need; empty where none is known."""
    limits = [result.limit(of_run) for of_run in steps]
    shares = [100 * limit.seconds / spent for limit, spent in zip(limits, seconds, strict=True) if limit and spent]
    return [Figure(name, "% of the machine's limit", shares)] if shares else []


def bench(benchmark: str, figures: Figures, args: argparse.Namespace) -> int:
    """Measure what the options of a command ask for, and print it. Returns the exit status.

    Args:
        benchmark: its name, for JSON.
        figures: what it tells of a result.
        args: of a parser that has `add_workload` and `add_settings`.

    """
    config, shape = settings_of(args), shape_of(args)
    with Session(config, variants_of(args)) as session:
        session.measure(shape, warmup=args.warmup, repeats=args.repeats)
        _publish(benchmark, session, shape, figures, args)
    return 0


def _publish(benchmark: str, session: Session, shape: Shape, figures: Figures, args: argparse.Namespace) -> None:
    """Print the report, write the JSON file; with '-' the JSON alone goes to stdout."""
    json_file: str | None = args.json
    table = [
        (result, [*figures(result), *_memory(result, alone=len(session.engines) == 1)]) for result in session.results
    ]
    document = _document(benchmark, session, shape, table, args.warmup, args.repeats)
    if json_file == "-":
        print(json.dumps(document, indent=2))
        return
    _print(document, session, shape, table)
    if json_file is not None:
        try:
            Path(json_file).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write --json {json_file}: {error.strerror}") from error


def _memory(result: Result, *, alone: bool) -> list[Figure]:
    """Of this process; not told where several engines share it."""
    beyond = result.engine.other_resident_bytes()
    if beyond is None or not alone:
        return []
    return [Figure("resident memory beyond the KV blocks in use", "MiB", [beyond / MIB])]


def _document(
    benchmark: str,
    session: Session,
    shape: Shape,
    table: Sequence[tuple[Result, list[Figure]]],
    warmup: int,
    repeats: int,
) -> dict[str, Any]:
    engine = session.results[0].engine
    plan = engine.recorder.memory_plan
    last = dict(_by_key(table[-1][1]))
    peak = peak_resident_bytes()
    return {
        "benchmark": benchmark,
        **engine.recorder.facts(),
        "settings": engine.llm.config.flat(),
        "workload": asdict(shape),
        "warmup": warmup,
        "repeats": repeats,
        "memory": {
            "weights": plan.weights,
            "workspace": plan.workspace,
            "kv_bytes": plan.kv_bytes,
            "peak_resident": peak,
        },
        "variants": [_variant(result, figures) for result, figures in table],
        "ratios": {
            f"{table[-1][0].variant.name}/{result.variant.name}": {
                figure.key: _ratio(last[figure.key], figure) for figure in figures if figure.key in last
            }
            for result, figures in table[:-1]
        },
    }


def _variant(result: Result, figures: Sequence[Figure]) -> dict[str, Any]:
    costs, probe = result.engine.costs, result.probe
    works = [result.works(run.steps) for run in result.runs]
    return {
        "name": result.variant.name,
        **{key: getattr(result.variant, key) for key in ("batching", "temperature", "top_p")},
        "settings": dict(result.variant.settings),
        "figures": {f.key: {"unit": f.unit, "median": f.median, "values": f.values} for f in figures},
        "costs": {
            "told_by": costs.told_by,
            "layer_bytes": costs.program.layer_bytes,
            "head_bytes": costs.program.head_bytes,
            "dtypes": [_name(d) for d in (costs.program.layer_dtype, costs.program.head_dtype)],
            "bytes": [sum(work.num_bytes for work in run) for run in works],
            "operations": [sum(work.num_ops for work in run) for run in works],
        },
        "limits": [
            {
                "read_bytes_per_second": each.read_bytes_per_second,
                "ops_per_second": {_name(dtype): rate for dtype, rate in each.ops_per_second.items()},
            }
            for each in result.probes
        ]
        if probe
        else None,
    }


def _print(
    document: Mapping[str, Any], session: Session, shape: Shape, table: Sequence[tuple[Result, list[Figure]]]
) -> None:
    settings = document["settings"]
    cache = "on" if settings["enable_prefix_caching"] else "off"
    print(f"{document['model']} on {document['platform']}, {settings['dtype']}, {document['program']}")
    print(
        f"{shape}; at most {settings['max_num_seqs']} at once, blocks of {settings['block_size']}, prefix cache {cache}"
    )
    print(f"medians of {document['repeats']} repeats after {document['warmup']} for warm-up (lowest to highest)\n")
    names = list(dict.fromkeys(figure.name for _, figures in table for figure in figures))
    rows = [["", *(result.variant.name for result, _ in table)]] if len(table) > 1 else []
    by_name = [{figure.name: figure for figure in figures} for _, figures in table]
    last, *_ = by_name[::-1]
    if rows:
        rows[0] += [f"{table[-1][0].variant.name}/{result.variant.name}" for result, _ in table[:-1]]
    for name in names:
        row = [name, *(str(of[name]) if name in of else "" for of in by_name)]
        for of in by_name[:-1]:
            ratio = _ratio(last[name], of[name]) if name in of and name in last else None
            row.append("" if ratio is None else f"{ratio:.2f}x")
        rows.append(row)
    _print_rows(rows)
    print()
    _print_rows([[name, text] for name, text in _limits(session.results)])


def _limits(results: Sequence[Result]) -> list[tuple[str, str]]:
    """The machine's limits and what they are held against; a line for each engine."""
    lines = []
    for result in {id(one.engine): one for one in results}.values():
        costs, probe = result.engine.costs, result.probe
        program = costs.program
        told = f"{program.layer_bytes / MIB:.1f} MiB of layers, {program.head_bytes / MIB:.1f} MiB of head"
        lines.append(("weights read a step", f"{told} (by {costs.told_by})"))
        if probe is None:
            lines.append(("limits", "the platform measures none, so no shares are given"))
            continue
        peaks = [f"{rate / 1e12:.3g} T/s in {_name(dtype)}" for dtype, rate in probe.ops_per_second.items()]
        rates = [one.read_bytes_per_second / 1e9 for one in result.probes]
        spread = f"({min(rates):.1f} to {max(rates):.1f})"
        lines.append(
            ("limits, probed between runs", ", ".join([f"{statistics.median(rates):.1f} GB/s {spread}", *peaks]))
        )
        missing = result.limit(result.runs[0].steps)
        if missing and missing.without_peak:
            lines.append(("", f"no peak is known for {_name(missing.without_peak)}: its operations count as nothing"))
    return list(dict.fromkeys(lines))  # two engines of one model read the same


def _print_rows(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    sys.stdout.flush()


def _by_key(figures: Sequence[Figure]) -> list[tuple[str, Figure]]:
    return [(figure.key, figure) for figure in figures]


def _ratio(one: Figure, other: Figure) -> float | None:
    return one.median / other.median if other.median else None


def _number(value: float) -> str:
    """Four digits that count."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
