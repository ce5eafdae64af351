"""Queries on chunks and the KV keys that they refer to.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
from sqlalchemy import bindparam, case, exists, func, select
from sqlalchemy import insert as insert_into

from ragkv.catalog import pgvector, segments, spans, tables
from ragkv.catalog.embedders import VectorTable
from ragkv.catalog.models import DocumentVersion, Passage
from ragkv.catalog.statements import values
from ragkv.catalog.tables import documents, versions
from ragkv.catalog.transaction import Transaction
from ragkv.passages import MAX_LABEL
from ragkv.types import Chunk, Key, TextSpan

_CHUNKS, _SPANS = tables.chunks, tables.spans
# Outer joins: an older release that writes to the same file leaves spans out.
_JOINED = (
    _CHUNKS.join(documents, documents.c.row == _CHUNKS.c.document)
    .outerjoin(versions, versions.c.document == documents.c.row)
    .outerjoin(_SPANS, _SPANS.c.chunk == _CHUNKS.c.row)
)
_SELECT = select(
    *(_CHUNKS.c.row, documents.c.id, _CHUNKS.c.ordinal, _CHUNKS.c.title, _CHUNKS.c.text, _CHUNKS.c.tokens),
    func.coalesce(versions.c.number, 1),
    # An earlier release has stored headings of any length.
    *(_SPANS.c.start, _SPANS.c.stop, func.substr(_SPANS.c.heading, 1, MAX_LABEL), _SPANS.c.page),
    case((_SPANS.c.page.is_(None), "[]"), else_=func.coalesce(versions.c.pages, "[]")),
).select_from(_JOINED)
_INSERT = insert_into(_CHUNKS).returning(_CHUNKS.c.row)
_STORE = {name: insert_into(tables.metadata.tables[name]) for name in ("vectors", "next_vectors")}
_MINE = _CHUNKS.c.collection == bindparam("of")
_LOAD = _SELECT.where(_MINE, _CHUNKS.c.row.in_(select(values("rows", "bigint").c.value)))
_STANDING = select(_CHUNKS.c.row).where(_MINE, _CHUNKS.c.row.in_(select(values("rows", "bigint").c.value)))
_EXIST = select(exists(select(1).select_from(_CHUNKS).where(_MINE)))
_NAMED = _SELECT.where(documents.c.collection == bindparam("of"), documents.c.id == bindparam("named"))
_OF_DOCUMENT = _NAMED.order_by(_CHUNKS.c.ordinal)
_PAGE = _OF_DOCUMENT.where(_CHUNKS.c.ordinal > bindparam("after")).limit(bindparam("most"))
_COUNTS = (
    select(documents.c.id, func.length(_CHUNKS.c.tokens))
    .select_from(documents.join(_CHUNKS, _CHUNKS.c.document == documents.c.row))
    .where(documents.c.collection == bindparam("of"))
    .where(documents.c.id.in_(select(values("ids", "text").c.value)))
)
_KEYS = select(_CHUNKS.c.key).distinct()
_TOKENS = select(_CHUNKS.c.collection, _CHUNKS.c.tokens)
_GIVEN = values("keys", "text")
_UNREFERENCED = (
    select(_GIVEN.c.value)
    .distinct()
    .where(~exists(select(1).select_from(_CHUNKS).where(_CHUNKS.c.key == _GIVEN.c.value)))
)
_PASSAGES = (
    select(_CHUNKS.c.row, _CHUNKS.c.title, _CHUNKS.c.text)
    .where(_CHUNKS.c.row > bindparam("after"))
    .order_by(_CHUNKS.c.row)
    .limit(bindparam("most"))
)


def insert(transaction: Transaction, document: int, version: DocumentVersion, table: VectorTable) -> None:
    """Insert the chunks of a document, with their vectors and keys.

    Args:
        transaction: The transaction.
        document: Row of the document.
        version: What to insert.
        table: Where the vectors belong.
    """
    collection, vectors = version.document.collection, np.ascontiguousarray(version.vectors, np.float32)
    inserted = [
        {
            "document": document,
            "collection": collection,
            "ordinal": chunk.ordinal,
            "key": key,
            "title": chunk.title,
            "text": chunk.text,
            "tokens": np.asarray(chunk.tokens, dtype="<i4").tobytes(),
        }
        for chunk, key in zip(version.chunks, version.keys, strict=True)
    ]
    rows = transaction.insert_all(_INSERT, inserted)
    stored = ({"chunk": row, "vector": vector.tobytes()} for row, vector in zip(rows, vectors, strict=True))
    transaction.execute_all(_STORE[table], stored)
    if table == "vectors":
        pgvector.insert(transaction, collection, document, rows, vectors)
    segments.store(transaction, dict(zip(rows, version.segments, strict=False)), version.embedder)
    spans.insert(transaction, zip(rows, (chunk.span for chunk in version.chunks), strict=True))


def load(transaction: Transaction, collection: str, rows: Iterable[int]) -> dict[int, Chunk]:
    """Return the chunks at these rows of a collection. Rows that no longer exist are left out."""
    found = transaction.execute(_LOAD, {"of": collection, "rows": transaction.array(int(row) for row in rows)})
    return {row[0]: _chunk(row) for row in found}


def standing(transaction: Transaction, collection: str, rows: Iterable[int]) -> set[int]:
    """Return those of these rows whose chunks are still in the collection."""
    found = transaction.execute(_STANDING, {"of": collection, "rows": transaction.array(int(row) for row in rows)})
    return {row for (row,) in found}


def exist(transaction: Transaction, collection: str) -> bool:
    """Whether a collection has any chunk."""
    return bool(transaction.scalar(_EXIST, {"of": collection}))


def of_document(transaction: Transaction, collection: str, document_id: str) -> list[Chunk]:
    """Return the chunks of a document, in order; [] if there is no such document."""
    return [_chunk(row) for row in transaction.execute(_OF_DOCUMENT, {"of": collection, "named": document_id})]


def page(transaction: Transaction, collection: str, document_id: str, after: int, limit: int) -> list[Chunk]:
    """Return the next `limit` chunks of a document whose ordinal is greater than `after`, in order."""
    parameters = {"of": collection, "named": document_id, "after": after, "most": limit}
    return [_chunk(row) for row in transaction.execute(_PAGE, parameters)]


def token_counts(transaction: Transaction, collection: str, ids: Iterable[str]) -> dict[str, list[int]]:
    """Return the tokens of each chunk of these documents, by document id."""
    counts: dict[str, list[int]] = {}
    for document_id, size in transaction.execute(_COUNTS, {"of": collection, "ids": transaction.array(ids)}):
        counts.setdefault(document_id, []).append(size // 4)
    return counts


def keys(transaction: Transaction) -> set[Key]:
    """Return the KV keys of all chunks."""
    return {Key(key) for (key,) in transaction.execute(_KEYS)}


def tokens(transaction: Transaction) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (collection, token ids) of every chunk."""
    for collection, blob in transaction.execute(_TOKENS):
        yield collection, _token_ids(blob)


