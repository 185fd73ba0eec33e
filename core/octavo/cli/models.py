"""`octavo models`: which models are served, by which program, and what each family takes."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from octavo.cli.options import Formatter

if TYPE_CHECKING:
    from octavo.model.catalog import FamilyEntry

__all__ = ["add_parser", "markdown", "run"]

EXAMPLES = """\
examples:
  octavo models
  octavo models --json          the same for another program to read
  octavo models --markdown      the table in README.md
"""
HEADERS = ("family", "attention", "feed-forward", "positions", "GGUF")
OTHERS = (
    "any other causal language model of transformers whose layers call attention through its attention interface, "
    "keep no recurrent state and need no code of their own"
)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "models",
        usage="octavo models [--json | --markdown]",
        description="Which models are served, by which program, and what each family takes.",
        epilog=EXAMPLES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print the families as a Markdown table")


def run(args: argparse.Namespace) -> int:
    """Print the catalog."""
    if args.json:
        json.dump(_as_json(), sys.stdout, indent=2)
        print()
    elif args.markdown:
        print(markdown())
    else:
        print("\n".join(_lines()))
    return 0


def markdown() -> str:
    """The families as a table, and a line on each of the other programs."""
    rows = [f"| {' | '.join(row)} |" for row in [HEADERS, ("---",) * len(HEADERS), *_rows("none")]]
    return "\n".join([*rows, "", *(f"- {text}" for text in _notes())])


def _lines() -> Iterator[str]:
    rows = [HEADERS, *_rows("")]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    yield from _notes()


def _rows(no_gguf: str) -> Iterator[Sequence[str]]:
    from octavo.model.catalog import families

    for entry in families():
        lists = (entry.attention, entry.feed_forward, entry.positions)
        yield (entry.model_type, *map(", ".join, lists), entry.gguf or no_gguf)


def _notes() -> Iterator[str]:
    from octavo.model.catalog import TRIED_THROUGH_TRANSFORMERS, families
    from octavo.model.encoder import ENCODERS
    from octavo.model.formats import METHODS

    yield f"native: the families above, with rope scaling by {', '.join(_scalings(families()))}"
    yield f"hf: {OTHERS}; tried are {', '.join(TRIED_THROUGH_TRANSFORMERS)}"
    yield f"hf, for embeddings alone: {', '.join(ENCODERS)}"
    yield (
        f"weights: safetensors in float32, float16 and bfloat16, in any shards; packed by {', '.join(sorted(METHODS))} "
        "(native, unpacked at load); GGUF in every type that the gguf package unpacks"
    )


def _scalings(entries: "Sequence[FamilyEntry]") -> list[str]:
    """Those that every family with rope takes."""
    with_rope = [entry.rope_scalings for entry in entries if entry.positions != ("learned",)]
    return [name for name in with_rope[0] if all(name in taken for taken in with_rope)]


def _as_json() -> dict[str, Any]:
    from octavo.model.catalog import TRIED_THROUGH_TRANSFORMERS, families
    from octavo.model.encoder import ENCODERS
    from octavo.model.formats import METHODS

    return {
        "families": [{**vars(entry), "program": "native"} for entry in families()],
        "encoders": [{"model_type": name, "program": "hf"} for name in ENCODERS],
        "others": {"program": "hf", "which": OTHERS, "tried": list(TRIED_THROUGH_TRANSFORMERS)},
        "weights": {"safetensors": ["float32", "float16", "bfloat16"], "packed": sorted(METHODS), "gguf": True},
    }
