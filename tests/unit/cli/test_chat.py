"""`octavo chat`: turns, what stays in the conversation, and how one leaves."""

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from octavo.cli.main import main

Say = Callable[..., int]


@pytest.fixture
def say(echo: Any, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Run the chat on lines of input."""

    def run(*lines: str, flags: tuple[str, ...] = (), terminal: bool = False) -> int:
        stdin = io.StringIO("".join(f"{line}\n" for line in lines))
        monkeypatch.setattr(stdin, "isatty", lambda: terminal)
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
        return main(["chat", "demo", *flags])

    return run


def roles(messages: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_turns_build_on_each_other(echo: Any, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say("one", "", "two") == 0
    assert capsys.readouterr() == ("you said one\nyou said two\n", "")
    assert [roles(messages) for messages in echo.made[0].conversations] == [
        [("user", "one")],
        [("user", "one"), ("assistant", "you said one"), ("user", "two")],
    ]
    assert echo.made[0].closed


def test_reset_keeps_the_system_prompt(echo: Any, say: Say) -> None:
    assert say("one", "/reset", "two", flags=("--system", "Be brief.")) == 0
    assert [roles(messages) for messages in echo.made[0].conversations] == [
        [("system", "Be brief."), ("user", "one")],
        [("system", "Be brief."), ("user", "two")],
    ]


@pytest.mark.parametrize("word", ["/exit", "/quit"])
def test_exit(echo: Any, say: Say, word: str) -> None:
    assert say("one", word, "two") == 0
    assert len(echo.made[0].conversations) == 1


def test_an_answer_has_no_limit_unless_told(echo: Any, say: Say) -> None:
    assert say("one") == 0
    assert echo.made[0].params[0].max_tokens is None
    assert say("one", flags=("--max-tokens", "9", "--temperature", "0.5")) == 0
    assert (echo.made[1].params[0].max_tokens, echo.made[1].params[0].temperature) == (9, 0.5)


def test_terminal_says_how_to_leave(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say("/help", terminal=True) == 0
    captured = capsys.readouterr()
    assert "/exit leaves" in captured.err
    assert "unknown command /help" in captured.err


def test_a_failed_turn_at_the_terminal_is_forgotten(echo: Any, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say("refuse", "fail", "two", terminal=True) == 0
    assert "prompt refused; /reset" in capsys.readouterr().err
    assert roles(echo.made[0].conversations[-1]) == [("user", "two")]


def test_a_failed_turn_in_a_pipe_ends_with_an_error(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say("refuse", "two") == 1
    assert capsys.readouterr().err == "octavo chat: error: prompt refused\n"


def test_interrupt_stops_the_answer_and_keeps_what_came(
    echo: Any, say: Say, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt_once() -> None:
        echo.made[0].on_word = lambda: None
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(echo, "__enter__", lambda self: setattr(self, "on_word", interrupt_once) or self)
    handler = signal.getsignal(signal.SIGINT)
    assert say("one two three", "next") == 0
    assert capsys.readouterr().out == "you said\nyou said next\n"
    assert roles(echo.made[0].conversations[1])[:2] == [("user", "one two three"), ("assistant", "you said")]
    assert signal.getsignal(signal.SIGINT) is handler


def test_interrupt_at_the_prompt_leaves(echo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert main(["chat", "demo"]) == 130
    assert echo.made[0].closed
