"""Collect spans that processes export by OTLP over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class ExportedSpan:
    """Hold a span as it was exported."""

    service: str
    name: str
    trace_id: int
    span_id: int
    parent_id: int
    attributes: dict[str, Any]


class Collector:
    """Collect spans. Use it as a context manager; `endpoint` is the value for OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __init__(self) -> None:
        self.spans: list[ExportedSpan] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                spans.extend(_spans_of(ExportTraceServiceRequest.FromString(body)))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _spans_of(request: ExportTraceServiceRequest) -> Iterator[ExportedSpan]:
    for part in request.resource_spans:
        service = next(a.value.string_value for a in part.resource.attributes if a.key == "service.name")
        for scope in part.scope_spans:
            for span in scope.spans:
                ids = (int.from_bytes(raw) for raw in (span.trace_id, span.span_id, span.parent_span_id))
                yield ExportedSpan(service, span.name, *ids, {a.key: _value(a.value) for a in span.attributes})


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
