"""What paging and batching gain on this machine, by `octavo bench`, against what they promise.

    python tests/bench/gains.py [--repeats 5] [MODEL] [SETTING ...]     as in: demo --dtype bfloat16

One process runs three comparisons, each with its two or three ways in turn: a system prompt of 500 tokens, one request
at a time and many at once, with the prefix cache and without; the same requests in continuous, static and padded
batches. Prints a Markdown table; the exit code is 1 where a promise is not kept.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.cli.main import main as octavo

PREFIX = ["--prefix-len", "500", "--input-len", "32"]
RUNS = {
    "first token": ["latency", *PREFIX, "--output-len", "2", "--compare", "prefix-cache"],
    "prefix": ["throughput", "--num-prompts", "64", *PREFIX, "--output-len", "32:96", "--compare", "prefix-cache"],
    # Chats: most turns short, some long. As many seats as a batch profits from, and several batches of requests.
    "batching": [
        *["throughput", "--num-prompts", "128", "--input-len", "16:512:log", "--output-len", "8:512:log"],
        *["--max-num-seqs", "32", "--compare", "batching"],
    ],
}


@dataclass(frozen=True)
class Promise:
    """A figure of a run, or a ratio of two ways, and its bound."""

    text: str
    run: str
    ratio: str | None
    figure: str
    at_least: float | None = None
    at_most: float | None = None

    def value(self, documents: dict[str, Any]) -> float:
        """What came out."""
        document = documents[self.run]
        found = document["ratios"][self.ratio] if self.ratio else document["variants"][-1]["figures"]
        value = found[self.figure] if self.ratio else found[self.figure]["median"]
        return float(value)

    def kept(self, value: float) -> bool:
        """Whether it is within its bound."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    @property
    def bound(self) -> str:
        """For readers."""
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:.3g}"


CACHE = "cache on/cache off"
RATE = "output_tokens_a_second"
PROMISES = (
    Promise("first token, prefix cache on to off", "first token", CACHE, "first_token", at_most=1 / 3),
    Promise("throughput, prefix cache on to off", "prefix", CACHE, RATE, at_least=1.4),
    Promise("throughput, continuous to padded static batches", "batching", "continuous/padded", RATE, at_least=2.0),
    Promise("throughput, continuous to static batches without padding", "batching", "continuous/static", RATE),
    Promise(
        "KV blocks allocated but unused, % of those in use",
        "batching",
        None,
        "KV_blocks_allocated_but_unused",
        at_most=4,
    ),
    Promise(
        "room for tokens in KV blocks that holds none, %", "batching", None, "room_for_tokens_in_them_that_holds_none"
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", default="5")
    parser.add_argument("model", nargs="?", default="demo")
    args, settings = parser.parse_known_args(argv)
    documents = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, run in RUNS.items():
            out = Path(folder) / "out.json"
            benchmark, *flags = run
            line = ["bench", benchmark, args.model, *flags, "--repeats", args.repeats, "--json", str(out), *settings]
            print(f"$ octavo {' '.join(line)}", flush=True)
            if code := octavo(line):
                return code
            documents[name] = json.loads(out.read_text())
            print(flush=True)
    print("| | measured | promised | |\n|---|---|---|---|")
    all_kept = True
    for promise in PROMISES:
        value = promise.value(documents)
        bound = promise.bound if promise.at_least is not None or promise.at_most is not None else ""
        kept = promise.kept(value)
        all_kept &= kept
        print(f"| {promise.text} | {value:.3g} | {bound} | {('kept' if kept else '**not kept**') if bound else ''} |")
    return 0 if all_kept else 1


if __name__ == "__main__":
    sys.exit(main())
