"""`ragkv bench ingest`: documents through the whole ingest, beside the model's batched prefill of their tokens.

Documents of one chunk each are queued as one job and ingested as the service does it: split, embedded, encoded, stored
and indexed, with nothing asked meanwhile. In each round the same chunks are then prefilled alone, as many in a forward
pass as ingest encodes together; that is the ceiling. The medians of the rounds count.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.encode import EncodeParams, EncodeResult, measure_encoding, prefill_together
from ragkv.config import Settings
from ragkv.engine.engine import Engine
from ragkv.ingest.jobs import Jobs
from ragkv.ingest.turns import IngestTurns
from ragkv.model.model_cache import Notify
from ragkv.timing import StepTimer
from ragkv.types import Document

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""

WORDS = (
    "the a this every old new first last small large northern open public ferry harbour bridge station library museum "
    "council school garden market river coast village train ticket letter winter summer morning evening year engineer "
    "teacher captain visitor opened closed carried found repaired painted moved kept sold planned measured near behind "
    "before after during without because while and or but with from to in on at"
).split()


@dataclass(frozen=True)
class IngestParams:
    """What is measured.

    Attributes:
        documents: documents, over all rounds.
        tokens: tokens of a document, about.
        rounds: rounds of ingest and prefill.
        seed: seed of the documents.
    """

    documents: int = 200
    tokens: int = 200
    rounds: int = 5
    seed: int = 0


@dataclass(frozen=True)
class IngestResult:
    """Medians over the rounds.

    Attributes:
        store: kind of the KV store.
        documents: documents ingested in all rounds.
        tokens: tokens of a document, mean.
        documents_per_second: documents ingested.
        tokens_per_second: their tokens.
        prefill_tokens_per_second: tokens of the batched prefill.
        share: `tokens_per_second` / `prefill_tokens_per_second` of the same round.
        encode: chunks of as many tokens without the rest of ingest.
    """

    store: str
    documents: int
    tokens: float
    documents_per_second: float
    tokens_per_second: float
    prefill_tokens_per_second: float
    share: float
    encode: EncodeResult


def ingest(
    settings: Settings, params: IngestParams, progress: Progress, notify: Notify = lambda line: None
) -> IngestResult:
    """Ingest generated documents into a temporary data folder.

    If the settings name a Redis store, it is used; the bench removes its entries afterwards.

    Args:
        settings: The settings.
        params: What is measured.
        progress: Is told how far it is.
        notify: As in `Engine.open`.
    """
    with tempfile.TemporaryDirectory(prefix="ragkv-ingest-") as folder:
        own = settings.model_copy(update={"data": Path(folder)})
        with Engine.open(own, notify) as engine:
            try:
                return _measure(engine, params, progress)
            finally:
                engine.evict(engine.catalog.keys())


def _measure(engine: Engine, params: IngestParams, progress: Progress) -> IngestResult:
    size = max(1, params.documents // params.rounds)
    rng, rounds = random.Random(params.seed), list[tuple[float, float, int]]()
    for number in range(params.rounds + 1):
        documents = [_document(engine, rng, f"{number}-{i}", params.tokens) for i in range(size if number else 2)]
        jobs = Jobs(engine.catalog, engine.settings.max_document_bytes)
        jobs.submit(documents)
        started = time.perf_counter()
        for _ in IngestTurns(jobs).steps(engine):
            pass
        seconds = time.perf_counter() - started
        chunks = [chunk.tokens for each in documents for chunk in engine.catalog.chunks_of(each.collection, each.id)]
        prefill = _prefill_seconds(engine, chunks)
        rounds += [(seconds, prefill, sum(map(len, chunks)))] if number else []  # the first round warms up
        progress("ingest", number, params.rounds)
    mean = sum(tokens for *_, tokens in rounds) / (size * params.rounds)
    encode = EncodeParams(round(mean), engine.group_tokens, params.rounds, seed=params.seed)
    return IngestResult(
        store=engine.settings.store.split(":")[0],
        documents=size * params.rounds,
        tokens=mean,
        documents_per_second=statistics.median(size / seconds for seconds, _, _ in rounds),
        tokens_per_second=statistics.median(tokens / seconds for seconds, _, tokens in rounds),
        prefill_tokens_per_second=statistics.median(tokens / prefill for _, prefill, tokens in rounds),
        share=statistics.median(prefill / seconds for seconds, prefill, _ in rounds),
        encode=measure_encoding(engine.prefiller, encode, progress),
    )


def _prefill_seconds(engine: Engine, chunks: list[tuple[int, ...]]) -> float:
    """Return the time to prefill chunks in groups of as many tokens as ingest encodes together."""
    timer, at = StepTimer(engine.model.device), 0
    while at < len(chunks):
        stop = at + 1
        while stop < len(chunks) and sum(map(len, chunks[at : stop + 1])) <= engine.group_tokens:
            stop += 1
        prefill_together(engine.prefiller, chunks[at:stop])
        at = stop
    return timer.total() / 1000


def _document(engine: Engine, rng: random.Random, name: str, tokens: int) -> Document:
    """Return a document of one chunk with about as many tokens."""
    text, title = "", f"Document {name}"
    while True:
        longer = f"{text} {' '.join(rng.choices(WORDS, k=9)).capitalize()}.".strip()
        if text and len(engine.model.prompt.chunk(title, longer)) > tokens:
            return Document(name, title, text)
        text = longer
