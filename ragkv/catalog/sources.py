"""Sources: the files that documents came from, so that one file is one document, whatever path it was given by.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

from sqlalchemy import bindparam, select

from ragkv.catalog.statements import upsert
from ragkv.catalog.tables import documents, sources
from ragkv.catalog.transaction import Transaction

LONGEST = 1024
"""Bytes of a path that is kept: a longer one does not fit into an index of PostgreSQL."""

_RECORD = upsert(sources, ["document"])
_ROW = select(documents.c.row).where(documents.c.collection == bindparam("of"), documents.c.id == bindparam("named"))
_FROM = (
    select(documents.c.id)
    .select_from(sources.join(documents, documents.c.row == sources.c.document))
    .where(sources.c.path == bindparam("path"), documents.c.collection == bindparam("of"))
    .order_by(documents.c.row)
)


def record(transaction: Transaction, document: int, path: str) -> None:
    """Record the file of a document. document: its row · path: "" if it came from none, which changes nothing."""
    if path and len(path.encode()) <= LONGEST:
        transaction.execute(_RECORD, {"document": document, "path": path})


def note(transaction: Transaction, collection: str, document_id: str, path: str) -> None:
    """Record the file of a document by its id. Nothing is done if there is no such document."""
    row = transaction.scalar(_ROW, {"of": collection, "named": document_id})
    if row is not None:
        record(transaction, row, path)


def document_from(transaction: Transaction, collection: str, path: str) -> str | None:
    """Return the id of the document that came from a file, or None."""
    found = transaction.execute(_FROM, {"of": collection, "path": path}).fetchone()
    return found[0] if found else None
