"""What happens to a document, step by step.

    hash → (unchanged: done) → split → quota → embed → claim → encode → write → commit → evict orphans → index

The catalogue changes once, at the end of the work, in one transaction. A crash anywhere therefore leaves either the
whole old version or the whole new one. KV without catalogue rows is an orphan, which is no fault.

The claim keeps other processes from removing KV that is stored, or was found in the store, before the catalogue
refers to it.

`ingest_steps` is a generator that yields after each unit of work, so that its caller may do something else in between.
`ingest` runs it to its end.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import Catalog, DocumentInfo, DocumentVersion, Passage
from ragkv.errors import QuotaExceeded, RagkvError
from ragkv.ingest.budget import within
from ragkv.ingest.chunker import split_steps
from ragkv.ingest.engine_contract import IngestEmbedder, IngestEngine
from ragkv.ingest.outcomes import IngestOutcome, ReindexOutcome
from ragkv.ingest.progress import (
    ENDS,
    ChunkGroup,
    IngestProgress,
    IngestStep,
    PassageBatch,
    Paused,
    Stage,
    no_progress,
    run_to_end,
)
from ragkv.types import Chunk, Document, EmbeddedPassages

__all__ = [
    "IngestEngine",
    "IngestOutcome",
    "IngestProgress",
    "IngestStep",
    "Paused",
    "ReindexOutcome",
    "Stage",
    "content_hash",
    "ingest",
    "ingest_steps",
    "reader_of",
    "reindex",
    "reindex_steps",
    "remove",
]

EMBED_BATCH = 32
"""Chunks that are embedded at once."""
RENEW_SECONDS = 300.0
"""How often a long ingest renews its claim."""


def ingest(engine: IngestEngine, document: Document, progress: IngestProgress = no_progress) -> IngestOutcome:
    """Ingest a document without a pause. See `ingest_steps`, also for what `progress` may raise."""
    return run_to_end(ingest_steps(engine, document), progress)


def ingest_steps(
    engine: IngestEngine, document: Document, check_wanted: Callable[[], None] | None = None
) -> Generator[IngestStep, None, IngestOutcome]:
    """Make a document answerable in place of its old version, one unit of work at a time.

    Unchanged content is left as it is, also where another process stores it meanwhile. The quota and the time
    limit apply to new content only: what is in the catalogue is never refused because another model reads it again.

    What is thrown in at a step stops the work and leaves the old version in place. An exception deletes the KV encoded
    so far; Paused and `close()` keep it, so that the next attempt finds it. At `index` the document is committed.

    Args:
        engine: The engine that encodes the chunks.
        document: It must have passed `ragkv.ingest.loader.checked`.
        check_wanted: Called inside the transaction that commits the document; it may read the catalogue. What it
            raises undoes that transaction. A removal before the transaction is seen here, and a removal after it finds
            the new version to remove.

    Yields:
        A step after each section that was split, and before each batch, group of chunks, commit and index.

    Raises:
        InvalidDocument: The document has no text.
        TooLarge, QuotaExceeded: Splitting its text takes too long; the collection has no room for it.
        ConfigError: The chunk size is too small.
        EmbedderChanged: The catalogue holds vectors of another embedder.
        StoreFull: The disk is full.
    """
    catalog, embedder = engine.catalog, engine.retriever.embedder
    catalog.check_embedder(embedder.identity)
    digest, reader = content_hash(document), reader_of(engine, document.collection)
    known = catalog.find(document.collection, document.id)
    if known and (known.content_hash, known.reader) == (digest, reader):
        return _keep(engine, document, known)
    is_new = known is None or known.content_hash != digest
    chunks = yield from _split_steps(engine, document, limited=is_new)
    tokens = sum(len(chunk.tokens) for chunk in chunks)
    admit = _admission(engine, document, tokens) if is_new else None
    embedded = yield from _embed_steps(embedder, [(chunk.title, chunk.text) for chunk in chunks], tokens)
    keys = [engine.key(chunk, document.collection) for chunk in chunks]
    stored_as = (keys, embedder.identity, reader, embedded.segments)
    version = DocumentVersion(document, digest, chunks, embedded.vectors, *stored_as)
    outcome = IngestOutcome(document.id, document.collection, "replaced" if known else "added", len(chunks), tokens)
    check_new = partial(_check_new, catalog, version, known, check_wanted)
    if not (yield from _store_steps(engine, version, admit, check_new)):
        return replace(outcome, status="unchanged")
    yield IngestStep("index", len(chunks), len(chunks))
    engine.retriever.views.changed(document.collection)
    return outcome


def _keep(engine: IngestEngine, document: Document, known: DocumentInfo) -> IngestOutcome:
    """Leave unchanged content as it is. A file that is new to the document is noted, and kept if there is room."""
    catalog = engine.catalog
    if document.source not in ("", known.source):
        catalog.note_source(document)
    if document.file:
        with suppress(QuotaExceeded):  # its pages cannot be shown; all else is there
            catalog.keep_file(document, _admission(engine, document, known.tokens))
    return IngestOutcome(document.id, document.collection, "unchanged", known.chunks, known.tokens)


def _split_steps(engine: IngestEngine, document: Document, limited: bool) -> Generator[IngestStep, None, list[Chunk]]:
    """Split a document, within the time limit where it is `limited`."""
    steps = split_steps(document, engine.model.prompt.of(document.collection), engine.chunk_tokens)
    return (yield from (within(steps, document, engine.split_seconds) if limited else steps))


def _admission(engine: IngestEngine, document: Document, tokens: int) -> Callable[[int, int], None] | None:
    """Check the quota; return what checks it again at the commit, None without a quota. Raises QuotaExceeded."""
    if not engine.quota.limit:
        return None
    admit = partial(engine.quota.admit, document, tokens)
    admit(*engine.catalog.held(document.collection, document.id))
    return admit


class _Stored(Exception):
    """Another process has stored the same version meanwhile."""


def _check_new(
    catalog: Catalog, version: DocumentVersion, known: DocumentInfo | None, check_wanted: Callable[[], None] | None
) -> None:
    """Raise _Stored if the version is in the catalogue already, and what `check_wanted` raises. See `put_document`."""
    if check_wanted is not None:
        check_wanted()
    now = catalog.find(version.document.collection, version.document.id)
    if now is not None and now != known and (now.content_hash, now.reader) == (version.content_hash, version.reader):
        raise _Stored


def remove(engine: IngestEngine, collection: str, document_id: str) -> None:
    """Remove a document, its vectors and its KV. Raises NotFound."""
    engine.evict(engine.catalog.remove(collection, document_id))
    # The index drops the rows at the next search. Until then no hit names them: the catalogue does not know them.


def reindex(engine: IngestEngine, progress: IngestProgress = no_progress) -> ReindexOutcome:
    """Reindex all documents without a pause. See `reindex_steps`."""
    return run_to_end(reindex_steps(engine), progress)


def reindex_steps(engine: IngestEngine) -> Generator[IngestStep, None, ReindexOutcome]:
    """Embed every chunk with the present embedder, then ingest again what another model or chunk size has read.

    Questions are answered from the old vectors until all new ones are stored.
    """
    catalog, embedder = engine.catalog, engine.retriever.embedder
    passages: list[Passage] = []
    while page := catalog.passages(passages[-1].row if passages else 0):
        passages += page
    embedded = yield from _embed_steps(embedder, [(passage.title, passage.text) for passage in passages])
    rows = [passage.row for passage in passages]
    catalog.replace_vectors(rows, embedded.vectors, embedder.identity)
    catalog.store_segments(dict(zip(rows, embedded.segments, strict=True)), embedder.identity)
    catalog.rebuild_full_text()
    reread = 0
    documents = catalog.documents(None)
    for info in documents:
        if info.reader != reader_of(engine, info.collection):
            yield from ingest_steps(engine, catalog.original(info.collection, info.id))
            reread += 1
    for collection in {info.collection for info in documents}:
        engine.retriever.views.refresh(collection)
    engine.retriever.views.save()
    return ReindexOutcome(len(passages), reread)


def content_hash(document: Document) -> str:
    """Hash the title, text and metadata. Two versions of a document differ in it."""
    content = [document.title, document.text, dict(document.metadata)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def reader_of(engine: IngestEngine, collection: str) -> str:
    """Name the model, the wrapper tokens and the chunk size that read documents.

    Where it changes, documents have to be ingested again.
    """
    return f"{engine.model.prompt.of(collection).reader(engine.fingerprint)}/{engine.chunk_tokens}"


def _embed_steps(
    embedder: IngestEmbedder, passages: Sequence[tuple[str, str]], tokens: int = 0
) -> Generator[IngestStep, None, EmbeddedPassages]:
    """Embed (title, text) pairs, of chunks with so many tokens.

    The title is embedded too, because it often holds the name that the text refers to as `it`.
    """
    vectors, segments = np.empty((len(passages), embedder.identity.dimension), np.float32), list[NDArray[np.int8]]()
    for start in range(0, len(passages), EMBED_BATCH):
        batch = PassageBatch(tuple(passages[start : start + EMBED_BATCH]), tokens)
        yield IngestStep("embed", start, len(passages), passages=batch)
        found = batch.embedded or embedder.encode_passages(batch.passages)
        vectors[start : start + len(batch.passages)] = found.vectors
        segments += found.segments
    return EmbeddedPassages(vectors, tuple(segments))


def _store_steps(
    engine: IngestEngine,
    version: DocumentVersion,
    admit: Callable[[int, int], None] | None,
    check_new: Callable[[], None],
) -> Generator[IngestStep, None, bool]:
    """Encode and commit a version under a claim. Returns whether it is stored; else another process stored the same."""
    catalog, document, chunks, keys = engine.catalog, version.document, version.chunks, version.keys
    claim = catalog.claim(keys, engine.fingerprint)
    try:
        yield from _encode_steps(engine, document.collection, chunks, claim)
        yield IngestStep("commit", len(chunks), len(chunks), writing=partial(engine.is_writing, keys))
        engine.finish_writes(keys)
        orphans = catalog.put_document(version, claim, admit, check_new)
    except (Paused, *ENDS):
        raise
    except BaseException as error:
        with suppress(RagkvError):
            # In this order: on a full disk nothing can be written to the catalogue until evicted KV has made room.
            engine.evict(keys, claim)
            catalog.release(claim)
        if isinstance(error, _Stored):
            return False
        raise
    engine.evict(orphans)
    return True


def _encode_steps(
    engine: IngestEngine, collection: str, chunks: Sequence[Chunk], claim: int
) -> Generator[IngestStep, None, None]:
    """Encode the chunks and store their KV. The claim is renewed before it can expire."""
    done, renewed = 0, time.monotonic()
    for chunks_together in _groups(chunks, engine.group_tokens):
        group = ChunkGroup(tuple((chunk, collection) for chunk in chunks_together))
        yield IngestStep("encode", done, len(chunks), group)
        if not group.encoded:
            engine.encode_and_store_all(group.chunks)
        done += len(chunks_together)
        if time.monotonic() - renewed > RENEW_SECONDS:
            engine.catalog.renew(claim)
            renewed = time.monotonic()


def _groups(chunks: Sequence[Chunk], most: int) -> Iterator[list[Chunk]]:
    """Yield successive chunks that have at most `most` tokens together; a larger chunk comes alone."""
    group, tokens = list[Chunk](), 0
    for chunk in chunks:
        if group and tokens + len(chunk.tokens) > most:
            yield group
            group, tokens = [], 0
        group.append(chunk)
        tokens += len(chunk.tokens)
    if group:
        yield group
