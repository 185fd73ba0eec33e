"""Reports for readers: lines on a terminal, and a table of several platforms."""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.testing.runner import Report, Result

__all__ = ["line", "summary", "support_table"]

WIDTH = 34  # of the longest names of checks


def line(result: Result) -> str:
    """One result; what passes is short."""
    words = {"pass": "pass", "not offered": "none"}
    return (
        f"{words.get(result.outcome, result.outcome):5} {result.level}  {result.name:{WIDTH}} {result.detail}".rstrip()
    )


def summary(report: Report) -> str:
    """What it comes to."""
    counts: dict[str, int] = {}
    for result in report.results:
        counts[result.outcome] = counts.get(result.outcome, 0) + 1
    reached = "no level is reached" if report.reached is None else f"level {report.reached} is reached"
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return f"{report.platform} of {report.plugin}, contract {report.contract}: {told}; {reached}"


def support_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: a line a group of checks (ops by op), a column a platform.

    Args:
        reports: as `Report.as_data` gives them.

    """
    subjects = list(dict.fromkeys(_subject(result["name"]) for report in reports for result in report["results"]))
    rows = [["", *(report["platform"] for report in reports)], ["---"] * (1 + len(reports))]
    rows.append(["**level reached**", *(_reached(report) for report in reports)])
    rows += [[subject, *(_cell(report["results"], subject) for report in reports)] for subject in subjects]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _reached(report: Mapping[str, Any]) -> str:
    return "none" if report["reached"] is None else f"**{report['reached']}**"


def _subject(name: str) -> str:
    """Of ops the op, of attention and its kernels the whole group, of the rest the check."""
    group, subject, *_ = name.split("/")
    return group if group in ("attention", "kernels") else f"{group}/{subject}"


def _cell(results: Sequence[Mapping[str, Any]], subject: str) -> str:
    """How many of the checks that there is something to check for pass."""
    outcomes = [result["outcome"] for result in results if _subject(result["name"]) == subject]
    offered = [outcome for outcome in outcomes if outcome not in ("not offered", "skip")]
    if not offered:
        return "skipped" if "skip" in outcomes else "not offered"
    good = offered.count("pass")
    return "yes" if good == len(offered) else f"{good} of {len(offered)}"
