"""Catalog: what the service holds and where it came from. SQLite is the truth; every index is built from it.

A change of a collection happens in one transaction and raises its generation, so a view knows when it is out of date.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import attributes, claims, documents, turns, vectors
from ragkv.catalog import full_text as words
from ragkv.catalog.database import Database
from ragkv.catalog.models import Changes, CollectionInfo, DocumentInfo, EmbedderIdentity, Passage, StoredTurn
from ragkv.errors import NotFound
from ragkv.types import Chunk, Document, Filter, Key

_CHUNK = "chunks.row, documents.id, chunks.ordinal, chunks.title, chunks.text, chunks.tokens"
_CHUNKS = f"SELECT {_CHUNK} FROM chunks JOIN documents ON documents.row = chunks.document"
_THESE = "(SELECT value FROM json_each(?))"


class Catalog:
    """Documents, chunks, vectors, conversations of all collections. Thread-safe: see Database.

    Any method may raise StoreFull (no room; nothing was changed), StoreUnavailable (locked by another process) and
    CatalogCorrupt.
    """

    def __init__(self, database: Database):
        self._database = database

    @classmethod
    def open(cls, path: Path) -> Catalog:
        """Open or create. Raises CatalogCorrupt when the file is damaged, ConfigError when it is not ours."""
        return cls(Database.open(path))

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def read(self) -> AbstractContextManager[sqlite3.Connection]:
        """A snapshot, for the rooms that keep tables of their own here."""
        return self._database.read()

    def write(self) -> AbstractContextManager[sqlite3.Connection]:
        """A transaction, for the rooms that keep tables of their own here. Do not nest."""
        return self._database.write()

    # Documents

    def put_document(
        self,
        document: Document,
        content_hash: str,
        chunks: Sequence[Chunk],
        matrix: NDArray[np.float32],
        keys: Sequence[Key],
        embedder: EmbedderIdentity,
        reader: str = "",
        claim: int | None = None,
        admit: Callable[[int], None] | None = None,
        wanted: Callable[[], None] | None = None,
    ) -> list[Key]:
        """Store a document in place of its old version: chunks, their vectors (matrix [n, dimension]) and KV keys.

        claim: one on `keys`, released with this · admit: told the tokens of the collection's other documents · wanted:
        asked inside the transaction, so that what others write comes before it or after all of it; it may read. What
        one of the two raises leaves everything as it was. Returns the keys of the old version that no chunk refers to
        any more. Raises EmbedderChanged.
        """
        if len(keys) != len(chunks) or matrix.shape != (len(chunks), embedder.dimension):
            raise ValueError(f"{len(chunks)} chunks, {len(keys)} keys, vectors {matrix.shape} do not belong together")
        facts = (content_hash, reader, len(chunks), sum(len(c.tokens) for c in chunks))
        with self.write() as connection:
            if wanted:
                wanted()
            vectors.claim(connection, embedder)
            if admit:
                admit(documents.tokens(connection, document.collection, document.id))
            if claim is not None:
                claims.release(connection, claim)
            row, old = documents.put(connection, document, facts)
            documents.fill(connection, row, document.collection, chunks, np.ascontiguousarray(matrix, np.float32), keys)
            vectors.advance(connection, document.collection)
            return documents.unreferenced(connection, old)

    def remove(self, collection: str, document_id: str) -> list[Key]:
        """Forget a document. Returns the keys that no chunk refers to any more. Raises NotFound."""
        with self.write() as connection:
            old = documents.remove(connection, collection, document_id)
            vectors.advance(connection, collection)
            return documents.unreferenced(connection, old)

    def clear(self, collection: str) -> list[Key]:
        """Forget all documents and conversations of a collection. Returns the keys that no chunk refers to any more;
        those of the documents, [] where there were none. Raises NotFound where there was nothing."""
        with self.write() as connection:
            old, removed = documents.clear(connection, collection)
            said = turns.clear(connection, collection)
            if not removed and not said:
                raise NotFound(f"there is no collection {collection!r}")
            vectors.advance(connection, collection)
            return documents.unreferenced(connection, old)

    def find(self, collection: str, document_id: str) -> DocumentInfo | None:
        """The document, or None."""
        with self.read() as connection:
            return documents.find(connection, collection, document_id)

    def document(self, collection: str, document_id: str) -> DocumentInfo:
        """The document. Raises NotFound."""
        found = self.find(collection, document_id)
        if found is None:
            raise documents.no_document(collection, document_id)
        return found

    def created(self, collection: str, ids: Iterable[str]) -> dict[str, float]:
        """When those of these documents of a collection came that are there, in Unix seconds; a new version of one is
        no new document."""
        with self.read() as connection:
            return documents.created(connection, collection, ids)

    def original(self, collection: str, document_id: str) -> Document:
        """The document as it was given, text included. Raises NotFound."""
        return self.whole(collection, document_id)[1]

    def whole(self, collection: str, document_id: str) -> tuple[DocumentInfo, Document]:
        """What is known of the document, and what was given, of the same version. Raises NotFound."""
        with self.read() as connection:
            found = documents.find(connection, collection, document_id)
            if found is None:
                raise documents.no_document(collection, document_id)
            text = documents.text(connection, collection, document_id)
        return found, Document(document_id, found.title, text, found.metadata, collection)

    def documents(self, collection: str | None = None) -> list[DocumentInfo]:
        """Documents of one collection, or of all (None), ordered by (collection, id)."""
        with self.read() as connection:
            return documents.listed(connection, collection)

    def page(self, collection: str, after: str, limit: int, wanted: Filter | None = None) -> list[DocumentInfo]:
        """The next `limit` documents of a collection beyond the id `after`, by id, of those that `wanted` describes.

        Raises InputError for what is no filter.
        """
        with self.read() as connection:
            return documents.page(connection, collection, after, limit, wanted)

    def collections(self, prefix: str = "") -> list[CollectionInfo]:
        """The collections that have documents and whose names begin with `prefix`, by name."""
        with self.read() as connection:
            return documents.collections(connection, prefix)

    def count(self) -> tuple[int, int]:
        """(documents, chunks) of all collections."""
        with self.read() as connection:
            documents, chunks = connection.execute("SELECT count(*), total(chunks) FROM documents").fetchone()
        return documents, int(chunks)

    def tokens(self, collection: str, without: str = "") -> int:
        """Tokens of all chunks of a collection, but for those of the document `without`."""
        with self.read() as connection:
            return documents.tokens(connection, collection, without)

    def copy(self, path: Path) -> None:
        """Write the catalogue as it is now to a new file, while others go on writing. Raises OSError."""
        self._database.copy(path)

    # Chunks

    def chunks(self, collection: str, rows: Iterable[int]) -> dict[int, Chunk]:
        """The chunks at these rows of the collection; those that are gone are left out."""
        sql = f"{_CHUNKS} WHERE chunks.collection = ? AND chunks.row IN {_THESE}"
        with self.read() as connection:
            found = connection.execute(sql, (collection, json.dumps([int(row) for row in rows]))).fetchall()
        return {row[0]: _chunk(row) for row in found}

    def chunks_of(self, collection: str, document_id: str) -> list[Chunk]:
        """The chunks of a document, in order. Raises NotFound."""
        sql = f"{_CHUNKS} WHERE documents.collection = ? AND documents.id = ? ORDER BY chunks.ordinal"
        with self.read() as connection:
            found = connection.execute(sql, (collection, document_id)).fetchall()
        if not found:
            raise documents.no_document(collection, document_id)
        return [_chunk(row) for row in found]

    def match(self, collection: str, text: str, limit: int, wanted: Filter | None = None) -> list[tuple[int, float]]:
        """[(chunk row, BM25 score)] of the chunks sharing a word with `text`, best first. Any text is safe.

        wanted: only chunks of documents it describes. Raises InputError for what is no filter.
        """
        with self.read() as connection:
            return words.match(connection, collection, text, limit, wanted)

    def among(self, collection: str, wanted: Filter) -> tuple[int, NDArray[np.int64]]:
        """(generation, chunk rows [n], ascending) of the documents of a collection that `wanted` describes.

        Raises InputError for what is no filter.
        """
        with self.read() as connection:
            return vectors.generations(connection, collection)[0], attributes.rows(connection, collection, wanted)

    def rebuild_words(self) -> None:
        """Make the full-text view anew from the chunks."""
        with self.write() as connection:
            words.rebuild(connection)

    def keys(self) -> set[Key]:
        """KV keys of every chunk; what a store holds beyond them is an orphan."""
        with self.read() as connection:
            return {Key(row[0]) for row in connection.execute("SELECT DISTINCT key FROM chunks")}

    def contents(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(collection, tokens) of every chunk."""
        with self.read() as connection:
            for collection, tokens in connection.execute("SELECT collection, tokens FROM chunks"):
                yield collection, _ids(tokens)

    # Claims (see claims.py)

    def claim(self, keys: Iterable[Key], fingerprint: str) -> int:
        """Nobody removes the KV of these keys until the claim is released; fingerprint: of the model that makes it."""
        with self.write() as connection:
            return claims.claim(connection, keys, fingerprint)

    def renew(self, claim: int) -> None:
        """Say that the claim is still needed. One that was not renewed for an hour counts no more."""
        with self.write() as connection:
            claims.renew(connection, claim)

    def release(self, claim: int) -> None:
        """Let others remove KV of the claimed keys that no chunk refers to."""
        with self.write() as connection:
            claims.release(connection, claim)

    @contextmanager
    def removing(
        self, keys: Iterable[Key], grace: float = claims.GRACE_SECONDS, mine: int | None = None
    ) -> Iterator[set[Key]]:
        """Those of `keys` that no chunk refers to and no claim but `mine` names; that stays so until the block ends.

        Inside it their KV can be removed. Other writers wait: a hundred keys at a time.
        """
        with self.write() as connection:
            yield set(claims.free(connection, keys, grace, mine))

    def forget_claims(self, grace: float = claims.GRACE_SECONDS) -> None:
        """Drop the claims that were not renewed for `grace` seconds."""
        with self.write() as connection:
            claims.forget(connection, grace)

    def fingerprint(self) -> str | None:
        """Of the model that ingested last; None before the first."""
        with self.read() as connection:
            return claims.fingerprint(connection)

    # Conversations (see turns.py)

    def add_turn(self, collection: str, conversation: str, after: Sequence[int], turn: StoredTurn) -> int | None:
        """Store a turn behind the turns at rows `after`; returns its row, None where those are gone: then nothing is
        stored."""
        with self.write() as connection:
            return turns.add(connection, collection, conversation, after, turn)

    def turns(self, collection: str, conversation: str) -> list[StoredTurn]:
        """The turns of a conversation, in order; [] where there is none."""
        with self.read() as connection:
            return turns.turns(connection, collection, conversation)

    def remove_conversation(self, collection: str, conversation: str) -> None:
        """Forget a conversation and all its turns. Raises NotFound."""
        with self.write() as connection:
            if not turns.remove(connection, collection, conversation):
                raise NotFound(f"collection {collection!r} has no conversation {conversation!r}")

    # Vectors

    def embedder(self) -> EmbedderIdentity | None:
        """What made the stored vectors; None while there are none."""
        with self.read() as connection:
            return vectors.embedder(connection)

    def check_embedder(self, embedder: EmbedderIdentity) -> None:
        """Raises EmbedderChanged when the stored vectors come from another model."""
        vectors.check(self.embedder(), embedder)

    def generation(self, collection: str) -> int:
        """Grows with every change of the collection; 0: never changed."""
        with self.read() as connection:
            return vectors.generations(connection, collection)[0]

    def vectors(self, collection: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(chunk rows [n] int64, vectors [n, dimension] float32) of a collection, by row."""
        changes = self.changes(collection, np.empty(0, np.int64), 0)
        return changes.added, changes.vectors

    def changes(self, collection: str, known: NDArray[np.int64], since: int) -> Changes:
        """What to take from and add to the rows `known` at generation `since` to have the collection as it is now."""
        with self.read() as connection:
            return vectors.changes(connection, collection, known, since)

    def passages(self, after: int = 0, limit: int = 1000) -> list[Passage]:
        """Chunks of all collections by row, from beyond row `after`: what reindexing embeds again."""
        with self.read() as connection:
            sql = "SELECT row, title, text FROM chunks WHERE row > ? ORDER BY row LIMIT ?"
            return [Passage(*row) for row in connection.execute(sql, (after, limit))]

    def replace_vectors(self, rows: Sequence[int], matrix: NDArray[np.float32], embedder: EmbedderIdentity) -> None:
        """Swap the vectors of all chunks at once. rows: every chunk, ascending · matrix [len(rows), dimension].

        Raises InputError when chunks came or went since `rows` were read.
        """
        if matrix.shape != (len(rows), embedder.dimension):
            raise ValueError(f"{len(rows)} rows and vectors {matrix.shape} do not belong together")
        with self.write() as connection:
            vectors.replace(connection, rows, matrix, embedder)


def _chunk(row: Sequence[Any]) -> Chunk:
    _, document_id, ordinal, title, text, tokens = row
    return Chunk(f"{document_id}#{ordinal}", document_id, ordinal, title, text, _ids(tokens))


def _ids(tokens: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(tokens, "<i4").tolist())
