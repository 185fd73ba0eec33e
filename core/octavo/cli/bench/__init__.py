"""`octavo bench`: one file a benchmark, and what they share. On its own the command tells which there are."""

import argparse

from octavo.cli.options import Formatter

__all__ = ["add_parser", "run"]

EXAMPLES = """\
which one:
  octavo bench latency demo          one request at a time: how long until the first token, and how long for each more
  octavo bench throughput demo       many requests at once: tokens a second, and how long each waits
  octavo bench quality demo          what a precision costs: perplexity and likeliest tokens, beside float32

octavo bench latency --help says what is measured, what the words mean, and how to compare two ways in one run.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the group; its benchmarks are commands of two words."""
    parser = commands.add_parser(
        "bench",
        usage="octavo bench {latency,throughput,quality} MODEL [options]",
        description="Measure a model on this machine, beside the machine's own limits.",
        epilog=EXAMPLES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("benchmark", choices=("latency", "throughput", "quality"), help="what to measure")


def run(args: argparse.Namespace) -> int:
    """Never called with a benchmark that exists: those are commands of their own."""
    raise AssertionError(f"bench {args.benchmark} is a command")
