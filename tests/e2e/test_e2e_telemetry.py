"""Test what a verifier tells of a session: a span in the caller's trace, and JSON lines that hold no text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from shared_cluster import QUICK, running, until
from small_pair import DRAFT, TARGET

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from edge_agent import AsyncClient
from outrider.core.text import short_id
from outrider.telemetry import logs, traces

pytestmark = pytest.mark.e2e

READY = r"listening on (127\.0\.0\.1:\d+)"
PROMPT, TOKENS = 'def read_pelicans(path):\n    """Return the lines of a file."""\n', 96


@contextlib.contextmanager
def collected() -> Iterator[tuple[str, list[Any]]]:
    """Yield the endpoint of a collector, and the spans that come to it by OTLP over HTTP."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            spans.extend(span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", spans
        finally:
            server.shutdown()
            thread.join()


async def test_a_session_is_in_the_callers_trace_and_in_json_lines_without_any_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces.trace, "get_tracer", provider.get_tracer)
    models = ("--model", TARGET, "--draft", DRAFT, "--listen", "127.0.0.1:0", *QUICK)
    with collected() as (endpoint, exported):
        variables = {traces.ENDPOINT: endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100", logs.FORMAT: "json"}
        with running(
            tmp_path, r"listening on (127\.0\.0\.1:\d+)", "outrider-verifier", *models, **variables
        ) as verifier:
            async with AsyncClient(verifier=verifier.ready, cache_dir=tmp_path / "cache") as client:
                with traces.span("caller"), logs.about(request="req-7"):
                    done = await client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)
            [served] = until(lambda: [span for span in exported if span.name == "outrider.verifier.session"])
        output = verifier.output
    spans = {span.name: span for span in exporter.get_finished_spans()}
    caller, session = spans["caller"].context, spans["outrider.device.session"]
    assert session.parent.span_id == caller.span_id
    assert served.trace_id == caller.trace_id.to_bytes(16, "big")
    assert served.parent_span_id == spans["outrider.device.attach"].context.span_id.to_bytes(8, "big")
    values = {one.key: one.value for one in served.attributes}
    assert values["outrider.session_id"].string_value == short_id(done.session_id)
    assert values["outrider.tokens"].int_value == TOKENS
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    [ended] = [line for line in lines if line["message"].endswith("ended: length")]
    assert (ended["session"], ended["request"]) == (short_id(done.session_id), "req-7")
    assert "elican" not in output + str(exported)
