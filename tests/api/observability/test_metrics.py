"""/metrics matches the recorded sums, is valid Prometheus text, and holds no text of users."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import settings as runs
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from ragkv.api.app import create_app
from ragkv.api.middleware.access_log import UNMATCHED
from ragkv.api.middleware.keys import make_key
from ragkv.api.observability.metrics import MetricsCollector
from ragkv.api.observability.request_counters import RequestCounters
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.passage_search import PassageSearch
from ragkv.api.runtime.rate_limits import RateLimiter, TenantLimits
from ragkv.catalog import Catalog
from ragkv.metrics.prometheus import parse_metrics
from ragkv.metrics.sums import MetricsRecorder
from ragkv.report import Report, Timings
from ragkv.retrieval import Retrieval, Retriever
from tests.api.conftest import BRIDGE, HARBOUR, Service, serving, settings
from tests.ingest.reader import WordEmbedder
from tests.reports import reports
from tests.retrieval.writer import put

QUESTIONS = ("Who built the harbour of Tarn?", "Who painted the bridge of Mell?", "When was the harbour built?")
METHODS = ("scout", "scout:cap=0.3", "full", "reuse")
KEY, PAIR = make_key("acme")


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, list[Any]]]:
    """A service with a host tier that has answered questions, and the reports of all answers."""
    with serving(settings(tmp_path_factory.mktemp("answered"), host_bytes=2**26)) as running:
        running.post("/v1/documents?wait=true", {"documents": [HARBOUR, BRIDGE]})
        found = []
        for method in METHODS:
            for question in QUESTIONS:
                answer = running.post("/v1/answers", {"question": question, "method": method})
                found.append(answer.json()["report"])
        yield running, found


def scraped(service: Service, accept: str = "") -> httpx.Response:
    response = service.client.get("/metrics", headers={"accept": accept} if accept else {})
    assert response.status_code == 200
    return response


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return all samples by name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(text: str, name: str, **labels: str) -> float:
    (found,) = [number for given, number in samples(text)[name] if given == labels]
    return found


# Sums


def test_the_prometheus_parser_accepts_the_text(answered: tuple[Service, list[Any]]) -> None:
    response = scraped(answered[0])
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families: list[Metric] = list(text_string_to_metric_families(response.text))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation and family.type != "unknown" for family in families)
    lines = [line.rpartition(" ")[0] for line in response.text.splitlines() if not line.startswith("#")]
    assert len(set(lines)) == len(lines), "no series is there twice"


def test_metrics_match_the_sums_of_the_reports(answered: tuple[Service, list[Any]]) -> None:
    service, found = answered
    text = scraped(service).text
    assert parse_metrics(text).sums == service.engine_thread.metrics.sums
    for kind in ("context", "kept", "recomputed", "question", "generated", "prefilled"):
        assert value(text, "ragkv_tokens_total", kind=kind) == sum(report["tokens"][kind] for report in found)
    for source, name in (("context", "context_kv"), ("heads", "heads"), ("loaded", "loaded")):
        assert value(text, "ragkv_kv_bytes_total", source=source) == sum(report["bytes"][name] for report in found)
    for tier in ("gpu", "host", "store"):
        hits = sum(report["cache"]["hits"][tier] for report in found)
        assert value(text, "ragkv_chunk_lookups_total", tier=tier, result="hit") == hits
    misses = sum(report["cache"]["misses"] for report in found)
    assert value(text, "ragkv_chunk_lookups_total", tier="none", result="miss") == misses
    for step in (each.name for each in fields(Timings)):
        spent = [report["timings_ms"][step] / 1000 for report in found]
        assert value(text, "ragkv_step_seconds_count", step=step) == len(found)
        assert value(text, "ragkv_step_seconds_sum", step=step) == pytest.approx(sum(spent), rel=1e-12)
        below = sum(seconds <= 0.1 for seconds in spent)
        assert value(text, "ragkv_step_seconds_bucket", step=step, le="0.1") == below


def test_fields_of_a_method_are_not_in_labels(answered: tuple[Service, list[Any]]) -> None:
    methods = [labels["method"] for labels, _ in samples(scraped(answered[0]).text)["ragkv_answers_total"]]
    assert sorted(methods) == ["full", "reuse", "scout"]


@runs(max_examples=10)
@given(reports())
def test_a_hundred_variants_of_a_method_make_one_label(report: Report) -> None:
    recorder = MetricsRecorder()
    for place in range(100):
        recorder.answered(replace(report, method=f"scout:cap=0.{place + 100}"))
    assert [method for method, *_ in recorder.sums.answers] == ["scout"]


def test_refused_methods_make_no_label(answered: tuple[Service, list[Any]]) -> None:
    service, _ = answered
    before = parse_metrics(scraped(service).text).sums
    for place in range(100):
        refused = service.post("/v1/answers", {"question": QUESTIONS[0], "method": f"made-up-{place}"})
        assert refused.status_code == 422
    text = scraped(service).text
    assert "made-up" not in text
    assert parse_metrics(text).sums.answers == before.answers


# Requests


def test_requests_are_counted_by_the_template_of_their_route(answered: tuple[Service, list[Any]]) -> None:
    service, _ = answered
    before = scraped(service).text
    for path in ("a", "b/c", "d%20e"):
        assert service.client.get(f"/v1/documents/{path}").status_code == 404
    assert service.client.get("/made/up/path").status_code == 404
    assert service.client.put("/v1/answers").status_code == 405
    text = scraped(service).text
    counted = {"route": "/v1/documents/{document_id}", "method": "GET", "status": "404"}
    assert value(text, "ragkv_http_requests_total", **counted) == 3
    assert value(text, "ragkv_http_requests_total", route=UNMATCHED, method="GET", status="404") == 1
    assert value(text, "ragkv_http_requests_total", route="/v1/answers", method="PUT", status="405") == 1
    assert "made/up" not in text
    scrapes = {"route": "/metrics", "method": "GET", "status": "200"}
    assert value(text, "ragkv_http_requests_total", **scrapes) >= ("/metrics" in before) + 1


def test_unknown_http_methods_make_one_label(answered: tuple[Service, list[Any]]) -> None:
    service, _ = answered
    for verb in ("BREW", "WHEN", "PROPFIND"):
        service.client.request(verb, "/v1/answers")
    counted = {"route": "/v1/answers", "method": "OTHER", "status": "405"}
    assert value(scraped(service).text, "ragkv_http_requests_total", **counted) == 3


def test_internal_errors_are_counted(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as service:
        service.app.state.metrics = None  # the route falls over it
        assert service.client.get("/metrics").status_code == 500
        deadline = time.monotonic() + 20
        while service.app.state.requests.counts["/metrics", "GET", "500"] != 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)  # the response may come before it is counted


# State


def test_info_and_gauges_describe_the_service(answered: tuple[Service, list[Any]]) -> None:
    service, _ = answered
    deadline = time.monotonic() + 20
    while not value(text := scraped(service).text, "ragkv_tier_slots", tier="host", state="used"):
        assert time.monotonic() < deadline
        time.sleep(0.1)  # the engine is asked every few seconds
    seen = parse_metrics(text)
    assert (seen.documents, seen.queued, seen.running, seen.waiting, seen.wrong) == (2, 0, 0, 0, ())
    assert (seen.model, seen.method, seen.queue_places) == ("tiny", "scout", service.engine_thread.health()["queue"])
    assert {labels["check"] for labels, _ in samples(text)["ragkv_ready"]} == set(
        service.client.get("/readyz").json()["checks"]
    )
    assert value(text, "process_resident_memory_bytes") > 2**20


def test_documents_are_counted_as_soon_as_the_queue_is_ingested(tmp_path: Path) -> None:
    with serving(settings(tmp_path)) as service:
        service.post("/v1/documents?wait=true", {"documents": [HARBOUR, BRIDGE]})
        deadline = time.monotonic() + 2
        while parse_metrics(scraped(service).text).documents != 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_unknown_values_are_left_out(tmp_path: Path) -> None:
    text, _ = MetricsCollector(
        EngineThread(settings(tmp_path)), RequestCounters(), RateLimiter(TenantLimits(), {})
    ).render("")
    assert b"ragkv_documents" not in text
    assert b"ragkv_info" not in text
    assert b'ragkv_ready{check="engine"} 0.0' in text
    assert parse_metrics(text.decode()).model == ""


def test_two_applications_of_a_process_share_no_metrics(tmp_path: Path) -> None:
    first, second = (create_app(settings(tmp_path / name)) for name in "ab")
    first.state.engine_thread.metrics.ended("failed")
    other, _ = second.state.metrics.render("")
    assert parse_metrics(other.decode()).sums.ended["failed"] == 0


def test_openmetrics_is_sent_if_the_client_accepts_it(answered: tuple[Service, list[Any]]) -> None:
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
    response = scraped(answered[0], accept)
    assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in open_families(response.text)}
    assert {"ragkv_tokens", "ragkv_step_seconds", "ragkv_ready"} <= names
    assert scraped(answered[0], "application/openmetrics-text; version=1.x").status_code == 200


def test_with_keys_a_request_needs_one(tmp_path: Path) -> None:
    with serving(settings(tmp_path, api_keys=PAIR)) as locked:
        refused = locked.client.get("/metrics")
        assert (refused.status_code, refused.json()["code"]) == (401, "no_api_key")
        assert "ragkv_tokens_total" not in refused.text
        allowed = locked.client.get("/metrics", headers={"authorization": f"Bearer {KEY}"})
        assert allowed.status_code == 200
        assert value(allowed.text, "ragkv_http_requests_total", route=UNMATCHED, method="GET", status="401") == 1
        assert KEY not in allowed.text


def test_a_scrape_takes_less_than_five_milliseconds(answered: tuple[Service, list[Any]]) -> None:
    """On a machine where sorting ten thousand numbers as texts takes half as long. Other work slows both down."""
    collector: MetricsCollector = answered[0].app.state.metrics
    taken, compared = list[float](), list[float]()
    for _ in range(20):
        started = time.thread_time()
        collector.render("")
        between = time.thread_time()
        sorted(str(7919 * number % 10007) for number in range(10_000))
        taken.append(between - started)
        compared.append(time.thread_time() - between)
    assert min(taken) < 2 * min(compared)


def test_a_replica_tells_how_far_its_search_views_are_behind(tmp_path: Path) -> None:
    catalog = Catalog.open(tmp_path / "catalog.sqlite")
    thread = EngineThread(settings(tmp_path))
    collector = MetricsCollector(thread, RequestCounters(), RateLimiter(TenantLimits(), {}))
    retriever = Retriever(catalog, WordEmbedder(), tmp_path / "index", Retrieval(staleness=1.0, own_words=True))
    thread.passage_search = PassageSearch(retriever, 4)
    assert b"ragkv_view" not in collector.render("")[0], "nothing follows the catalogue"
    retriever.views.start_follower()
    put(catalog, "a", "boat")
    retriever.search("boat")
    put(catalog, "b", "boat")
    end = time.monotonic() + 20
    text = collector.render("")[0].decode()
    while value(text, "ragkv_views_behind") or not value(text, "ragkv_view_refreshes_total"):
        assert time.monotonic() < end
        time.sleep(0.02)
        text = collector.render("")[0].decode()
    assert retriever.views.words.generations() == {"default": catalog.generation("default")}
    assert 0 <= value(text, "ragkv_view_age_seconds") < 20
    retriever.close()
    catalog.close()
