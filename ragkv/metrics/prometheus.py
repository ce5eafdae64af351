"""Converts sums to Prometheus metrics and back.

`families` produces the metrics that /metrics exposes for answers. `parse_metrics` parses them for `ragkv top`, so the
terminal and Grafana show the same sums. There are only counters and histograms, no ratios: a viewer computes ratios
over the time span that it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from ragkv.metrics.sums import BOUNDS, DRAFTS, OUTCOMES, STEPS, TIERS, TOKENS, Histogram, MetricSums
from ragkv.types import HourPrice

NO_TIER = "none"
"""Value of the label `tier` for chunks that no tier held."""
_SOURCES = {"context": "context_kv", "heads": "heads", "loaded": "loaded"}
"""Values of the label `source`, and their keys in `MetricSums.kv_bytes`."""
_BUCKETS = (*map(floatToGoString, BOUNDS), "+Inf")

Labels = tuple[str, ...]
L = TypeVar("L", bound=Labels)


@dataclass(frozen=True)
class ScrapedMetrics:
    """The contents of /metrics at one moment.

    Attributes:
        sums: Sums since the start of the service.
        started: When the process started, in Unix seconds.
        running: Questions that are being answered.
        waiting: Requests that wait for the engine.
        queue_places: Capacity of the queue.
        documents: Documents in the catalogue; None while the service does not know.
        queued: Documents that wait to be ingested; None while the service does not know.
        wrong: Names of the readiness checks that fail.
        model: Name of the model; "" while the service does not know.
        method: The default method; "" while the service does not know.
        price: Of an hour of the machine; None if nobody has told it.
    """

    sums: MetricSums
    started: float
    running: int
    waiting: int
    queue_places: int
    documents: int | None
    queued: int | None
    wrong: tuple[str, ...]
    model: str
    method: str
    price: HourPrice | None = None


def families(sums: MetricSums) -> Iterator[Metric]:
    """Yield all metrics of answers.

    Series start at 0 before their first event, so that rates are right from the first event on. The exception is
    `ragkv_answers_total`, because the methods are not known in advance.
    """
    yield counter(
        "ragkv_answers_total",
        "Questions answered.",
        ("method", "prefill", "decode"),
        sums.answers,
    )
    yield counter(
        "ragkv_questions_unanswered_total",
        "Questions that ended without an answer, by how.",
        ("outcome",),
        {(outcome,): sums.ended[outcome] for outcome in OUTCOMES},
    )
    yield counter(
        "ragkv_tokens_total",
        "Tokens of the reports; kept, recomputed and prefilled are means over layers.",
        ("kind",),
        {(kind,): sums.tokens[kind] for kind in TOKENS},
    )
    yield counter(
        "ragkv_chunk_lookups_total",
        "Chunks whose stored KV was looked up, by the tier that had it.",
        ("tier", "result"),
        {(tier or NO_TIER, "hit" if tier else "miss"): sums.lookups[tier] for tier in (*TIERS, "")},
    )
    yield counter(
        "ragkv_kv_bytes_total",
        "Bytes of KV: of all retrieved chunks (context), and what was read of it: head records, loaded blocks.",
        ("source",),
        {(source,): sums.kv_bytes[name] for source, name in _SOURCES.items()},
    )
    yield counter(
        "ragkv_draft_tokens_total",
        "Tokens that speculation drafted, and those of them that became tokens of answers.",
        ("kind",),
        {(kind,): sums.drafts[kind] for kind in DRAFTS},
    )
    yield from _unlabelled(sums)
    steps = HistogramMetricFamily("ragkv_step_seconds", "Seconds of each step of an answer.", labels=("step",))
    for step, histogram in sums.seconds.items():
        steps.add_metric((step,), list(zip(_BUCKETS, accumulate(histogram.counts), strict=True)), histogram.total)
    yield steps


def _unlabelled(sums: MetricSums) -> Iterator[Metric]:
    yield counter(
        "ragkv_fallbacks_total",
        "Chunks encoded again because their stored KV could not be used.",
        (),
        {(): sums.fallbacks},
    )
    yield counter(
        "ragkv_pulled_blocks_total", "Blocks that decoding brought back from the store.", (), {(): sums.pulled}
    )
    yield counter(
        "ragkv_full_seconds_total",
        "Estimated seconds to the first token, had everything been prefilled.",
        (),
        {(): sums.full_seconds},
    )
    yield counter(
        "ragkv_compared_seconds_total",
        "Seconds to the first token of the answers for which ragkv_full_seconds_total was estimated.",
        (),
        {(): sums.compared_seconds},
    )


def counter(name: str, documentation: str, labels: Sequence[str], values: Mapping[L, float]) -> Metric:
    """Return a counter family. values: value of each counter, by its label values."""
    family = CounterMetricFamily(name, documentation, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def gauge(name: str, documentation: str, labels: Sequence[str], values: Mapping[L, float]) -> Metric:
    """Return a gauge family. values: value of each gauge, by its label values."""
    family = GaugeMetricFamily(name, documentation, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def parse_metrics(text: str) -> ScrapedMetrics:
    """Parse the Prometheus text of /metrics.

    Raises:
        ValueError: The text is not in the Prometheus format, or not from a compatible ragkv service.
    """
    samples = _Samples(text)
    if "ragkv_tokens_total" not in samples.by_name:
        raise ValueError("no ragkv_tokens_total")
    prices = samples.by_labels("ragkv_hour_price", "currency", of=max)
    model, method = next(iter(samples.by_labels("ragkv_info", "model", "method")), ("", ""))
    return ScrapedMetrics(
        sums=_sums(samples),
        started=samples.value("process_start_time_seconds", min) or 0.0,
        running=int(samples.value("ragkv_questions_running") or 0),
        waiting=int(samples.value("ragkv_questions_waiting") or 0),
        queue_places=int(samples.value("ragkv_queue_places") or 0),
        documents=_int_or_none(samples.value("ragkv_documents")),
        queued=_int_or_none(samples.value("ragkv_documents_waiting")),
        wrong=tuple(check for (check,), ok in samples.by_labels("ragkv_ready", "check", of=min).items() if not ok),
        model=model,
        method=method,
        price=next((HourPrice(amount, name) for (name,), amount in prices.items() if amount), None),
    )


class _Samples:
    """All samples of a Prometheus text, by name."""

    def __init__(self, text: str):
        self.by_name: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.by_name.setdefault(sample.name, []).append(sample)

    def by_labels(self, name: str, *labels: str, of: Callable[[Iterable[float]], float] = sum) -> dict[Labels, float]:
        """Return the values of a metric by the values of these labels. Raises ValueError if a label is missing.

        of: what to make of the values of several replicas.
        """
        values: dict[Labels, list[float]] = {}
        for sample in self.by_name.get(name, ()):
            if missing := set(labels) - sample.labels.keys():
                raise ValueError(f"{name} has no label {min(missing)}")
            values.setdefault(tuple(sample.labels[label] for label in labels), []).append(sample.value)
        return {key: of(found) for key, found in values.items()}

    def value(self, name: str, of: Callable[[Iterable[float]], float] = sum) -> float | None:
        """Return the value of a metric without labels, or None if it is missing. of: as for `by_labels`."""
        return self.by_labels(name, of=of).get(())


def _sums(samples: _Samples) -> MetricSums:
    empty = MetricSums()
    answers = samples.by_labels("ragkv_answers_total", "method", "prefill", "decode")
    ended = samples.by_labels("ragkv_questions_unanswered_total", "outcome")
    tokens, kv_bytes = (
        samples.by_labels("ragkv_tokens_total", "kind"),
        samples.by_labels("ragkv_kv_bytes_total", "source"),
    )
    lookups = samples.by_labels("ragkv_chunk_lookups_total", "tier")
    drafts = samples.by_labels("ragkv_draft_tokens_total", "kind")
    return MetricSums(
        answers={(method, prefill, decode): int(count) for (method, prefill, decode), count in answers.items()},
        ended={outcome: int(ended.get((outcome,), 0)) for outcome in OUTCOMES},
        tokens={kind: tokens.get((kind,), 0.0) for kind in TOKENS},
        lookups={tier: int(lookups.get((tier or NO_TIER,), 0)) for tier in empty.lookups},
        kv_bytes={name: int(kv_bytes.get((source,), 0)) for source, name in _SOURCES.items()},
        fallbacks=int(samples.value("ragkv_fallbacks_total") or 0),
        pulled=int(samples.value("ragkv_pulled_blocks_total") or 0),
        drafts={kind: int(drafts.get((kind,), 0)) for kind in DRAFTS},
        full_seconds=samples.value("ragkv_full_seconds_total") or 0.0,
        compared_seconds=samples.value("ragkv_compared_seconds_total") or 0.0,
        seconds=_seconds(samples),
    )


def _seconds(samples: _Samples) -> dict[str, Histogram]:
    buckets, totals = (
        samples.by_labels("ragkv_step_seconds_bucket", "step", "le"),
        samples.by_labels("ragkv_step_seconds_sum", "step"),
    )
    if {le for _, le in buckets} - set(_BUCKETS):
        raise ValueError("ragkv_step_seconds has other buckets")
    seconds = {}
    for step in STEPS:
        cumulative = [int(buckets.get((step, le), 0)) for le in _BUCKETS]
        counts = tuple(more - less for less, more in pairwise((0, *cumulative)))
        seconds[step] = Histogram(counts, totals.get((step,), 0.0))
    return seconds


def _int_or_none(value: float | None) -> int | None:
    return None if value is None else int(value)
