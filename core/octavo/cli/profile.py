"""`octavo profile`: where the time of a running server's steps goes."""

import argparse
import json
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from octavo.cli.options import Formatter
from octavo.errors import ConfigError, OctavoError

__all__ = ["add_parser", "run"]

URL = "http://127.0.0.1:8000"
KEYS_VARIABLE = "OCTAVO_API_KEYS"
MARGIN_SECONDS = 60.0  # that an answer may come late

EXAMPLES = """\
examples:
  octavo profile                                         100 steps of http://127.0.0.1:8000, at most 10 s of them
  octavo profile --steps 1000 --output steps.json        with a picture: open it at ui.perfetto.dev
  octavo profile http://10.0.0.7:8000 --api-key KEY

Nothing is measured while nobody asks. API keys also come from the environment, as with octavo serve: the first of
OCTAVO_API_KEYS is sent.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "profile",
        usage="octavo profile [URL] [options]",
        description="Show where the time of a server's steps goes: schedule, build, program, sample, update, send.",
        epilog=EXAMPLES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("url", nargs="?", default=URL, help=f"of the server (default: {URL})")
    parser.add_argument("--steps", metavar="N", type=int, default=100, help="how many steps (default: 100)")
    parser.add_argument("--seconds", metavar="X", type=float, default=10.0, help="at most so long (default: 10)")
    parser.add_argument("--output", metavar="FILE", help="write a picture there: trace events, as Perfetto reads them")
    parser.add_argument("--api-key", metavar="KEY", help="for a server that asks for one")


def run(args: argparse.Namespace) -> int:
    """Profile, print the table and write the picture."""
    picture = _fetch(args)
    print(picture["otherData"]["table"], end="")
    if args.output:
        Path(args.output).write_text(json.dumps(picture), encoding="utf-8")
        print(f"{args.output}: open it at https://ui.perfetto.dev or chrome://tracing")
    return 0


def _fetch(args: argparse.Namespace) -> dict[str, Any]:
    parts = urlsplit(args.url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"URL is {args.url!r:.100}; it must be a server's, such as http://127.0.0.1:8000")
    query = urlencode({"steps": args.steps, "seconds": args.seconds, "format": "trace"})
    url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}/profile?{query}"
    key = args.api_key or next(iter(re.findall(r"[^\s,]+", os.environ.get(KEYS_VARIABLE, ""))), None)
    request = urllib.request.Request(url, method="POST", headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=args.seconds + MARGIN_SECONDS) as answer:
            picture: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        raise OctavoError(f"{args.url} answers {error.code}: {_message(error)}") from error
    except (OSError, ValueError) as error:
        raise OctavoError(f"no profile comes from {args.url}: {getattr(error, 'reason', error)}") from error
    if "traceEvents" not in picture:
        raise OctavoError(f"{args.url} is no server of octavo's")
    return picture


def _message(error: urllib.error.HTTPError) -> str:
    """What an error's answer says, or else its status."""
    try:
        return str(json.loads(error.read(4096))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
