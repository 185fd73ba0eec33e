"""A collector of traces in the tests' process: OTLP over HTTP, as OpenTelemetry's exporters speak it."""

import gzip
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

__all__ = ["Collector", "attributes"]


class Collector:
    """Keeps the spans that it is sent.

    Attributes:
        url: that spans go to.
        spans: by arrival.
        resources: attributes of those whose spans they are.
        headers: of each export.

    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                assert self.headers["content-type"] == "application/x-protobuf"
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resources.append(attributes(group.resource))
                    collector.spans.extend(span for scope in group.scope_spans for span in scope.spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.base = f"http://127.0.0.1:{self._server.server_port}"
        self.url = f"{self.base}/v1/traces"

    def wait_for(self, found: Callable[[Span], bool]) -> Span:
        """The first span that is such a one."""
        end = time.monotonic() + 60
        while True:
            for span in list(self.spans):
                if found(span):
                    return span
            assert time.monotonic() < end, f"no such span among {[span.name for span in self.spans]}"
            time.sleep(0.01)

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes(holder: Any) -> dict[str, Any]:
    """Of a span, an event or a resource, as plain values."""
    return {pair.key: _plain(pair.value) for pair in holder.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind)
