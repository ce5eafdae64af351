"""Catalog: the documents, chunks, vectors and conversations of the service, in an SQLite file or in PostgreSQL.

The database is the source of truth, and every index is built from it. A change of a collection happens in one
transaction that raises the collection's generation, so an index can tell that it is stale.

The SQL lives in one module for each table. This file is longer than others because `Catalog` has one short method for
each operation: it opens the transaction and calls the query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import (
    attributes,
    chunks,
    claims,
    copying,
    documents,
    embedders,
    feed,
    files,
    full_text,
    pgvector,
    prices,
    segments,
    sources,
    turns,
    vectors,
)
from ragkv.catalog.database import Database, GiveWay, again_with_room, nothing_gives_way
from ragkv.catalog.listener import ChangeListener
from ragkv.catalog.models import (
    ID_ORDER,
    Changes,
    CollectionInfo,
    DocumentInfo,
    DocumentOrder,
    DocumentVersion,
    EmbedderIdentity,
    Passage,
    PassageChanges,
    Reembedding,
    StoredTurn,
)
from ragkv.catalog.sqlite_file import SqliteFile
from ragkv.catalog.transaction import Transaction
from ragkv.errors import CatalogCorrupt, ConfigError, NotFound
from ragkv.types import GRACE_SECONDS, Chunk, Document, Filter, HourPrice, Key

_STORED_TIMES = 16
"""Bytes that a document takes for a character of its text, at most: as text, in chunks, as words, in log and file."""


class Catalog:
    """Documents, chunks, vectors and conversations of all collections. Thread-safe; see `Database`.

    Every method may raise StoreFull (no space left; nothing was changed), StoreUnavailable (another process holds the
    write lock, or the database does not answer) and CatalogCorrupt. Methods with a `filter` raise InputError for a
    malformed filter.

    Attributes:
        name: What messages call the catalogue: its path, or its address without the password.
        has_words: Whether the catalogue has a word index (`match`). Without one, each process keeps its own, from
            `passage_changes`.
    """

    def __init__(self, database: Database):
        self._database = database
        self.name, self.has_words = database.name, database.has_words

    @classmethod
    def open(cls, where: Path | str, give_way: GiveWay = nothing_gives_way) -> Catalog:
        """Open a catalogue, or create it, and bring its tables up to date.

        Args:
            where: Path of an SQLite file, or address of a PostgreSQL database (postgresql+psycopg://…).
            give_way: Makes room for the file on a full disk.

        Raises:
            CatalogCorrupt: The file is damaged.
            ConfigError: The catalogue belongs to another program or to a newer ragkv, or cannot be opened.
            MissingPackage: The driver of PostgreSQL is not installed.
            StoreUnavailable: The database does not answer.
        """
        if isinstance(where, Path):
            return cls(SqliteFile.open(where, give_way))
        from ragkv.catalog.postgres import PostgresDatabase  # imports SQLAlchemy's pool, which a file does without

        return cls(PostgresDatabase.open(where))

    def close(self) -> None:
        """Close the catalogue."""
        self._database.close()

    def check(self) -> None:
        """Raise CatalogCorrupt where the catalogue is damaged, as far as that can be seen without reading all of it."""
        self._database.check()

    @property
    def damage(self) -> CatalogCorrupt | None:
        """What was found damaged, by any call. All calls raise it from then on."""
        return self._database.damage

    def read(self) -> AbstractContextManager[Transaction]:
        """Open a snapshot, for modules that keep tables of their own in the catalogue."""
        return self._database.read()

    def write(self, alone: bool = True, durable: bool = True, size: int = 0) -> AbstractContextManager[Transaction]:
        """Open a write transaction, for modules that keep tables of their own in the catalogue. Do not nest.

        See `Database.write`. A method that may meet a full disk is decorated with `again_with_room`.
        """
        return self._database.write(alone, durable, size)

    def copy(self, path: Path) -> None:
        """Write the present state of the catalogue to a new file. Writers are not blocked.

        Raises:
            OSError: The file cannot be written.
            ConfigError: The catalogue is not a file.
        """
        self._database.copy(path)

    def check_empty(self) -> None:
        """Raise InputError if there are documents, conversations or jobs."""
        with self.read() as transaction:
            copying.check_empty(transaction, self.name)

    def take_over(self, source: Catalog) -> None:
        """Copy everything of a catalogue in an SQLite file into this one, which is empty and in PostgreSQL.

        Raises:
            InputError: This catalogue is not empty, or a text has a character that PostgreSQL does not store.
        """
        with source.read() as reading, self.write() as writing:
            copying.check_empty(writing, self.name)
            copying.copy_rows(reading, writing)

    # Documents

    @again_with_room
    def put_document(
        self,
        version: DocumentVersion,
        claim: int | None = None,
        admit: Callable[[int, int], None] | None = None,
        precondition: Callable[[], None] | None = None,
    ) -> list[Key]:
        """Store a document with its chunks, vectors and KV keys, in place of its previous version.

        `admit` and `precondition` run inside the transaction. If one of them raises, nothing is changed.

        Args:
            version: What to store.
            claim: A claim on the version's keys. The transaction releases it.
            admit: Called with what the collection's other documents hold (`held`). Raises if there is no room.
            precondition: Called first. Raises if the version is not to be stored any more. It may read the catalogue;
                a write of another process happens before this call or after the whole transaction.

        Returns:
            The keys of the previous version that no chunk refers to any more.

        Raises:
            EmbedderChanged: The stored vectors come from another embedder.
        """
        document = version.document
        size = (
            _STORED_TIMES * len(document.text) + version.vectors.nbytes + sum(each.nbytes for each in version.segments)
        ) + 2 * len(document.file)
        with self.write(alone=False, size=size) as transaction:
            transaction.lock(f"collection {document.collection}")  # for its quota and for the order of its rows
            if precondition:
                precondition()
            table = embedders.place(transaction, document.collection, version.embedder)
            if admit:
                admit(*documents.held(transaction, document.collection, document.id))
            if claim is not None:
                claims.release(transaction, claim)
            row, old_keys = documents.upsert(transaction, version)
            chunks.insert(transaction, row, version, table)
            vectors.raise_generation(transaction, document.collection)
            return chunks.unreferenced(transaction, old_keys)

    @again_with_room
    def remove(self, collection: str, document_id: str) -> list[Key]:
        """Delete a document; return its KV keys that no chunk refers to any more. Raises NotFound."""
        with self.write() as transaction:
            old_keys = documents.remove(transaction, collection, document_id)
            vectors.raise_generation(transaction, collection)
            return chunks.unreferenced(transaction, old_keys)

    @again_with_room
    def clear(self, collection: str) -> list[Key]:
        """Delete all documents and conversations of a collection.

        Returns:
            The KV keys of its documents that no chunk refers to any more.

        Raises:
            NotFound: The collection has neither documents nor conversations.
        """
        with self.write() as transaction:
            old_keys, removed_documents = documents.clear(transaction, collection)
            removed_turns = turns.clear(transaction, collection)
            if not removed_documents and not removed_turns:
                raise NotFound(f"there is no collection {collection!r}")
            vectors.raise_generation(transaction, collection)
            return chunks.unreferenced(transaction, old_keys)

    def find(self, collection: str, document_id: str) -> DocumentInfo | None:
        """Return the document, or None if the collection does not have it."""
        with self.read() as transaction:
            return documents.find(transaction, collection, document_id)

    def readers(self, collection: str, ids: Iterable[str]) -> dict[str, str]:
        """Return which model read each of these documents (`DocumentInfo.reader`). Unknown documents are left out."""
        with self.read() as transaction:
            return documents.readers(transaction, collection, ids)

    def document_from(self, collection: str, path: str) -> str | None:
        """Return the id of the document that came from a file (`Document.source`), or None."""
        with self.read() as transaction:
            return sources.document_from(transaction, collection, path)

    @again_with_room
    def note_source(self, document: Document) -> None:
        """Record the file of a document whose content is there already."""
        with self.write(alone=False) as transaction:
            sources.note(transaction, document.collection, document.id, document.source)

    @again_with_room
    def keep_file(self, document: Document, admit: Callable[[int, int], None] | None = None) -> None:
        """Store the file of a document whose content is there already, unless it is stored. `admit`: see above."""
        with self.read() as transaction:
            if files.load(transaction, document.collection, document.id) == document.file:
                return
        with self.write(alone=False, size=2 * len(document.file)) as transaction:
            transaction.lock(f"collection {document.collection}")
            if admit:
                admit(*documents.held(transaction, document.collection, document.id))
            files.note(transaction, document.collection, document.id, document.file)

    def document(self, collection: str, document_id: str) -> DocumentInfo:
        """Return the document. Raises NotFound."""
        found = self.find(collection, document_id)
        if found is None:
            raise documents.not_found(collection, document_id)
        return found

    def original(self, collection: str, document_id: str) -> Document:
        """Return the document as the user sent it, with its text. Raises NotFound."""
        return self.info_and_original(collection, document_id)[1]

    def info_and_original(self, collection: str, document_id: str) -> tuple[DocumentInfo, Document]:
        """Return `document` and `original` of the same version. Raises NotFound."""
        with self.read() as transaction:
            return documents.original(transaction, collection, document_id)

    def with_file(self, collection: str, document_id: str) -> tuple[DocumentInfo, Document]:
        """Return `info_and_original` with the file, where one is kept. Raises NotFound."""
        with self.read() as transaction:
            info, document = documents.original(transaction, collection, document_id)
            return info, replace(document, file=files.load(transaction, collection, document_id))

    def documents(self, collection: str | None = None, order: DocumentOrder = ID_ORDER) -> list[DocumentInfo]:
        """Return the documents of one collection, or of all (None); by default ordered by (collection, id)."""
        with self.read() as transaction:
            return documents.all_documents(transaction, collection, order)

    def page(
        self,
        collection: str,
        after: tuple[str | float, str] | None,
        limit: int,
        filter: Filter | None = None,
        order: DocumentOrder = ID_ORDER,
    ) -> list[DocumentInfo]:
        """Return a page of the documents that match the filter.

        Args:
            collection: Collection to list.
            after: Return documents behind this place (`DocumentOrder.place`); None for the first page. The document
                that had this place need not exist any more.
            limit: Return at most so many documents.
            filter: What the metadata must contain; None for all documents.
            order: What to list, and in which order.
        """
        with self.read() as transaction:
            return documents.page(transaction, collection, after, limit, filter, order)

    def collections(self, prefix: str = "") -> list[CollectionInfo]:
        """Return the collections that have documents and whose names start with `prefix`, ordered by name."""
        with self.read() as transaction:
            return documents.collections(transaction, prefix)

    def count(self) -> tuple[int, int]:
        """Return (documents, chunks) of all collections."""
        with self.read() as transaction:
            return documents.count(transaction)

    def held(self, collection: str, without: str = "") -> tuple[int, int]:
        """Return (tokens of all chunks, bytes of all files) of a collection, except those of the document `without`."""
        with self.read() as transaction:
            return documents.held(transaction, collection, without)

    # Chunks

    def chunks(self, collection: str, rows: Iterable[int]) -> dict[int, Chunk]:
        """Return the chunks at these rows of a collection. Rows that no longer exist are left out."""
        with self.read() as transaction:
            return chunks.load(transaction, collection, rows)

    def standing(self, collection: str, rows: Iterable[int]) -> set[int]:
        """Return those of these rows whose chunks are still in the collection: not deleted and not replaced."""
        with self.read() as transaction:
            return chunks.standing(transaction, collection, rows)

    def has_chunks(self, collection: str) -> bool:
        """Whether a collection has any chunk."""
        with self.read() as transaction:
            return chunks.exist(transaction, collection)

    def chunks_of(self, collection: str, document_id: str) -> list[Chunk]:
        """Return the chunks of a document, in order. Raises NotFound."""
        with self.read() as transaction:
            found = chunks.of_document(transaction, collection, document_id)
        if not found:
            raise documents.not_found(collection, document_id)
        return found

    def chunk_page(self, collection: str, document_id: str, after: int, limit: int) -> tuple[DocumentInfo, list[Chunk]]:
        """Return a document and some of its chunks, of the same version.

        Args:
            collection: Collection of the document.
            document_id: Id of the document.
            after: Return chunks whose ordinal is greater than this one; -1 for the first page.
            limit: Return at most so many chunks.

        Raises:
            NotFound: The collection has no such document.
        """
        with self.read() as transaction:
            info = documents.find(transaction, collection, document_id)
            if info is None:
                raise documents.not_found(collection, document_id)
            return info, chunks.page(transaction, collection, document_id, after, limit)

    def token_counts(self, collection: str, ids: Iterable[str]) -> dict[str, list[int]]:
        """Return the tokens of each chunk of these documents, by document id. Unknown documents are left out."""
        with self.read() as transaction:
            return chunks.token_counts(transaction, collection, ids)

    def match(
        self,
        collection: str,
        text: str,
        limit: int,
        filter: Filter | None = None,
        documents: Sequence[str] | None = None,
        *,
        every: bool = False,
    ) -> list[tuple[int, float]]:
        """Search the full-text index.

        Args:
            collection: Collection to search.
            text: Any text; a chunk matches if it shares a word with it.
            limit: Return at most so many chunks.
            filter: Search only the documents that match the filter.
            documents: Search only the documents with these ids; None searches all.
            every: A chunk matches only if it has every word of a text of several.

        Returns:
            (chunk row, BM25 score) of the best chunks, best first.

        Raises:
            ConfigError: The catalogue has no word index.
        """
        if not self.has_words:
            raise ConfigError(f"the catalogue {self.name} has no word index; each process keeps its own")
        with self.read() as transaction:
            return full_text.match(transaction, collection, text, limit, filter, documents, every=every)

    def filtered_rows(
        self, collection: str, filter: Filter | None, documents: Sequence[str] | None = None
    ) -> tuple[int, NDArray[np.int64]]:
        """Return (generation, chunk rows [n] ascending) of the documents of a collection that match as in `match`."""
        with self.read() as transaction:
            generation = vectors.generations(transaction, collection)[0]
            return generation, attributes.rows(transaction, collection, filter, documents)

    def rebuild_full_text(self) -> None:
        """Rebuild the full-text index from the chunks, if there is one."""
        if not self.has_words:
            return
        with self.write() as transaction:
            full_text.rebuild(transaction)

    def keys(self) -> set[Key]:
        """Return the KV keys of all chunks. Any other entry of a KV store is an orphan."""
        with self.read() as transaction:
            return chunks.keys(transaction)

    def unreferenced(self, keys: Iterable[Key]) -> list[Key]:
        """Return those of these keys that no chunk of any collection refers to."""
        with self.read() as transaction:
            return chunks.unreferenced(transaction, keys)

    def iter_chunk_tokens(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (collection, token ids) of every chunk."""
        with self.read() as transaction:
            yield from chunks.tokens(transaction)

    # Claims (see claims.py)

    @again_with_room
    def claim(self, keys: Iterable[Key], fingerprint: str) -> int:
        """Protect the KV of these keys from removal until the claim is released.

        Args:
            keys: Keys of the KV that an ingest is about to store or to rely on.
            fingerprint: Fingerprint of the model that produces the KV.

        Returns:
            The id of the claim.
        """
        with self.write(alone=False, durable=False) as transaction:  # if it is lost, the KV is an orphan at most
            return claims.claim(transaction, keys, fingerprint)

    def renew(self, claim: int) -> None:
        """Keep a claim alive. A claim expires if it is not renewed for an hour."""
        with self.write(alone=False, durable=False) as transaction:
            claims.renew(transaction, claim)

    @again_with_room
    def release(self, claim: int) -> None:
        """Release a claim. KV of its keys that no chunk refers to may then be removed."""
        with self.write(alone=False) as transaction:
            claims.release(transaction, claim)

    @contextmanager
    def removing(
        self, keys: Iterable[Key], grace: float = GRACE_SECONDS, mine: int | None = None
    ) -> Iterator[set[Key]]:
        """Open a block in which the KV of unused keys can be removed safely.

        The block is a write transaction and blocks other writers, so pass about a hundred keys at a time.

        Args:
            keys: Candidates for removal.
            grace: Seconds after which a claim that was not renewed expires.
            mine: The caller's own claim, which does not protect the keys.

        Yields:
            Those of `keys` that no chunk refers to and no live claim names. This stays true until the block ends.
        """
        with self.write() as transaction:
            yield set(claims.unclaimed(transaction, keys, grace, mine))

    def drop_expired_claims(self, grace: float = GRACE_SECONDS) -> None:
        """Delete the claims that were not renewed for `grace` seconds."""
        with self.write() as transaction:
            claims.drop_expired(transaction, grace)

    def fingerprint(self) -> str | None:
        """Return the fingerprint of the model that ingested last, or None before the first ingest."""
        with self.read() as transaction:
            return claims.fingerprint(transaction)

    # Conversations (see turns.py)

    @again_with_room
    def add_turn(
        self, collection: str, conversation: str, after: Sequence[int], turn: StoredTurn, read: Iterable[int] = ()
    ) -> int | None:
        """Store a turn after the turns at the rows `after`.

        Args:
            collection: Collection of the conversation.
            conversation: Its name.
            after: Rows of its earlier turns.
            turn: What to store.
            read: Rows of all chunks that its answer was read from.

        Returns:
            The row of the new turn. None, and nothing is stored, if those turns were removed.

        Raises:
            Outdated: A chunk that the answer was read from is gone.
        """
        with self.write(alone=False) as transaction:
            return turns.add(transaction, collection, conversation, after, turn, frozenset(read))

    def turns(self, collection: str, conversation: str) -> list[StoredTurn]:
        """Return the turns of a conversation, in order; [] if there is no such conversation."""
        with self.read() as transaction:
            return turns.turns(transaction, collection, conversation)

    @again_with_room
    def remove_conversation(self, collection: str, conversation: str) -> None:
        """Delete a conversation and all its turns. Raises NotFound."""
        with self.write() as transaction:
            if not turns.remove(transaction, collection, conversation):
                raise NotFound(f"collection {collection!r} has no conversation {conversation!r}")

    @again_with_room
    def read_again(self, collection: str, document_ids: Sequence[str]) -> None:
        """Let the next ingest of these documents read them again, whatever model and chunk size have read them."""
        with self.write() as transaction:
            documents.read_again(transaction, collection, document_ids)

    # Price

    def hour_price(self) -> HourPrice | None:
        """Return what an hour of the machine costs, or None if nobody has told it."""
        with self.read() as transaction:
            return prices.find(transaction)

    @again_with_room
    def record_hour_price(self, price: HourPrice | None) -> None:
        """Record what an hour of the machine costs; None takes it back."""
        with self.write() as transaction:
            prices.record(transaction, price)

    # Vectors

    def embedder(self) -> EmbedderIdentity | None:
        """Return the embedder of the stored vectors, or None while there are none."""
        with self.read() as transaction:
            return embedders.recorded(transaction)

    def check_embedder(self, embedder: EmbedderIdentity) -> None:
        """Raise EmbedderChanged if the stored vectors come from another embedder and are not changed to this one."""
        with self.read() as transaction:
            embedders.check(transaction, embedder)

    def state(self, collection: str) -> tuple[EmbedderIdentity | None, int]:
        """Return (the embedder of a collection's vectors, its generation); None while there are no chunks at all."""
        with self.read() as transaction:
            return embedders.of_collection(transaction, collection), vectors.generations(transaction, collection)[0]

    def aim_embedder(self, embedder: EmbedderIdentity) -> Reembedding | None:
        """Begin or go on with the change of all vectors to an embedder; see embedders.py.

        Returns:
            How far the change is; None if all vectors come from this embedder.
        """
        with self.write() as transaction:
            embedders.aim(transaction, embedder)
            return embedders.progress(transaction)

    def reembedding(self) -> Reembedding | None:
        """Return how far the change to another embedder is, or None without one."""
        with self.read() as transaction:
            return embedders.progress(transaction)

    def stale_collections(self, embedder: EmbedderIdentity) -> list[str]:
        """Return the collections whose vectors come from another embedder, ordered by name."""
        with self.read() as transaction:
            return embedders.stale(transaction, embedder)

    def unembedded(self, collection: str, after: int, limit: int) -> list[Passage]:
        """Return the next `limit` chunks of a collection without a next vector whose row is greater than `after`."""
        with self.read() as transaction:
            return embedders.unembedded(transaction, collection, after, limit)

    def store_next_vectors(self, rows: Sequence[int], matrix: NDArray[np.float32], embedder: EmbedderIdentity) -> None:
        """Store next vectors [len(rows), dimension] of chunks. Raises EmbedderChanged if the change leads elsewhere."""
        with self.write() as transaction:
            embedders.store_next(transaction, rows, matrix, embedder)

    def swap_vectors(self, collection: str, embedder: EmbedderIdentity) -> bool:
        """Put the next vectors of a collection in the place of its present ones, if they are complete.

        Returns:
            Whether they were complete.

        Raises:
            EmbedderChanged: The change leads to another embedder now.
        """
        with self.write() as transaction:
            return vectors.swap(transaction, collection, embedder)

    def generation(self, collection: str) -> int:
        """Return the generation of a collection. It grows with every change and is 0 before the first."""
        with self.read() as transaction:
            return vectors.generations(transaction, collection)[0]

    def vectors(self, collection: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return (chunk rows [n] int64, vectors [n, dimension] float32) of a collection, ordered by row."""
        changes = self.changes(collection, np.empty(0, np.int64), 0)
        return changes.added, changes.vectors

    def vectors_of(self, rows: Iterable[int]) -> dict[int, NDArray[np.float32]]:
        """Return the vectors [dimension] of the chunks at these rows. Rows that no longer exist are left out."""
        with self.read() as transaction:
            return vectors.of_rows(transaction, rows)

    def segments_of(self, rows: Iterable[int], embedder: EmbedderIdentity) -> dict[int, NDArray[np.int8]]:
        """Return the segments [S, dimension] of chunks that this embedder made, by row. Others are left out."""
        with self.read() as transaction:
            return segments.load(transaction, rows, embedder)

    def store_segments(self, found: Mapping[int, NDArray[np.int8]], embedder: EmbedderIdentity) -> None:
        """Store the segments of chunks by row. Rows that no longer exist are left out."""
        with self.write(alone=False, durable=False) as transaction:
            segments.store(transaction, found, embedder)

    def changes(self, collection: str, known: NDArray[np.int64], since: int) -> Changes:
        """Return the changes that bring an index up to date.

        Args:
            collection: Collection of the index.
            known: Chunk rows that the index holds.
            since: Generation of the index.
        """
        with self.read() as transaction:
            return vectors.changes(transaction, collection, known, since)

    def passage_changes(
        self, collection: str, known: NDArray[np.int64], since: int, limit: int = 1000
    ) -> PassageChanges:
        """Return the changes that bring a word index up to date. Repeat it until the changes are complete.

        Args:
            collection: Collection of the index.
            known: Chunk rows that the index holds, ascending.
            since: Generation of the index; 0 for an empty one.
            limit: Return at most so many new chunks.
        """
        with self.read() as transaction:
            return feed.passage_changes(transaction, collection, known, since, limit)

    def generations(self) -> dict[str, int]:
        """Return the generation of every collection that was ever changed."""
        with self.read() as transaction:
            return feed.all_generations(transaction)

    def listener(self) -> ChangeListener:
        """Return what waits for changes of collections, whichever process makes them. Close it before the catalogue."""
        return ChangeListener(self._database.change_signal(), self.generations)

    # Vector search in PostgreSQL (see pgvector.py)

    def prepare_vector_search(self) -> None:
        """Let PostgreSQL search the vectors from now on. The first call copies them all.

        Raises:
            ConfigError: The catalogue is in SQLite, or the server does not have pgvector.
        """
        if self.has_words:
            raise ConfigError(
                f"RAGKV_VECTORS=pgvector needs a catalogue in PostgreSQL, {self.name} is a file",
                "set RAGKV_CATALOG, or RAGKV_VECTORS=faiss",
            )
        pgvector.prepare(self.write)

    def index_vectors(self, dimension: int) -> None:
        """Create the index of vectors of a dimension where it is missing. Raises ConfigError: there are too many."""
        with self.write() as transaction:
            pgvector.index(transaction, dimension)

    def count_vectors(self, collection: str, limit: int | None = None) -> int:
        """Return how many vectors of a collection PostgreSQL searches, or `limit` if there are more."""
        with self.read() as transaction:
            return pgvector.count(transaction, collection, limit)

    def nearest(
        self,
        collection: str,
        vector: NDArray[np.float32],
        limit: int,
        filter: Filter | None = None,
        documents: Sequence[str] | None = None,
    ) -> tuple[EmbedderIdentity | None, list[int]]:
        """Return the embedder of a collection, and the chunk rows nearest to a vector of it, nearest first.

        Args:
            collection: Collection to search.
            vector: What to search for, [dimension].
            limit: Return at most so many rows.
            filter: Search only the documents that match the filter.
            documents: Search only the documents with these ids; None searches all.
        """
        with self.read() as transaction:
            identity = embedders.of_collection(transaction, collection)
            return identity, pgvector.nearest(transaction, vector, limit, collection, filter, documents)

    def passages(self, after: int = 0, limit: int = 1000) -> list[Passage]:
        """Return the next `limit` chunks of all collections whose row is greater than `after`, ordered by row.

        Reindexing embeds them again.
        """
        with self.read() as transaction:
            return chunks.passages(transaction, after, limit)

    def replace_vectors(self, rows: Sequence[int], matrix: NDArray[np.float32], embedder: EmbedderIdentity) -> None:
        """Replace the vectors of all chunks in one transaction.

        Args:
            rows: Rows of all chunks, ascending.
            matrix: Their new vectors, [len(rows), dimension].
            embedder: The embedder that produced the vectors.

        Raises:
            InputError: Chunks were added or removed since `rows` were read.
        """
        if matrix.shape != (len(rows), embedder.dimension):
            raise ValueError(f"{len(rows)} rows and vectors {matrix.shape} do not belong together")
        with self.write() as transaction:
            vectors.replace(transaction, rows, matrix, embedder)
