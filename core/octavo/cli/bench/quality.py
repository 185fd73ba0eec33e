"""`octavo bench quality`: what a precision costs in quality, beside the model in float32."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from octavo.cli.options import Formatter, add_settings, settings_of

__all__ = ["add_parser", "run"]

EXAMPLES = """\
examples:
  octavo bench quality ./Llama-3.2-1B --quantization int8        8 bits beside the same model in float32
  octavo bench quality ./Llama-3.2-1B --quantization int4 --max-perplexity 5
                                                                 exit code 1 where perplexity grows by over 5%
  octavo bench quality ./Llama-3.2-1B --quantization int4 --calibration-file mine.txt --text other.txt
                                                                 fitted to a text of your kind, judged by another
  octavo bench quality ./Llama-3.2-1B --dtype bfloat16 --reference transformers --max-gap 0.1

what is shown:
  perplexity        of a text that Python ships (its own manual), or of --text: exp of the mean surprise of a token
  agreement         prompts are cut from the text and go on with the reference's own greedy tokens; at each of these
                    both say which token is likeliest
  largest gap       of the positions where they part: by how much the reference's best logit led its second best. Where
                    that is next to nothing either token is right
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the sub-command."""
    from octavo.cli.bench.options import count

    parser = commands.add_parser(
        "bench quality",
        usage="octavo bench quality MODEL [options]",
        description="Compare perplexity and likeliest tokens of a precision with those of the model in float32.",
        epilog=EXAMPLES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    work = parser.add_argument_group("what is compared")
    work.add_argument(
        "--reference",
        choices=("octavo", "transformers"),
        default="octavo",
        help="whose float32 is the truth; transformers takes a folder (default: octavo)",
    )
    work.add_argument("--text", metavar="FILE", help="text to read (default: Python's manual)")
    work.add_argument("--num-texts", type=count, metavar="N", default=16, help="pieces for perplexity (default: 16)")
    work.add_argument("--text-len", type=count, metavar="N", default=512, help="tokens of a piece (default: 512)")
    work.add_argument("--num-prompts", type=count, metavar="N", default=200, help="for agreement (default: 200)")
    work.add_argument("--prompt-len", type=count, metavar="N", default=32, help="tokens of a prompt (default: 32)")
    work.add_argument("--output-len", type=count, metavar="N", default=32, help="tokens that follow (default: 32)")
    gates = parser.add_argument_group("what is demanded", "Where it is not met the exit code is 1.")
    gates.add_argument("--max-perplexity", type=float, metavar="PERCENT", help="growth of perplexity at most")
    gates.add_argument("--max-gap", type=float, metavar="X", help="gap of logits at most where tokens part")
    parser.add_argument("--json", metavar="FILE", help="write every figure there ('-': to stdout, alone)")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Compare and print; 1 where a demand is not met."""
    from octavo.cli.bench.likeness import Comparison, Workload, compare

    workload = Workload(args.num_texts, args.text_len, args.num_prompts, args.prompt_len, args.output_len)
    found: Comparison = compare(settings_of(args), args.reference, args.text, workload)
    unmet = list(found.unmet(args.max_perplexity, args.max_gap))
    if args.json == "-":
        json.dump(asdict(found), sys.stdout, indent=2)
        print()
    else:
        print("\n".join(found.lines()))
        if args.json:
            Path(args.json).write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    for line in unmet:
        print(f"octavo bench quality: {line}", file=sys.stderr)
    return 1 if unmet else 0
