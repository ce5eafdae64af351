"""What every answer says about itself: the report contract (docs/architecture.md), as frozen dataclasses.

`dataclasses.asdict` of an Answer is exactly the JSON object of `ragkv ask --json` and of POST /v1/answers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Citation:
    """A retrieved chunk the answer was read from. score: fused rank score of the retrieval."""

    document_id: str
    chunk_id: str
    title: str
    score: float


@dataclass(frozen=True)
class Tokens:
    """context: of all retrieved chunks · kept: mean over layers · recomputed: mean over layers of the tokens
    computed again there · question · generated."""

    context: int
    kept: float
    recomputed: float
    question: int
    generated: int


@dataclass(frozen=True)
class Ratios:
    """sequence = kept/context · recompute = recomputed/context · load = bytes read, heads included / context KV ·
    cache_hit = chunks found in any tier / chunks retrieved."""

    sequence: float
    recompute: float
    load: float
    cache_hit: float


@dataclass(frozen=True)
class Hits:
    """Chunks found, by the tier that answered."""

    gpu: int = 0
    host: int = 0
    store: int = 0


@dataclass(frozen=True)
class Fallback:
    """A chunk whose stored KV could not be used, so that it was encoded again, and why."""

    chunk_id: str
    reason: str


@dataclass(frozen=True)
class Cache:
    """What the KV store gave. A method that needs no stored KV (full) looks nothing up: hits and misses are 0."""

    chunks: int
    hits: Hits
    misses: int
    fallbacks: tuple[Fallback, ...]


@dataclass(frozen=True)
class Bytes:
    """context_kv: full KV of the retrieved chunks · heads: head records read · loaded: ranges read, the
    kept blocks and what stands in for dropped ones while rows pass through during repair (SamKV's padding)."""

    context_kv: int
    heads: int
    loaded: int


@dataclass(frozen=True)
class Timings:
    """Milliseconds by step. ttft runs from the request to the first token, retrieval and loading included.

    A method that repairs and prefills in one pass books it under `prefill`; `repair` is then 0.
    """

    retrieve: float
    open: float
    plan: float
    load: float
    repair: float
    prefill: float
    ttft: float
    decode: float
    total: float


@dataclass(frozen=True)
class ChunkReport:
    """kept: per block, the share of layers that kept it, 0..1."""

    chunk_id: str
    document_id: str
    title: str
    tokens: int
    blocks: int
    kept: tuple[float, ...]
    recomputed_tokens: float


@dataclass(frozen=True)
class Report:
    """Everything one request reused, loaded and recomputed, and how long it took."""

    method: str
    prefill: str
    decode: str
    model: str
    tokens: Tokens
    ratios: Ratios
    cache: Cache
    bytes: Bytes
    timings_ms: Timings
    chunks: tuple[ChunkReport, ...]


@dataclass(frozen=True)
class Answer:
    """An answered question."""

    question: str
    answer: str
    citations: tuple[Citation, ...]
    report: Report
