"""Spans say of a request what its timeline says, reach a collector, and are nobody's burden."""

import itertools
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from server.collector import Collector, attributes
from server.command import Command
from server.served import OPTIONS, Served

from octavo.cli.main import main
from octavo.engine.history import History, RequestRecord
from octavo.errors import ConfigError
from octavo.server import tracing
from octavo.server.options import ServerOptions
from octavo.server.tracing import Tracing, endpoint_of, trace_headers

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = [4 + 7 * i % 250 for i in range(100)]  # two chunks
BODY = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "temperature": 0.5, "top_p": 0.9, "seed": 1}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def traced(served: Served, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A client of a server that tells the collector of requests."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    observers = served.engine.history.observers
    before = list(observers)
    url = served.listen(ServerOptions(OPTIONS.served_model_names, otlp_traces_endpoint=collector.url))
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client
    [own] = [observer for observer in observers if isinstance(observer, Tracing) and observer not in before]
    observers.remove(own)
    served.call(own.close(10))


def root_of(collector: Collector, request_id: str) -> Span:
    return collector.wait_for(lambda span: attributes(span).get("gen_ai.request.id") == request_id)


def parts_of(collector: Collector, root: Span) -> list[Span]:
    return [span for span in collector.spans if span.parent_span_id == root.span_id and span is not root]


def test_a_span_says_what_the_timeline_says(traced: httpx.Client, collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    answer = traced.post("/v1/completions", json=BODY, headers=headers).json()
    root = root_of(collector, answer["id"])
    assert (root.name, root.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, PARENT, "vendor=1")
    timeline = traced.get(f"/requests/{answer['id']}").json()
    assert [event.name for event in root.events] == [event["event"] for event in timeline["events"]]
    for event, line in zip(root.events, timeline["events"], strict=True):
        assert attributes(event).get("detail", "") == line["detail"]
        assert event.time_unix_nano / 1e9 - timeline["received"] == pytest.approx(line["seconds"], abs=1e-4)
    found = attributes(root)
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["http.route"] == "/v1/completions"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "tiny"
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.n"]) == (6, 1)
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert found["gen_ai.usage.prompt_tokens"] == found["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert found["gen_ai.usage.completion_tokens"] == found["gen_ai.usage.output_tokens"] == 6
    assert found["gen_ai.usage.cache_read.input_tokens"] == timeline["num_cached_tokens"]
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert found["gen_ai.latency.time_in_queue"] == pytest.approx(timeline["queue_seconds"])
    assert found["gen_ai.latency.time_to_first_token"] == pytest.approx(timeline["first_token_seconds"])
    assert found["gen_ai.latency.e2e"] == pytest.approx(timeline["seconds"])
    prefill, decode = (found[f"gen_ai.latency.time_in_model_{part}"] for part in ("prefill", "decode"))
    assert found["gen_ai.latency.time_in_model_inference"] == pytest.approx(prefill + decode)
    assert root.status.code == Status.STATUS_CODE_UNSET
    assert collector.resources[-1]["service.name"] == "octavo"
    assert collector.resources[-1]["deployment.environment.name"] == "test"
    assert collector.headers[-1]["x-key"] == "secret"


def test_stages_lie_within_their_request_without_gaps(traced: httpx.Client, collector: Collector) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30, "ignore_eos": True}
    chat = traced.post("/v1/chat/completions", json={**body, "response_format": {"type": "json_object"}}).json()
    root = root_of(collector, chat["id"])
    assert attributes(root)["gen_ai.operation.name"] == "chat"
    assert root.parent_span_id == b""
    collector.wait_for(lambda span: span.name == "decode" and span.parent_span_id == root.span_id)
    parts = sorted(parts_of(collector, root), key=lambda span: span.start_time_unix_nano)
    assert [part.name for part in parts] == ["tokenise", "compile", "queue", "prefill", "decode"]
    assert parts[0].start_time_unix_nano == root.start_time_unix_nano
    for before, after in pairwise(parts):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert parts[-1].end_time_unix_nano <= root.end_time_unix_nano
    assert all(part.trace_id == root.trace_id for part in parts)


def test_who_is_not_sampled_has_no_span(traced: httpx.Client, collector: Collector) -> None:
    other = TRACE.replace("4b", "5c", 1)
    unwanted = traced.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{other}-{PARENT}-00"}).json()
    broken = traced.post("/v1/completions", json=BODY, headers={"traceparent": "garbage"}).json()
    assert root_of(collector, broken["id"]).parent_span_id == b""
    assert all(attributes(span).get("gen_ai.request.id") != unwanted["id"] for span in collector.spans)
    assert all(span.trace_id.hex() != other for span in collector.spans)


def test_a_failure_is_an_error_with_its_message(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    history, observer = History(), Tracing(collector.url, "tiny")
    history.observers.append(observer)
    record = RequestRecord("one", time.time(), num_prompt_tokens=3)
    history.begin(record)
    history.end(record, "error", "the model failed: out of luck")
    root = root_of(collector, "one")
    assert (root.status.code, root.status.message) == (Status.STATUS_CODE_ERROR, "the model failed: out of luck")
    assert "gen_ai.latency.time_to_first_token" not in attributes(root)


def test_a_collector_that_is_not_there_or_does_not_answer_burdens_nobody(served: Served) -> None:
    with socket.socket() as silent:  # takes connections, never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for url in ("http://127.0.0.1:9/v1/traces", f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"):
            observer = Tracing(url, "tiny")
            served.engine.observe(observer)
            for _ in range(3):
                answer = httpx.post(f"{served.url}/v1/completions", json=BODY, timeout=60)
                assert answer.json()["usage"]["completion_tokens"] == 6
            served.engine.history.observers.remove(observer)
            begin = time.monotonic()
            served.call(observer.close(0.3))
            assert time.monotonic() - begin < 20  # no longer than it may, load aside


def test_a_collector_that_is_not_there_is_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, served: Served
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # seconds, after which a batch is given up
    history, observer = History(), Tracing("http://127.0.0.1:9/v1/traces", "tiny")
    history.observers.append(observer)
    numbers = itertools.count()

    def end_one() -> None:
        record = RequestRecord(f"r{next(numbers)}", time.time())
        history.begin(record)
        history.end(record, "stop")

    def lines() -> list[str]:
        told = [
            record for record in caplog.records if record.name.startswith(("opentelemetry", "octavo.server.tracing"))
        ]
        return [text for record in told if "127.0.0.1:9" in (text := record.getMessage()) or "port=9" in text]

    for num in range(3):
        end_one()
        Served.wait_until(lambda num=num: observer._sender.num_failed > num)
    [line] = lines()
    assert "cannot be sent to http://127.0.0.1:9/v1/traces (otlp_traces_endpoint), 1 batches" in line
    monkeypatch.setattr(tracing, "WARN_SECONDS", 0.0)  # as if a minute had gone by
    end_one()
    Served.wait_until(lambda: len(lines()) > 1)
    assert re.search(r" [4-9] batches are lost so far: ", lines()[1])
    assert all("\n" not in line for line in lines())
    served.call(observer.close(5))


def test_too_many_ends_at_once_are_dropped_and_counted(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "MAX_PENDING", 2)
    monkeypatch.setattr(Tracing, "_work", lambda self: None)
    history, observer = History(), Tracing(collector.url, "tiny")
    history.observers.append(observer)
    for number in range(5):
        record = RequestRecord(f"r{number}", time.time())
        history.begin(record)
        history.end(record, "stop")
    assert observer.num_dropped == 3
    assert len([line for line in caplog.messages if "spans are made too slowly" in line]) == 1


def test_the_last_spans_leave_before_the_command_ends(
    tiny_folder: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standard variables are enough, and spans that wait for their batch are sent at the end."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.base)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    command = Command(tiny_folder, "--served-model-name=tiny")
    try:
        url = command.wait_for(r"ready on (http://\S+)")
        answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()
        assert not collector.spans
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(60) == 0, command.text
    finally:
        command.close()
    root_of(collector, answer["id"])
    assert collector.resources[0]["service.name"] == "my-service"


@pytest.mark.parametrize(
    ("given", "environment", "found"),
    [
        (None, {}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318/"}, "http://a:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318/otlp"}, "http://a:4318/otlp/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b/x"}, "http://b/x"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_TRACES_EXPORTER": "none"}, None),
        ("http://c:4318", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b/x"}, "http://c:4318/v1/traces"),
        ("https://c/api/traces", {}, "https://c/api/traces"),
        ("http://c", {"OTEL_SDK_DISABLED": "TRUE"}, None),
        ("http://c/", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://c/v1/traces"),
    ],
)
def test_where_spans_go(given: str | None, environment: dict[str, str], found: str | None) -> None:
    assert endpoint_of(given, environment) == found


@pytest.mark.parametrize(
    ("given", "environment", "said"),
    [
        ("collector:4317", {}, "it must be a URL such as http://localhost:4318/v1/traces"),
        ("http://a", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "spans are sent as http/protobuf only"),
        (
            None,
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_TRACES_EXPORTER": "zipkin"},
            "there are otlp and none",
        ),
    ],
)
def test_what_is_no_place_for_spans(given: str | None, environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        endpoint_of(given, environment)


def test_without_the_packages_the_command_says_what_to_install(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    assert main(["serve", str(tiny_folder), "--otlp-traces-endpoint", "http://localhost:4318"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "pip install 'octavo[otel]'" in line


def test_headers_that_are_too_long_are_none() -> None:
    given: dict[str, Any] = {"traceparent": "x" * 200, "tracestate": "a=1", "other": "y"}
    assert trace_headers(given) == {"tracestate": "a=1"}
