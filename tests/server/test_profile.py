"""Where the time of steps goes: every phase is there, they add up, and nothing is left behind."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.served import OPTIONS, Served

from octavo.cli.main import main
from octavo.engine.profiling import PHASES, Profiled, StepProfile
from octavo.server.options import ServerOptions
from octavo.server.step_times import picture_of, summary_of, table_of

BODY = {"prompt": [4 + 7 * i % 250 for i in range(200)], "max_tokens": 200, "ignore_eos": True}


@contextmanager
def busy(served: Served) -> Iterator[None]:
    """Two clients that ask again and again."""
    done = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=served.url, timeout=60) as client:
            while not done.is_set():
                client.post("/v1/completions", json=BODY)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        served.wait_until(lambda: served.engine.num_live > 0)
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_phases_add_up_to_steps(served: Served, http: httpx.Client) -> None:
    with busy(served):
        found = http.post("/profile", params={"steps": 300, "seconds": 60}).json()
        text = http.post("/profile", params={"steps": 5, "seconds": 60, "format": "text"}).text
    assert found["num_steps"] == 300
    assert list(found["phases"]) == list(PHASES)
    assert all(figures["total"] > 0 for figures in found["phases"].values())
    whole = found["step"]
    assert sum(figures["total"] for figures in found["phases"].values()) == pytest.approx(whole["total"])
    assert whole["total"] + found["between"]["total"] <= found["seconds"] * 1.001
    assert whole["share"] + found["between"]["share"] == pytest.approx(1)
    for figures in (*found["phases"].values(), found["between"], whole, *found["kinds"].values()):
        assert 0 <= figures["p50"] <= figures["p90"] <= figures["p99"] <= figures["max"] <= figures["total"]
    assert sum(kind["num_steps"] for kind in found["kinds"].values()) == 300
    assert set(found["kinds"]) == {"steps of outputs", "steps with prompts"}
    assert found["num_tokens"] > found["num_generated"] > 0
    assert text.startswith("5 steps in ")
    assert [line.split()[0] for line in text.splitlines()[2:8]] == list(PHASES)


def test_a_picture_has_steps_with_their_phases_and_requests_below(served: Served, http: httpx.Client) -> None:
    with busy(served):
        answer = http.post("/profile", params={"steps": 50, "seconds": 60, "format": "trace"})
    assert "octavo-steps.json" in answer.headers["content-disposition"]
    picture = answer.json()
    events = picture["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M", "C"}
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    steps = [event for event in slices if event["name"].startswith("step")]
    assert [event["name"] for event in steps] == [f"step {number}" for number in range(50)]
    for before, after in pairwise(steps):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.01
    for phase in (event for event in slices if event["name"] in PHASES):
        assert any(
            step["ts"] - 0.01 <= phase["ts"] and phase["ts"] + phase["dur"] <= step["ts"] + step["dur"] + 0.01
            for step in steps
        )
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 2}
    assert rows and all(name.startswith("cmpl-") for name in rows)
    stages = {event["name"] for event in events if event["ph"] == "X" and event["pid"] == 2}
    assert "decode" in stages and stages <= {"tokenise", "queue", "prefill", "decode", "preempted"}
    assert picture["otherData"]["summary"]["num_steps"] == 50


def test_an_engine_with_nothing_to_do_answers_in_time_and_serves_on(served: Served, http: httpx.Client) -> None:
    served.wait_until(served.is_idle)
    assert http.post("/profile", params={"seconds": 0.05}).json()["num_steps"] == 0
    text = http.post("/profile", params={"seconds": 0.05, "format": "text"}).text
    assert text == "no step was made: the engine had nothing to do\n"
    answer = http.post("/v1/completions", json={**BODY, "max_tokens": 3}).json()
    assert answer["usage"]["completion_tokens"] == 3


def test_one_profile_at_a_time_and_who_leaves_ends_it(served: Served, http: httpx.Client) -> None:
    profiles = served.engine._keeper.profiles
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as opened:
        opened.sendall(b"POST /profile?seconds=600 HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        served.wait_until(lambda: profiles._waits is not None)
        refused = http.post("/profile")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert "another profile is being taken" in refused.json()["error"]["message"]
    served.wait_until(lambda: profiles._waits is None)
    assert http.post("/profile", params={"seconds": 0.05}).status_code == 200


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"steps": "0"}, "steps"),
        ({"steps": "many"}, "steps"),
        ({"steps": "1.5"}, "steps"),
        ({"steps": "10001"}, "steps"),
        ({"seconds": "nan"}, "seconds"),
        ({"seconds": "601"}, "seconds"),
        ({"format": "svg"}, "format"),
    ],
)
def test_what_cannot_be_measured(http: httpx.Client, params: dict[str, str], param: str) -> None:
    answer = http.post("/profile", params=params)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_the_command_prints_the_table_and_writes_the_picture(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "steps.json"
    with busy(served):
        assert main(["profile", f"{served.url}/v1", "--steps", "20", "--output", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("20 steps in ") and str(file) in printed
    assert len(json.loads(file.read_text())["traceEvents"]) > 20 * 7
    url = served.listen(ServerOptions(OPTIONS.served_model_names, api_keys=("secret",)))
    assert main(["profile", url, "--seconds", "0.05"]) == 1
    assert "answers 401: an API key is needed" in capsys.readouterr().err
    monkeypatch.setenv("OCTAVO_API_KEYS", "secret other")
    assert main(["profile", url, "--seconds", "0.05"]) == 0
    for wrong, said in (("localhost", "it must be a server's"), ("http://127.0.0.1:9", "no profile comes from")):
        assert main(["profile", wrong]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert said in line


def test_figures_of_known_steps() -> None:
    """A step of two program calls has its phases twice; a pause without work is not between steps."""

    def step(begin: float, names: str, **more: Any) -> StepProfile:
        marks = tuple((name, begin + 0.001 * i) for i, name in enumerate(names.split()))
        counts = {"num_tokens": 1, "num_generated": 1, "num_seqs": 1, "num_running": 1, "num_waiting": 0, **more}
        return StepProfile(marks, begin + 0.001 * len(marks), num_used_blocks=3, **counts)

    long = step(0.0, "schedule build program sample build program sample update send", num_tokens=9)
    last = step(0.010, "schedule build program sample update send", num_running=0)
    late = step(5.0, "schedule build program sample update send")
    summary = summary_of(Profiled(1, 100.0, [long, last, late]))
    assert summary["phases"]["program"]["total"] == pytest.approx(0.004)
    assert summary["phases"]["program"]["max"] == pytest.approx(0.002)
    assert summary["between"]["total"] == pytest.approx(0.001)
    assert summary["step"]["total"] == pytest.approx(0.021)
    assert summary["seconds"] == pytest.approx(5.006)
    assert {kind: figures["num_steps"] for kind, figures in summary["kinds"].items()} == {
        "steps of outputs": 2,
        "steps with prompts": 1,
    }
    assert "3 steps in 5.006 s: 11 tokens computed, 3 generated" in table_of(summary)
    empty = picture_of(Profiled(1, 100.0, []), [])
    assert empty["otherData"]["summary"]["num_steps"] == 0
