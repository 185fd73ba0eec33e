"""Flags that the benchmarks share."""

import argparse
from typing import TYPE_CHECKING, Any

from octavo.cli.bench.workload import Length, Shape
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.cli.bench.measure import Batching
    from octavo.cli.bench.session import Variant

__all__ = ["add_workload", "count", "length", "shape_of", "variants_of"]

LENGTH_HELP = "tokens: 128, a range 32:512, or 16:1024:log, where short ones are common"


def add_workload(
    parser: argparse.ArgumentParser, *, num_prompts: int, input_len: str, output_len: str, repeats: int
) -> argparse._ArgumentGroup:
    """Add what is sent and how often; the arguments are the benchmark's own defaults."""
    work = parser.add_argument_group("the workload", "Prompts are random token ids; outputs never end early.")
    if num_prompts > 1:
        work.add_argument(
            "--num-prompts", type=count, metavar="N", default=num_prompts, help=f"requests (default: {num_prompts})"
        )
    work.add_argument(
        "--input-len",
        type=length,
        metavar="LENGTH",
        default=length(input_len),
        help=f"of a prompt beyond the shared prefix, in {LENGTH_HELP} (default: {input_len})",
    )
    work.add_argument(
        "--output-len",
        type=length,
        metavar="LENGTH",
        default=length(output_len),
        help=f"to generate, likewise (default: {output_len})",
    )
    work.add_argument(
        "--prefix-len",
        type=nonnegative,
        metavar="N",
        default=0,
        help="tokens that all prompts begin with, as a system prompt does (default: 0)",
    )
    work.add_argument(
        "--new-prefix",
        action="store_true",
        help="another prefix for each repeat, so that each computes it once; else the first repeat does",
    )
    work.add_argument(
        "--workload-seed",
        type=nonnegative,
        metavar="N",
        default=0,
        help="of lengths and token ids; the same seed gives the same requests (default: 0)",
    )
    work.add_argument(
        "--temperature", type=float, metavar="X", default=0.0, help="0 (the default) is greedy; else each has a seed"
    )
    work.add_argument("--top-p", type=float, metavar="X", default=1.0, help="for a temperature over 0 (default: 1)")
    how = parser.add_argument_group("how it is measured")
    how.add_argument(
        "--warmup", type=nonnegative, metavar="N", default=1, help="runs beforehand that do not count (default: 1)"
    )
    how.add_argument(
        "--repeats",
        type=count,
        metavar="N",
        default=repeats,
        help=f"runs that do; medians are shown (default: {repeats})",
    )
    how.add_argument("--json", metavar="FILE", help="write every figure of every run there ('-': to stdout, alone)")
    return how


def shape_of(args: argparse.Namespace) -> Shape:
    """The workload that the flags ask for."""
    return Shape(
        num_prompts=getattr(args, "num_prompts", 1),
        input_len=args.input_len,
        output_len=args.output_len,
        prefix_len=args.prefix_len,
        new_prefix=args.new_prefix,
        seed=args.workload_seed,
    )


def variants_of(args: argparse.Namespace) -> "list[Variant]":
    """What runs in turn; ratios are of the last against the others."""
    from octavo.cli.bench.measure import BATCHINGS
    from octavo.cli.bench.session import Variant

    sampling: dict[str, Any] = {"temperature": args.temperature, "top_p": args.top_p}
    batching: Batching = getattr(args, "batching", "continuous")
    match args.compare:
        case "prefix-cache":
            off, on = ({"enable_prefix_caching": value} for value in (False, True))
            return [Variant("cache off", off, batching, **sampling), Variant("cache on", on, batching, **sampling)]
        case "batching":
            return [Variant(each, batching=each, **sampling) for each in BATCHINGS]
        case "sampling":
            drawn = sampling if args.temperature else {"temperature": 0.8, "top_p": 0.95}
            name = f"temperature {drawn['temperature']:g}, top_p {drawn['top_p']:g}"
            return [Variant("greedy", batching=batching), Variant(name, batching=batching, **drawn)]
        case _:
            return [Variant(batching, batching=batching, **sampling)]


def length(text: str) -> Length:
    """For argparse."""
    try:
        return Length.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """For argparse: 1 or more."""
    return _at_least(1, text)


def nonnegative(text: str) -> int:
    """For argparse: 0 or more."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"a whole number of at least {least} is right, got {text!r}")
    return value
