"""`octavo generate`: what goes to stdout, and what of it fails."""

import io
import json
import sys
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.sampling_params import SamplingParams


def test_one_prompt_streams_its_text_alone(echo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "hello there"]) == 0
    assert capsys.readouterr() == ("you said hello there\n", "")
    assert echo.made[0].config.model.model == "demo"
    assert echo.made[0].closed


def test_several_prompts_in_order(echo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "b", "a"]) == 0
    assert capsys.readouterr() == ("<b>\n<a>\n", "")


def test_prompts_may_stand_after_flags(echo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "--max-tokens", "4", "a", "--temperature", "1", "b"]) == 0
    assert capsys.readouterr().out == "<a>\n<b>\n"


def test_a_prompt_may_look_like_a_flag(echo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "--", "--help"]) == 0
    assert capsys.readouterr().out == "you said --help\n"


def test_stdin_is_one_prompt(echo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines"))
    assert main(["generate", "demo"]) == 0
    assert capsys.readouterr().out == "you said two\nlines\n"


def test_no_prompt_at_a_terminal(
    echo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = io.StringIO()
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["generate", "demo"]) == 1
    assert "no prompt: give one as an argument" in capsys.readouterr().err
    assert echo.made == []


def test_sampling_flags_over_the_models_own_over_greedy(echo: Any) -> None:
    flags = ["--max-tokens", "5", "--top-k", "4", "--stop", "x", "--stop", "y", "--ignore-eos", "--min-tokens", "2"]
    assert main(["generate", "demo", "p", *flags]) == 0
    expected = SamplingParams(
        temperature=0.0, top_p=0.9, max_tokens=5, top_k=4, stop=("x", "y"), ignore_eos=True, min_tokens=2
    )
    assert echo.made[0].params == [expected]


def test_several_outputs_a_prompt(echo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "a", "--n", "2", "--temperature", "1"]) == 0
    assert capsys.readouterr().out == "<a>\n<a>\n"


def test_json(echo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "é", "fail", "--json"]) == 1
    captured = capsys.readouterr()
    first, second = (json.loads(line) for line in captured.out.splitlines())
    assert first == {
        "prompt": "é",
        "prompt_token_ids": [1, 2, 3],
        "outputs": [{"index": 0, "text": "<é>", "token_ids": [7, 8], "finish_reason": "stop", "stop_reason": None}],
        "num_prompt_tokens": 3,
        "num_cached_tokens": 0,
        "num_generated_tokens": 2,
        "error": None,
    }
    assert second["error"] == "it failed"


def test_a_failed_prompt_is_named_and_the_others_are_printed(echo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "a", "fail", "b"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "<a>\n<b>\n"
    assert captured.err == "octavo generate: error: prompt 2: it failed\n"


@pytest.mark.parametrize(("prompt", "said"), [("fail", "it failed"), ("refuse", "prompt refused")])
def test_the_one_prompt_fails(echo: Any, capsys: pytest.CaptureFixture[str], prompt: str, said: str) -> None:
    assert main(["generate", "demo", prompt]) == 1
    assert capsys.readouterr().err == f"octavo generate: error: {said}\n"
