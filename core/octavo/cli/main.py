"""The `octavo` command. A sub-command's module is imported once it is called, so that help comes at once."""

import argparse
import gc
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

from octavo import __version__
from octavo.errors import OctavoError

__all__ = ["main"]

# Each is a module here with add_parser(commands) and run(args) -> exit code; "bench latency" is latency.py in bench/.
# A command without a text only tells of those that begin with its name.
COMMANDS = {
    "generate": "continue prompts",
    "serve": "serve a model over HTTP, as OpenAI's clients expect it",
    "chat": "talk with a model in the terminal",
    "models": "which models are served, by which program",
    "info": "platforms, memory and which kernel serves each op, with reasons",
    "profile": "where the time of a running server's steps goes",
    "bench": None,
    "bench latency": "how long a request waits for its tokens, beside the machine's limits",
    "bench throughput": "tokens a second of many requests, beside the machine's limits",
    "bench quality": "what a precision costs in perplexity and likeliest tokens, beside float32",
    "conformance": "whether a platform does what the contract asks",
    "new-platform": "write a plugin to begin with",
}

EXAMPLES = """\
examples:
  octavo generate demo "The capital of France is"     a small model, fetched on first use
  octavo chat ./Qwen2.5-0.5B-Instruct                 a folder in Hugging Face layout
  octavo chat model.gguf --max-model-len 4096         a GGUF file
  octavo serve demo                                   http://127.0.0.1:8000/v1
  octavo info                                         what this machine offers
  octavo bench throughput demo                        how fast it is here

octavo COMMAND --help lists the settings. Each can also come from a YAML file (--config) or from the environment:
--max-num-seqs 8 is OCTAVO_MAX_NUM_SEQS=8.
"""

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what shells report
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

# Objects made before the garbage collector looks. Imports make a million that stay, and nothing here makes cycles.
GC_THRESHOLD = 50_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code.

    What a user can mend is one line on stderr; --debug shows its traceback too.
    """
    _settle_streams()
    gc.set_threshold(GC_THRESHOLD)
    given = list(sys.argv[1:] if argv is None else argv)
    command = next((name for n in (2, 1) if (name := " ".join(given[:n])) in COMMANDS), None)
    parser, commands = _parsers(command)
    if command is None:
        parser.parse_args(given)  # help, the version, or an error that lists the commands
        parser.print_help()
        return 0
    rest = given[len(command.split()) :]
    args = commands[command].parse_intermixed_args(rest)  # prompts may stand after flags
    try:
        with _refusals_unlogged():
            code: int | None = _module(command).run(args)
        sys.stdout.flush()
    except OctavoError as error:
        if args.debug:
            raise
        print(f"octavo {command}: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read the output has left
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # the system refuses, as where the disk is full that the output goes to
        if args.debug:
            raise
        _drop_output()
        print(f"octavo {command}: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    return code or 0


def _settle_streams() -> None:
    """Give every stream that the caller closed an empty one, and let no character be a reason to stop."""
    nothing = Path(os.devnull)
    sys.stdin = sys.stdin or nothing.open(encoding="utf-8")
    sys.stdout = sys.stdout or nothing.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or nothing.open("w", encoding="utf-8")
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_output() -> None:
    """Let what is left of the output go nowhere. Python would complain once more when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _refusals_unlogged() -> Iterator[None]:
    """What the engine refuses is printed as the command's error, and need not be said by the log too."""
    log = logging.getLogger("octavo.engine.llm")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _parsers(command: str | None) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of `octavo` and those of its commands; only the one that is called has its flags."""
    parser = argparse.ArgumentParser(
        prog="octavo",
        description="Serves large language models on whatever accelerator is there.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name, text in COMMANDS.items():
        if name == command:
            _module(name).add_parser(commands)
            commands.choices[name].add_argument("--debug", action="store_true", help="show the traceback of an error")
        elif text is not None:
            commands.add_parser(name, help=text)
    return parser, commands.choices


def _module(command: str) -> ModuleType:
    return import_module(f"octavo.cli.{command.replace('-', '_').replace(' ', '.')}")


if __name__ == "__main__":
    sys.exit(main())
