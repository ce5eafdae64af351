"""What the Grafana dashboard shows, row by row.

Ratios are of rates of counters, over the span of a point or of the whole view; nothing is a mean of ratios.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ragkv.metrics.figures import FIGURES
from ragkv.metrics.sums import OUTCOMES


@dataclass(frozen=True)
class Query:
    """expression: PromQL · legend: name of its series, with labels in double braces."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """says: what one sees, on hover · kind: `stat` shows the last value, large · share: the highest value is 1."""

    title: str
    says: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    share: bool = False


def share(part: str, whole: str, span: str) -> str:
    """A ratio of two counters over a span; where there was nothing, there is no value."""
    return f"sum(rate({part}[{span}])) / (sum(rate({whole}[{span}])) > 0)"


def quantile(rank: float, step: str, span: str) -> str:
    """Of the seconds of a step."""
    return f'histogram_quantile({rank}, sum by (le) (rate(ragkv_step_seconds_bucket{{step="{step}"}}[{span}])))'


def tile(title: str, says: str, expression: str, unit: str, width: int) -> Panel:
    """One figure for the whole view."""
    return Panel(title, says, unit, (Query(expression, title),), "stat", width=width, height=4)


EACH, ALL = "$__rate_interval", "$__range"
CONTEXT, KEPT, AGAIN = (f'ragkv_tokens_total{{kind="{kind}"}}' for kind in ("context", "kept", "recomputed"))
LOOKUPS, HITS = "ragkv_chunk_lookups_total", 'ragkv_chunk_lookups_total{result="hit"}'
KV, READ = 'ragkv_kv_bytes_total{source="context"}', 'ragkv_kv_bytes_total{source=~"heads|loaded"}'
TTFT = 'ragkv_step_seconds_count{step="ttft"}'
STEPS = 'ragkv_step_seconds_sum{step!~"ttft|total"}'

SAVED = f"(sum(increase(ragkv_full_seconds_total[{ALL}])) - sum(increase(ragkv_compared_seconds_total[{ALL}])))"
_TILES = {
    "First token, median": quantile(0.5, "ttft", ALL),
    "First token, 95%": quantile(0.95, "ttft", ALL),
    "Full prefill, estimated": f"sum(rate(ragkv_full_seconds_total[{ALL}])) / (sum(rate({TTFT}[{ALL}])) > 0)",
    "Time saved": SAVED,
    "Money saved": f"{SAVED} / 3600 * (max(ragkv_hour_price) > 0)",
    "Answers": f"sum(increase(ragkv_answers_total[{ALL}]))",
    "Cache hits": share(HITS, LOOKUPS, ALL),
    "Recomputed": share(AGAIN, CONTEXT, ALL),
    "Kept": share(KEPT, CONTEXT, ALL),
    "Loaded": share(READ, KV, ALL),
}
_NARROW = 6
"""Figures of the first line; the others have the second one."""
_UNITS = {"seconds": "s", "share": "percentunit", "count": "short", "money": "short"}
TILES = tuple(
    tile(each.name, each.says, _TILES[each.name], _UNITS[each.form], 4 if at < _NARROW else 6)
    for at, each in enumerate(FIGURES)
)
"""The figures that the overview and `ragkv top` show, too."""
RATIOS = (
    Panel(
        "Cache hits by tier",
        "Of the chunks looked up, how many each tier had. What is missing to 100% was encoded again.",
        "percentunit",
        (
            Query(
                f"sum by (tier) (rate({HITS}[{EACH}])) / on () group_left () (sum(rate({LOOKUPS}[{EACH}])) > 0)",
                "{{tier}}",
            ),
        ),
        stacked=True,
        share=True,
    ),
    Panel(
        "Kept, recomputed, loaded",
        "Of the context: tokens attended to, tokens computed again, bytes of KV read.",
        "percentunit",
        (
            Query(share(KEPT, CONTEXT, EACH), "kept"),
            Query(share(AGAIN, CONTEXT, EACH), "recomputed"),
            Query(share(READ, KV, EACH), "loaded"),
        ),
    ),
    Panel(
        "KV a second",
        "Bytes of the context's KV, and what was read of it.",
        "Bps",
        (
            Query(f"sum(rate({KV}[{EACH}]))", "context"),
            Query(f"sum by (source) (rate({READ}[{EACH}]))", "{{source}}"),
        ),
    ),
)
LATENCY = (
    Panel(
        "Time to the first token",
        "Retrieval and loading included.",
        "s",
        (
            Query(quantile(0.5, "ttft", EACH), "median"),
            Query(quantile(0.95, "ttft", EACH), "95%"),
            Query(
                f"sum(rate(ragkv_full_seconds_total[{EACH}])) / (sum(rate({TTFT}[{EACH}])) > 0)",
                "full prefill, estimated",
            ),
        ),
    ),
    Panel(
        "Where an answer's time goes",
        "Mean seconds of each step of an answer.",
        "s",
        (
            Query(
                f"sum by (step) (rate({STEPS}[{EACH}])) / on () group_left () (sum(rate({TTFT}[{EACH}])) > 0)",
                "{{step}}",
            ),
        ),
        stacked=True,
    ),
    Panel(
        "Whole answers",
        "From the first look at the question to the last token. Waiting in the line is not in it.",
        "s",
        (Query(quantile(0.5, "total", EACH), "median"), Query(quantile(0.95, "total", EACH), "95%")),
    ),
)
TRAFFIC = (
    Panel(
        "Answers a second",
        "By method.",
        "ops",
        (Query(f"sum by (method) (rate(ragkv_answers_total[{EACH}]))", "{{method}}"),),
        width=6,
        stacked=True,
    ),
    Panel(
        "Questions without an answer",
        "A second, by how they ended. refused: the line was full; expired: RAGKV_DEADLINE.",
        "ops",
        (Query(f"sum by (outcome) (rate(ragkv_questions_unanswered_total[{EACH}]))", "{{outcome}}"),),
        width=6,
        stacked=True,
    ),
    Panel(
        "Tokens a second",
        "Generated, and put through the model before a first token; drafted, and accepted of these.",
        "short",
        (
            Query(f'sum by (kind) (rate(ragkv_tokens_total{{kind=~"generated|prefilled"}}[{EACH}]))', "{{kind}}"),
            Query(f"sum by (kind) (rate(ragkv_draft_tokens_total[{EACH}]))", "{{kind}}"),
        ),
        width=6,
    ),
    Panel(
        "The line",
        "Questions being answered, requests that wait, places for them.",
        "short",
        (
            Query("sum(ragkv_questions_running)", "running"),
            Query("sum(ragkv_questions_waiting)", "waiting"),
            Query("sum(ragkv_queue_places)", "places"),
        ),
        width=6,
    ),
    Panel(
        "Missing chunks a second",
        "Encoded here, read from another process, encoded after too long a wait, or without a lease.",
        "ops",
        (Query(f"sum by (result) (rate(ragkv_chunk_flights_total[{EACH}]))", "{{result}}"),),
        width=8,
        stacked=True,
    ),
    Panel(
        "Requests by status",
        "A second, whoever answered them.",
        "reqps",
        (Query(f"sum by (status) (rate(ragkv_http_requests_total[{EACH}]))", "{{status}}"),),
        width=8,
        stacked=True,
    ),
    Panel(
        "Requests by route",
        "A second. other: no such route, or no key.",
        "reqps",
        (Query(f"sum by (route) (rate(ragkv_http_requests_total[{EACH}]))", "{{route}}"),),
        width=8,
        stacked=True,
    ),
)
HEALTH = (
    Panel(
        "Documents",
        "In the catalogue, and on their way into it.",
        "short",
        (Query("sum(ragkv_documents)", "there"), Query("sum(ragkv_documents_waiting)", "waiting")),
    ),
    Panel(
        "Ingest jobs", "Not done yet.", "short", (Query("sum by (status) (ragkv_jobs)", "{{status}}"),), stacked=True
    ),
    Panel(
        "Checks",
        "1 where /readyz says ok. Without engine and catalogue no questions are answered.",
        "short",
        (Query("min by (check) (ragkv_ready)", "{{check}}"),),
        share=True,
    ),
    Panel(
        "What went wrong with stored KV",
        "A second: chunks encoded again, writes the store refused, damaged entries.",
        "ops",
        (
            Query(f"sum(rate(ragkv_fallbacks_total[{EACH}]))", "fallbacks"),
            Query(f"sum(rate(ragkv_store_faults_total[{EACH}]))", "store faults"),
            Query(f"sum(rate(ragkv_quarantined_total[{EACH}]))", "damaged"),
            Query(f"sum(rate(ragkv_pulled_blocks_total[{EACH}]))", "blocks pulled in"),
            Query(f"sum(rate(ragkv_engine_replaced_total[{EACH}]))", "engine replaced"),
        ),
    ),
    Panel(
        "Memory for KV",
        "Of what each tier may hold, how much is taken. Full and with evictions: the budget is small.",
        "percentunit",
        (Query('sum by (tier) (ragkv_tier_slots{state="used"}) / (sum by (tier) (ragkv_tier_slots) > 0)', "{{tier}}"),),
        share=True,
    ),
    Panel(
        "Blocks evicted a second",
        "To make room for others.",
        "ops",
        (Query(f"sum by (tier) (rate(ragkv_tier_evicted_total[{EACH}]))", "{{tier}}"),),
    ),
    Panel(
        "Processors",
        "Seconds of processor time a second.",
        "short",
        (Query(f"rate(process_cpu_seconds_total[{EACH}]) and on (job, instance) ragkv_info", "cores"),),
    ),
    Panel(
        "Memory",
        "Of the process.",
        "bytes",
        (Query("process_resident_memory_bytes and on (job, instance) ragkv_info", "resident"),),
    ),
    Panel(
        "Texts embedded and ranked",
        "For requests that bring their own texts.",
        "short",
        (
            Query(f"sum(rate(ragkv_texts_total[{EACH}]))", "texts a second"),
            Query(f"sum(rate(ragkv_text_tokens_total[{EACH}]))", "tokens a second"),
        ),
    ),
)
SERIES: dict[str, tuple[str, ...]] = {
    "{{tier}}": ("gpu", "host", "store"),
    "{{step}}": ("retrieve", "open", "plan", "load", "repair", "prefill", "decode"),
    "{{source}}": ("heads", "loaded"),
    "{{outcome}}": OUTCOMES,
    "{{kind}}": ("generated", "prefilled", "drafted", "accepted"),
    "{{check}}": ("engine", "catalogue", "index", "store", "reuse", "queue"),
    "{{method}}": (),
    "{{status}}": (),
    "{{route}}": (),
}
"""What labels are known to say; the others get Grafana's colours."""
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Reuse", (*TILES, *RATIOS)),
    ("Latency", LATENCY),
    ("Traffic", TRAFFIC),
    ("Ingest and health", HEALTH),
)
