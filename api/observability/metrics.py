"""Metrics of /metrics: a view of sums and gauges that are kept elsewhere.

Sums over answers come from ragkv/metrics/sums.py, request counts from request_counters.py. The state of the engine is
the one of its last idle moment, so a scrape waits for nothing and queries no table. Values that are not known yet are
left out. No label holds text of users. A tenant sees what it used itself; operators see all tenants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ragkv import __version__
from ragkv.api.observability.readiness import readiness_checks
from ragkv.api.observability.request_counters import RequestCounters
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.rate_limits import RateLimiter
from ragkv.api.runtime.text_service import WORKS
from ragkv.metrics.prometheus import counter, families, gauge
from ragkv.types import HourPrice

OPENMETRICS = "application/openmetrics-text"
SHARED = frozenset(
    {"ragkv_documents", "ragkv_documents_waiting", "ragkv_hour_price", "ragkv_jobs", "ragkv_reembedding_left"}
)
"""Metrics of the catalogue, which all replicas share."""


class MetricsCollector(Collector):
    """Collects the metrics of one application, in its own registry."""

    def __init__(self, engine_thread: EngineThread, requests: RequestCounters, limiter: RateLimiter):
        self._engine_thread, self._requests, self._limiter = engine_thread, requests, limiter
        self._process = ProcessCollector(registry=None)

    def render(
        self, accept: str, tenant: str | None = None, replicas: Mapping[str, Sequence[Metric]] | None = None
    ) -> tuple[bytes, str]:
        """Return the metrics and their media type.

        Args:
            accept: The `Accept` header. OpenMetrics is used if the header names it, else Prometheus text.
            tenant: Show what this tenant used and nothing of the others; None shows all tenants.
            replicas: Metrics of several replicas by their names, to render in place of those of this process.
        """
        encode, media_type = choose_encoder(f"{OPENMETRICS}; version=1.0.0" if OPENMETRICS in accept else "")
        registry = CollectorRegistry()
        if replicas:
            registry.register(_ReplicaCollector(replicas, tenant))
            return encode(registry), media_type
        for collector in (self, self._process, _TenantCollector(self._limiter, tenant)):
            registry.register(collector)
        return encode(registry), media_type

    def families(self, shared: bool = True) -> list[Metric]:
        """Return all metrics of this process, those of every tenant included.

        Args:
            shared: Whether to include what all replicas tell alike, because it is of the catalogue.
        """
        collectors = (self, self._process, _TenantCollector(self._limiter, None))
        found = [family for collector in collectors for family in collector.collect()]
        return [family for family in found if shared or family.name not in SHARED]

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        health = self._engine_thread.health()
        yield from families(self._engine_thread.metrics.sums)
        yield from _questions(health)
        yield counter(
            "ragkv_http_requests_total",
            "Requests by route, its template, and status.",
            ("route", "method", "status"),
            dict(self._requests.counts),
        )
        yield from _texts(self._engine_thread)
        yield from _views(self._engine_thread)
        checks = readiness_checks(health, self._engine_thread.stopping)
        yield gauge(
            "ragkv_ready",
            "1 if a check of /readyz is ok. Without engine and catalogue no questions are answered.",
            ("check",),
            {(name,): float(check["status"] == "ok") for name, check in checks.items()},
        )
        if "model" in health:
            labels = (__version__, health["model"], health["method"].partition(":")[0])
            yield gauge(
                "ragkv_info", "Version, model and method of this service.", ("version", "model", "method"), {labels: 1}
            )
            yield from _catalog(health)
            price = HourPrice.read(health["price"]) or HourPrice(0.0)
            yield gauge(
                "ragkv_hour_price",
                "What an hour of this machine costs, as the overview was told; 0 if it was not.",
                ("currency",),
                {(price.currency,): price.amount},
            )
            yield from _tiers(health["tiers"])
            if health["pool"] is not None:
                yield from _pool(health["pool"])


class _ReplicaCollector(Collector):
    """Collects the metrics of replicas, with the label `replica`. tenant: as for `MetricsCollector.render`."""

    def __init__(self, replicas: Mapping[str, Sequence[Metric]], tenant: str | None):
        self._replicas, self._tenant = replicas, tenant

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families, each with the samples of all replicas."""
        merged: dict[str, Metric] = {}
        for replica, metrics in self._replicas.items():
            for family in metrics:
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                into.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica})
                    for sample in family.samples
                    if self._tenant is None or sample.labels.get("tenant", self._tenant) == self._tenant
                ]
        yield from merged.values()


class _TenantCollector(Collector):
    """Collects what tenants used: of one, or of all (None). Without tenants there is nothing to tell apart."""

    def __init__(self, limiter: RateLimiter, tenant: str | None):
        self._limiter, self._tenant = limiter, tenant

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        shown = {
            name: usage
            for name, usage in self._limiter.usage().items()
            if name and (self._tenant is None or name == self._tenant)
        }
        used = {(name, what): count for name, usage in shown.items() for what, count in usage.used.items()}
        refused = {(name, what): count for name, usage in shown.items() for what, count in usage.refused.items()}
        labels = ("tenant", "resource")
        yield counter("ragkv_tenant_usage_total", "Requests, tokens and document bytes, by tenant.", labels, used)
        yield counter("ragkv_tenant_refused_total", "Requests that a limit of a tenant refused.", labels, refused)


