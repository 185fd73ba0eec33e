"""`octavo bench latency`: one request at a time."""

import argparse

from octavo.cli.options import Formatter, add_settings

__all__ = ["add_parser", "run"]

EXAMPLES = """\
examples:
  octavo bench latency demo
  octavo bench latency demo --input-len 2048 --output-len 1          how fast a prompt is read
  octavo bench latency demo --prefix-len 500 --input-len 32 --compare prefix-cache
                                                                     what the prefix cache saves of a system prompt
  octavo bench latency demo --json out.json                          every figure, for another program

what is shown:
  first token        from the request's arrival to its first token: the prompt is read
  further tokens     between one token and the next; p99 is what one in a hundred exceeds
  % of the machine's limit
                     the least time in which the device could read the bytes and do the operations of the same steps,
                     as a share of the time they took. Bandwidth and peak are measured between the runs, where the
                     platform can; weights, keys, values and products are counted
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the sub-command."""
    from octavo.cli.bench.options import add_workload

    parser = commands.add_parser(
        "bench latency",
        usage="octavo bench latency MODEL [options]",
        description="Measure how long one request waits for its first token and for each further one.",
        epilog=EXAMPLES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    how = add_workload(parser, num_prompts=1, input_len="128", output_len="128", repeats=5)
    how.add_argument(
        "--compare",
        choices=("prefix-cache", "sampling"),
        help="run two ways in turn, with their ratios: the prefix cache off and on; sampled and greedy",
    )
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from octavo.cli.bench.figures import latency_figures
    from octavo.cli.bench.report import bench

    return bench("latency", latency_figures, args)
