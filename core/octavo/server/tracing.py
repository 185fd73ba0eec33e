"""OpenTelemetry spans: each request's timeline, sent to a collector once the request has ended.

Nothing of it happens where requests are served: a request that ends is put on a bounded list, and a thread makes its
spans and hands them to OpenTelemetry's own batches, which send them over HTTP and give up when nobody takes them.
The standard variables hold (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_EXPORTER_OTLP_HEADERS ...).
Names of attributes are those of the gen_ai conventions, and those beside them that vLLM's spans have.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from octavo import __version__
from octavo.engine.history import RequestRecord
from octavo.engine.stages import stages_of
from octavo.engine.wire import WireStats
from octavo.errors import ConfigError, shown

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

__all__ = ["Tracing", "attributes_of", "check_installed", "endpoint_of", "trace_headers"]

TRACES_PATH = "/v1/traces"
PROTOCOL = "http/protobuf"
MAX_PENDING = 4096  # ended requests whose spans are not made yet; more are dropped and counted
WARN_SECONDS = 60.0  # between two lines that say so, or that spans cannot be sent
SENDER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"  # the logger of what sends them
MAX_HEADERS = {"traceparent": 128, "tracestate": 512}  # characters; longer ones are none

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}

logger = logging.getLogger(__name__)


def endpoint_of(given: str | None, environment: Mapping[str, str]) -> str | None:
    """The URL that spans go to, by the setting or else by OpenTelemetry's variables; None: nobody wants them.

    Raises:
        ConfigError: it is none, or another protocol or exporter is asked for.

    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    own = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "").strip()
    url = given or (own or (base and base.rstrip("/") + TRACES_PATH) if exporter != "none" else None)
    if not url:
        return None
    if given is None and exporter != "otlp":
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {shown(exporter)}; there are otlp and none")
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environment.get(name, "").strip():
            if protocol != PROTOCOL:
                raise ConfigError(f"{name} is {shown(protocol)}; spans are sent as {PROTOCOL} only: set it to that")
            break
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"otlp_traces_endpoint is {shown(url)}; it must be a URL such as http://localhost:4318{TRACES_PATH}"
        )
    return url.rstrip("/") + TRACES_PATH if given and parts.path in ("", "/") else url


def check_installed() -> None:
    """Whether spans can be made and sent.

    Raises:
        ConfigError: packages are missing.

    """
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"an endpoint for traces is set and OpenTelemetry is not installed ({error}): pip install 'octavo[otel]', "
            "or unset otlp_traces_endpoint and OTEL_EXPORTER_OTLP_ENDPOINT"
        ) from error


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of a request that say which trace it is part of (W3C Trace Context)."""
    found = {name: headers.get(name, "") for name in MAX_HEADERS}
    return {name: value for name, value in found.items() if value and len(value) <= MAX_HEADERS[name]}


def attributes_of(record: RequestRecord, model: str) -> dict[str, Any]:
    """What a request's span says of it."""
    assert record.finished is not None, "the request goes on"
    found: dict[str, Any] = {
        "gen_ai.operation.name": OPERATIONS.get(record.path),
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": model,
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.n": record.n,
        "gen_ai.request.choice.count": record.n,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.temperature": record.temperature,
        "gen_ai.request.top_p": record.top_p,
        "gen_ai.response.model": model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.finish_reasons": (record.finish_reason or "").split(", "),
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "gen_ai.usage.output_tokens": record.num_generated_tokens,
        "gen_ai.usage.completion_tokens": record.num_generated_tokens,
        "gen_ai.usage.num_sequences": record.n,
        "gen_ai.latency.e2e": record.finished - record.received,
        "http.route": record.path or None,
        "octavo.num_preemptions": record.num_preemptions,
    }
    if record.admitted is not None:
        found["gen_ai.latency.time_in_queue"] = record.admitted - record.received
    if record.first_token is not None:
        found["gen_ai.latency.time_to_first_token"] = record.first_token - record.received
    if record.admitted is not None and record.first_token is not None and record.last_token is not None:
        found["gen_ai.latency.time_in_model_prefill"] = record.first_token - record.admitted
        found["gen_ai.latency.time_in_model_decode"] = record.last_token - record.first_token
        found["gen_ai.latency.time_in_model_inference"] = record.last_token - record.admitted
    return {name: value for name, value in found.items() if value is not None}


