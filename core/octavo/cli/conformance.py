"""`octavo conformance`: whether a platform does what the contract asks and what it says."""

import argparse
import json
import sys

from octavo.cli.options import Formatter

__all__ = ["add_parser", "run"]

EXAMPLES = """\
examples:
  octavo conformance --platform NAME                 everything
  octavo conformance --platform NAME --level 0       what every platform must do
  octavo conformance --platform NAME ops/linear      some checks; shell-like patterns may be used
  octavo conformance --list                          the checks, and what each says

Levels: 0 serves on the reference ops, 1 has attention and cache kernels of its own, 2 graphs, quantised weights,
ranks. The exit code is 1 where a check fails.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "conformance",
        usage="octavo conformance --platform NAME [options] [CHECK ...]",
        description="Check a platform against the contract: ops, attention, a served model, and what it claims.",
        epilog=EXAMPLES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="names or patterns of checks (default: all)")
    parser.add_argument("--platform", metavar="NAME", help="the platform to check")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="its device (default: 0)")
    parser.add_argument("--level", type=int, choices=(0, 1, 2), default=2, help="the highest to check (default: 2)")
    parser.add_argument("--expectations", metavar="FILE", help="YAML file of checks that fail or are skipped")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--list", action="store_true", help="print the checks and run none")


def run(args: argparse.Namespace) -> int:
    """Run the checks; 1 where one fails."""
    from octavo.errors import ConfigError
    from octavo.testing.catalog import checks
    from octavo.testing.expectations import Expectations
    from octavo.testing.report import line, summary
    from octavo.testing.runner import conformance

    chosen = checks(args.level, args.checks)
    if not chosen:
        raise ConfigError(f"no check up to level {args.level} is named {' '.join(args.checks)}; --list shows them all")
    if args.list:
        for check in chosen:
            print(f"{check.level}  {check.name:34} {check.says}")
        return 0
    if args.platform is None:
        raise ConfigError("which platform? give --platform NAME; octavo info lists those installed")
    report = conformance(
        args.platform,
        level=args.level,
        device=args.device,
        patterns=args.checks,
        expectations=Expectations.read(args.expectations) if args.expectations else None,
        told=(lambda result: None) if args.json else (lambda result: print(line(result), flush=True)),
    )
    if args.json:
        json.dump(report.as_data(), sys.stdout, indent=2)
        print()
        return 0 if report.ok else 1
    print(f"\n{summary(report)}")
    if args.debug:
        for result in report.results:
            if result.trace:
                print(f"\n{result.name}\n{result.trace}", file=sys.stderr)
    return 0 if report.ok else 1
