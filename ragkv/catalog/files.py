"""Files: the bytes that a document was read from, where its pages can be shown. They go with the document.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

from sqlalchemy import bindparam, delete, func, select

from ragkv.catalog.statements import upsert
from ragkv.catalog.tables import documents, files
from ragkv.catalog.transaction import Transaction

_RECORD = upsert(files, ["document"])
_DELETE = delete(files).where(files.c.document == bindparam("of"))
_NAMED = (documents.c.collection == bindparam("of"), documents.c.id == bindparam("named"))
_ROW = select(documents.c.row).where(*_NAMED)
_JOINED = files.join(documents, documents.c.row == files.c.document)
_LOAD = select(files.c.content).select_from(_JOINED).where(*_NAMED)
_SIZES = select(documents.c.collection, func.sum(files.c.bytes)).select_from(_JOINED).group_by(documents.c.collection)
_SIZE = (
    select(func.coalesce(func.sum(files.c.bytes), 0))
    .select_from(_JOINED)
    .where(_NAMED[0], documents.c.id != bindparam("without"))
)


def record(transaction: Transaction, document: int, content: bytes, differs: bool) -> None:
    """Record the file of a version that was just written.

    Args:
        transaction: The transaction.
        document: Row of the document.
        content: The file; b"" if there is none.
        differs: Whether the text differs from the last version. Where it does not, a document without a file, as the
            catalogue returns it to be read again, keeps the file that is there.
    """
    if content:
        transaction.execute(_RECORD, {"document": document, "bytes": len(content), "content": content})
    elif differs:
        transaction.execute(_DELETE, {"of": document})


def note(transaction: Transaction, collection: str, document_id: str, content: bytes) -> None:
    """Record the file of a document by its id. Nothing is done if there is no such document."""
    row = transaction.scalar(_ROW, {"of": collection, "named": document_id})
    if row is not None:
        record(transaction, row, content, differs=False)


def load(transaction: Transaction, collection: str, document_id: str) -> bytes:
    """Return the file of a document; b"" if there is none."""
    return bytes(transaction.scalar(_LOAD, {"of": collection, "named": document_id}) or b"")


def sizes(transaction: Transaction) -> dict[str, int]:
    """Return the bytes of all files of each collection that has any."""
    return {collection: int(size) for collection, size in transaction.execute(_SIZES)}


def size(transaction: Transaction, collection: str, without: str) -> int:
    """Return the bytes of all files of a collection, except that of the document `without`."""
    return int(transaction.scalar(_SIZE, {"of": collection, "without": without}))
