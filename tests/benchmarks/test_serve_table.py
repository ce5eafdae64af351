"""Figures of `bench serve`: from when times count, what percentiles, the steady window and goodput are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.serve import LoadResult, PoolSums, TimedAnswer
from benchmarks.serve_table import (
    LoadSummary,
    failures,
    percentiles,
    pool_grid,
    pool_note,
    reuse_grid,
    steady_window,
    summary_of,
    time_grid,
)
from ragkv.report import (
    ByteCounts,
    CacheReport,
    DecodeReport,
    PoolReport,
    PrefillReport,
    Ratios,
    Report,
    TierHits,
    Timings,
    TokenCounts,
)


def report(context: int = 100, kept: float = 50.0, generated: int = 4, pool: PoolReport | None = None) -> Report:
    return Report(
        method="reuse",
        prefill="dense",
        decode="psa",
        model="tiny",
        tokens=TokenCounts(context, kept, 10.0, 5, generated, 0.0, 5),
        ratios=Ratios(0.0, 0.0, 0.0, 0.0),
        cache=CacheReport(4, TierHits(host=3), 1, ()),
        bytes=ByteCounts(context * 8, 10, 70),
        prefilling=PrefillReport(None, None, ""),
        decoding=DecodeReport(generated - 1, 25.0, float(context), 0, "length", "", pool),
        timings_ms=Timings(*(0.0,) * 9),
        chunks=(),
    )


def answer(scheduled: float, tokens: tuple[float, ...], sent: float | None = None, **more: object) -> TimedAnswer:
    made = report(generated=len(tokens), **more)  # type: ignore[arg-type]
    return TimedAnswer(scheduled, scheduled if sent is None else sent, tokens, tokens[-1] + 0.25, report=made)


def refused(scheduled: float, ended: float, error: str = "busy") -> TimedAnswer:
    return TimedAnswer(scheduled, scheduled, (), ended, error, f"it is {error}")


def summary(*answers: TimedAnswer, concurrency: int | None = None, limit: float | None = None) -> LoadSummary:
    return summary_of(LoadResult("reuse", answers, None), concurrency, limit)


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1000])
def test_percentiles_are_those_of_a_sorted_list_with_linear_interpolation(count: int) -> None:
    values = [random.Random(count).lognormvariate(0, 1) for _ in range(count)]
    found, ranked = percentiles(values), sorted(values)
    assert found is not None
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        below = int(share * (count - 1))
        above = min(below + 1, count - 1)
        expected = ranked[below] + (share * (count - 1) - below) * (ranked[above] - ranked[below])
        assert getattr(found, name) == pytest.approx(1000 * expected)
    assert found.mean == pytest.approx(1000 * sum(values) / count)
    assert percentiles([]) is None


def test_time_to_first_token_counts_from_the_arrival_however_late_the_client_sent_it() -> None:
    late = answer(1.0, (5.0, 5.5), sent=4.0)
    assert late.ttft == 4.0
    found = summary(late)
    assert found.ttft_ms is not None
    assert found.delay_ms is not None
    assert found.ttft_ms.p50 == 4000
    assert found.delay_ms.p50 == 3000


def test_an_answer_without_text_counts_from_its_end() -> None:
    assert TimedAnswer(1.0, 1.0, (), 3.0, report=report(generated=1)).ttft == 2.0


def test_times_between_tokens_are_gaps_within_an_answer() -> None:
    found = summary(answer(0.0, (1.0, 1.1, 1.3)), answer(0.0, (9.0, 9.6)))
    assert found.between_tokens_ms is not None
    assert found.between_tokens_ms.mean == pytest.approx((100 + 200 + 600) / 3)
    assert found.between_tokens_ms.p50 == pytest.approx(200)


def test_rates_count_to_the_end_of_the_last_answer() -> None:
    found = summary(answer(0.0, (1.0, 2.0)), answer(2.0, (3.0, 3.5, 3.75)), refused(1.0, 1.5))
    assert (found.asked, found.answered, found.seconds, found.tokens) == (3, 2, 4.0, 5)
    assert (found.achieved_rate, found.tokens_per_s, found.offered_rate) == (0.5, 1.25, 1.5)


def test_the_window_of_a_wave_is_from_the_last_first_token_to_the_first_end() -> None:
    # They decode from 1 to 5, from 2 to 7 and from 3 to 6: all three between 3 and 5.
    wave = [answer(0.0, (1.0, 2.0, 3.0, 4.0, 5.0)), answer(0.0, (2.0, 3.5, 4.5, 7.0)), answer(0.0, (3.0, 4.0, 6.0))]
    found = steady_window(wave, 3)
    assert found is not None
    assert found.seconds == 2.0
    # After 3 and until 5: tokens at 4 and 5, at 3.5 and 4.5, and at 4.
    assert found.tokens_per_s == 5 / 2
    # The tokens of an answer are shared among its events: two of each here.
    pairs = [replace(each, report=report(generated=2 * len(each.tokens))) for each in wave]
    assert steady_window(pairs, 3).tokens_per_s == 5  # type: ignore[union-attr]


def test_windows_of_later_waves_add_up_and_there_may_be_none() -> None:
    first, second = (
        [answer(0.0, (1.0, 3.0)), answer(0.0, (2.0, 4.0))],
        [answer(4.0, (5.0, 8.0)), answer(4.0, (6.0, 7.0))],
    )
    found = steady_window([*first, *second], 2)
    assert found is not None
    assert (found.seconds, found.tokens_per_s) == (2.0, 1.0)
    assert steady_window([*first, *second], 3) is None
    assert steady_window([answer(0.0, (1.0, 2.0)), answer(0.0, (2.0, 3.0))], 2) is None, "one ends as the other begins"
    assert summary(*first, concurrency=2).steady is not None
    assert summary(*first).steady is None, "an open loop has no such window"


def test_goodput_counts_answers_within_the_limit_among_all_questions() -> None:
    found = summary(
        answer(0.0, (1.0, 2.0)), answer(1.0, (3.5, 3.75)), refused(1.0, 1.5), answer(0.0, (1.5,)), limit=1.5
    )
    assert (found.within_limit, found.goodput) == (0.5, 0.5)
    assert summary(answer(0.0, (1.0,))).goodput is None


def test_ratios_are_sums_over_sums() -> None:
    found = summary(answer(0.0, (1.0, 2.0), context=100, kept=100.0), answer(0.0, (1.0, 2.0), context=300, kept=20.0))
    assert (found.context, found.kept, found.sequence) == (200, 60, 0.3)
    assert (found.cache_hit, found.recompute, found.load) == (0.75, 20 / 400, 160 / 3200)
    assert found.keys_read == 50 / 400
    assert summary(refused(0.0, 1.0)).sequence is None


def test_a_difference_between_reports_and_counters_is_told() -> None:
    pools = PoolReport(10, 6, 5, 1.0), PoolReport(7, 7, 0, 0.0)
    answers = tuple(answer(0.0, (1.0, 2.0), pool=pool) for pool in (*pools, None))
    equal, other, none = (
        summary_of(LoadResult("reuse", answers, counters), 1, None)
        for counters in (PoolSums(17, 13, 5), PoolSums(17, 13, 6), None)
    )
    assert equal.pool == PoolSums(17, 13, 5)
    assert pool_note(equal) == "reuse: the reports equal the counters"
    assert "DIFFER" in pool_note(other)
    assert pool_note(none) == ""
    assert pool_note(replace(equal, pool=None)) == pool_note(other), "reports without a pool count as zero"
    assert [row[1:] for row in pool_grid([other]).rows] == [
        ("reports", "17", "13", "5"),
        ("counters", "17", "13", "6"),
    ]


def test_failures_are_counted_by_code_with_the_first_message() -> None:
    answers = (refused(0.0, 1.0), answer(0.0, (1.0,)), refused(0.0, 1.0, "expired"), refused(0.0, 2.0))
    result = LoadResult("reuse", answers, None)
    assert failures([result]) == ["reuse: 2 busy (it is busy)", "reuse: 1 expired (it is expired)"]
    assert summary(*answers).failed == {"busy": 2, "expired": 1}


def test_tables_show_what_applies_to_the_load() -> None:
    answers = answer(0.0, (1.0, 2.0)), refused(0.5, 1.0)
    closed, limited = time_grid([summary(*answers, concurrency=1)]), time_grid([summary(*answers, limit=2.0)])
    assert "steady tokens/s" in closed.heads
    assert not {"offered/s", "goodput/s"} & set(closed.heads)
    assert {"offered/s", "goodput/s"} <= set(limited.heads)
    assert limited.rows[0][1:3] == ("1", "1")
    failed = summary(refused(0.0, 1.0))
    for grid in (closed, limited, time_grid([failed]), reuse_grid([failed])):
        assert all(len(row) == len(grid.heads) for row in grid.rows)
