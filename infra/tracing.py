"""Spans of requests, groups and steps, for OpenTelemetry. The only module with opentelemetry, which is an option.

A span is made from what was written to the log, after it was: the services know nothing of it. The span of a request
has the identity that its header says, so what another process makes of the same request hangs below it.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schemas.errors import ConfigError
from schemas.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

Attribute = str | int | float
FLUSH_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span that is over."""

    name: str
    start_us: int
    end_us: int
    own: TraceContext | None = None
    """its identity, where the log says it; None: a new one"""
    parent: TraceContext | None = None
    links: Sequence[TraceContext] = ()
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


class Tracing:
    """Hands spans to an exporter, on a thread of its library. `close` sends what is left."""

    def __init__(self, service: str, run: str, exporter: SpanExporter, *, at_once: bool = False) -> None:
        """`at_once`: export inside `emit`, for tests."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        self._ids = _given_ids()
        resource = Resource({"service.name": f"driftlog-{service}", "driftlog.run": run})
        # A provider of our own: the process-wide one belongs to whoever embeds us (MLflow sets one).
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(exporter) if at_once else BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("driftlog")

    def emit(self, span: Span) -> None:
        """Hand it over; never waits for the collector, whose queue drops what is too much."""
        from opentelemetry import trace

        parent = trace.set_span_in_context(trace.NonRecordingSpan(_context(span.parent))) if span.parent else None
        self._ids.given = span.own
        made = self._tracer.start_span(
            span.name,
            context=parent if parent is not None else _nothing(),
            links=[trace.Link(_context(link)) for link in span.links],
            attributes=dict(span.attributes),
            start_time=span.start_us * 1000,
        )
        made.end(end_time=span.end_us * 1000)

    def close(self) -> None:
        """Send what is left, within a limit."""
        self._provider.force_flush(int(FLUSH_LIMIT_S * 1000))
        self._provider.shutdown()


def otlp_exporter(address: str) -> SpanExporter:
    """An exporter to a collector. ConfigError without the extra packages."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # type: ignore[import-not-found,unused-ignore]
            OTLPSpanExporter,
        )
    except ImportError as error:
        raise ConfigError(
            f"metrics.otlp = {address!r} needs the extra `otel`: pip install 'driftlog[otel]', or leave it empty"
        ) from error
    exporter: SpanExporter = OTLPSpanExporter(endpoint=address, timeout=FLUSH_LIMIT_S)
    return exporter


def _context(context: TraceContext) -> Any:
    from opentelemetry import trace

    return trace.SpanContext(
        trace_id=int(context.trace_id, 16),
        span_id=int(context.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )


def _nothing() -> Any:
    from opentelemetry.context import Context

    return Context()  # not the current one: a span of somebody else in this thread is no parent of ours


def _given_ids() -> Any:
    """Random ids, but for a span whose identity is given."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class GivenIds(RandomIdGenerator):
        """State: the identity of the next span."""

        given: TraceContext | None = None
        # Never the process-wide generator: its state decides what is learnt.
        _random = random.Random(secrets.randbits(128))

        def generate_span_id(self) -> int:
            given, self.given = self.given, None
            return int(given.span_id, 16) if given else self._random.getrandbits(64) or 1

        def generate_trace_id(self) -> int:
            return int(self.given.trace_id, 16) if self.given else self._random.getrandbits(128) or 1

    return GivenIds()
