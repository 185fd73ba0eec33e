"""The engine is killed under everything that a client can ask for, and no client can tell."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from doubles.cursed_child import CURSE_VARIABLE
from server.served import Served

from octavo.engine import supervisor
from octavo.server.options import ServerOptions

TESTS = Path(__file__).resolve().parent.parent
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FATAL = 250  # a token id that is in no other prompt
NUM_TOKENS = 60

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "n", "ok"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "store", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
LONG_PROMPT = [5 + i % 200 for i in range(440)]  # in chunks of what 64 tokens a step leave beside the others


def prompt(number: int) -> list[int]:
    return [5 + (7 * number + 3 * i) % 200 for i in range(6 + 5 * number)]


def said(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me of {number} things"}]


def wish(path: str, number: int, *, whole: bool = False, **more: Any) -> tuple[str, dict[str, Any]]:
    """A request's path and body."""
    asked: dict[str, Any] = {"prompt": prompt(number)} if path == COMPLETIONS else {"messages": said(number)}
    usage = {} if whole else {"stream": True, "stream_options": {"include_usage": True}}
    body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True, "seed": number}
    return path, {**body, **asked, **usage, **more}


GREEDY: dict[str, Any] = {"temperature": 0}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
WISHES = [
    wish(COMPLETIONS, 1, **GREEDY),
    wish(CHAT, 2, **GREEDY),
    wish(COMPLETIONS, 3),
    wish(CHAT, 4, top_p=0.9, top_k=50),
    wish(COMPLETIONS, 5, n=2),
    wish(CHAT, 6, n=2, temperature=0.7),
    wish(COMPLETIONS, 7, **FORM, max_tokens=150),
    wish(CHAT, 8, **FORM, max_tokens=150),
    wish(CHAT, 9, tools=TOOLS, tool_choice="required", max_tokens=150),
    wish(CHAT, 10, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "store"}}, max_tokens=150),
    wish(COMPLETIONS, 11, logprobs=3, echo=True),
    wish(CHAT, 12, logprobs=True, top_logprobs=2),
    wish(COMPLETIONS, 13, **GREEDY, stop=["no such text", "q", "zz"]),
    wish(CHAT, 14, stop=["x", "no such text"], min_tokens=10),
    wish(COMPLETIONS, 15, repetition_penalty=1.3, presence_penalty=0.5),
    wish(CHAT, 16, **GREEDY, frequency_penalty=1.2),
    wish(COMPLETIONS, 17, whole=True, n=2, logprobs=1),
    wish(CHAT, 18, whole=True),
    wish(CHAT, 19, whole=True, tools=TOOLS, tool_choice="required", max_tokens=150),
    wish(COMPLETIONS, 20, **GREEDY, prompt=LONG_PROMPT, max_tokens=30),
]


class Answer:
    """What one client was told, however it came: by choice, with tool calls' ids left out, which are drawn."""

    def __init__(self) -> None:
        self.choices: dict[int, dict[str, Any]] = {}
        self.usage: Any = None
        self.times: list[float] = []

    def ask(self, http: httpx.Client, path: str, body: dict[str, Any]) -> "Answer":
        """Send a request and take all of its answer."""
        if not body.get("stream"):
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            self.take(answer.json())
            return self
        with http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line for line in map(self._timed, answer.iter_lines()) if line]
        assert lines.pop() == "data: [DONE]"
        for line in lines:
            self.take(json.loads(line.removeprefix("data: ")))
        return self

    def _timed(self, line: str) -> str:
        self.times.append(time.monotonic())
        return line

    def take(self, data: dict[str, Any]) -> None:
        """Take an answer or a piece of one."""
        assert "error" not in data, data
        self.usage = data.get("usage") or self.usage
        for piece in data["choices"]:
            choice = self.choices.setdefault(
                piece["index"], {"text": "", "token_ids": [], "calls": [], "logprobs": [], "reason": None}
            )
            assert choice["reason"] is None, "something came after the end"
            told = piece.get("message") or piece.get("delta") or piece
            choice["text"] += told.get("text") or told.get("content") or ""
            choice["token_ids"] += piece.get("token_ids") or []
            choice["logprobs"] += _logprobs(piece.get("logprobs") or {})
            for i, call in enumerate(told.get("tool_calls") or ()):
                if call.get("index", i) == len(choice["calls"]):
                    choice["calls"].append({"name": call["function"]["name"], "arguments": ""})
                choice["calls"][call.get("index", i)]["arguments"] += call["function"]["arguments"]
            choice["reason"] = piece["finish_reason"]


def _logprobs(logprobs: dict[str, Any]) -> list[Any]:
    """One entry a token, of either schema."""
    if "content" in logprobs:
        return [(entry["token"], entry["logprob"]) for entry in logprobs["content"]]
    return list(zip(logprobs.get("tokens", ()), logprobs.get("token_logprobs", ()), strict=True))


