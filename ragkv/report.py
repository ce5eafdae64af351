"""Answer and report as frozen dataclasses (the report contract in docs/architecture.md).

`dataclasses.asdict` of an Answer is exactly the JSON object of `ragkv ask --json` and of POST /v1/answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.passages import Citation


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of an answer.

    `history` and `prefilled` leave out the prompt's prefix. The pass in which a question selects blocks is not counted.

    Attributes:
        context: Tokens of the retrieved chunks, those that were left out as well; in a conversation also those of
            earlier turns.
        kept: Context tokens whose KV was kept, mean over layers.
        recomputed: Context tokens that were recomputed, mean over layers.
        question: Tokens of the question part of the prompt.
        generated: Tokens of the answer.
        history: Tokens of earlier turns and their chunks that were in the cache when the question arrived, mean over
            layers. With `full:prefix=true` also tokens of chunks that an earlier question prefilled.
        prefilled: Tokens that went through the model before the first token, mean over layers: prefilled or recomputed
            chunks, chunks whose states were composed, pending tokens of the last answer, earlier turns that had to be
            prefilled again, and the question.
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
    """Ratios of an answer.

    Attributes:
        sequence: Kept tokens / context tokens.
        recompute: Recomputed tokens / context tokens.
        load: Bytes read, head records included / bytes of the context's KV.
        cache_hit: Chunks found in any tier / chunks of the context.
    """

    sequence: float
    recompute: float
    load: float
    cache_hit: float


@dataclass(frozen=True)
class TierHits:
    """Number of chunks found in each tier.

    Attributes:
        gpu: Chunks found in GPU memory.
        host: Chunks found in host memory.
        store: Chunks found in the KV store.
    """

    gpu: int = 0
    host: int = 0
    store: int = 0


ENCODING_IS_QUICKER = "encoding_is_quicker"
NOT_QUALIFIED = "not_qualified"


@dataclass(frozen=True)
class Fallback:
    """A chunk that was encoded again because its stored KV could not be used.

    Attributes:
        chunk_id: Id of the chunk.
        reason: Why the stored KV was not used: `missing`, `corrupt` or `unavailable` (the store did not answer);
            `encoding_is_quicker` than loading, by the costs measured here; `not_qualified`, when the model failed its
            self-test. Details are in the log, because tenants read reports.
    """

    chunk_id: str
    reason: str


@dataclass(frozen=True)
class CacheReport:
    """Cache lookups of an answer. The method `full` uses no stored KV, so its hits and misses are 0.

    Attributes:
        chunks: Chunks of the context, and those that were retrieved and left out.
        hits: Chunks found, by tier.
        misses: Chunks found in no tier.
        fallbacks: Chunks that were encoded again, with the reason.
    """

    chunks: int
    hits: TierHits
    misses: int
    fallbacks: tuple[Fallback, ...]


@dataclass(frozen=True)
class ByteCounts:
    """Byte counts of an answer.

    Attributes:
        context_kv: Full KV of the chunks.
        heads: Head records read.
        loaded: Block ranges read: the kept blocks, and the padding that replaces dropped blocks while rows pass through
            during repair (SamKV). A kept block whose rows are all recomputed before anything reads them is not read.
        windows: Those of `loaded` that belong to layers with a window.
        states: States of layers without attention, of one chunk at most; 0 in a model that has none, and where they are
            composed.
    """

    context_kv: int
    heads: int
    loaded: int
    windows: int = 0
    states: int = 0


@dataclass(frozen=True)
class Timings:
    """Durations of the steps of an answer, in milliseconds.

    If a method repairs and prefills in one pass, the pass counts as `prefill` and `repair` is 0.

    Attributes:
        retrieve: Retrieving the chunks.
        open: Reading the head records of the chunks.
        plan: Selecting blocks and tokens to recompute.
        load: Loading the kept blocks.
        repair: Recomputing tokens.
        prefill: Prefilling the question, and chunks where needed.
        ttft: Time from the request to the first token, retrieval and loading included.
        decode: Decoding.
        total: The whole request.
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
class PrefillReport:
    """What the question and the repaired tokens read. A method that prefills everything counts all tokens.

    A pair is a token of one layer and attention head and a key that is not after it.

    Attributes:
        pairs_read: Pairs that a prefill policy read; None if no policy was at work.
        pairs_dense: Pairs that dense attention would have read; None likewise.
        why_dense: Why everything was read; "" if it was not.
    """

    pairs_read: int | None
    pairs_dense: int | None
    why_dense: str


@dataclass(frozen=True)
class PoolReport:
    """What decoding did with the pool of KV blocks. A block is one of one kv head and layer.

    Attributes:
        read: Blocks that the steps read.
        hits: Blocks of those that were in the pool.
        loaded: Blocks that were copied from host memory: those that were not in the pool, and those loaded ahead.
        loaded_tokens: Tokens of KV that this is, as tokens of all layers and kv heads.
    """

    read: int
    hits: int
    loaded: int
    loaded_tokens: float


@dataclass(frozen=True)
class SpeculationReport:
    """What speculation did for an answer.

    Attributes:
        drafts: Steps that verified drafted tokens.
        drafted: Tokens that were drafted.
        accepted: Tokens of those that became tokens of the answer.
        why_none: Why nothing could be drafted; "" if it could.
    """

    drafts: int
    drafted: int
    accepted: int
    why_none: str


