"""Queries on documents.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ragkv.catalog import attributes
from ragkv.catalog.models import CollectionInfo, DocumentInfo, DocumentVersion
from ragkv.errors import NotFound
from ragkv.types import Filter, Key

_INFO = "collection, id, title, metadata, content_hash, reader, chunks, tokens, created, updated"


def upsert(connection: sqlite3.Connection, version: DocumentVersion) -> tuple[int, list[Key]]:
    """Store a document without its chunks, and delete the chunks of its previous version.

    Returns:
        The row of the document, and the KV keys of the deleted chunks.
    """
    document = version.document
    row, old_keys = _delete_chunks(connection, document.collection, document.id)
    now = time.time()
    columns = (
        *(version.content_hash, version.reader, len(version.chunks), version.tokens, now, document.title),
        *(json.dumps(dict(document.metadata), ensure_ascii=False), document.text),
    )
    if row is not None:
        connection.execute(
            "UPDATE documents SET content_hash = ?, reader = ?, chunks = ?, tokens = ?, updated = ?, title = ?,"
            " metadata = ?, text = ? WHERE row = ?",
            (*columns, row),
        )
        return row, old_keys
    inserted = connection.execute(
        "INSERT INTO documents (content_hash, reader, chunks, tokens, updated, title, metadata, text,"
        " collection, id, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING row",
        (*columns, document.collection, document.id, now),
    )
    return inserted.fetchone()[0], old_keys


def remove(connection: sqlite3.Connection, collection: str, document_id: str) -> list[Key]:
    """Delete a document and return the KV keys of its chunks.

    Raises:
        NotFound: The collection has no such document.
    """
    row, keys = _delete_chunks(connection, collection, document_id)
    if row is None:
        raise not_found(collection, document_id)
    connection.execute("DELETE FROM documents WHERE row = ?", (row,))
    return keys


def clear(connection: sqlite3.Connection, collection: str) -> tuple[list[Key], int]:
    """Delete all documents of a collection; return (the KV keys of their chunks, the number of documents)."""
    found = connection.execute("SELECT DISTINCT key FROM chunks WHERE collection = ?", (collection,))
    keys = [Key(key) for (key,) in found]
    connection.execute("DELETE FROM chunks WHERE collection = ?", (collection,))
    return keys, connection.execute("DELETE FROM documents WHERE collection = ?", (collection,)).rowcount


def find(connection: sqlite3.Connection, collection: str, document_id: str) -> DocumentInfo | None:
    """Return the document, or None if the collection does not have it."""
    sql = f"SELECT {_INFO} FROM documents WHERE collection = ? AND id = ?"
    row = connection.execute(sql, (collection, document_id)).fetchone()
    return _info(row) if row else None


def creation_times(connection: sqlite3.Connection, collection: str, ids: Iterable[str]) -> dict[str, float]:
    """Return when each of these documents was created. Documents that do not exist are left out."""
    sql = "SELECT id, created FROM documents WHERE collection = ? AND id IN (SELECT value FROM json_each(?))"
    return dict(connection.execute(sql, (collection, json.dumps(list(ids)))))


def text(connection: sqlite3.Connection, collection: str, document_id: str) -> str:
    """Return the text of a document that exists."""
    sql = "SELECT text FROM documents WHERE collection = ? AND id = ?"
    return str(connection.execute(sql, (collection, document_id)).fetchone()[0])


def all_documents(connection: sqlite3.Connection, collection: str | None) -> list[DocumentInfo]:
    """Return the documents of one collection, or of all (None), ordered by (collection, id)."""
    where, parameters = ("WHERE collection = ?", (collection,)) if collection is not None else ("", ())
    found = connection.execute(f"SELECT {_INFO} FROM documents {where} ORDER BY collection, id", parameters)
    return [_info(row) for row in found]


def page(
    connection: sqlite3.Connection, collection: str, after: str, limit: int, filter: Filter | None
) -> list[DocumentInfo]:
    """Return the next `limit` matching documents whose id is greater than `after`, ordered by id."""
    condition, parameters = attributes.condition(collection, filter, "row")
    sql = f"SELECT {_INFO} FROM documents WHERE collection = ? AND id > ? AND {condition} ORDER BY id LIMIT ?"
    return [_info(row) for row in connection.execute(sql, (collection, after, *parameters, limit))]


def collections(connection: sqlite3.Connection, prefix: str) -> list[CollectionInfo]:
    """Return the collections that have documents and whose names start with `prefix`, ordered by name."""
    sql = (
        "SELECT collection, count(*), total(chunks), total(tokens) FROM documents"
        " WHERE substr(collection, 1, length(?)) = ? GROUP BY collection ORDER BY collection"
    )
    found = connection.execute(sql, (prefix, prefix))
    return [CollectionInfo(name, documents, int(chunks), int(tokens)) for name, documents, chunks, tokens in found]


def count(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return (documents, chunks) of all collections."""
    documents, chunks = connection.execute("SELECT count(*), total(chunks) FROM documents").fetchone()
    return documents, int(chunks)


def tokens(connection: sqlite3.Connection, collection: str, without: str) -> int:
    """Return the number of tokens of all chunks of a collection, except those of the document `without`."""
    sql = "SELECT total(tokens) FROM documents WHERE collection = ? AND id != ?"
    return int(connection.execute(sql, (collection, without)).fetchone()[0])


def not_found(collection: str, document_id: str) -> NotFound:
    """Return the error that says that the collection has no such document."""
    return NotFound(f"collection {collection!r} has no document {document_id!r}")


def _delete_chunks(connection: sqlite3.Connection, collection: str, document_id: str) -> tuple[int | None, list[Key]]:
    """Delete the chunks of a document; return (its row, or None if there is no such document; the chunks' KV keys)."""
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
