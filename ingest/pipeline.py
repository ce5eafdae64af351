"""What happens to a document, step by step. The catalogue changes once, at the end of the work, in one transaction:
a crash anywhere leaves the old version whole or the new one whole. KV without catalogue rows is an orphan, no fault.

    hash → (unchanged: done) → split → quota → embed → claim → encode → commit → forget orphans → index

The claim keeps others from removing KV that is stored, or found in the store, before the catalogue refers to it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ingest.chunker import PromptPiece, split
from ragkv.admin.quota import Quota
from ragkv.catalog import Catalog, DocumentVersion, EmbedderIdentity, Passage
from ragkv.errors import RagkvError
from ragkv.types import Chunk, Document, Key

EMBED_BATCH = 32
RENEW_SECONDS = 300.0
"""How often a long ingest says that its claim is still needed."""

Stage = Literal["split", "embed", "encode", "commit", "index"]


class IngestProgress(Protocol):
    """Told how far a stage is, between chunks; may raise to stop the work.

    Nothing is then left behind, unless it raised Paused. done and total count characters in `split`, chunks elsewhere.
    """

    def __call__(self, stage: Stage, done: int, total: int, /) -> None: ...


class Paused(Exception):
    """A Progress raises it to stop work that will be taken up again: the KV encoded so far is kept for then."""


class IngestModel(Protocol):
    """The part of the model that ingest needs."""

    @property
    def prompt(self) -> PromptPiece: ...


class IngestEmbedder(Protocol):
    """The part of ragkv.retrieval.Embedder that ingest needs."""

    @property
    def identity(self) -> EmbedderIdentity: ...

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]: ...


class IngestIndex(Protocol):
    """The part of ragkv.retrieval.Retriever that ingest needs."""

    @property
    def embedder(self) -> IngestEmbedder: ...

    def refresh(self, collection: str) -> None: ...

    def save(self) -> None: ...


class IngestEngine(Protocol):
    """The part of ragkv.engine.engine.Engine that ingest needs."""

    @property
    def model(self) -> IngestModel: ...

    @property
    def catalog(self) -> Catalog: ...

    @property
    def retriever(self) -> IngestIndex: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def chunk_tokens(self) -> int: ...

    @property
    def quota(self) -> Quota: ...

    def key(self, chunk: Chunk, collection: str) -> Key:
        """The name of a chunk's KV."""
        ...

    def encode_and_store(self, chunk: Chunk, collection: str) -> Key:
        """Encode a chunk and store its KV, unless it is there."""
        ...

    def evict(self, keys: Iterable[Key], claim: int | None = None) -> None:
        """Delete KV that no chunk refers to and nobody claims, but for the caller's own claim."""
        ...


@dataclass(frozen=True)
class IngestOutcome:
    """What became of a document. chunks, tokens: of the version that is now in the catalogue."""

    document_id: str
    collection: str
    status: Literal["added", "replaced", "unchanged"]
    chunks: int
    tokens: int


@dataclass(frozen=True)
class ReindexOutcome:
    """embedded: chunks that got new vectors · reread: documents split and encoded again for the present model."""

    embedded: int
    reread: int


def no_progress(stage: Stage, done: int, total: int) -> None:
    """Nobody watches."""


