"""Stop strings against a plain reference, and the cases that streams get wrong."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.stop import StopChecker


def stream(checker: StopChecker, tokens: list[str]) -> tuple[list[str], str | None]:
    """Feed tokens as an engine does; returns what was shown after each, and after the end."""
    shown = []
    for token in tokens:
        text, stop = checker.add(token)
        shown.append(text)
        if stop is not None:
            return shown, stop
    shown.append(checker.finish())
    return shown, None


def reference(tokens: list[str], stops: list[str], include: bool, min_tokens: int) -> tuple[str, str | None]:
    """The text up to the first stop string that is complete, character by character."""
    text = ""
    for number, token in enumerate(tokens, 1):
        for char in token:
            text += char
            ending = [stop for stop in stops if text.endswith(stop)]
            if ending and number > min_tokens:
                longest = max(ending, key=len)
                return (text if include else text.removesuffix(longest)), longest
    return text, None


TOKENS = st.lists(st.text("ab\n", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3)


@given(tokens=TOKENS, stops=STOPS, include=st.booleans(), min_tokens=st.integers(0, 6))
def test_equals_the_reference(tokens: list[str], stops: list[str], include: bool, min_tokens: int) -> None:
    checker = StopChecker(stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    shown, stop = stream(checker, tokens)
    assert ("".join(shown), stop) == reference(tokens, stops, include, min_tokens)


@given(text=st.text("ab\n", max_size=30), stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=6))
def test_does_not_depend_on_how_tokens_cut_the_text(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    tokens = [text[a:b] for a, b in pairwise(edges)]
    shown, stop = stream(StopChecker(stops), tokens)
    assert ("".join(shown), stop) == reference(list(text), stops, False, 0)


@given(tokens=TOKENS, stops=STOPS)
def test_holds_back_only_what_may_begin_a_stop(tokens: list[str], stops: list[str]) -> None:
    checker = StopChecker(stops)
    received = shown = ""
    for token in tokens:
        text, stop = checker.add(token)
        received += token
        shown += text
        if stop is not None:
            return
        beginnings = [stop[:length] for stop in stops for length in range(1, len(stop))]
        held = max((len(begin) for begin in beginnings if received.endswith(begin)), default=0)
        assert len(received) - len(shown) == held


@pytest.mark.parametrize(
    ("tokens", "stops", "text", "stop"),
    [
        (["Hello wor", "ld"], ["world"], "Hello ", "world"),
        (["one two three"], ["two"], "one ", "two"),  # the rest of the token is dropped
        (["a", "<|im_", "end|>", "b"], ["<|im_end|>"], "a", "<|im_end|>"),
        (["x", "abc"], ["xabc", "ab"], "x", "ab"),  # complete first
        (["zab"], ["b", "ab"], "z", "ab"),  # complete together
        (["aab", "aac"], ["aac"], "aab", "aac"),
        (["ababac"], ["abac"], "ab", "abac"),
        (["\n", "\n", "Q:"], ["\n\nQ"], "", "\n\nQ"),
        (["stop"], ["stop"], "", "stop"),
        (["👋🏽 ok"], ["🏽"], "👋", "🏽"),
        (["sto", "re"], ["stop"], "store", None),
        (["never"], [], "never", None),
    ],
)
def test_cases(tokens: list[str], stops: list[str], text: str, stop: str | None) -> None:
    shown, found = stream(StopChecker(stops), tokens)
    assert ("".join(shown), found) == (text, stop)


def test_holds_and_lets_go() -> None:
    assert stream(StopChecker(["stop"]), ["a st", "ore", " sto"]) == (["a ", "store", " ", "sto"], None)


def test_include_keeps_the_stop_string_and_nothing_after_it() -> None:
    checker = StopChecker(["END"], include_stop_str_in_output=True)
    assert stream(checker, ["x E", "NDing"]) == (["x ", "END"], "END")
    assert checker.stop == "END"


def test_min_tokens() -> None:
    within = StopChecker(["b"], min_tokens=2)
    assert stream(within, ["a", "b", "c"]) == (["a", "b", "c", ""], None)
    across = StopChecker(["bc"], min_tokens=2)  # begins within, ends after: it counts
    assert stream(across, ["a", "b", "c"]) == (["a", "", ""], "bc")


def test_nothing_is_shown_after_a_stop() -> None:
    checker = StopChecker(["x"])
    assert checker.add("ax") == ("a", "x")
    assert checker.add("more") == ("", "x")
    assert checker.finish() == ""


def test_repetitive_stop_and_text_stay_linear() -> None:
    checker = StopChecker(["a" * 20_000 + "b"])
    shown = "".join(checker.add("a" * 100).text for _ in range(1000))
    assert len(shown) == 80_000
    assert checker.finish() == "a" * 20_000
