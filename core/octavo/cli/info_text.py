"""The report of `octavo info` for readers: tables on a terminal, aligned lines where it is piped."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from octavo.executor.memory import MemoryPlan

__all__ = ["print_report", "sections"]

GIB = 2**30


@dataclass(frozen=True)
class Section:
    """A heading, and rows of cells or single lines under it. Without headers the first cell names the second."""

    title: str
    rows: Sequence[Sequence[str]]
    headers: Sequence[str] = ()
    notes: Sequence[str] = ()


def print_report(report: dict[str, Any], *, tracebacks: bool = False) -> None:
    """To standard output; a refusal to standard error."""
    show = _show_tables if sys.stdout.isatty() else _show_lines
    for section in sections(report, tracebacks=tracebacks):
        show(section)
    if report["error"]:
        sys.stdout.flush()
        print(f"octavo info: error: {report['error']}", file=sys.stderr)


def sections(report: dict[str, Any], *, tracebacks: bool = False) -> Iterator[Section]:
    """The report in reading order; what it does not know is left out."""
    yield _platforms(report)
    if report["problems"]:
        yield _problems(report["problems"], tracebacks)
    if report["chosen"]:
        chosen = report["chosen"]
        facts = [("platform", f"{chosen['name']}: {chosen['reason']}")]
        yield Section("Chosen", [*facts, *(report["diagnostics"] or {}).items(), *_capabilities(report)])
    if report["memory"]:
        yield Section("Memory", _memory(report["memory"]))
    if report["model"]:
        said_above = {"settings", "platform", "row invariant", "op table", *(report["diagnostics"] or {})}
        yield Section("Model", [fact for fact in report["model"].items() if fact[0] not in said_above])
        yield Section("Settings", [(name, _value(value)) for name, value in report["model"]["settings"].items()])
    if report["ops"]:
        yield _ops(report)


def _platforms(report: dict[str, Any]) -> Section:
    rows = [
        (
            platform["name"],
            f"{platform['distribution']} {platform['version']}",
            "yes" if platform["available"] else "no",
            str(platform["priority"]),
            platform["reason"],
            "; ".join(platform["devices"]),
        )
        for platform in report["platforms"]
    ]
    loaded = [f"{p['name']} ({p['distribution']} {p['version']})" for p in report["plugins"]]
    notes = [f"plugins: {', '.join(loaded) or 'none is installed'}"]
    headers = ("name", "package", "available", "priority", "because", "devices")
    return Section(f"Platforms (contract {report['contract']})", rows, headers, notes)


def _problems(problems: Sequence[dict[str, str]], tracebacks: bool) -> Section:
    rows = [(p["plugin"], p["origin"], p["stage"], p["reason"]) for p in problems]
    notes = [p["detail"].rstrip() for p in problems if p["detail"]] if tracebacks else []
    return Section("Broken plugins", rows, ("plugin", "package", "failed in", "cause"), notes)


def _capabilities(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in (report["capabilities"] or {}).items():
        empty = "none" if name == "kernel_languages" else "any"
        yield name.replace("_", " "), _value(value) or empty


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _memory(memory: dict[str, int]) -> list[tuple[str, str]]:
    if "num_blocks" in memory:
        plan = MemoryPlan(**{field.name: memory[field.name] for field in fields(MemoryPlan)})
        return plan.lines()
    return [("total", f"{memory['total'] / GIB:.2f} GiB"), ("free", f"{memory['free'] / GIB:.2f} GiB")]


def _ops(report: dict[str, Any]) -> Section:
    ops = report["ops"]
    rows = []
    for row in ops["rows"]:
        passed_over = [f"{s['provider']} ({s['tier']}): {'; '.join(s['reasons'])}" for s in row["skipped"]]
        rows.append((row["call"], row["provider"], row["tier"], _yes(row["row_invariant"]), ", ".join(passed_over)))
    chain = ops["row_invariant"]
    notes = [f"a request's tokens depend on the request alone: {'yes' if chain['ok'] else 'not bitwise'}"]
    notes += [f"  {reason}" for reason in chain["reasons"]]
    notes.append(f"manifest {ops['hash']}")
    whose = "of this model" if report["model"] else "at a common size; --model shows a model's own"
    return Section(f"Ops, {whose}", rows, ("op", "provider", "tier", "row invariant", "passed over"), notes)


def _yes(answer: dict[str, Any]) -> str:
    return "yes" if answer["ok"] else "no"


def _show_lines(section: Section) -> None:
    """Columns two spaces apart, no line ever broken."""
    print(section.title)
    rows = [section.headers, *section.rows] if section.headers and section.rows else list(section.rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for note in section.notes:
        print("\n".join(f"  {line}" for line in note.splitlines()))
    print()


def _show_tables(section: Section) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(section.title, style="bold"))
    if section.rows:
        table = Table(box=box.SIMPLE_HEAD, show_header=bool(section.headers), pad_edge=False)
        for header in section.headers or ("", ""):
            table.add_column(header, overflow="fold")
        for row in section.rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    for note in section.notes:
        console.print(Text(note, style="dim"))
    console.print()