def ingest(
    engine: IngestEngine,
    document: Document,
    progress: IngestProgress = no_progress,
    wanted: Callable[[], None] | None = None,
) -> IngestOutcome:
    """Read a document and make it answerable, in place of its old version. Does nothing when nothing changed.

    wanted: asked at the last moment, in the transaction that makes the change; raises where the change is to be left,
    and may read the catalogue. Whoever withdraws a document before it gets no new version, after it he finds one.
    The document must have passed ingest.loader.checked. Raises InvalidDocument, QuotaExceeded, ConfigError,
    EmbedderChanged, StoreFull. A quota is asked about new content only: what is in is never thrown out by being read
    again for another model.
    """
    catalog, embedder = engine.catalog, engine.retriever.embedder
    catalog.check_embedder(embedder.identity)
    digest, reader = content_hash(document), reader_of(engine)
    known = catalog.find(document.collection, document.id)
    if known and (known.content_hash, known.reader) == (digest, reader):
        return IngestOutcome(document.id, document.collection, "unchanged", known.chunks, known.tokens)

    chunks = split(document, engine.model.prompt, engine.chunk_tokens, lambda done, of: progress("split", done, of))
    tokens = sum(len(chunk.tokens) for chunk in chunks)
    admit = None
    if engine.quota.limit and (known is None or known.content_hash != digest):
        admit = partial(engine.quota.admit, document, tokens)
        admit(catalog.tokens(document.collection, document.id))
    vectors = _embed(embedder, [(chunk.title, chunk.text) for chunk in chunks], progress)
    keys = [engine.key(chunk, document.collection) for chunk in chunks]
    claim, renewed = catalog.claim(keys, engine.fingerprint), time.monotonic()
    try:
        for done, chunk in enumerate(chunks):
            progress("encode", done, len(chunks))
            engine.encode_and_store(chunk, document.collection)
            if time.monotonic() - renewed > RENEW_SECONDS:
                catalog.renew(claim)
                renewed = time.monotonic()
        progress("commit", len(chunks), len(chunks))
        version = DocumentVersion(document, digest, chunks, vectors, keys, embedder.identity, reader)
        orphans = catalog.put_document(version, claim, admit, wanted)
    except Paused:
        raise
    except Exception:
        with suppress(RagkvError):
            # In this order: on a full disk nothing can be written to the catalogue, but its KV makes room.
            engine.evict(keys, claim)
            catalog.release(claim)
        raise
    engine.evict(orphans)
    progress("index", len(chunks), len(chunks))
    engine.retriever.refresh(document.collection)
    return IngestOutcome(document.id, document.collection, "replaced" if known else "added", len(chunks), tokens)


def remove(engine: IngestEngine, collection: str, document_id: str) -> None:
    """Forget a document, its vectors and its KV. Raises NotFound."""
    engine.evict(engine.catalog.remove(collection, document_id))
    # The index drops the rows when it is next asked; until then the catalogue does not know them, so no hit names them.


def reindex(engine: IngestEngine, progress: IngestProgress = no_progress) -> ReindexOutcome:
    """Embed every chunk again with the present embedder, then read again what another model or chunk size has read.

    Questions are answered from the old vectors until all new ones are there.
    """
    catalog, embedder = engine.catalog, engine.retriever.embedder
    passages: list[Passage] = []
    while page := catalog.passages(passages[-1].row if passages else 0):
        passages += page
    vectors = _embed(embedder, [(passage.title, passage.text) for passage in passages], progress)
    catalog.replace_vectors([passage.row for passage in passages], vectors, embedder.identity)
    catalog.rebuild_full_text()
    reread, reader = 0, reader_of(engine)
    documents = catalog.documents(None)
    for info in documents:
        if info.reader != reader:
            ingest(engine, catalog.original(info.collection, info.id), progress)
            reread += 1
    for collection in {info.collection for info in documents}:
        engine.retriever.refresh(collection)
    engine.retriever.save()
    return ReindexOutcome(len(passages), reread)


def content_hash(document: Document) -> str:
    """What tells two versions of a document apart: title, text and metadata."""
    content = [document.title, document.text, dict(document.metadata)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def reader_of(engine: IngestEngine) -> str:
    """What reads a document: a change of model or chunk size means that documents have to be read again."""
    return f"{engine.fingerprint}/{engine.chunk_tokens}"


def _embed(
    embedder: IngestEmbedder, passages: Sequence[tuple[str, str]], progress: IngestProgress
) -> NDArray[np.float32]:
    """[len(passages), dimension]. passages: (title, text); a title often holds the name that the text calls `it`."""
    vectors = np.empty((len(passages), embedder.identity.dimension), np.float32)
    for start in range(0, len(passages), EMBED_BATCH):
        progress("embed", start, len(passages))
        batch = [f"{title}\n{text}" for title, text in passages[start : start + EMBED_BATCH]]
        vectors[start : start + len(batch)] = embedder.encode(batch)
    return vectors
