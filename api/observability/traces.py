"""Traces: a span for every request and, inside it, one for each step of its answer, in OpenTelemetry's format.

This module is imported only when traces are on, and needs the extra `otel`. A trace is built when its request is done,
from what RequestContext measured anyway. A thread of its own sends it, so a slow or missing collector delays nobody.
OpenTelemetry's own variables say where to send traces and how many (OTEL_EXPORTER_OTLP_ENDPOINT, …).

Attributes hold names, numbers and the id of the request. They never hold a question, an answer, a document or a path.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ragkv import __version__
from ragkv.api.middleware.access_log import UNMATCHED, ServedRequest
from ragkv.report import Report
from ragkv.timing import StepTimer

LOG_SECONDS = 300.0
"""Least time between two log lines about lost spans."""

Attributes = dict[str, str | int | float]

logger = logging.getLogger("ragkv.api")


def open_tracing() -> Tracing:
    """Create tracing that sends to the collector named in the environment."""
    # OpenTelemetry logs every failed attempt and every dropped span. RateLimitedLogExporter logs the loss now and then.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return Tracing(BatchSpanProcessor(RateLimitedLogExporter(OTLPSpanExporter())))


class Tracing:
    """Records requests as traces. Thread-safe. Owns its provider and processor and sets no global."""

    def __init__(self, processor: SpanProcessor):
        """Create a provider whose finished spans go to `processor`."""
        service = Resource({"service.name": "ragkv", "service.version": __version__})
        resource = Resource.create().merge(service).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("ragkv", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, served: ServedRequest) -> None:
        """Make the spans of a request that is done."""
        if served.quiet:
            return
        timer = served.context.timer
        span = self._tracer.start_span(
            served.method if served.route == UNMATCHED else f"{served.method} {served.route}",
            self._propagator.extract(served.trace_headers),
            SpanKind.SERVER,
            _request_attributes(served),
            start_time=served.started_unix_ns,
        )
        if served.status >= 500:
            span.set_status(StatusCode.ERROR)
        parent = set_span_in_context(span)
        if timer is not None:
            self._record_steps(served, timer, parent)
        span.end(served.unix_ns(served.ended))

    def _record_steps(self, served: ServedRequest, timer: StepTimer, parent: Context) -> None:
        for step in tuple(timer.intervals):
            start, end = (served.unix_ns(timer.started + at / 1000) for at in (step.start, step.end))
            attributes = _step_attributes(step.name, served.context.report)
            self._tracer.start_span(step.name, parent, attributes=attributes, start_time=start).end(end)

    def close(self, seconds: float) -> None:
        """Send the remaining spans; wait at most `seconds`."""
        sender = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        sender.start()
        sender.join(seconds)


class RateLimitedLogExporter(SpanExporter):
    """Wraps an exporter and logs lost spans at most once every LOG_SECONDS instead of for every attempt."""

    def __init__(self, exporter: SpanExporter):
        self._exporter = exporter
        self._lost, self._logged = 0, -LOG_SECONDS

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send the spans. Spans that cannot be sent are lost."""
        try:
            result = self._exporter.export(spans)
        except Exception:
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            self._lost += len(spans)
            if time.monotonic() - self._logged >= LOG_SECONDS:
                logger.warning(
                    "%d spans could not be sent: is there a collector at OTEL_EXPORTER_OTLP_ENDPOINT?", self._lost
                )
                self._lost, self._logged = 0, time.monotonic()
        return result

    def shutdown(self) -> None:
        """Shut the wrapped exporter down."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Flush the wrapped exporter."""
        return self._exporter.force_flush(timeout_millis)


def _request_attributes(served: ServedRequest) -> Attributes:
    context = served.context
    attributes: Attributes = {"http.request.method": served.method, "ragkv.request_id": context.id}
    if served.route != UNMATCHED:
        attributes["http.route"] = served.route
    if served.status:
        attributes["http.response.status_code"] = served.status
    if served.status >= 500:
        attributes["error.type"] = context.fault or str(served.status)
    if context.tenant:
        attributes["ragkv.tenant"] = context.tenant
    return attributes if context.report is None else {**attributes, **_answer_attributes(context.report)}


def _answer_attributes(report: Report) -> Attributes:
    attributes: Attributes = {
        "ragkv.method": _name(report.method),
        "ragkv.prefill": _name(report.prefill),
        "ragkv.decode": _name(report.decode),
        "ragkv.ttft_ms": report.timings_ms.ttft,
        "ragkv.cache.misses": report.cache.misses,
        "ragkv.cache.fallbacks": len(report.cache.fallbacks),
    }
    for part, values in (("tokens", report.tokens), ("bytes", report.bytes), ("ratios", report.ratios)):
        attributes |= {f"ragkv.{part}.{name}": value for name, value in vars(values).items()}
    return attributes | {f"ragkv.cache.hits.{tier}": count for tier, count in vars(report.cache.hits).items()}


def _step_attributes(name: str, report: Report | None) -> Attributes:
    """Describe one step. A step that runs several times (load) is described by its sum, on the span of the request."""
    if report is None:
        return {}
    attributes: Attributes = {"ragkv.method": _name(report.method)}
    if name == "retrieve":
        attributes["ragkv.cache.chunks"] = report.cache.chunks
    elif name == "open":
        attributes["ragkv.bytes.heads"] = report.bytes.heads
    elif name == "decode":
        attributes |= {"ragkv.tokens.generated": report.tokens.generated, "ragkv.steps": report.decoding.steps}
    return attributes


def _name(spec: str) -> str:
    """Return the name of a method or policy without its fields, which hold text of the client."""
    return spec.partition(":")[0]
