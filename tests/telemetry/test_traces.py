"""Test that spans are made and ended, in this process."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.core.errors import Overloaded
from outrider.telemetry import logs, traces

WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
from outrider.telemetry import traces
with traces.span("a", x=1) as span:
    span.note(y=2)
traces.begin("b", ()).end("Overloaded")
assert traces.call_metadata() == ()
traces.configure("tester")
print("fine")
"""


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces.trace, "get_tracer", provider.get_tracer)
    return exporter


async def test_a_task_begun_in_a_span_is_its_child(finished) -> None:
    async def work() -> None:
        with traces.span("inner"):
            pass

    with traces.span("outer"):
        task = asyncio.create_task(work())
    await task
    inner, outer = sorted(finished.get_finished_spans(), key=lambda span: span.name)
    assert inner.parent.span_id == outer.context.span_id


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


def test_without_opentelemetry_nothing_happens() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_an_endpoint_without_the_packages_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setenv(traces.ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ImportError, match=r"outrider\[otel\]"):
        traces.configure("tester")
