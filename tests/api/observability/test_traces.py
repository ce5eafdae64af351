"""Traces: one span per request, one per step inside it, and no delay by a slow collector."""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from ragkv.api.middleware.access_log import ServedRequest
from ragkv.api.observability.traces import RateLimitedLogExporter, Tracing
from ragkv.api.runtime.request_context import RequestContext
from ragkv.timing import StepTimer
from tests.api.conftest import BRIDGE, HARBOUR, Service, serving, settings
from tests.api.streams import streamed
from tests.forked import run_forked
from tests.redis_server import free_port

MARK = "zwetschge"
QUESTION = {"question": "Who built the harbour of Tarn?", "method": "samkv-fusion"}
STEPS = {"retrieve", "open", "plan", "load", "repair", "prefill", "decode"}


@dataclass(frozen=True)
class Traced:
    """A service and its exported spans."""

    service: Service
    exporter: InMemorySpanExporter

    def spans(self, count: int = 1) -> tuple[ReadableSpan, dict[str, list[ReadableSpan]]]:
        """Wait for the latest request; return its span and the spans of its steps by name. Clears the exporter."""
        until = time.monotonic() + 10
        while time.monotonic() < until:
            found = self.exporter.get_finished_spans()
            requests = [span for span in found if span.kind is SpanKind.SERVER]
            if len(requests) == count:
                break
            time.sleep(0.01)
        self.exporter.clear()
        steps = defaultdict(list)
        for span in found:
            if span.kind is SpanKind.INTERNAL:
                steps[span.name].append(span)
        return requests[-1], steps


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    with serving(settings(tmp_path_factory.mktemp("traces")), tracing) as service:
        service.post(
            "/v1/documents?wait=true", {"documents": [HARBOUR, {**BRIDGE, "text": f"{BRIDGE['text']} {MARK}"}]}
        )
        yield Traced(service, exporter)


@pytest.fixture
def traced(running: Traced) -> Traced:
    """The service with no spans of other tests."""
    time.sleep(0.05)
    running.exporter.clear()
    return running


def test_an_answer_is_a_span_with_its_steps_inside(traced: Traced) -> None:
    before = time.time_ns()
    answer = traced.service.post("/v1/answers", QUESTION)
    request, steps = traced.spans()
    assert (request.name, request.kind, request.parent) == ("POST /v1/answers", SpanKind.SERVER, None)
    assert set(steps) == STEPS
    everything = [span for same in steps.values() for span in same]
    assert {span.parent.span_id for span in everything} == {request.context.span_id}
    assert {span.context.trace_id for span in everything} == {request.context.trace_id}
    assert all(request.start_time <= s.start_time <= s.end_time <= request.end_time for s in everything)
    assert before <= request.start_time
    assert request.end_time <= time.time_ns() + 10**6
    assert answer.headers["x-request-id"] == request.attributes["ragkv.request_id"]


def test_span_durations_match_the_report(traced: Traced) -> None:
    timings = traced.service.post("/v1/answers", QUESTION).json()["report"]["timings_ms"]
    _, steps = traced.spans()
    assert len(steps["load"]) > 1
    assert timings["decode"] > 1
    for name, spans in steps.items():
        assert sum(s.end_time - s.start_time for s in spans) / 1e6 == pytest.approx(timings[name], abs=1), name


def test_span_attributes_match_the_report(traced: Traced) -> None:
    report = traced.service.post("/v1/answers", QUESTION).json()["report"]
    request, steps = traced.spans()
    attributes = request.attributes
    assert (attributes["http.request.method"], attributes["http.route"]) == ("POST", "/v1/answers")
    assert (attributes["http.response.status_code"], attributes["ragkv.method"]) == (200, "samkv-fusion")
    for part in ("tokens", "bytes", "ratios"):
        assert {name: attributes[f"ragkv.{part}.{name}"] for name in report[part]} == report[part]
    (decode,) = steps["decode"]
    assert decode.attributes["ragkv.tokens.generated"] == report["tokens"]["generated"]


def test_a_stream_is_traced_to_its_end(traced: Traced) -> None:
    with streamed(traced.service, **QUESTION) as (_, events):
        assert list(events)[-1][0] == "done"
    request, steps = traced.spans()
    assert set(steps) == STEPS
    assert request.end_time >= steps["decode"][0].end_time


