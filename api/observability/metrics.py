"""Metrics: what /metrics says, a view of sums and figures that are kept elsewhere.

Answers are those of the tally (ragkv/metrics/prometheus.py), requests are counted at the door (requests.py), and what the
engine says of itself is as of its last free moment: a scrape waits for nothing and looks into no table. What is not
known yet is left out. No label holds what a user wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from api.observability.readiness import checks
from api.observability.request_counters import RequestCounters
from api.runtime.engine_thread import EngineThread
from ragkv import __version__
from ragkv.metrics.prometheus import counter, families, gauge

OPENMETRICS = "application/openmetrics-text"


class MetricsCollector(Collector):
    """Of one application, in a registry of its own."""

    def __init__(self, worker: EngineThread, requests: RequestCounters):
        self._worker, self._requests = worker, requests
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def written(self, accept: str) -> tuple[bytes, str]:
        """(all of them, their media type): OpenMetrics where `accept`, the header, names it, else Prometheus text."""
        encode, media_type = choose_encoder(f"{OPENMETRICS}; version=1.0.0" if OPENMETRICS in accept else "")
        return encode(self._registry), media_type

    def collect(self) -> Iterator[Metric]:
        """Family by family."""
        health = self._worker.health()
        yield from families(self._worker.metrics.sums)
        yield from _questions(health)
        yield counter(
            "ragkv_http_requests_total",
            "Requests by route, its template, and status.",
            ("route", "method", "status"),
            dict(self._requests.counts),
        )
        found = checks(health, self._worker.stopping)
        yield gauge(
            "ragkv_ready",
            "1 where a check of /readyz is ok. Without engine, catalogue and index no questions are answered.",
            ("check",),
            {(name,): float(check["status"] == "ok") for name, check in found.items()},
        )
        if "model" in health:
            about = (__version__, health["model"], health["method"].partition(":")[0])
            yield gauge("ragkv_info", "What runs here.", ("version", "model", "method"), {about: 1})
            yield from _holdings(health)
            yield from _tiers(health["tiers"])


def _questions(health: dict[str, Any]) -> Iterator[Metric]:
    yield gauge("ragkv_questions_running", "Questions being answered.", (), {(): health["running"]})
    yield gauge("ragkv_questions_waiting", "Requests that wait for the engine.", (), {(): health["waiting"]})
    yield gauge("ragkv_queue_places", "How many may.", (), {(): health["queue"]})


def _holdings(health: dict[str, Any]) -> Iterator[Metric]:
    yield gauge("ragkv_documents", "Documents in the catalogue.", (), {(): health["documents"]})
    yield gauge("ragkv_documents_waiting", "Documents that wait to be read.", (), {(): health["documents_waiting"]})
    jobs = {(status,): health[f"jobs_{status}"] for status in ("queued", "running")}
    yield gauge("ragkv_jobs", "Ingest jobs that are not done, by status.", ("status",), jobs)
    yield counter(
        "ragkv_store_faults_total",
        "Writes and deletions that the KV store refused.",
        (),
        {(): health["store_faults"]},
    )
    yield counter("ragkv_quarantined_total", "Stored entries found damaged.", (), {(): health["quarantined"]})


def _tiers(tiers: dict[str, dict[str, int]]) -> Iterator[Metric]:
    yield gauge(
        "ragkv_tier_slots",
        "Places for blocks of KV in memory, by tier.",
        ("tier", "state"),
        {
            (name, state): count
            for name, pool in tiers.items()
            for state, count in (("used", pool["used"]), ("free", pool["slots"] - pool["used"]))
        },
    )
    sizes = {(name,): pool["size"] for name, pool in tiers.items()}
    yield gauge("ragkv_tier_slot_bytes", "Bytes of such a place.", ("tier",), sizes)
    evicted = {(name,): pool["evicted"] for name, pool in tiers.items()}
    yield counter("ragkv_tier_evicted_total", "Blocks that made room for others.", ("tier",), evicted)
