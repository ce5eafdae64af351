"""The tally says what the reports say, for any span of time."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.report import Bytes, Cache, Decoded, Fallback, Hits, Ratios, Report, Timings, Tokens
from ragkv.tally import BOUNDS, OUTCOMES, STEPS, Histogram, Tally

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


@given(st.lists(reports(), min_size=1, max_size=8))
def test_the_sums_are_those_of_the_reports(found: list[Report]) -> None:
    sums = told(found).sums
    assert sums.answered == len(found)
    assert sums.tokens["kept"] == sum(report.tokens.kept for report in found)
    assert sums.sequence == sums.tokens["kept"] / sum(report.tokens.context for report in found)
    assert sums.recompute == sum(report.tokens.recomputed for report in found) / sums.tokens["context"]
    assert sums.saved == sum(each.bytes.context_kv - each.bytes.heads - each.bytes.loaded for each in found)
    assert sum(sums.lookups.values()) == sum(report.cache.chunks for report in found)
    assert sums.pulled == sum(report.decoding.pulled for report in found)
    assert sums.seconds["ttft"].count == len(found)
    assert sums.seconds["ttft"].total == pytest.approx(sum(report.timings_ms.ttft for report in found) / 1000)
    assert {way[0] for way in sums.answers} <= {"full", "scout"}, "a method's fields make no new label"


@given(st.lists(reports(), max_size=5), st.lists(reports(), max_size=5))
def test_what_came_after_a_moment_is_the_difference_of_two_sums(before: list[Report], after: list[Report]) -> None:
    tally = told(before)
    then = tally.sums
    for report in after:
        tally.answered(report)
    later, alone = tally.sums.since(then), told(after).sums
    assert later.answered == len(after)
    assert (later.tokens, later.kv_bytes, later.lookups) == (alone.tokens, alone.kv_bytes, alone.lookups)
    assert later.seconds["ttft"].counts == alone.seconds["ttft"].counts
    assert then == told(before).sums, "sums that were taken do not change"


def test_a_ratio_of_nothing_is_none() -> None:
    sums = Tally().sums
    assert (sums.sequence, sums.recompute, sums.load, sums.cache_hit) == (None,) * 4
    assert Histogram().quantile(0.5) is None


def test_questions_that_are_not_answered_are_counted_by_how_they_ended() -> None:
    tally = Tally()
    for outcome in OUTCOMES:
        tally.ended(outcome)
    tally.ended("refused")
    assert tally.sums.ended == {**dict.fromkeys(OUTCOMES, 1), "refused": 2}
    assert tally.sums.answered == 0


def test_a_quantile_lies_in_the_bucket_of_its_rank_as_in_promql() -> None:
    spent = Histogram()
    for milliseconds in (18, 18, 18, 25):  # three in (15, 20] ms, one in (20, 30]
        spent = spent.observed(milliseconds / 1000)
    assert spent.quantile(0.5) == pytest.approx(0.015 + 0.005 * 2 / 3)
    assert spent.quantile(0.75) == pytest.approx(0.020)
    assert spent.quantile(1.0) == pytest.approx(0.030)
    assert Histogram().observed(1e9).quantile(0.5) == BOUNDS[-1]


@given(st.lists(st.floats(0, 90), min_size=1, max_size=50), st.integers(1, 100))
def test_a_quantile_lies_in_the_bucket_of_the_value_it_stands_for(values: list[float], percent: int) -> None:
    spent = Histogram()
    for value in values:
        spent = spent.observed(value)
    exact = sorted(values)[-(-percent * len(values) // 100) - 1]
    place = bisect_left(BOUNDS, exact)
    found = spent.quantile(percent / 100)
    assert found is not None
    assert (BOUNDS[place - 1] if place else 0) <= found * (1 + 1e-9)
    assert found <= BOUNDS[place] * (1 + 1e-9)