def unreferenced(transaction: Transaction, keys: Iterable[Key]) -> list[Key]:
    """Return those of `keys` that no chunk refers to."""
    return [Key(key) for (key,) in transaction.execute(_UNREFERENCED, {"keys": transaction.array(keys)})]


def passages(transaction: Transaction, after: int, limit: int) -> list[Passage]:
    """Return the next `limit` chunks of all collections whose row is greater than `after`, ordered by row."""
    return [Passage(*row) for row in transaction.execute(_PASSAGES, {"after": after, "most": limit})]


def _chunk(row: Sequence[Any]) -> Chunk:
    _, document_id, ordinal, title, text, tokens, version, start, end, heading, page, starts = row
    span = None if start is None else TextSpan(start, end, heading, page, _inside(starts, start, end))
    return Chunk(f"{document_id}#{ordinal}", document_id, ordinal, title, text, _token_ids(tokens), span, version)


def _inside(starts: str, start: int, end: int) -> tuple[tuple[int, int], ...]:
    """Return (offset, number) of the pages that begin behind `start` and before `end`. starts: of the document."""
    pages = _pages(starts)
    return pages[bisect_right(pages, start, key=itemgetter(0)) : bisect_left(pages, end, key=itemgetter(0))]


@lru_cache(maxsize=32)  # the chunks of a search are of few documents
def _pages(starts: str) -> tuple[tuple[int, int], ...]:
    return tuple((offset, number) for offset, number in json.loads(starts))


def _token_ids(blob: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(blob, "<i4").tolist())