class _Heard(logging.Filter):
    """Takes a logger's lines in threads that listen, and leaves those of others alone."""

    def __init__(self) -> None:
        super().__init__()
        self._of_thread = threading.local()

    @contextmanager
    def listen(self) -> Iterator[list[str]]:
        """What is logged meanwhile in this thread."""
        texts: list[str] = []
        self._of_thread.texts = texts
        try:
            yield texts
        finally:
            self._of_thread.texts = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line goes its way."""
        texts: list[str] | None = getattr(self._of_thread, "texts", None)
        if texts is not None:
            texts.append(record.getMessage())
        return texts is None


_heard = _Heard()


class _Sender:
    """Sends spans, and says so once a minute when nobody takes them: the library has several lines on each batch."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        logging.getLogger(SENDER).addFilter(_heard)
        self.num_failed = 0  # batches
        self._endpoint = endpoint
        self._exporter: SpanExporter = OTLPSpanExporter(endpoint)
        self._warned = float("-inf")

    def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
        """Send a batch."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        with _heard.listen() as texts:
            try:
                result = self._exporter.export(spans)
            except Exception as error:
                result = SpanExportResult.FAILURE
                texts.append(repr(error))
        if result is not SpanExportResult.SUCCESS:
            self._failed(" ".join(texts[-1].split()) if texts else "no reason is given")
        return result

    def _failed(self, why: str) -> None:
        self.num_failed += 1
        if time.monotonic() - self._warned > WARN_SECONDS:
            self._warned = time.monotonic()
            logger.warning(
                "spans cannot be sent to %s (otlp_traces_endpoint), %d batches are lost so far: %.500s",
                self._endpoint,
                self.num_failed,
                why,
            )

    def shutdown(self) -> None:
        """Send no more."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is held here."""
        return self._exporter.force_flush(timeout_millis)


class Tracing:
    """Observes requests, and tells a collector of each that ends.

    Args:
        endpoint: URL of the collector's traces.
        model: the name that spans carry.

    Attributes:
        num_dropped: requests without spans, for too many had ended at once.

    Raises:
        ConfigError: packages are missing.

    """

    def __init__(self, endpoint: str, model: str) -> None:
        check_installed()
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self.num_dropped = 0
        self._sender = _Sender(endpoint)
        self._model = model
        self._provider = _provider()
        self._provider.add_span_processor(BatchSpanProcessor(cast("SpanExporter", self._sender)))
        self._tracer = self._provider.get_tracer("octavo", __version__)
        self._ended: deque[RequestRecord] = deque()
        self._news = threading.Event()
        self._is_closing = False
        self._warned = float("-inf")
        self._thread = threading.Thread(target=self._work, name="octavo-tracing", daemon=True)
        self._thread.start()

    def on_step(self, stats: WireStats, gained: Mapping[str, int]) -> None:
        """Nothing: traces are of requests."""

    def on_tokens(self, record: RequestRecord, num_tokens: int, seconds: float | None) -> None:
        """Nothing: the record keeps what a span says of tokens."""

    def on_end(self, record: RequestRecord) -> None:
        """A request has ended: the thread will see to it."""
        if len(self._ended) < MAX_PENDING:
            self._ended.append(record)
            self._news.set()
            return
        self.num_dropped += 1
        if time.monotonic() - self._warned > WARN_SECONDS:
            self._warned = time.monotonic()
            logger.warning("spans are made too slowly: %d requests have none so far", self.num_dropped)

    async def close(self, seconds: float) -> None:
        """Send what there is, for at most so long."""
        self._is_closing = True
        self._news.set()
        end = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < end:
            await asyncio.sleep(0.01)
        if self._thread.is_alive():
            logger.warning("the last spans could not be sent within %g s", seconds)

    def _work(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            while self._ended:
                try:
                    self._trace(self._ended.popleft())
                except Exception:
                    logger.exception("a request has no spans")
            if self._is_closing:
                self._provider.shutdown()
                return

    def _trace(self, record: RequestRecord) -> None:
        """Make the spans of one request: its own, and one for each stage of it."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        assert record.finished is not None
        parent = TraceContextTextMapPropagator().extract(record.trace)
        begin = _nanoseconds(record.received)
        attributes = attributes_of(record, self._model)
        span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, attributes, start_time=begin)
        if span.is_recording():
            for event in sorted(record.events, key=lambda event: event.time):
                span.add_event(event.name, {"detail": event.detail} if event.detail else None, _nanoseconds(event.time))
            inside = set_span_in_context(span)
            for stage in stages_of(record):
                why = {"octavo.why": stage.why} if stage.why else None
                part = self._tracer.start_span(stage.name, inside, attributes=why, start_time=_nanoseconds(stage.begin))
                part.end(_nanoseconds(stage.end))
            if record.error is not None:
                span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(_nanoseconds(record.finished))


def _provider() -> "TracerProvider":
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider

    resource = Resource.create({SERVICE_VERSION: __version__})
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "octavo"}))
    return TracerProvider(resource=resource, shutdown_on_exit=False)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
