"""`octavo bench throughput`: many requests at once."""

import argparse

from octavo.cli.options import Formatter, add_settings

__all__ = ["add_parser", "run"]

EXAMPLES = """\
examples:
  octavo bench throughput demo
  octavo bench throughput demo --num-prompts 128 --input-len 16:1024:log --output-len 16:512:log
  octavo bench throughput demo --max-num-seqs 16 --compare batching
                                                   what it gains that a request takes the place of one that ended
  octavo bench throughput demo --prefix-len 500 --input-len 32 --output-len 16 --compare prefix-cache
  octavo bench throughput demo --compare sampling  what it costs to draw tokens

All requests are there at the start, as `LLM.generate` gets them.

what is shown:
  output tokens      those that were asked for; prompts count in "all tokens"
  first token        from the start to a request's first token, its time in the queue included
  further tokens     between a request's tokens; p99 is what one in a hundred exceeds
  % of the machine's limit
                     the least time in which the device could read the bytes and do the operations of the same steps,
                     as a share of the time they took; see octavo bench latency --help
  KV blocks allocated but unused
                     those that a sequence holds without a token in them. A sequence's last block is filled as it
                     grows: how much of all held blocks that leaves empty is the line below

how requests are batched:
  continuous         the engine's way: a request starts as soon as there is a place
  static             groups of max_num_seqs: the next starts when the last request of a group has ended
  padded             the same, every prompt padded to the group's longest and every row computed to its last output
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the sub-command."""
    from octavo.cli.bench.options import add_workload

    parser = commands.add_parser(
        "bench throughput",
        usage="octavo bench throughput MODEL [options]",
        description="Measure how many tokens a second come of many requests at once, and how long each waits.",
        epilog=EXAMPLES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    how = add_workload(parser, num_prompts=64, input_len="32:512", output_len="32:256", repeats=3)
    how.add_argument(
        "--batching",
        choices=("continuous", "static", "padded"),
        default="continuous",
        help="how requests become batches, see below (default: continuous)",
    )
    how.add_argument(
        "--compare",
        choices=("prefix-cache", "batching", "sampling"),
        help="run several ways in turn, with their ratios: the prefix cache off and on; padded, static and continuous "
        "batches; greedy and sampled",
    )
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from octavo.cli.bench.figures import throughput_figures
    from octavo.cli.bench.report import bench

    return bench("throughput", throughput_figures, args)
