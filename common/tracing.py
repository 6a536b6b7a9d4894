"""OpenTelemetry spans, sent to an OTLP endpoint where one is set; else every call here costs next to nothing.

The SDK is imported only then, and not made the global provider: frameworks would add spans of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.version import VERSION

_NAME = "dsv4pd"
# With all attempts: a service's end must not wait for a collector that is away.
EXPORT_TIMEOUT_S = 2
_W3C = TraceContextTextMapPropagator()
REQUEST_ID = "request_id"

current_span: ContextVar[Span | None] = ContextVar("current_span", default=None)
"""The span that new ones are made under, in this task and those it starts."""


class _Current:
    """The tracer in use: one that does nothing until tracing is switched on."""

    def __init__(self) -> None:
        self.tracer: trace.Tracer = trace.NoOpTracer()


_current = _Current()


class Tracing:
    """Where spans go. Close it at the end: what waits to be sent is sent."""

    def __init__(self, service: str, endpoint: str) -> None:
        """`endpoint` is the base URL of an OTLP/HTTP collector; empty = off."""
        self.enabled = bool(endpoint)
        self._provider = None
        if not endpoint:
            return
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": f"dsv4pd-{service}", "service.version": VERSION})
        self._provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        _current.tracer = self._provider.get_tracer(_NAME, VERSION)

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()


def server_span(name: str, carrier: Mapping[str, str], attributes: Mapping[str, str]) -> Span:
    """The span of a call that came in; `carrier` may have the caller's `traceparent`."""
    caller = _W3C.extract(dict(carrier), context=Context())
    return _current.tracer.start_span(name, context=caller, kind=SpanKind.SERVER, attributes=dict(attributes))


def child(
    name: str, parent: Span | None = None, start_ns: int | None = None, kind: SpanKind = SpanKind.INTERNAL
) -> Span:
    """A span under `parent`, or under the current one. The caller ends it."""
    above = parent or current_span.get()
    context = Context() if above is None else trace.set_span_in_context(above, Context())
    return _current.tracer.start_span(name, context=context, kind=kind, start_time=start_ns)


def carrier_of(span: Span | None) -> dict[str, str]:
    """`traceparent` (and `tracestate`) for those who are called; empty when tracing is off."""
    carrier: dict[str, str] = {}
    if span is not None:
        _W3C.inject(carrier, context=trace.set_span_in_context(span, Context()))
    return carrier


def fail(span: Span, reason: str) -> None:
    """Marks a span as failed."""
    span.set_status(Status(StatusCode.ERROR, reason))


def intervals(parent: Span, marks: Iterable[tuple[str, int]], start_ns: int) -> None:
    """Spans that follow each other under `parent`: each ends at its mark and begins where the one before ended. A
    mark before that, from another host's clock, makes an empty one."""
    for name, end_ns in marks:
        end = max(start_ns, end_ns)
        child(name, parent, start_ns).end(end)
        start_ns = end
