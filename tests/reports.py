"""Generated reports of answers, for tests of the metrics."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ragkv.metrics.sums import STEPS, MetricsRecorder
from ragkv.report import (
    ByteCounts,
    CacheReport,
    DecodeReport,
    Fallback,
    PrefillReport,
    Ratios,
    Report,
    SpeculationReport,
    TierHits,
    Timings,
    TokenCounts,
)

COUNTS = st.integers(0, 10_000)


@st.composite
def reports(draw: Any) -> Report:
    """A consistent report: the counts of kept, recomputed and loaded data do not exceed the totals."""
    context = draw(st.integers(1, 10_000))
    kept, recomputed = (draw(st.integers(0, context * 8)) / 8 for _ in range(2))
    hits, misses = TierHits(draw(COUNTS), draw(COUNTS), draw(COUNTS)), draw(COUNTS)
    chunks = hits.gpu + hits.host + hits.store + misses
    size, heads, loaded = context * 1024, draw(COUNTS), draw(COUNTS)
    drafts = draw(st.none() | st.builds(SpeculationReport, COUNTS, COUNTS, COUNTS, st.just("")))
    return Report(
        method=draw(st.sampled_from(["full", "scout", "scout:cap=0.2,heads=all"])),
        prefill="dense",
        decode=draw(st.sampled_from(["dense", "psa:least=0"])),
        model="tiny",
        tokens=TokenCounts(context, kept, recomputed, draw(COUNTS), draw(COUNTS), 0.0, draw(COUNTS) / 2),
        ratios=Ratios(kept / context, recomputed / context, (heads + loaded) / size, 1.0),
        cache=CacheReport(chunks, hits, misses, (Fallback("a#0", "missing"),) * draw(st.integers(0, 2))),
        bytes=ByteCounts(size, heads, loaded),
        prefilling=PrefillReport(None, None, "dense was asked for"),
        decoding=DecodeReport(8, 100.0, 200.0, draw(st.integers(0, 9)), "stop", "", speculation=drafts),
        timings_ms=Timings(*(draw(st.integers(0, 200_000)) / 4 for _ in STEPS)),
        chunks=(),
    )


def recorded(answered: list[Report]) -> MetricsRecorder:
    """A recorder of these answers."""
    recorder = MetricsRecorder()
    for report in answered:
        recorder.answered(report)
    return recorder
