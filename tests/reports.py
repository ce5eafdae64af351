"""Reports of answers that nobody gave, for what counts them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ragkv.report import Bytes, Cache, Decoded, Fallback, Hits, Ratios, Report, Timings, Tokens
from ragkv.tally import STEPS, Tally

COUNTS = st.integers(0, 10_000)


@st.composite
def reports(draw: Any) -> Report:
    """Of any answer: what it kept, recomputed and read is at most what there was."""
    context = draw(st.integers(1, 10_000))
    kept, again = (draw(st.integers(0, context * 8)) / 8 for _ in range(2))
    hits, misses = Hits(draw(COUNTS), draw(COUNTS), draw(COUNTS)), draw(COUNTS)
    chunks = hits.gpu + hits.host + hits.store + misses
    size, heads, loaded = context * 1024, draw(COUNTS), draw(COUNTS)
    return Report(
        method=draw(st.sampled_from(["full", "scout", "scout:cap=0.2,heads=all"])),
        prefill="dense",
        decode=draw(st.sampled_from(["dense", "psa:least=0"])),
        model="demo",
        tokens=Tokens(context, kept, again, draw(COUNTS), draw(COUNTS), 0.0, draw(COUNTS) / 2),
        ratios=Ratios(kept / context, again / context, (heads + loaded) / size, 1.0),
        cache=Cache(chunks, hits, misses, (Fallback("a#0", "missing"),) * draw(st.integers(0, 2))),
        bytes=Bytes(size, heads, loaded),
        decoding=Decoded(8, 100.0, 200.0, draw(st.integers(0, 9)), "stop"),
        timings_ms=Timings(*(draw(st.integers(0, 200_000)) / 4 for _ in STEPS)),
        chunks=(),
    )


def told(found: list[Report]) -> Tally:
    """A tally of these answers."""
    tally = Tally()
    for report in found:
        tally.answered(report)
    return tally
