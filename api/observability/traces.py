"""Traces: a span for every request and, inside it, one for each step of its answer, in OpenTelemetry's words.

Only imported where traces are wanted; needs the extra `otel`. A trace is built when its request is done, of what was
measured anyway (account.py), and sent by a thread of its own: a collector that is slow or away keeps nobody waiting.
Where to send them, and how many, OpenTelemetry's own variables say (OTEL_EXPORTER_OTLP_ENDPOINT, …).

Attributes are names, numbers and the request's id. No question, answer, document or path is among them.
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

from api.middleware.access_log import UNMATCHED, ServedRequest
from ragkv import __version__
from ragkv.report import Report
from ragkv.timing import StepTimer

TOLD_SECONDS = 300.0
"""Least time between two lines about traces that were not taken."""

Attributes = dict[str, str | int | float]

logger = logging.getLogger("ragkv.api")


def open_tracing() -> Tracing:
    """Tracing that sends to the collector that the environment names."""
    # It says on every try that nobody is there, and of every span that was too much; Patient says it now and then.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return Tracing(BatchSpanProcessor(Patient(OTLPSpanExporter())))


class Tracing:
    """Thread-safe. Owns its processor; nothing of it is global."""

    def __init__(self, processor: SpanProcessor):
        """processor: takes spans that have ended."""
        named = Resource({"service.name": "ragkv", "service.version": __version__})
        resource = Resource.create().merge(named).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("ragkv", __version__)
        self._parents = TraceContextTextMapPropagator()

    def record(self, served: ServedRequest) -> None:
        """The observer (observe.py) that makes spans of a request."""
        if served.quiet:
            return
        account = served.account
        span = self._tracer.start_span(
            served.method if served.route == UNMATCHED else f"{served.method} {served.route}",
            self._parents.extract(served.parents),
            SpanKind.SERVER,
            _of_request(served),
            start_time=served.unix,
        )
        if served.status >= 500:
            span.set_status(StatusCode.ERROR)
        inside = set_span_in_context(span)
        if account.timer is not None:
            self._steps(served, account.timer, inside)
        span.end(served.when(served.ended))

    def _steps(self, served: ServedRequest, watch: StepTimer, inside: Context) -> None:
        for step in tuple(watch.intervals):
            start, end = (served.when(watch.started + at / 1000) for at in (step.start, step.end))
            told = _of_step(step.name, served.account.report)
            self._tracer.start_span(step.name, inside, attributes=told, start_time=start).end(end)

    def close(self, seconds: float) -> None:
        """Send what is left, for so long at most."""
        sending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        sending.start()
        sending.join(seconds)


class Patient(SpanExporter):
    """An exporter whose collector may be away: told in a line, not for every try."""

    def __init__(self, exporter: SpanExporter):
        self._exporter = exporter
        self._lost, self._told = 0, -TOLD_SECONDS

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send them, or lose them."""
        try:
            result = self._exporter.export(spans)
        except Exception:
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            self._lost += len(spans)
            if time.monotonic() - self._told >= TOLD_SECONDS:
                logger.warning(
                    "%d spans were not taken: is there a collector at OTEL_EXPORTER_OTLP_ENDPOINT?", self._lost
                )
                self._lost, self._told = 0, time.monotonic()
        return result

    def shutdown(self) -> None:
        """No more is sent."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is kept here."""
        return self._exporter.force_flush(timeout_millis)


def _of_request(served: ServedRequest) -> Attributes:
    account = served.account
    told: Attributes = {"http.request.method": served.method, "ragkv.request_id": account.id}
    if served.route != UNMATCHED:
        told["http.route"] = served.route
    if served.status:
        told["http.response.status_code"] = served.status
    if served.status >= 500:
        told["error.type"] = account.fault or str(served.status)
    if account.tenant:
        told["ragkv.tenant"] = account.tenant
    return told if account.report is None else {**told, **_of_answer(account.report)}


def _of_answer(report: Report) -> Attributes:
    told: Attributes = {
        "ragkv.method": _name(report.method),
        "ragkv.prefill": _name(report.prefill),
        "ragkv.engine.generation": _name(report.decode),
        "ragkv.ttft_ms": report.timings_ms.ttft,
        "ragkv.cache.misses": report.cache.misses,
        "ragkv.cache.fallbacks": len(report.cache.fallbacks),
    }
    for part, whole in (("tokens", report.tokens), ("bytes", report.bytes), ("ratios", report.ratios)):
        told |= {f"ragkv.{part}.{name}": value for name, value in vars(whole).items()}
    return told | {f"ragkv.cache.hits.{tier}": count for tier, count in vars(report.cache.hits).items()}


def _of_step(name: str, report: Report | None) -> Attributes:
    """What a step did; one that is there more than once (load) is told by its sum, with the request."""
    if report is None:
        return {}
    told: Attributes = {"ragkv.method": _name(report.method)}
    if name == "retrieve":
        told["ragkv.cache.chunks"] = report.cache.chunks
    elif name == "open":
        told["ragkv.bytes.heads"] = report.bytes.heads
    elif name == "decode":
        told |= {
            "ragkv.tokens.generated": report.tokens.generated,
            "ragkv.model.execution.graph_decode": report.decoding.steps,
        }
    return told


def _name(spec: str) -> str:
    """Without fields: these stand as somebody wrote them."""
    return spec.partition(":")[0]
