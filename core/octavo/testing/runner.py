"""Runs checks on a platform and says what came out."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from octavo.contract import API_VERSION
from octavo.hardware.text import one_line
from octavo.testing.bench import Bench
from octavo.testing.catalog import HIGHEST_LEVEL, Check, checks
from octavo.testing.expectations import Expectation, Expectations
from octavo.testing.outcome import CheckError, NotOfferedError

__all__ = ["Outcome", "Report", "Result", "conformance", "run_check"]

Outcome = Literal["pass", "fail", "xfail", "xpass", "skip", "not offered"]


@dataclass(frozen=True)
class Result:
    """What came out of one check.

    Attributes:
        name, level, says: of the check.
        outcome: pass; fail; xfail, a failure that was expected; xpass, one that was and did not come, which is a
            fault too; skip, by the expectations; not offered, since the platform has nothing to check.
        detail: a remark, the failure or the reason, in one line.
        trace: of a raise that is no verdict of the kit.

    """

    name: str
    level: int
    says: str
    outcome: Outcome
    detail: str
    trace: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is no fault."""
        return self.outcome not in ("fail", "xpass")


@dataclass
class Report:
    """All results of a run.

    Attributes:
        platform, plugin, contract: who was checked, who brings it, the contract's version.
        level: up to which checks were run.
        results: in the order of the checks.

    """

    platform: str
    plugin: str
    level: int
    contract: str = ".".join(map(str, API_VERSION))
    results: list[Result] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing failed that was not expected to."""
        return all(result.ok for result in self.results)

    @property
    def reached(self) -> int | None:
        """The highest level all of whose checks hold, none expected to fail, and those below too; None: not even 0.

        What is not offered does not stand in the way, but a level of which nothing is offered is not reached.
        """
        reached = None
        for level in range(self.level + 1):
            outcomes = [result.outcome for result in self.results if result.level == level]
            if "pass" not in outcomes or {"fail", "xfail", "xpass"} & set(outcomes):
                break
            reached = level
        return reached

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "platform": self.platform,
            "plugin": self.plugin,
            "contract": self.contract,
            "level": self.level,
            "reached": self.reached,
            "ok": self.ok,
            "results": [asdict(result) for result in self.results],
        }


def conformance(
    platform: str,
    *,
    level: int = HIGHEST_LEVEL,
    device: int = 0,
    patterns: Sequence[str] = (),
    expectations: Expectations | None = None,
    told: Callable[[Result], None] = lambda result: None,
) -> Report:
    """Check a platform.

    Args:
        platform: as `--platform` takes it.
        level: the highest to check.
        device: index.
        patterns: of the checks to run; none: all.
        expectations: what is known before.
        told: called with each result as it comes.

    Raises:
        PlatformError: the platform is unknown, cannot serve here, or cannot be made.

    """
    known = expectations or Expectations()
    with Bench(platform, device) as bench:
        assert bench.platform  # what cannot be made is no matter of a check
        report = Report(bench.info.name, str(bench.plugin), level)
        for check in checks(level, patterns):
            result = run_check(check, bench, known.of_check(check))
            report.results.append(result)
            told(result)
    return report


def run_check(check: Check, bench: Bench, expected: Expectation = Expectation()) -> Result:  # noqa: B008
    """Run one check. Whatever it raises becomes its result, but for an interrupt."""
    outcome: Outcome
    trace = ""
    if expected.kind == "skip":
        outcome, detail = "skip", expected.reason
    else:
        try:
            outcome, detail = "pass", check.run(bench)
        except NotOfferedError as error:
            outcome, detail = "not offered", str(error)
        except CheckError as error:
            outcome, detail = "fail", str(error)
        except Exception as error:
            outcome, detail, trace = "fail", one_line(error), traceback.format_exc()
        if expected.kind == "xfail" and outcome in ("pass", "fail"):
            outcome = "xfail" if outcome == "fail" else "xpass"
            detail = f"expected to fail ({expected.reason}): {detail or 'it passes'}"
    return Result(check.name, check.level, check.says, outcome, " ".join(detail.split()), trace)
