"""Queries on documents.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ragkv.catalog import attributes, versions
from ragkv.catalog.models import ID_ORDER, CollectionInfo, DocumentInfo, DocumentOrder, DocumentVersion
from ragkv.errors import NotFound
from ragkv.types import Filter, Key

_INFO = (
    "collection, id, title, metadata, content_hash, reader, chunks, tokens, created, updated,"
    " ifnull(versions.number, 1), ifnull(versions.bytes, 0)"
)
_FROM = "FROM documents LEFT JOIN versions ON versions.document = documents.row"


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
        versions.set_pages(connection, row, document.pages)
        return row, old_keys
    inserted = connection.execute(
        "INSERT INTO documents (content_hash, reader, chunks, tokens, updated, title, metadata, text,"
        " collection, id, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING row",
        (*columns, document.collection, document.id, now),
    )
    row = inserted.fetchone()[0]
    versions.set_pages(connection, row, document.pages)
    return row, old_keys


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
    sql = f"SELECT {_INFO} {_FROM} WHERE collection = ? AND id = ?"
    row = connection.execute(sql, (collection, document_id)).fetchone()
    return _info(row) if row else None


def creation_times(connection: sqlite3.Connection, collection: str, ids: Iterable[str]) -> dict[str, float]:
    """Return when each of these documents was created. Documents that do not exist are left out."""
    sql = "SELECT id, created FROM documents WHERE collection = ? AND id IN (SELECT value FROM json_each(?))"
    return dict(connection.execute(sql, (collection, json.dumps(list(ids)))))


def text_and_pages(
    connection: sqlite3.Connection, collection: str, document_id: str
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the text of a document that exists, and its pages (see `Document.pages`)."""
    sql = f"SELECT text, ifnull(versions.pages, '[]') {_FROM} WHERE collection = ? AND id = ?"
    text, pages = connection.execute(sql, (collection, document_id)).fetchone()
    return str(text), tuple((offset, number) for offset, number in json.loads(pages))


def all_documents(
    connection: sqlite3.Connection, collection: str | None, order: DocumentOrder = ID_ORDER
) -> list[DocumentInfo]:
    """Return the documents of one collection, or of all (None), in this order; by default by (collection, id)."""
    where, parameters = ("WHERE collection = ?", (collection,)) if collection is not None else ("WHERE TRUE", ())
    matching, words = _word_condition(connection, order.words)
    direction = "DESC" if order.descending else "ASC"
    first = "collection" if order.sort == "id" else f"{order.sort} {direction}, collection"
    sql = f"SELECT {_INFO} {_FROM} {where} AND {matching} ORDER BY {first}, id {direction}"
    return [_info(row) for row in connection.execute(sql, (*parameters, *words))]


def page(
    connection: sqlite3.Connection,
    collection: str,
    after: tuple[str | float, str] | None,
    limit: int,
    filter: Filter | None,
    order: DocumentOrder = ID_ORDER,
) -> list[DocumentInfo]:
    """Return the next `limit` matching documents behind `after`, which is (sort value, id) of a document."""
    condition, parameters = attributes.condition(collection, filter, "row")
    matching, words = _word_condition(connection, order.words)
    direction, behind = ("DESC", "<") if order.descending else ("ASC", ">")
    columns = ("id",) if order.sort == "id" else (order.sort, "id")
    place, values = "TRUE", tuple[str | float, ...]()
    if after is not None:
        place, values = f"({', '.join(columns)}) {behind} ({', '.join('?' * len(columns))})", after[-len(columns) :]
    sql = (
        f"SELECT {_INFO} {_FROM} WHERE collection = ? AND {place} AND {condition} AND {matching}"
        f" ORDER BY {', '.join(f'{column} {direction}' for column in columns)} LIMIT ?"
    )
    return [_info(row) for row in connection.execute(sql, (collection, *values, *parameters, *words, limit))]


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


def _word_condition(connection: sqlite3.Connection, words: str) -> tuple[str, tuple[str, ...]]:
    """Return an SQL condition for documents whose id or title contains all words, and its parameters."""
    if not words.strip():
        return "TRUE", ()
    connection.create_function("ragkv_matches", 2, _matches, deterministic=True)  # LIKE folds ASCII letters only
    return "ragkv_matches(id || char(10) || title, ?)", (words,)


def _matches(text: str, words: str) -> bool:
    """Whether every word occurs in the text, in any case."""
    folded = text.casefold()
    return all(word in folded for word in words.casefold().split())


def _info(row: Sequence[Any]) -> DocumentInfo:
    collection, document_id, title, metadata, *rest = row
    return DocumentInfo(collection, document_id, title, json.loads(metadata), *rest)
