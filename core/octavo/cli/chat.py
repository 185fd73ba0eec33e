"""`octavo chat`: talk with a model in the terminal, or through a pipe, a line a turn."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from octavo.cli.options import Formatter, add_sampling, add_settings, sampling_changes, sampling_params, settings_of
from octavo.errors import OctavoError, RequestError

if TYPE_CHECKING:
    from octavo.engine.llm import LLM
    from octavo.sampling_params import SamplingParams

__all__ = ["add_parser", "run"]

EXAMPLES = """\
examples:
  octavo chat demo
  octavo chat demo --system "Answer in one sentence." --temperature 0.7
  echo "What is the capital of France?" | octavo chat demo

in the chat:
  /reset    forget what was said        /exit     leave (so does end of input)
  Ctrl-C    stop the answer; at the prompt, leave
"""

WELCOME = "Ctrl-C stops an answer, /reset forgets what was said, /exit leaves."


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "chat",
        usage="octavo chat MODEL [options]",
        description="Talk with a model. What was said stays in its context until /reset.",
        epilog=EXAMPLES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt, kept over /reset")
    add_sampling(parser, max_tokens=None)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Answer line by line until the input ends; 1 where a turn failed and nobody sits at the terminal."""
    changes = sampling_changes(args)
    config = settings_of(args)

    from octavo.engine.llm import LLM

    with LLM(config=config) as llm:
        params = sampling_params(llm.description.sampling_defaults, changes)
        conversation = Conversation(llm, params, args.system)
        return _talk(conversation, interactive=sys.stdin.isatty() and sys.stdout.isatty())


class Conversation:
    """What was said so far, and the model that answers."""

    def __init__(self, llm: "LLM", params: "SamplingParams", system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._opening)

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self._messages = list(self._opening)

    def answer(self, text: str) -> None:
        """Print the model's answer as it comes. Ctrl-C stops it, and what came stays in the conversation.

        Raises:
            RequestError: the turn cannot be served; the conversation is as before it.

        """
        messages = [*self._messages, {"role": "user", "content": text}]
        answer = ""
        with _interrupt_noted() as interrupted:
            for output in self._llm.stream_chat(messages, self._params):
                if output.error is not None:
                    raise RequestError(output.error)
                print(output.outputs[0].delta, end="", flush=True)
                answer = output.outputs[0].text
                if interrupted():
                    break  # ends the request, so that its blocks are free
        print(flush=True)
        self._messages = [*messages, {"role": "assistant", "content": answer}]


@contextmanager
def _interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C is only noted, so that the engine finishes its step; the second interrupts."""
    noted = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)


def _talk(conversation: Conversation, *, interactive: bool) -> int:
    if interactive:
        import readline  # noqa: F401  (its import gives input() line editing and a history)

        print(WELCOME, file=sys.stderr)
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            return 0
        match text:
            case "":
                continue
            case "/exit" | "/quit":
                return 0
            case "/reset":
                conversation.reset()
                continue
        if text.startswith("/") and " " not in text and interactive:
            print(f"unknown command {text}; known are /reset and /exit", file=sys.stderr)
            continue
        try:
            conversation.answer(text)
        except OctavoError as error:
            if not interactive:
                raise
            print(f"octavo chat: error: {error}; /reset forgets what was said", file=sys.stderr)
