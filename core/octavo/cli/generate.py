"""`octavo generate`: continue prompts. The text alone goes to stdout."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.cli.options import Formatter, add_sampling, add_settings, sampling_changes, sampling_params, settings_of
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.engine.llm import LLM
    from octavo.engine.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams

__all__ = ["add_parser", "run"]

MAX_TOKENS = 128

EXAMPLES = """\
examples:
  octavo generate demo "The capital of France is"
  octavo generate demo "Once upon a time" "It was a dark night" --max-tokens 64
  octavo generate demo --temperature 0.8 --n 3 --json "My favourite colour is"
  octavo generate demo < prompt.txt
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "generate",
        usage="octavo generate MODEL [PROMPT ...] [options]",
        description="Continue each prompt and print what the model adds. One prompt streams.",
        epilog=EXAMPLES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt, with token ids and counts")
    parser.add_argument("--n", type=int, metavar="N", default=1, help="outputs for each prompt (default: 1)")
    add_sampling(parser, max_tokens=MAX_TOKENS)
    add_settings(parser)
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="*", help="text to continue; none: all of stdin is one prompt"
    )


def run(args: argparse.Namespace) -> int:
    """Generate and print; 1 where a prompt failed."""
    prompts = args.prompts or [_read_stdin()]
    changes = sampling_changes(args)
    config = settings_of(args)

    from octavo.engine.llm import LLM

    with LLM(config=config) as llm:
        params = sampling_params(llm.description.sampling_defaults, changes)
        if len(prompts) == 1 and params.n == 1 and not args.json:
            return _stream(llm, prompts[0], params)
        outputs = llm.generate(prompts, params)
    return _print_all(outputs, as_json=args.json)


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise RequestError('no prompt: give one as an argument, as in octavo generate demo "Hello", or on stdin')
    return sys.stdin.read()


def _stream(llm: "LLM", prompt: str, params: "SamplingParams") -> int:
    error: str | None = None
    for output in llm.stream(prompt, params):
        error = output.error
        if error is None:
            print(output.outputs[0].delta, end="", flush=True)
    if error is None:
        print()
    return _report([error])


def _print_all(outputs: "Sequence[RequestOutput]", *, as_json: bool) -> int:
    for output in outputs:
        if as_json:
            print(json.dumps(_as_json(output), ensure_ascii=False))
        elif output.error is None:
            for sample in output.outputs:
                print(sample.text)
    return _report([output.error for output in outputs])


def _report(errors: Sequence[str | None]) -> int:
    """Print what failed, with its place where there were several prompts; returns the exit code."""
    for number, error in enumerate(errors, 1):
        if error is not None:
            place = f"prompt {number}: " if len(errors) > 1 else ""
            print(f"octavo generate: error: {place}{error}", file=sys.stderr)
    return int(any(error is not None for error in errors))


def _as_json(output: "RequestOutput") -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [
            {
                "index": sample.index,
                "text": sample.text,
                "token_ids": list(sample.token_ids),
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
            }
            for sample in output.outputs
        ],
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_cached_tokens": output.num_cached_tokens,
        "num_generated_tokens": output.num_generated_tokens,
        "error": output.error,
    }
