"""Test that spans are made and ended, in this process."""

from __future__ import annotations

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.core.errors import Overloaded
from outrider.telemetry import logs, traces


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces.trace, "get_tracer", provider.get_tracer)
    return exporter


def test_a_calls_metadata_makes_its_server_part_of_the_trace(finished) -> None:
    with traces.span("client"), logs.about(request="req-1"):
        metadata = traces.call_metadata()
    assert dict(metadata)[logs.REQUEST_HEADER] == "req-1"
    traces.begin("server", metadata, epoch=3).end()
    client, server = finished.get_finished_spans()
    assert server.parent.span_id == client.context.span_id
    assert dict(server.attributes) == {"outrider.epoch": 3}


def test_a_failure_is_recorded_by_its_class_alone(finished) -> None:
    with pytest.raises(Overloaded), traces.span("call"):
        raise Overloaded("what a peer may have sent")
    [span] = finished.get_finished_spans()
    assert span.status.description == "Overloaded"
    assert "peer" not in span.to_json()
