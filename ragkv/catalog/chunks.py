"""Queries on chunks and the KV keys that they refer to.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ragkv.catalog import spans
from ragkv.catalog.embedders import VectorTable
from ragkv.catalog.models import DocumentVersion, Passage
from ragkv.types import Chunk, Key, TextSpan

_COLUMNS = (
    "chunks.row, documents.id, chunks.ordinal, chunks.title, chunks.text, chunks.tokens,"
    " ifnull(versions.number, 1), spans.start, spans.stop, spans.heading, spans.page"
)
# LEFT JOIN: an older release that writes to the same file leaves spans out.
_SELECT = (
    f"SELECT {_COLUMNS} FROM chunks JOIN documents ON documents.row = chunks.document"
    " LEFT JOIN versions ON versions.document = documents.row LEFT JOIN spans ON spans.chunk = chunks.row"
)


def insert(connection: sqlite3.Connection, document: int, version: DocumentVersion, table: VectorTable) -> None:
    """Insert the chunks of a document, with their vectors and keys.

    Args:
        connection: The transaction.
        document: Row of the document.
        version: What to insert.
        table: Where the vectors belong.
    """
    collection, vectors = version.document.collection, np.ascontiguousarray(version.vectors, np.float32)
    for chunk, vector, key in zip(version.chunks, vectors, version.keys, strict=True):
        tokens = np.asarray(chunk.tokens, dtype="<i4").tobytes()
        inserted = connection.execute(
            "INSERT INTO chunks (document, collection, ordinal, key, title, text, tokens) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (document, collection, chunk.ordinal, key, chunk.title, chunk.text, tokens),
        )
        row = inserted.lastrowid
        assert row is not None  # sqlite3 types lastrowid as optional because of statements that insert nothing
        connection.execute(f"INSERT INTO {table} VALUES (?, ?)", (row, vector.tobytes()))
        spans.insert(connection, row, chunk.span)


def load(connection: sqlite3.Connection, collection: str, rows: Iterable[int]) -> dict[int, Chunk]:
    """Return the chunks at these rows of a collection. Rows that no longer exist are left out."""
    sql = f"{_SELECT} WHERE chunks.collection = ? AND chunks.row IN (SELECT value FROM json_each(?))"
    found = connection.execute(sql, (collection, json.dumps([int(row) for row in rows])))
    return {row[0]: _chunk(row) for row in found}


def exist(connection: sqlite3.Connection, collection: str) -> bool:
    """Whether a collection has any chunk."""
    sql = "SELECT EXISTS (SELECT 1 FROM chunks WHERE collection = ?)"
    return bool(connection.execute(sql, (collection,)).fetchone()[0])


def of_document(connection: sqlite3.Connection, collection: str, document_id: str) -> list[Chunk]:
    """Return the chunks of a document, in order; [] if there is no such document."""
    sql = f"{_SELECT} WHERE documents.collection = ? AND documents.id = ? ORDER BY chunks.ordinal"
    return [_chunk(row) for row in connection.execute(sql, (collection, document_id))]


def page(connection: sqlite3.Connection, collection: str, document_id: str, after: int, limit: int) -> list[Chunk]:
    """Return the next `limit` chunks of a document whose ordinal is greater than `after`, in order."""
    where = "WHERE documents.collection = ? AND documents.id = ? AND chunks.ordinal > ? ORDER BY chunks.ordinal LIMIT ?"
    return [_chunk(row) for row in connection.execute(f"{_SELECT} {where}", (collection, document_id, after, limit))]


def token_counts(connection: sqlite3.Connection, collection: str, ids: Iterable[str]) -> dict[str, list[int]]:
    """Return the tokens of each chunk of these documents, by document id."""
    sql = (
        "SELECT documents.id, length(chunks.tokens) / 4 FROM documents JOIN chunks ON chunks.document = documents.row"
        " WHERE documents.collection = ? AND documents.id IN (SELECT value FROM json_each(?))"
    )
    counts: dict[str, list[int]] = {}
    for document_id, count in connection.execute(sql, (collection, json.dumps(list(ids)))):
        counts.setdefault(document_id, []).append(count)
    return counts


def keys(connection: sqlite3.Connection) -> set[Key]:
    """Return the KV keys of all chunks."""
    return {Key(key) for (key,) in connection.execute("SELECT DISTINCT key FROM chunks")}


def tokens(connection: sqlite3.Connection) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (collection, token ids) of every chunk."""
    for collection, blob in connection.execute("SELECT collection, tokens FROM chunks"):
        yield collection, _token_ids(blob)


def unreferenced(connection: sqlite3.Connection, keys: Iterable[Key]) -> list[Key]:
    """Return those of `keys` that no chunk refers to."""
    sql = "SELECT DISTINCT value FROM json_each(?) WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE key = value)"
    return [Key(key) for (key,) in connection.execute(sql, (json.dumps(list(keys)),))]


def passages(connection: sqlite3.Connection, after: int, limit: int) -> list[Passage]:
    """Return the next `limit` chunks of all collections whose row is greater than `after`, ordered by row."""
    sql = "SELECT row, title, text FROM chunks WHERE row > ? ORDER BY row LIMIT ?"
    return [Passage(*row) for row in connection.execute(sql, (after, limit))]


def _chunk(row: Sequence[Any]) -> Chunk:
    _, document_id, ordinal, title, text, tokens, version, start, end, heading, page = row
    span = None if start is None else TextSpan(start, end, heading, page)
    return Chunk(f"{document_id}#{ordinal}", document_id, ordinal, title, text, _token_ids(tokens), span, version)


def _token_ids(blob: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(blob, "<i4").tolist())
