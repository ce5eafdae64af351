"""Documents and their chunks, in the catalogue.

These functions run inside a transaction of the caller.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import attributes
from ragkv.catalog.models import CollectionInfo, DocumentInfo
from ragkv.errors import NotFound
from ragkv.types import Chunk, Document, Filter, Key

_INFO = "collection, id, title, metadata, content_hash, reader, chunks, tokens, created, updated"


def put(connection: sqlite3.Connection, document: Document, facts: tuple[str, str, int, int]) -> tuple[int, list[Key]]:
    """Store a document, without chunks. facts: (content hash, reader, chunks, tokens).

    Returns its row, and the keys of the chunks it had; those are deleted.
    """
    row, old = _take_chunks(connection, document.collection, document.id)
    now = time.time()
    body = (json.dumps(dict(document.metadata), ensure_ascii=False), document.text)
    if row is not None:
        connection.execute(
            "UPDATE documents SET content_hash = ?, reader = ?, chunks = ?, tokens = ?, updated = ?, title = ?,"
            " metadata = ?, text = ? WHERE row = ?",
            (*facts, now, document.title, *body, row),
        )
        return row, old
    added = connection.execute(
        "INSERT INTO documents (content_hash, reader, chunks, tokens, updated, title, metadata, text,"
        " collection, id, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING row",
        (*facts, now, document.title, *body, document.collection, document.id, now),
    )
    return added.fetchone()[0], old


def fill(
    connection: sqlite3.Connection,
    document: int,
    collection: str,
    chunks: Sequence[Chunk],
    matrix: NDArray[np.float32],
    keys: Sequence[Key],
) -> None:
    """Give the document at a row its chunks, their vectors and their keys, all in the same order."""
    for chunk, vector, key in zip(chunks, matrix, keys, strict=True):
        tokens = np.asarray(chunk.tokens, dtype="<i4").tobytes()
        added = connection.execute(
            "INSERT INTO chunks (document, collection, ordinal, key, title, text, tokens) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (document, collection, chunk.ordinal, key, chunk.title, chunk.text, tokens),
        )
        connection.execute("INSERT INTO vectors VALUES (?, ?)", (added.lastrowid, vector.tobytes()))


def remove(connection: sqlite3.Connection, collection: str, document_id: str) -> list[Key]:
    """Delete a document; returns the keys of its chunks. Raises NotFound."""
    row, old = _take_chunks(connection, collection, document_id)
    if row is None:
        raise no_document(collection, document_id)
    connection.execute("DELETE FROM documents WHERE row = ?", (row,))
    return old


def clear(connection: sqlite3.Connection, collection: str) -> tuple[list[Key], int]:
    """Delete all documents of a collection; returns (the keys of their chunks, how many documents there were)."""
    found = connection.execute("SELECT DISTINCT key FROM chunks WHERE collection = ?", (collection,))
    keys = [Key(key) for (key,) in found]
    connection.execute("DELETE FROM chunks WHERE collection = ?", (collection,))
    return keys, connection.execute("DELETE FROM documents WHERE collection = ?", (collection,)).rowcount


def unreferenced(connection: sqlite3.Connection, keys: Iterable[Key]) -> list[Key]:
    """Those of `keys` that no chunk refers to."""
    sql = "SELECT DISTINCT value FROM json_each(?) WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE key = value)"
    return [Key(key) for (key,) in connection.execute(sql, (json.dumps(list(keys)),))]


def find(connection: sqlite3.Connection, collection: str, document_id: str) -> DocumentInfo | None:
    """The document, or None."""
    sql = f"SELECT {_INFO} FROM documents WHERE collection = ? AND id = ?"
    row = connection.execute(sql, (collection, document_id)).fetchone()
    return _info(row) if row else None


def created(connection: sqlite3.Connection, collection: str, ids: Iterable[str]) -> dict[str, float]:
    """When those of the documents came that are there."""
    sql = "SELECT id, created FROM documents WHERE collection = ? AND id IN (SELECT value FROM json_each(?))"
    return dict(connection.execute(sql, (collection, json.dumps(list(ids)))))


def text(connection: sqlite3.Connection, collection: str, document_id: str) -> str:
    """Text of a document that is there."""
    sql = "SELECT text FROM documents WHERE collection = ? AND id = ?"
    return str(connection.execute(sql, (collection, document_id)).fetchone()[0])


def listed(connection: sqlite3.Connection, collection: str | None) -> list[DocumentInfo]:
    """Documents of one collection, or of all (None), ordered by (collection, id)."""
    where, arguments = ("WHERE collection = ?", (collection,)) if collection is not None else ("", ())
    found = connection.execute(f"SELECT {_INFO} FROM documents {where} ORDER BY collection, id", arguments)
    return [_info(row) for row in found]


def page(
    connection: sqlite3.Connection, collection: str, after: str, limit: int, wanted: Filter | None
) -> list[DocumentInfo]:
    """The next `limit` documents beyond the id `after`, by id, of those that `wanted` describes."""
    condition, values = attributes.condition(collection, wanted, "row")
    sql = f"SELECT {_INFO} FROM documents WHERE collection = ? AND id > ? AND {condition} ORDER BY id LIMIT ?"
    return [_info(row) for row in connection.execute(sql, (collection, after, *values, limit))]


def collections(connection: sqlite3.Connection, prefix: str) -> list[CollectionInfo]:
    """The collections that have documents and whose names begin with `prefix`, by name."""
    sql = (
        "SELECT collection, count(*), total(chunks), total(tokens) FROM documents"
        " WHERE substr(collection, 1, length(?)) = ? GROUP BY collection ORDER BY collection"
    )
    found = connection.execute(sql, (prefix, prefix))
    return [CollectionInfo(name, documents, int(chunks), int(tokens)) for name, documents, chunks, tokens in found]


def tokens(connection: sqlite3.Connection, collection: str, without: str) -> int:
    """Tokens of all chunks of a collection, but for those of the document `without`."""
    sql = "SELECT total(tokens) FROM documents WHERE collection = ? AND id != ?"
    return int(connection.execute(sql, (collection, without)).fetchone()[0])


def no_document(collection: str, document_id: str) -> NotFound:
    """The fault that there is no such document."""
    return NotFound(f"collection {collection!r} has no document {document_id!r}")


def _take_chunks(connection: sqlite3.Connection, collection: str, document_id: str) -> tuple[int | None, list[Key]]:
    """(row of the document or None, keys its chunks had); the chunks are deleted."""
    sql = "SELECT row FROM documents WHERE collection = ? AND id = ?"
    found = connection.execute(sql, (collection, document_id)).fetchone()
    if found is None:
        return None, []
    keys = [Key(key) for (key,) in connection.execute("SELECT key FROM chunks WHERE document = ?", found)]
    connection.execute("DELETE FROM chunks WHERE document = ?", found)
    return found[0], keys


def _info(row: Sequence[Any]) -> DocumentInfo:
    collection, document_id, title, metadata, *rest = row
    return DocumentInfo(collection, document_id, title, json.loads(metadata), *rest)