@dataclass(frozen=True)
class DecodeReport:
    """What decoding read.

    Attributes:
        steps: Decode steps. The first token needs none. A step decodes one token, and with it the drafted tokens that
            it accepts.
        read: Keys that a token read, mean over tokens, layers and attention heads. The prompt's prefix, the question
            and the answer so far count.
        present: Keys in the cache, the same mean.
        pulled: Blocks that were fetched back from the store during decoding.
        ended: `stop`, or `length` if the answer reached its largest number of tokens.
        why_dense: Why everything was read; "" if it was not.
        pool: What was read through the pool of KV blocks; None if the context was in none.
        speculation: What was drafted and accepted; None if speculation was off.
        in_place: Keys of `present` that were read where they are stored in GPU memory, without a copy for this answer;
            mean over layers.
        in_host: Keys of `present` that lay in host memory alone, where the CPU attended to them; mean over layers, at
            the end.
    """

    steps: int
    read: float
    present: float
    pulled: int
    ended: str
    why_dense: str
    pool: PoolReport | None = None
    speculation: SpeculationReport | None = None
    in_place: float = 0.0
    in_host: float = 0.0


@dataclass(frozen=True)
class ChunkReport:
    """What an answer used of one chunk.

    Attributes:
        chunk_id: Id of the chunk.
        document_id: Id of its document.
        title: Title of the chunk.
        tokens: Number of tokens.
        blocks: Number of blocks.
        kept: For each block the share of layers that kept it, 0 to 1.
        recomputed_tokens: Recomputed tokens, mean over layers.
    """

    chunk_id: str
    document_id: str
    title: str
    tokens: int
    blocks: int
    kept: tuple[float, ...]
    recomputed_tokens: float


@dataclass(frozen=True)
class Selection:
    """What the blocks were chosen by.

    Attributes:
        evidence: Kinds of evidence that scored the blocks: `meaning` and `words` need no pass of the model, `attention`
            does. Empty where the method asks the model alone, or reads everything.
        looks: Passes of the model over a part of the context before the question's own.
        promised: Probability, by this evidence, that the answer is in what was kept; None without evidence.
        agreement: What `ragkv calibrate --documents` measured of the model's default method: its F1 minus that of
            `full`, in points; None where it was not measured.
    """

    evidence: tuple[str, ...] = ()
    looks: int = 0
    promised: float | None = None
    agreement: float | None = None


@dataclass(frozen=True)
class Evidence:
    """What the confidence of an answer is computed from.

    Attributes:
        mean_log_probability: Mean natural logarithm of the probability of the answer's tokens, the one that ended it
            included.
        least_log_probability: The least of them.
        similarity: Cosine of the question and the retrieved chunk that is most similar to it.
        known: How improbable `unknown` was: minus the natural logarithm of the probability that the answer begins so,
            at most 8. 0.0 for `unknown` itself.
        support: Share of the question's words that stand in a sentence in which the answer is marked, or in the title
            above it. Without a mark, minus the share of the answer's words that no passage holds.
        unknown: 1.0 for the answer `unknown`.
    """

    mean_log_probability: float
    least_log_probability: float
    similarity: float
    known: float = 0.0
    support: float = 0.0
    unknown: float = 0.0


NOT_HELD = "No passage holds a word of this answer."
"""What a user reads where `Report.held` is 0."""
LIKELY, UNSURE = 0.7, 0.4
"""Confidence from which on an answer is called likely, and below which unsure."""


def describe_confidence(confidence: float) -> str:
    """Return the word for a confidence: `likely`, `possible` or `unsure`."""
    return "likely" if confidence >= LIKELY else "possible" if confidence >= UNSURE else "unsure"


@dataclass(frozen=True)
class Report:
    """What a request reused, loaded and recomputed, and how long it took.

    Attributes:
        method: Method of the request.
        prefill: Prefill policy that chose what the new rows read, without its fields; `dense` if none did.
        decode: Decode policy that chose what a step read, without its fields; `dense` if none did.
        model: Name of the model.
        tokens: Token counts.
        ratios: Ratios.
        cache: Cache lookups.
        bytes: Byte counts.
        prefilling: What the prefill read.
        decoding: What decoding read.
        timings_ms: Durations of the steps, in milliseconds.
        chunks: One entry for each chunk, in prompt order; behind them those that were retrieved and left out.
        confidence: Probability that the answer is right, 0 to 1; None if the model's profile has no coefficients.
        evidence: What the confidence is computed from.
        abstained: Whether the answer was below the confidence that the request asked for, and became `unknown`.
        removed_turns: Earlier turns of the conversation that the answer did not read, because a document that they may
            quote was deleted or replaced since.
        selection: What the blocks were chosen by.
        held: Share of the answer's words that stand in the passage that holds most of them, 0 to 1. With 0 no passage
            holds a word of it. For `yes` and `no` 1 if a sentence decides, else 0. None for `unknown`.
        rule: Which rule answered without documents and model: `greeting`, `service`, `summary` or `list`; "" for any
            other answer.
    """

    method: str
    prefill: str
    decode: str
    model: str
    tokens: TokenCounts
    ratios: Ratios
    cache: CacheReport
    bytes: ByteCounts
    prefilling: PrefillReport
    decoding: DecodeReport
    timings_ms: Timings
    chunks: tuple[ChunkReport, ...]
    confidence: float | None = None
    evidence: Evidence | None = None
    abstained: bool = False
    removed_turns: int = 0
    selection: Selection = Selection()
    held: float | None = None
    rule: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer to a question.

    Attributes:
        question: Text of the question.
        answer: Text of the answer.
        citations: The retrieved chunks, with marks where the answer occurs; none if the answer is `unknown`.
        report: What the request reused, loaded and recomputed.
    """

    question: str
    answer: str
    citations: tuple[Citation, ...]
    report: Report
