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
class TokenCounts:
    """context: of all chunks the answer stands on, in a conversation those of its earlier turns, too · kept: mean over
    layers · recomputed: mean over layers of the tokens computed again there · question · generated.

    history: of a conversation's earlier turns and their chunks, what was in the cache when the question came ·
    prefilled: what went through the model before the first token: chunks prefilled or recomputed, what was left of the
    last answer, earlier turns where they had to be read again, the question. Both are means over layers and leave out
    the prompt's prefix; the pass in which a question chooses blocks is not counted either.
    """

    context: int
    kept: float
    recomputed: float
    question: int
    generated: int
    history: float
    prefilled: float


@dataclass(frozen=True)
class Ratios:
    """sequence = kept/context · recompute = recomputed/context · load = bytes read, heads included / context KV ·
    cache_hit = chunks found in any tier / chunks of the context."""

    sequence: float
    recompute: float
    load: float
    cache_hit: float


@dataclass(frozen=True)
class TierHits:
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
class CacheReport:
    """What the KV store gave. A method that needs no stored KV (full) looks nothing up: hits and misses are 0."""

    chunks: int
    hits: TierHits
    misses: int
    fallbacks: tuple[Fallback, ...]


@dataclass(frozen=True)
class ByteCounts:
    """context_kv: full KV of the chunks · heads: head records read · loaded: ranges read, the kept blocks and what
    stands in for dropped ones while rows pass through during repair (SamKV's padding). A kept block whose rows are all
    computed again and written over, before anything reads them, is not read."""

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
class DecodeReport:
    """What decoding read. steps: passes of one token, the first token needs none · read, present: keys a step read, and
    keys there were, means over steps, layers and attention heads; the prompt's prefix, the question and the answer so
    far are among them · pulled: blocks that came back from the store on the way · ended: `stop`, or `length` where
    the answer has all the tokens it may have and might go on."""

    steps: int
    read: float
    present: float
    pulled: int
    ended: str


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
    """Everything one request reused, loaded and recomputed, and how long it took.

    prefill, decode: the policies that were at work; dense where the input was too short for the one asked for, or the
    answer for a step that left keys out.
    """

    method: str
    prefill: str
    decode: str
    model: str
    tokens: TokenCounts
    ratios: Ratios
    cache: CacheReport
    bytes: ByteCounts
    decoding: DecodeReport
    timings_ms: Timings
    chunks: tuple[ChunkReport, ...]


@dataclass(frozen=True)
class Answer:
    """An answered question."""

    question: str
    answer: str
    citations: tuple[Citation, ...]
    report: Report
