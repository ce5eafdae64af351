"""Figures of `ragkv bench serve`: a summary of each method's answers, and its tables.

Percentiles interpolate linearly between the two nearest values, as numpy's default does. Ratios are sums over sums.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.grid import TextGrid, number
from benchmarks.serve import LoadResult, PoolSums, TimedAnswer, pool_sums
from ragkv.report import Report


@dataclass(frozen=True)
class Percentiles:
    """Percentiles and mean of durations, in milliseconds."""

    p50: float
    p90: float
    p99: float
    mean: float


@dataclass(frozen=True)
class SteadyWindow:
    """The time in which a closed loop decoded all its answers together.

    An answer decodes from its first `token` event to its last. The window is the time in which as many answers decode
    as the loop keeps in flight. Of a single wave of questions it lasts from the moment at which the last stream gave
    its first token to the end of the first stream.

    Attributes:
        seconds: Length of the window.
        tokens_per_s: Tokens of all answers in the window, a second. The tokens of an answer are shared equally among
            its events.
    """

    seconds: float
    tokens_per_s: float


@dataclass(frozen=True)
class LoadSummary:
    """Figures of one method.

    Attributes:
        method: As it was asked for.
        prefill: Prefill policies of the reports.
        decode: Decode policies of the reports.
        asked: Questions asked.
        answered: Questions answered.
        failed: Number of the others, by error code.
        seconds: From the start of the load to the end of the last answer.
        offered_rate: Questions that arrived a second; None in a closed loop.
        achieved_rate: Answers a second.
        ttft_ms: Time to first token of the answered questions, from their arrival.
        between_tokens_ms: Time between consecutive `token` events of an answer.
        delay_ms: From the arrival of a question to its sending: what the client itself was late.
        tokens: Tokens generated.
        tokens_per_event: Tokens that one `token` event holds, in the mean.
        tokens_per_s: Tokens generated a second, over all the seconds.
        steady: The same while as many answers as possible decode; None without such a time.
        within_limit: Share of the questions asked whose first token came within the limit; None without a limit.
        goodput: The same questions a second.
        cache_hit: Chunks found in any tier / chunks looked up; None if none was.
        sequence: Kept tokens / context tokens.
        recompute: Recomputed tokens / context tokens.
        load: Bytes read, head records included / bytes of the contexts' KV.
        context: Context tokens of a question, mean.
        kept: Kept tokens of a question, mean.
        keys_read: Keys that decode steps read / keys present; None without decode steps.
        pool: Sums of the reports; None if no report has a pool.
        counters: The same by the counters of the service; None without a pool.
    """

    method: str
    prefill: str
    decode: str
    asked: int
    answered: int
    failed: Mapping[str, int]
    seconds: float
    offered_rate: float | None
    achieved_rate: float
    ttft_ms: Percentiles | None
    between_tokens_ms: Percentiles | None
    delay_ms: Percentiles | None
    tokens: int
    tokens_per_event: float | None
    tokens_per_s: float
    steady: SteadyWindow | None
    within_limit: float | None
    goodput: float | None
    cache_hit: float | None
    sequence: float | None
    recompute: float | None
    load: float | None
    context: float | None
    kept: float | None
    keys_read: float | None
    pool: PoolSums | None
    counters: PoolSums | None


def summary_of(result: LoadResult, concurrency: int | None, limit: float | None) -> LoadSummary:
    """Return the figures of a method.

    Args:
        result: Its answers.
        concurrency: Questions that the closed loop kept in flight; None for an open loop.
        limit: Longest time to first token, in seconds, of a question that counts as goodput; None leaves it out.
    """
    answers = result.answers
    answered = [each for each in answers if each.report is not None]
    reports = [each.report for each in answers if each.report is not None]
    seconds = max(each.ended for each in answers)
    tokens, events = sum(each.tokens.generated for each in reports), sum(len(each.tokens) for each in answered)
    within = None if limit is None else sum(each.ttft <= limit for each in answered)
    last = max(each.scheduled for each in answers)
    return LoadSummary(
        method=result.method,
        prefill=" ".join(sorted({each.prefill for each in reports})),
        decode=" ".join(sorted({each.decode for each in reports})),
        asked=len(answers),
        answered=len(answered),
        failed=dict(Counter(each.error for each in answers if each.error)),
        seconds=seconds,
        offered_rate=None if concurrency is not None else _ratio(len(answers), last),
        achieved_rate=len(answered) / seconds,
        ttft_ms=percentiles([each.ttft for each in answered]),
        between_tokens_ms=percentiles([late - early for each in answered for early, late in pairwise(each.tokens)]),
        delay_ms=percentiles([each.sent - each.scheduled for each in answers]),
        tokens=tokens,
        tokens_per_event=_ratio(tokens, events),
        tokens_per_s=tokens / seconds,
        steady=None if concurrency is None else steady_window(answered, concurrency),
        within_limit=None if within is None else within / len(answers),
        goodput=None if within is None else within / seconds,
        **_reuse(reports),
        pool=pool_sums(answers) if any(each.decoding.pool for each in reports) else None,
        counters=result.counters,
    )


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """Return percentiles and mean of durations, in milliseconds; None if there are none."""
    if not seconds:
        return None
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return Percentiles(*(1000 * float(each) for each in (p50, p90, p99, np.mean(seconds))))


def steady_window(answers: Sequence[TimedAnswer], concurrency: int) -> SteadyWindow | None:
    """Return the time in which `concurrency` answers decode at once; None if there is none.

    Args:
        answers: Answers with their reports.
        concurrency: Questions that were kept in flight.
    """
    spans = [(each.tokens[0], each.tokens[-1]) for each in answers if each.tokens]
    changes = sorted([(end, -1) for _, end in spans] + [(start, 1) for start, _ in spans])
    decoding, windows = 0, list[tuple[float, float]]()
    for (at, change), (until, _) in pairwise(changes):
        decoding += change
        if decoding >= concurrency and until > at:
            windows.append((at, until))
    seconds = sum(until - at for at, until in windows)
    if not seconds:
        return None
    tokens = 0.0
    for answer in answers:
        if answer.tokens and answer.report is not None:
            inside = sum(bisect_right(answer.tokens, until) - bisect_right(answer.tokens, at) for at, until in windows)
            tokens += answer.report.tokens.generated * inside / len(answer.tokens)
    return SteadyWindow(seconds, tokens / seconds)


def _reuse(reports: Sequence[Report]) -> dict[str, float | None]:
    context = sum(each.tokens.context for each in reports)
    hits = sum(sum(vars(each.cache.hits).values()) for each in reports)
    kept, present = (
        sum(each.tokens.kept for each in reports),
        sum(e.decoding.steps * e.decoding.present for e in reports),
    )
    return {
        "cache_hit": _ratio(hits, hits + sum(each.cache.misses for each in reports)),
        "sequence": _ratio(kept, context),
        "recompute": _ratio(sum(each.tokens.recomputed for each in reports), context),
        "load": _ratio(sum(e.bytes.heads + e.bytes.loaded for e in reports), sum(e.bytes.context_kv for e in reports)),
        "context": _ratio(context, len(reports)),
        "kept": _ratio(kept, len(reports)),
        "keys_read": _ratio(sum(e.decoding.steps * e.decoding.read for e in reports), present),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def time_grid(summaries: Sequence[LoadSummary]) -> TextGrid:
    """Rates, times in milliseconds, and tokens a second; what does not apply to the load is left out."""
    offered, limited = summaries[0].offered_rate is not None, summaries[0].within_limit is not None
    heads = [
        *("method", "answered", "failed", *(["offered/s"] if offered else []), "answers/s"),
        *("TTFT p50", "p90", "p99", "mean", "between p50", "p90", "p99", "tokens/s"),
        *(["in time %", "goodput/s"] if limited else []),
        *([] if offered else ["steady tokens/s"]),
    ]
    rows = []
    for summary in summaries:
        limits = [number(summary.within_limit, ".1f", 100), number(summary.goodput, ".2f")]
        row = [summary.method, str(summary.answered), str(sum(summary.failed.values()))]
        row += [number(summary.offered_rate, ".2f")] if offered else []
        row += [f"{summary.achieved_rate:.2f}", *_times(summary.ttft_ms, ("p50", "p90", "p99", "mean"))]
        row += [*_times(summary.between_tokens_ms, ("p50", "p90", "p99")), f"{summary.tokens_per_s:.1f}"]
        row += limits if limited else []
        row += [] if offered else [number(summary.steady.tokens_per_s if summary.steady else None, ".1f")]
        rows.append(tuple(row))
    return TextGrid(tuple(heads), tuple(rows))


def reuse_grid(summaries: Sequence[LoadSummary]) -> TextGrid:
    """What the reports say of reuse: shares in percent, and tokens."""
    heads = ("method", "prefill", "decode", "context", "kept", "cache hit %", "sequence %", "recompute %", "load %")
    rows = [
        (
            *(each.method, each.prefill, each.decode, number(each.context, ".0f"), number(each.kept, ".0f")),
            *(number(x, ".1f", 100) for x in (each.cache_hit, each.sequence, each.recompute, each.load)),
            number(each.keys_read, ".1f", 100),
        )
        for each in summaries
    ]
    return TextGrid((*heads, "keys read %"), tuple(rows), words=3)


def pool_grid(summaries: Sequence[LoadSummary]) -> TextGrid:
    """The sums of the reports beside the counters of the service, for the methods that have either."""
    rows = [
        (each.method, source, f"{sums.read}", f"{sums.hits}", f"{sums.loaded}")
        for each in summaries
        for source, sums in (("reports", each.pool), ("counters", each.counters))
        if sums is not None
    ]
    return TextGrid(("method", "source", "read", "hits", "loaded"), tuple(rows), words=2)


def pool_note(summary: LoadSummary) -> str:
    """Say whether the reports of a method equal the counters; "" if there is no pool."""
    if summary.counters is None:
        return ""
    if (summary.pool or PoolSums()) == summary.counters:
        return f"{summary.method}: the reports equal the counters"
    return (
        f"{summary.method}: the reports DIFFER from the counters, which count failed questions and those of others, too"
    )


def failures(results: Sequence[LoadResult]) -> list[str]:
    """Say for each method and error code how many questions failed, with the first message."""
    found = []
    for result in results:
        for code, count in Counter(each.error for each in result.answers if each.error).items():
            first = next(each.message for each in result.answers if each.error == code)
            found.append(f"{result.method}: {count} {code} ({first})")
    return found


def _times(values: Percentiles | None, names: Sequence[str]) -> list[str]:
    return [number(None if values is None else getattr(values, name), ".1f") for name in names]
