"""Exposition: the sums of a tally as Prometheus metrics, and back.

`families` is what /metrics says of all answers, `read` what `ragkv top` makes of it, so a figure in the terminal and
one in Grafana are of the same sums. Counters and histograms, no ratios: whoever shows them divides, over a span of its
choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from ragkv.metrics.sums import BOUNDS, OUTCOMES, STEPS, TIERS, TOKENS, Histogram, MetricSums

NOWHERE = "none"
"""The label `tier` of chunks that no tier had."""
_SOURCES = {"context": "context_kv", "heads": "heads", "loaded": "loaded"}
"""The label `source`, and what it is in Sums."""
_BUCKETS = (*map(floatToGoString, BOUNDS), "+Inf")

Labels = tuple[str, ...]
L = TypeVar("L", bound=Labels)


@dataclass(frozen=True)
class ScrapedMetrics:
    """What /metrics says at one moment. sums: since the start · started: of the process, Unix seconds · running,
    waiting, places: questions that are answered and wait, and how many may · documents, queued: in the catalogue, and
    on their way into it; None where the service does not know yet · wrong: names of the checks that are not all right ·
    model, method: "" where the service does not know yet."""

    sums: MetricSums
    started: float
    running: int
    waiting: int
    places: int
    documents: int | None
    queued: int | None
    wrong: tuple[str, ...]
    model: str
    method: str


def families(sums: MetricSums) -> Iterator[Metric]:
    """All that is said of answers. What has not happened yet is there with 0, so that its rate is right from the first
    time on; but answers by method, of which there may be any."""
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
        {(tier or NOWHERE, "hit" if tier else "miss"): sums.lookups[tier] for tier in (*TIERS, "")},
    )
    yield counter(
        "ragkv_kv_bytes_total",
        "Bytes of KV: of all retrieved chunks (context), and what was read of it: head records, loaded blocks.",
        ("source",),
        {(source,): sums.kv_bytes[name] for source, name in _SOURCES.items()},
    )
    yield from _single(sums)
    steps = HistogramMetricFamily("ragkv_step_seconds", "Seconds of each step of an answer.", labels=("step",))
    for step, spent in sums.seconds.items():
        steps.add_metric((step,), list(zip(_BUCKETS, accumulate(spent.counts), strict=True)), spent.total)
    yield steps


def _single(sums: MetricSums) -> Iterator[Metric]:
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


def counter(name: str, says: str, labels: Sequence[str], values: Mapping[L, float]) -> Metric:
    """A family of counters: their values by the values of their labels."""
    family = CounterMetricFamily(name, says, labels=labels)
    for each, value in values.items():
        family.add_metric(each, value)
    return family


def gauge(name: str, says: str, labels: Sequence[str], values: Mapping[L, float]) -> Metric:
    """The same of gauges."""
    family = GaugeMetricFamily(name, says, labels=labels)
    for each, value in values.items():
        family.add_metric(each, value)
    return family


def read(text: str) -> ScrapedMetrics:
    """Of Prometheus text. Raises ValueError for text that is no such thing, or not that of a ragkv like this one."""
    found = _Samples(text)
    if "ragkv_tokens_total" not in found.samples:
        raise ValueError("no ragkv_tokens_total")
    model, method = next(iter(found.by("ragkv_info", "model", "method")), ("", ""))
    return ScrapedMetrics(
        sums=_sums(found),
        started=found.one("process_start_time_seconds") or 0.0,
        running=int(found.one("ragkv_questions_running") or 0),
        waiting=int(found.one("ragkv_questions_waiting") or 0),
        places=int(found.one("ragkv_queue_places") or 0),
        documents=_whole(found.one("ragkv_documents")),
        queued=_whole(found.one("ragkv_documents_waiting")),
        wrong=tuple(check for (check,), fine in found.by("ragkv_ready", "check").items() if not fine),
        model=model,
        method=method,
    )


class _Samples:
    """samples: all of a text, by name."""

    def __init__(self, text: str):
        self.samples: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.samples.setdefault(sample.name, []).append(sample)

    def by(self, name: str, *labels: str) -> dict[Labels, float]:
        """Values by those of these labels. Raises ValueError when one is not there."""
        found = {}
        for sample in self.samples.get(name, ()):
            if missing := set(labels) - sample.labels.keys():
                raise ValueError(f"{name} has no label {min(missing)}")
            found[tuple(sample.labels[label] for label in labels)] = sample.value
        return found

    def one(self, name: str) -> float | None:
        """The value of what has no labels; None where it is not there."""
        return self.by(name).get(())


def _sums(found: _Samples) -> MetricSums:
    empty = MetricSums()
    answers = found.by("ragkv_answers_total", "method", "prefill", "decode")
    ended = found.by("ragkv_questions_unanswered_total", "outcome")
    tokens, kv_bytes = found.by("ragkv_tokens_total", "kind"), found.by("ragkv_kv_bytes_total", "source")
    lookups = found.by("ragkv_chunk_lookups_total", "tier")
    return MetricSums(
        answers={(method, prefill, decode): int(count) for (method, prefill, decode), count in answers.items()},
        ended={outcome: int(ended.get((outcome,), 0)) for outcome in OUTCOMES},
        tokens={kind: tokens.get((kind,), 0.0) for kind in TOKENS},
        lookups={tier: int(lookups.get((tier or NOWHERE,), 0)) for tier in empty.lookups},
        kv_bytes={name: int(kv_bytes.get((source,), 0)) for source, name in _SOURCES.items()},
        fallbacks=int(found.one("ragkv_fallbacks_total") or 0),
        pulled=int(found.one("ragkv_pulled_blocks_total") or 0),
        full_seconds=found.one("ragkv_full_seconds_total") or 0.0,
        seconds=_seconds(found),
    )


def _seconds(found: _Samples) -> dict[str, Histogram]:
    buckets, totals = found.by("ragkv_step_seconds_bucket", "step", "le"), found.by("ragkv_step_seconds_sum", "step")
    if {le for _, le in buckets} - set(_BUCKETS):
        raise ValueError("ragkv_step_seconds has other buckets")
    seconds = {}
    for step in STEPS:
        up_to = [int(buckets.get((step, le), 0)) for le in _BUCKETS]
        counts = tuple(more - less for less, more in pairwise((0, *up_to)))
        seconds[step] = Histogram(counts, totals.get((step,), 0.0))
    return seconds


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