def test_a_trace_context_of_the_client_is_continued(traced: Traced) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    traced.service.post("/v1/answers", QUESTION, headers={"traceparent": f"00-{trace}-{parent}-01"})
    request, steps = traced.spans()
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (trace, parent)
    assert {span.context.trace_id for same in steps.values() for span in same} == {request.context.trace_id}
    for unusable in ("00-zz-1-01", MARK, ""):
        traced.service.post("/v1/answers", QUESTION, headers={"traceparent": unusable})
        assert traced.spans()[0].parent is None


def test_a_request_marked_as_not_sampled_is_not_traced(traced: Traced) -> None:
    headers = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"}
    traced.service.post("/v1/answers", QUESTION, headers=headers)
    traced.service.client.get("/v1/models")
    request, steps = traced.spans()
    assert request.name == "GET /v1/models"
    assert not steps


def test_no_text_of_a_user_is_in_a_span(traced: Traced) -> None:
    method = "scout:cap=0.3"
    traced.service.post("/v1/answers", {"question": f"Who is {MARK}?", "method": method, "conversation_id": MARK})
    traced.service.client.get(f"/v1/documents/{MARK}?collection={MARK}")
    traced.service.client.get(f"/{MARK}", headers={"traceparent": MARK, "tracestate": f"a={MARK}"})
    traced.service.client.request(MARK.upper(), "/v1/answers")
    traced.service.post("/v1/answers", {"question": MARK, "method": MARK})
    deadline = time.monotonic() + 10
    while len(found := traced.exporter.get_finished_spans()) < 5 + len(STEPS) - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {"GET", "GET /v1/documents/{document_id}"} <= {span.name for span in found}
    text = "".join(span.to_json() for span in found)
    assert MARK not in text.lower()
    assert "cap=" not in text


def test_a_failed_request_is_an_error_span_with_its_finished_steps(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError(MARK)

    engine = traced.service.engine_thread.submit(lambda engine: engine).result(30)
    monkeypatch.setattr(engine, "finalize", broken)
    assert httpx.post(f"{traced.service.url}/v1/answers", json=QUESTION).status_code == 500
    request, steps = traced.spans()
    assert (request.status.status_code, request.attributes["error.type"]) == (StatusCode.ERROR, "internal")
    assert STEPS - {"decode"} == set(steps)


def test_health_checks_are_not_traced(traced: Traced) -> None:
    for path in ("/healthz", "/readyz", "/v1/models"):
        traced.service.client.get(path)
    assert traced.spans()[0].name == "GET /v1/models"


def answered() -> ServedRequest:
    """Build a served request with one step."""
    timer, began = StepTimer(), time.perf_counter()
    with timer.step("retrieve"):
        pass
    return ServedRequest(
        RequestContext("id", timer=timer), "POST", "/v1/answers", 200, began, time.perf_counter(), time.time_ns(), {}
    )


def test_a_missing_collector_delays_no_request_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    away = OTLPSpanExporter(f"http://127.0.0.1:{free_port()}/v1/traces", timeout=0.2)
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # as open_tracing does
    tracing = Tracing(
        BatchSpanProcessor(
            RateLimitedLogExporter(away), max_queue_size=64, schedule_delay_millis=20, max_export_batch_size=8
        )
    )
    times = [time.perf_counter()]
    for _ in range(500):
        tracing.record(answered())
        times.append(time.perf_counter())
    typical = median(after - before for before, after in pairwise(times))
    time.sleep(0.6)
    began = time.perf_counter()
    tracing.close(0.5)
    assert time.perf_counter() - began < 5
    assert typical < 0.005
    lines = [record.getMessage() for record in caplog.records]  # the service of another test may still log its end
    (line,) = [line for line in lines if "spans could not be sent" in line]
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in line


WITHOUT = """
import sys
from importlib.machinery import PathFinder
from pathlib import Path

class Missing(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in ("opentelemetry.sdk", "opentelemetry.exporter"):
            return None
        return super().find_spec(name, path, target)

from ragkv.api.app import create_app
from ragkv.cli.common import fail
from ragkv.config import load_settings
from ragkv.errors import ConfigError

create_app(load_settings(dashboard=False))  # NiceGUI creates a FastAPI application, which searches for the SDK
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
sys.meta_path[:] = [Missing if finder is PathFinder else finder for finder in sys.meta_path]
try:
    create_app(load_settings(traces=True, dashboard=False))
except ConfigError as error:
    print(error)
"""


def test_otel_is_imported_only_for_traces_and_a_missing_extra_is_named(root: Any) -> None:
    done = run_forked(["-c", WITHOUT], root, os.environ, timeout=100)
    assert done.returncode == 0, done.stderr
    imported, message = done.stdout.splitlines()
    assert imported == "[]"
    assert "pip install 'opentelemetry-sdk" in message
