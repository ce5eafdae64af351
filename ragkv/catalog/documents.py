"""Queries on documents.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Select, bindparam, delete, func, insert, select, text, tuple_, update

from ragkv.catalog import attributes, files, sources, tables, turns, versions
from ragkv.catalog.attributes import FilterShape
from ragkv.catalog.limits import MAX_TITLE, read_metadata
from ragkv.catalog.models import ID_ORDER, CollectionInfo, DocumentInfo, DocumentOrder, DocumentVersion
from ragkv.catalog.statements import NAME, values
from ragkv.catalog.tables import chunks, document_attributes
from ragkv.catalog.transaction import Transaction
from ragkv.errors import NotFound
from ragkv.normalisation import folded
from ragkv.types import Document, Filter, Key

_DOCUMENTS, _VERSIONS, _SOURCES, _FILES = tables.documents, tables.versions, tables.sources, tables.files
_JOINED = _DOCUMENTS.outerjoin(_VERSIONS, _VERSIONS.c.document == _DOCUMENTS.c.row)
_INFO = ("metadata", "content_hash", "reader", "chunks", "tokens", "created", "updated")
# An earlier release has stored titles of any length. What is sorted by is what is shown, so that a page is continued.
_TITLE = func.substr(_DOCUMENTS.c.title, 1, MAX_TITLE, type_=NAME)
_SELECT = select(
    *(_DOCUMENTS.c.collection, _DOCUMENTS.c.id, _TITLE),
    *(_DOCUMENTS.c[name] for name in _INFO),
    func.coalesce(_VERSIONS.c.number, 1),
    func.coalesce(_VERSIONS.c.bytes, 0),
    func.coalesce(_SOURCES.c.path, ""),
    func.coalesce(_FILES.c.bytes, 0),
).select_from(
    _JOINED.outerjoin(_SOURCES, _SOURCES.c.document == _DOCUMENTS.c.row).outerjoin(
        _FILES, _FILES.c.document == _DOCUMENTS.c.row
    )
)
_MINE = _DOCUMENTS.c.collection == bindparam("of")
_NAMED = (_MINE, _DOCUMENTS.c.id == bindparam("named"))
_INSERT = insert(_DOCUMENTS).returning(_DOCUMENTS.c.row)
_UPDATE = update(_DOCUMENTS).where(_DOCUMENTS.c.row == bindparam("at"))
_READ_AGAIN = update(_DOCUMENTS).where(*_NAMED).values(reader="")
_DELETE = delete(_DOCUMENTS).where(_DOCUMENTS.c.row == bindparam("at"))
_CLEAR = delete(_DOCUMENTS).where(_MINE)
_ROW = select(_DOCUMENTS.c.row, _DOCUMENTS.c.content_hash).where(*_NAMED)
_FIND = _SELECT.where(*_NAMED)
_READERS = select(_DOCUMENTS.c.id, _DOCUMENTS.c.reader).where(
    _MINE, _DOCUMENTS.c.id.in_(select(values("ids", "text").c.value))
)
_TEXT = select(_DOCUMENTS.c.text, func.coalesce(_VERSIONS.c.pages, "[]")).select_from(_JOINED).where(*_NAMED)
_SUMS = (func.coalesce(func.sum(_DOCUMENTS.c.chunks), 0), func.coalesce(func.sum(_DOCUMENTS.c.tokens), 0))
_COLLECTIONS = (
    select(_DOCUMENTS.c.collection, func.count(), *_SUMS)
    .where(func.substr(_DOCUMENTS.c.collection, 1, func.length(bindparam("prefix"))) == bindparam("prefix"))
    .group_by(_DOCUMENTS.c.collection)
    .order_by(_DOCUMENTS.c.collection)
)
_COUNT = select(func.count(), _SUMS[0]).select_from(_DOCUMENTS)
_TOKENS = select(_SUMS[1]).where(_MINE, _DOCUMENTS.c.id != bindparam("without"))
_KEYS_OF = select(chunks.c.key).where(chunks.c.document == bindparam("at"))
_DELETE_CHUNKS = delete(chunks).where(chunks.c.document == bindparam("at"))
_KEYS = select(chunks.c.key).distinct().where(chunks.c.collection == bindparam("of"))
_CLEAR_CHUNKS = delete(chunks).where(chunks.c.collection == bindparam("of"))


@dataclass(frozen=True)
class _Listing:
    """The form of a listing, without its values.

    shape: of the filter · whole: no collection is named · behind: it begins behind a place · words: it has so many ·
    limited: it is a page · folder: it is of a folder
    """

    shape: FilterShape
    sort: str
    descending: bool
    whole: bool = False
    behind: bool = False
    words: int = 0
    limited: bool = False
    folder: bool = False


def upsert(transaction: Transaction, version: DocumentVersion) -> tuple[int, list[Key]]:
    """Store a document without its chunks, and delete the chunks of its previous version.

    Returns:
        The row of the document, and the KV keys of the deleted chunks.
    """
    document, now = version.document, time.time()
    found, old_keys = _delete_chunks(transaction, document.collection, document.id)
    stored: dict[str, Any] = {"content_hash": version.content_hash, "reader": version.reader}
    stored |= {"chunks": len(version.chunks), "tokens": version.tokens, "updated": now, "title": document.title}
    stored |= {"metadata": json.dumps(dict(document.metadata), ensure_ascii=False), "text": document.text}
    if found is not None:
        row, differs = found[0], found[1] != version.content_hash
        if differs:
            turns.withdraw(transaction, [row])
        transaction.execute(_UPDATE, {**stored, "at": row})
    else:
        stored |= {"collection": document.collection, "id": document.id, "created": now}
        row, differs = transaction.scalar(_INSERT, stored), True
    versions.record(transaction, row, document.text, document.pages, differs)
    attributes.record(transaction, row, document)
    sources.record(transaction, row, document.source)
    files.record(transaction, row, document.file, differs)
    return row, old_keys


def remove(transaction: Transaction, collection: str, document_id: str) -> list[Key]:
    """Delete a document and return the KV keys of its chunks.

    Raises:
        NotFound: The collection has no such document.
    """
    found, keys = _delete_chunks(transaction, collection, document_id)
    if found is None:
        raise not_found(collection, document_id)
    turns.withdraw(transaction, [found[0]])
    transaction.execute(_DELETE, {"at": found[0]})
    return keys


def clear(transaction: Transaction, collection: str) -> tuple[list[Key], int]:
    """Delete all documents of a collection; return (the KV keys of their chunks, the number of documents)."""
    keys = [Key(key) for (key,) in transaction.execute(_KEYS, {"of": collection})]
    transaction.execute(_CLEAR_CHUNKS, {"of": collection})
    return keys, transaction.execute(_CLEAR, {"of": collection}).rowcount


def find(transaction: Transaction, collection: str, document_id: str) -> DocumentInfo | None:
    """Return the document, or None if the collection does not have it."""
    row = transaction.execute(_FIND, {"of": collection, "named": document_id}).fetchone()
    return _info(row) if row else None


def readers(transaction: Transaction, collection: str, ids: Iterable[str]) -> dict[str, str]:
    """Return which model read each of these documents (`DocumentInfo.reader`). Unknown documents are left out."""
    found = transaction.execute(_READERS, {"of": collection, "ids": transaction.array(ids)})
    return {document_id: str(reader) for document_id, reader in found}


def original(transaction: Transaction, collection: str, document_id: str) -> tuple[DocumentInfo, Document]:
    """Return a document and what the user sent, without its source and file. Raises NotFound."""
    info = find(transaction, collection, document_id)
    if info is None:
        raise not_found(collection, document_id)
    found, pages = transaction.execute(_TEXT, {"of": collection, "named": document_id}).fetchone()
    starts = tuple((offset, number) for offset, number in json.loads(pages))
    return info, Document(document_id, info.title, str(found), info.metadata, collection, starts)


def all_documents(
    transaction: Transaction, collection: str | None, order: DocumentOrder = ID_ORDER
) -> list[DocumentInfo]:
    """Return the documents of one collection, or of all (None), in this order; by default by (collection, id)."""
    shape, parameters = attributes.condition(transaction, collection or "", None)
    words = _words(transaction, order.words)
    folder = {"folder": order.folder} if order.folder else {}
    whole = collection is None
    listing = _Listing(shape, order.sort, order.descending, whole, words=len(words), folder=bool(folder))
    return [_info(row) for row in transaction.execute(_listing(listing), {**parameters, **words, **folder})]


def page(
    transaction: Transaction,
    collection: str,
    after: tuple[str | float, str] | None,
    limit: int,
    filter: Filter | None,
    order: DocumentOrder = ID_ORDER,
) -> list[DocumentInfo]:
    """Return the next `limit` matching documents behind `after`, which is (sort value, id) of a document."""
    shape, parameters = attributes.condition(transaction, collection, filter)
    words = _words(transaction, order.words)
    place = {} if after is None else {"value": after[0], "last": after[1]}
    folder = {"folder": order.folder} if order.folder else {}
    behind = after is not None
    listing = _Listing(shape, order.sort, order.descending, False, behind, len(words), True, bool(folder))
    found = transaction.execute(_listing(listing), {**parameters, **words, **place, **folder, "most": limit})
    return [_info(row) for row in found]


def read_again(transaction: Transaction, collection: str, document_ids: Sequence[str]) -> None:
    """Let the next ingest of these documents read them again, whatever has read them."""
    transaction.execute_all(_READ_AGAIN, [{"of": collection, "named": each} for each in document_ids])


def collections(transaction: Transaction, prefix: str) -> list[CollectionInfo]:
    """Return the collections that have documents and whose names start with `prefix`, ordered by name."""
    found, kept = transaction.execute(_COLLECTIONS, {"prefix": prefix}).fetchall(), files.sizes(transaction)
    return [
        CollectionInfo(name, documents, int(chunks), int(tokens), kept.get(name, 0))
        for name, documents, chunks, tokens in found
    ]


def count(transaction: Transaction) -> tuple[int, int]:
    """Return (documents, chunks) of all collections."""
    documents, chunks = transaction.execute(_COUNT).fetchone()
    return documents, int(chunks)


def held(transaction: Transaction, collection: str, without: str) -> tuple[int, int]:
    """Return (tokens of all chunks, bytes of all files) of a collection, except those of the document `without`."""
    tokens = int(transaction.scalar(_TOKENS, {"of": collection, "without": without}))
    return tokens, files.size(transaction, collection, without)


def not_found(collection: str, document_id: str) -> NotFound:
    """Return the error that says that the collection has no such document."""
    return NotFound(f"collection {collection!r} has no document {document_id!r}")


@lru_cache(maxsize=512)
def _listing(listing: _Listing) -> Select[Any]:
    """Build the statement of a listing."""
    found = _SELECT.where(*listing.shape.conditions(_DOCUMENTS.c.row))
    if not listing.whole:
        found = found.where(_DOCUMENTS.c.collection == bindparam("collection"))
    for number in range(listing.words):
        found = found.where(_contains(listing.shape, f"word{number}"))
    if listing.folder:
        begins = bindparam("folder", type_=_DOCUMENTS.c.id.type)
        found = found.where(func.substr(_DOCUMENTS.c.id, 1, func.length(begins)) == begins)
    special: dict[str, ColumnElement[Any]] = {"bytes": _VERSIONS.c.bytes, "title": _TITLE}
    sorted_by = special[listing.sort] if listing.sort in special else _DOCUMENTS.c[listing.sort]
    identity = _DOCUMENTS.c.id
    columns = [identity] if listing.sort == "id" else [sorted_by, identity]
    if listing.behind:
        names = ["last"] if listing.sort == "id" else ["value", "last"]
        place = tuple_(*(bindparam(name, type_=column.type) for name, column in zip(names, columns, strict=True)))
        mine = tuple_(*columns)
        found = found.where(mine < place if listing.descending else mine > place)
    if not listing.limited:  # of equal values, the collections come in their order
        columns.insert(-1, _DOCUMENTS.c.collection)
    ordered: list[ColumnElement[Any]] = [
        column.desc() if listing.descending and column is not _DOCUMENTS.c.collection else column for column in columns
    ]
    found = found.order_by(*ordered)
    return found.limit(bindparam("most")) if listing.limited else found


def _contains(shape: FilterShape, name: str) -> ColumnElement[bool]:
    """Return the condition that the id or the title contains a word, in any case."""
    if shape.dialect == "sqlite":
        return text(f"instr(ragkv_folded(documents.id || char(10) || documents.title), :{name})")  # type: ignore[return-value]
    having = select(document_attributes.c.document).where(
        func.strpos(document_attributes.c.folded, bindparam(name)) > 0
    )
    return _DOCUMENTS.c.row.in_(having)


def _words(transaction: Transaction, words: str) -> dict[str, str]:
    """Return the parameters for the words that an id or a title must contain."""
    found = {f"word{number}": word for number, word in enumerate(_case_folded(words).split())}
    if found and transaction.dialect == "sqlite":
        # LIKE folds ASCII letters only
        transaction.driver.create_function("ragkv_folded", 1, _case_folded, deterministic=True)
    return found


def _case_folded(text: str) -> str:
    return folded(text).casefold()


def _delete_chunks(
    transaction: Transaction, collection: str, document_id: str
) -> tuple[tuple[int, str] | None, list[Key]]:
    """Delete the chunks of a document.

    Returns:
        (Its row and content hash, or None if there is no such document; the chunks' KV keys).
    """
    found = transaction.execute(_ROW, {"of": collection, "named": document_id}).fetchone()
    if found is None:
        return None, []
    keys = [Key(key) for (key,) in transaction.execute(_KEYS_OF, {"at": found[0]})]
    transaction.execute(_DELETE_CHUNKS, {"at": found[0]})
    return (found[0], found[1]), keys


def _info(row: Sequence[Any]) -> DocumentInfo:
    collection, document_id, title, metadata, *rest = row
    return DocumentInfo(collection, document_id, title, read_metadata(metadata), *rest)
