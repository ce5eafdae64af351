"""Spans: where each chunk stands in the text of its document, under which heading, and on which page.

Ingest computes spans when it splits a document. Chunks of a release that did not do so get theirs when the catalogue is
opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from sqlalchemy import bindparam, delete, exists, select
from sqlalchemy import insert as insert_into

from ragkv.catalog.limits import read_metadata
from ragkv.catalog.tables import chunks, documents, spans, versions
from ragkv.catalog.transaction import Transaction
from ragkv.passages import locate
from ragkv.types import Document, TextSpan

_INSERT = insert_into(spans)
_LOST = ~exists(select(1).select_from(spans).where(spans.c.chunk == chunks.c.row))
_LACKS = select(exists(select(1).select_from(chunks).where(_LOST)))
_LACKING = select(chunks.c.document).distinct().where(_LOST)
_DOCUMENT = (
    select(documents.c.id, documents.c.metadata, documents.c.text, versions.c.pages)
    .select_from(documents.join(versions, versions.c.document == documents.c.row))
    .where(documents.c.row == bindparam("at"))
)
_CHUNKS = select(chunks.c.row, chunks.c.text).where(chunks.c.document == bindparam("of")).order_by(chunks.c.ordinal)
_DELETE = delete(spans).where(spans.c.chunk.in_(select(chunks.c.row).where(chunks.c.document == bindparam("of"))))


def insert(transaction: Transaction, located: Iterable[tuple[int, TextSpan | None]]) -> None:
    """Store the spans of chunks. located: the row of each, and its span."""
    transaction.execute_all(_INSERT, [_columns(chunk, span) for chunk, span in located])


def is_intact(transaction: Transaction) -> bool:
    """Return whether every chunk has a row."""
    return not transaction.scalar(_LACKS)


def rebuild(transaction: Transaction) -> None:
    """Locate the chunks of all documents of which some chunk has no row. Needs a write transaction."""
    for (row,) in transaction.execute(_LACKING).fetchall():
        document_id, metadata, text, pages = transaction.execute(_DOCUMENT, {"at": row}).fetchone()
        starts = tuple((offset, number) for offset, number in json.loads(pages))
        document = Document(document_id, "", text, read_metadata(metadata), pages=starts)
        found = transaction.execute(_CHUNKS, {"of": row}).fetchall()
        transaction.execute(_DELETE, {"of": row})
        located = locate(document, [text for _, text in found])
        insert(transaction, zip((chunk for chunk, _ in found), located, strict=True))


def _columns(chunk: int, span: TextSpan | None) -> dict[str, int | str | None]:
    start, end, heading, page = (
        (None, None, "", None) if span is None else (span.start, span.end, span.heading, span.page)
    )
    return {"chunk": chunk, "start": start, "stop": end, "heading": heading, "page": page}
