"""Record spans with OpenTelemetry if it is installed, and nothing otherwise.

One trace leads from a caller through device, coordinator and verifier: its context travels in the calls' metadata (W3C
`traceparent`). A span covers a session or a call, never a step or a token; it has ids, counts and how it ended, and
holds no text. On a device spans go where the application's own tracer provider sends them; a process of ours exports by
OTLP over HTTP when OpenTelemetry's OTEL_EXPORTER_OTLP_ENDPOINT is set.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

from outrider.telemetry.logs import request_metadata

try:
    from opentelemetry import trace
    from opentelemetry.trace import SpanKind, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    _INSTALLED = False
else:
    _INSTALLED = True

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
INSTALL = "pip install 'outrider[otel]'"
_CARRIED = ("traceparent", "tracestate")

Metadata = Iterable[tuple[str, str | bytes]]
Value = str | int | float | bool


class Span:
    """Wraps a span of OpenTelemetry; without one, all methods do nothing."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def note(self, **attributes: Value) -> None:
        """Set attributes; their names get the prefix `outrider.`."""
        if self._span is not None:
            self._span.set_attributes({f"outrider.{name}": value for name, value in attributes.items()})

    def end(self, failure: str = "") -> None:
        """End the span. failure: class of the error that ended it, whose message may hold what a peer has sent."""
        if self._span is not None:
            if failure:
                self._span.set_status(StatusCode.ERROR, failure)
            self._span.end()


def begin(name: str, metadata: Metadata | None = None, **attributes: Value) -> Span:
    """Begin a span that the caller ends.

    metadata: of the call that it serves; a span that it names is the parent. Without metadata the current span is.
    """
    if not _INSTALLED:
        return Span()
    span = Span(_start(name, metadata))
    span.note(**attributes)
    return span


@contextlib.contextmanager
def span(name: str, metadata: Metadata | None = None, **attributes: Value) -> Iterator[Span]:
    """Make a span the current one in the body and in tasks that are begun there.

    It must not be used in a generator, whose body runs in the context of whatever asks for its next value.
    """
    if not _INSTALLED:
        yield Span()
        return
    started = _start(name, metadata)
    with trace.use_span(started, record_exception=False, set_status_on_exception=False):
        ours, failure = Span(started), ""
        ours.note(**attributes)
        try:
            yield ours
        except Exception as error:
            failure = type(error).__name__
            raise
        finally:
            ours.end(failure)


def call_metadata() -> tuple[tuple[str, str], ...]:
    """Return metadata for a call to another process: the request's id, and the current span as its parent."""
    carried: dict[str, str] = {}
    if _INSTALLED:
        TraceContextTextMapPropagator().inject(carried)
    return (*request_metadata(), *carried.items())


def configure(process: str) -> None:
    """Export this process's spans if the environment says where to. Raises ImportError that names what to install."""
    if not os.environ.get(ENDPOINT):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ImportError(f"{ENDPOINT} is set, and spans need: {INSTALL}") from error
    provider = TracerProvider(resource=Resource.create({"service.name": f"outrider-{process}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def _start(name: str, metadata: Metadata | None) -> Any:
    context, kind = None, SpanKind.INTERNAL
    if metadata is not None:
        given = {name: value for name, value in metadata if name in _CARRIED and isinstance(value, str)}
        context, kind = TraceContextTextMapPropagator().extract(given), SpanKind.SERVER
    return trace.get_tracer("outrider").start_span(name, context=context, kind=kind)