def _questions(health: dict[str, Any]) -> Iterator[Metric]:
    yield gauge("ragkv_questions_running", "Questions being answered.", (), {(): health["running"]})
    yield gauge("ragkv_questions_waiting", "Requests that wait for the engine.", (), {(): health["waiting"]})
    replaced = "Times that the engine ended unexpectedly and was replaced."
    yield counter("ragkv_engine_replaced_total", replaced, (), {(): health["replaced"]})
    yield gauge("ragkv_queue_places", "Requests that may wait for the engine.", (), {(): health["queue"]})


def _texts(engine_thread: EngineThread) -> Iterator[Metric]:
    """Yield what requests had embedded and ranked; nothing before the engine is open."""
    service = getattr(engine_thread, "text_service", None)
    if service is None:
        return
    for name, what, counts in (
        ("ragkv_texts_total", "Texts that requests had embedded or ranked.", service.texts),
        ("ragkv_text_tokens_total", "Tokens of these texts.", service.tokens),
    ):
        yield counter(name, what, ("work",), {(work,): counts[work] for work in WORKS})


def _views(engine_thread: EngineThread) -> Iterator[Metric]:
    """Yield how far the search views are behind the catalogue; nothing where they cannot be."""
    service = getattr(engine_thread, "passage_search", None)
    status = service.view_status() if service is not None else None
    if status is None:
        return
    what = "Seconds since the search view that is furthest behind was known to be up to date."
    yield gauge("ragkv_view_age_seconds", what, (), {(): status.age})
    what = "Collections whose search views lack changes that the catalogue has."
    yield gauge("ragkv_views_behind", what, (), {(): status.behind})
    what = "Updates of the search views of a collection in the background."
    yield counter("ragkv_view_refreshes_total", what, (), {(): status.refreshed})


def _catalog(health: dict[str, Any]) -> Iterator[Metric]:
    yield gauge("ragkv_documents", "Documents in the catalogue.", (), {(): health["documents"]})
    yield gauge("ragkv_documents_waiting", "Documents that wait to be ingested.", (), {(): health["documents_waiting"]})
    change = health["reembedding"]
    left = change["total"] - change["done"] if change else 0
    yield gauge("ragkv_reembedding_left", "Chunks that the present embedder has not embedded yet.", (), {(): left})
    jobs = {(status,): health[f"jobs_{status}"] for status in ("queued", "running")}
    yield gauge("ragkv_jobs", "Ingest jobs that are not done, by status.", ("status",), jobs)
    yield counter(
        "ragkv_store_faults_total",
        "Writes and deletions that the KV store refused.",
        (),
        {(): health["store_faults"]},
    )
    flights = {(result,): count for result, count in health["flights"].items()}
    about = "Chunks that the KV store did not have, by how they were obtained: encoded under a lease (led), read after "
    about += "another process had encoded them (joined), encoded after a wait (expired) or without a lease (alone)."
    yield counter("ragkv_chunk_flights_total", about, ("result",), flights)
    yield counter("ragkv_quarantined_total", "Stored entries found damaged.", (), {(): health["quarantined"]})


def _tiers(tiers: dict[str, dict[str, int]]) -> Iterator[Metric]:
    yield gauge(
        "ragkv_tier_slots",
        "Slots for KV blocks in memory, by tier.",
        ("tier", "state"),
        {
            (name, state): count
            for name, pool in tiers.items()
            for state, count in (("used", pool["used"]), ("free", pool["slots"] - pool["used"]))
        },
    )
    sizes = {(name,): pool["size"] for name, pool in tiers.items()}
    yield gauge("ragkv_tier_slot_bytes", "Bytes of one slot.", ("tier",), sizes)
    evicted = {(name,): pool["evicted"] for name, pool in tiers.items()}
    yield counter("ragkv_tier_evicted_total", "Blocks evicted to make room for others.", ("tier",), evicted)


def _pool(pool: dict[str, int]) -> Iterator[Metric]:
    states = {("used",): pool["used"], ("free",): pool["slots"] - pool["used"]}
    yield gauge("ragkv_pool_slots", "Slots of the pool for decoding, by state.", ("state",), states)
    yield gauge("ragkv_pool_slot_bytes", "Bytes of one slot.", (), {(): pool["size"]})
    reads = {("hit",): pool["hits"], ("miss",): pool["read"] - pool["hits"]}
    yield counter(
        "ragkv_pool_reads_total", "Blocks that decoding read, by whether they had a slot.", ("result",), reads
    )
    yield counter("ragkv_pool_loaded_total", "Blocks copied from host memory.", (), {(): pool["loaded"]})
    yield counter("ragkv_pool_evicted_total", "Blocks evicted to make room for others.", (), {(): pool["evicted"]})