@pytest.fixture
def cursed(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server with an engine whose steps take their time, and that dies of one token id."""
    paths = filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(supervisor, "CHILD_MODULE", "doubles.cursed_child")
    monkeypatch.setenv(CURSE_VARIABLE, f"kill={FATAL} slow=0.02")
    served = Served(tiny_folder, ServerOptions(tool_parser="hermes"), max_num_seqs=32)
    try:
        yield served.ready()
    finally:
        served.close()


def ask_all(served: Served, http: httpx.Client, threads: ThreadPoolExecutor) -> list[Any]:
    """Send all wishes; the last once the others have their first tokens. Returns as soon as that one computes."""
    served.call(served.engine.reset_prefix_cache())  # so that the last one's prompt is computed, and takes its time
    before = served.engine.stats.counts.get("num_generated_tokens", 0)
    asked = [threads.submit(Answer().ask, http, path, body) for path, body in WISHES[:-1]]
    served.wait_until(lambda: served.engine.num_live == len(asked))
    served.wait_until(lambda: served.engine.stats.counts.get("num_generated_tokens", 0) > before + 100)
    asked.append(threads.submit(Answer().ask, http, *WISHES[-1]))
    served.wait_until(lambda: any(_is_in_its_prompt(request) for request in served.engine.requests()))
    return asked


def _is_in_its_prompt(request: dict[str, Any]) -> bool:
    return request["num_prompt_tokens"] == len(LONG_PROMPT) and 0 < request["num_prompt_done"] < len(LONG_PROMPT)


def check_same(answers: list[Answer], expected: list[Answer]) -> None:
    for (path, body), answer, other in zip(WISHES, answers, expected, strict=True):
        assert answer.choices.keys() == other.choices.keys() == set(range(body.get("n", 1)))
        for index, choice in other.choices.items():
            found = answer.choices[index]
            scores, others = ([score for _, score in each.pop("logprobs")] for each in (found, choice))
            assert found == choice, (path, body)
            assert [score is None for score in scores] == [score is None for score in others]
            assert [s for s in scores if s is not None] == pytest.approx([s for s in others if s is not None], abs=1e-3)
        assert answer.usage["completion_tokens"] == other.usage["completion_tokens"]
        assert answer.usage["completion_tokens"] == sum(len(c["token_ids"]) for c in answer.choices.values())
        assert answer.usage["prompt_tokens"] == other.usage["prompt_tokens"]


def test_no_client_can_tell_that_the_engine_was_killed(cursed: Served, capsys: pytest.CaptureFixture[str]) -> None:
    with httpx.Client(base_url=cursed.url, timeout=200) as http, ThreadPoolExecutor(32) as threads:
        expected = [asked.result() for asked in ask_all(cursed, http, threads)]
        cursed.wait_until(cursed.is_idle)

        asked = ask_all(cursed, http, threads)
        os.kill(cursed.engine.pid, signal.SIGKILL)
        killed = time.monotonic()
        cursed.wait_until(lambda: cursed.engine.state == "restarting")
        noticed = time.monotonic()
        assert http.get("/health").status_code == 503
        assert [one.done() for one in asked[:-3]] != [True] * len(asked[:-3])
        [long] = [request for request in cursed.engine.requests() if _is_in_its_prompt(request)]
        answers = [one.result() for one in asked]
        first = min(min((when for when in answer.times if when > noticed), default=1e9) for answer in answers)
        with capsys.disabled():
            print(f"\nthe death was noticed after {noticed - killed:.2f} s; {first - killed:.2f} s without tokens")

        check_same(answers, expected)
        timeline = cursed.engine.timeline(long["id"])
        assert timeline is not None
        events = [event["event"] for event in timeline["events"]]
        assert events.index("engine died") < events.index("first token")
        assert cursed.engine.num_restarts == 1
        assert http.get("/health").status_code == 200
        cursed.wait_until(cursed.is_idle)


def test_a_token_that_kills_the_engine_fails_its_request_alone(cursed: Served) -> None:
    with httpx.Client(base_url=cursed.url, timeout=200) as http, ThreadPoolExecutor(32) as threads:
        expected = [asked.result() for asked in ask_all(cursed, http, threads)]
        asked = ask_all(cursed, http, threads)
        fatal = http.post(COMPLETIONS, json={"prompt": [7, FATAL, 8], "max_tokens": 5})
        assert fatal.status_code == 500
        assert "the engine died 2 times while it ran this request" in fatal.json()["error"]["message"]
        check_same([one.result() for one in asked], expected)
        assert cursed.engine.num_restarts == 2
        cursed.wait_until(cursed.is_idle)
        _check_that_it_can_be_gone_for_good(cursed, http)


def _check_that_it_can_be_gone_for_good(served: Served, http: httpx.Client) -> None:
    for number in range(3):
        assert http.get("/health").status_code == 200
        os.kill(served.engine.pid, signal.SIGKILL)
        served.wait_until(lambda: served.engine.state != "ready")
        states = {response.json()["status"] for response in [http.get("/health")] if response.status_code == 503}
        assert states == {"restarting" if number < 2 else "dead"}
        if number < 2:
            served.call(served.engine.wait_ready())
    refused = http.post(COMPLETIONS, json={"prompt": "a"})
    assert refused.status_code == 503
    assert "retry-after" not in refused.headers
