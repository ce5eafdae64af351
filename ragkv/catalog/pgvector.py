"""Vectors that PostgreSQL searches itself, with the extension pgvector.

The table `searchable_vectors` holds the present vectors of all chunks in the type of pgvector. It exists once a process
was started with `RAGKV_VECTORS=pgvector`. From then on every transaction that writes to `vectors` writes to it,
whatever the settings of its process, and chunks that are deleted go from it by their foreign key. So it is never stale.
`vectors` stays the truth: the table may be dropped, and `prepare` fills it again.

There is an HNSW index for each dimension. Inside it, a search skips rows of other collections, and rows that do not
match a filter (iterative scan). A search with few matching rows compares all of them, which is exact and then quicker.

Functions that take a transaction run inside one of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Column, MetaData, Select, Table, Text, bindparam, func, select, text
from sqlalchemy.types import BigInteger

from ragkv.catalog import attributes
from ragkv.catalog.attributes import FilterShape
from ragkv.catalog.transaction import Transaction
from ragkv.errors import ConfigError
from ragkv.types import Filter

MOST_DIMENSIONS = 2000
"""An HNSW index of pgvector has no more."""
OLDEST = (0, 8, 0)
"""The first release of pgvector with iterative scans."""
EXACT = 10_000
"""Up to so many matching vectors are all compared. 10,000 of 384 dimensions are 15 MB, and take about 10 ms."""
SCANNED = 100_000
"""Rows that a search in the HNSW index looks at, at most. If it finds too few then, it compares all that match."""
EF_SEARCH, MOST_EF_SEARCH = 128, 1000
BATCH = 1000

_COMPLETE = "pgvector"
"""Name of the fact that all vectors were copied."""
_TABLE = (
    "CREATE TABLE IF NOT EXISTS searchable_vectors (chunk bigint PRIMARY KEY REFERENCES chunks (row) ON DELETE CASCADE,"
    ' collection text COLLATE "C" NOT NULL, document bigint NOT NULL, dimension integer NOT NULL,'
    " vector vector NOT NULL)",
    "CREATE INDEX IF NOT EXISTS searchable_vectors_by_collection ON searchable_vectors (collection, document)",
    f"DELETE FROM facts WHERE name = '{_COMPLETE}'",
)
_INDEX = (
    "CREATE INDEX IF NOT EXISTS searchable_vectors_{0} ON searchable_vectors"
    " USING hnsw (CAST(vector AS vector({0})) vector_ip_ops) WHERE dimension = {0}"
)
_INSERT = (
    "INSERT INTO searchable_vectors (chunk, collection, document, dimension, vector)"
    " VALUES (%s, %s, %s, %s, CAST(%s AS vector)) ON CONFLICT (chunk) DO NOTHING"
)
_MISSING = (
    "SELECT chunks.row, chunks.collection, chunks.document, vectors.vector FROM vectors"
    " JOIN chunks ON chunks.row = vectors.chunk WHERE vectors.chunk > %s AND (%s::text IS NULL OR collection = %s)"
    " AND NOT EXISTS (SELECT 1 FROM searchable_vectors WHERE chunk = chunks.row) ORDER BY vectors.chunk LIMIT %s"
)
_SEARCHED = Table(
    "searchable_vectors",
    MetaData(),
    Column("chunk", BigInteger),
    Column("collection", Text),
    Column("document", BigInteger),
    Column("dimension", BigInteger),
)

OpenWrite = Callable[[], AbstractContextManager[Transaction]]
"""Opens a write transaction that is alone."""


def is_on(transaction: Transaction) -> bool:
    """Return whether the table exists."""
    if transaction.dialect != "postgresql":
        return False
    return bool(transaction.exec_driver_sql("SELECT to_regclass('searchable_vectors')").fetchone()[0])


def prepare(write: OpenWrite) -> None:
    """Create the table where it is missing, and copy all vectors to it. An interrupted copy goes on.

    Raises:
        ConfigError: The server does not have pgvector, or an old one.
    """
    with write() as transaction:
        _check_extension(transaction)
        if not is_on(transaction):
            for statement in _TABLE:
                transaction.exec_driver_sql(statement)
        sql = f"SELECT 1 FROM facts WHERE name = '{_COMPLETE}'"
        if transaction.exec_driver_sql(sql).fetchone():
            return
    last: int | None = 0
    while last is not None:  # in short transactions, because other writers wait for each
        with write() as transaction:
            last = _copy_some(transaction, last)
    with write() as transaction:
        sql = f"INSERT INTO facts VALUES ('{_COMPLETE}', 'complete') ON CONFLICT DO NOTHING"
        transaction.exec_driver_sql(sql)
        sizes = transaction.exec_driver_sql("SELECT DISTINCT dimension FROM searchable_vectors").fetchall()
        for (dimension,) in sizes:
            index(transaction, dimension)


def index(transaction: Transaction, dimension: int) -> None:
    """Create the HNSW index for a dimension where it is missing.

    Raises:
        ConfigError: pgvector cannot index so many dimensions.
    """
    if dimension > MOST_DIMENSIONS:
        raise ConfigError(
            f"pgvector indexes vectors of at most {MOST_DIMENSIONS} dimensions, these have {dimension}",
            "set RAGKV_VECTORS=faiss, or another RAGKV_EMBEDDER",
        )
    transaction.exec_driver_sql(_INDEX.format(dimension))


def insert(
    transaction: Transaction, collection: str, document: int, rows: Sequence[int], vectors: NDArray[np.float32]
) -> None:
    """Add the vectors of the chunks of a document, if the table exists.

    Args:
        transaction: The transaction that stores the vectors.
        collection: Collection of the document.
        document: Row of the document.
        rows: Rows of its chunks.
        vectors: Their vectors, [len(rows), dimension].
    """
    if is_on(transaction):
        _insert(transaction, [(row, collection, document, vector) for row, vector in zip(rows, vectors, strict=True)])


def replace(transaction: Transaction, collection: str | None = None) -> None:
    """Take over all vectors of a collection, or of all (None), after they changed; if the table exists."""
    if not is_on(transaction):
        return
    if collection is None:
        transaction.exec_driver_sql("DELETE FROM searchable_vectors")
    else:
        transaction.exec_driver_sql("DELETE FROM searchable_vectors WHERE collection = %s", (collection,))
    last: int | None = 0
    while last is not None:
        last = _copy_some(transaction, last, collection)
    sizes = transaction.exec_driver_sql("SELECT DISTINCT dimension FROM searchable_vectors").fetchall()
    for (dimension,) in sizes:
        index(transaction, dimension)


def count(transaction: Transaction, collection: str, limit: int | None = None) -> int:
    """Return the number of vectors of a collection, or `limit` if there are more."""
    sql = "SELECT count(*) FROM (SELECT 1 FROM searchable_vectors WHERE collection = %s LIMIT %s) AS found"
    return int(transaction.exec_driver_sql(sql, (collection, limit)).fetchone()[0])


def nearest(
    transaction: Transaction,
    vector: NDArray[np.float32],
    limit: int,
    collection: str,
    filter: Filter | None = None,
    documents: Sequence[str] | None = None,
) -> list[int]:
    """Return the chunk rows nearest to a vector by inner product, nearest first.

    Args:
        transaction: The transaction.
        vector: What to search for, [dimension].
        limit: Return at most so many rows.
        collection: Collection to search.
        filter: Search only the documents that match the filter.
        documents: Search only the documents with these ids; None searches all.
    """
    shape, parameters = attributes.condition(transaction, collection, filter, documents)
    sized = {**parameters, "dimension": len(vector)}
    matching = transaction.scalar(_count(shape), {**sized, "most": EXACT + 1})
    # A plan that is made once for all values would not know how many rows match.
    transaction.exec_driver_sql("SET LOCAL plan_cache_mode = force_custom_plan")
    wanted = {**sized, "vector": _literal(vector), "most": limit}
    if matching > EXACT:
        transaction.exec_driver_sql("SET LOCAL hnsw.iterative_scan = strict_order")
        transaction.exec_driver_sql(f"SET LOCAL hnsw.max_scan_tuples = {SCANNED}")
        wide = min(MOST_EF_SEARCH, max(EF_SEARCH, limit))
        transaction.exec_driver_sql(f"SET LOCAL hnsw.ef_search = {wide}")
        found = [row for (row,) in transaction.execute(_nearest(shape, len(vector), False), wanted)]
        if len(found) >= min(limit, matching):
            return found
    return [row for (row,) in transaction.execute(_nearest(shape, len(vector), True), wanted)]


def _matching(shape: FilterShape) -> list[Any]:
    mine = _SEARCHED.c.collection == bindparam("collection"), _SEARCHED.c.dimension == bindparam("dimension")
    return [*mine, *shape.conditions(_SEARCHED.c.document)]


@lru_cache(maxsize=256)
def _count(shape: FilterShape) -> Select[Any]:
    some = select(_SEARCHED.c.chunk).where(*_matching(shape)).limit(bindparam("most")).subquery()
    return select(func.count()).select_from(some)


@lru_cache(maxsize=256)
def _nearest(shape: FilterShape, dimension: int, exact: bool) -> Select[Any]:
    distance = f"CAST(vector AS vector({dimension})) <#> CAST(:vector AS vector({dimension}))"
    if exact:
        distance = f"({distance}) + 0"  # an expression that the HNSW index does not have
    conditions = [text(f"dimension = {dimension}"), *_matching(shape)]  # as the index says it
    return select(_SEARCHED.c.chunk).where(*conditions).order_by(text(distance)).limit(bindparam("most"))


def _copy_some(transaction: Transaction, last: int, collection: str | None = None) -> int | None:
    """Copy the next vectors that are missing; return the last row of them, or None if there was none."""
    found = transaction.exec_driver_sql(_MISSING, (last, collection, collection, BATCH)).fetchall()
    _insert(transaction, [(row, of, document, np.frombuffer(blob, np.float32)) for row, of, document, blob in found])
    return found[-1][0] if found else None


def _insert(transaction: Transaction, rows: Sequence[tuple[int, str, int, NDArray[np.float32]]]) -> None:
    stored = [(row, of, document, len(vector), _literal(vector)) for row, of, document, vector in rows]
    if stored:
        transaction.driver.cursor().executemany(_INSERT, stored)


def _literal(vector: NDArray[np.float32]) -> str:
    """Return a vector as pgvector writes it, with every bit."""
    return f"[{','.join(map(repr, np.asarray(vector, np.float32).tolist()))}]"


def _check_extension(transaction: Transaction) -> None:
    sql = "SELECT default_version, installed_version FROM pg_available_extensions WHERE name = 'vector'"
    found = transaction.exec_driver_sql(sql).fetchone()
    if found is None:
        raise ConfigError(
            "the PostgreSQL server does not have the extension pgvector",
            "install it there (the package postgresql-16-pgvector, or the image pgvector/pgvector), or set "
            "RAGKV_VECTORS=faiss",
        )
    available, installed = found
    if tuple(int(part) for part in (installed or available).split(".")[:3]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"pgvector {installed or available} is too old, {oldest} is the oldest that works",
            "run ALTER EXTENSION vector UPDATE, or set RAGKV_VECTORS=faiss",
        )
    if installed is None:
        sql = "SELECT has_database_privilege(current_database(), 'CREATE')"
        if not transaction.exec_driver_sql(sql).fetchone()[0]:
            raise ConfigError(
                "the extension pgvector is not created in this database",
                "let an administrator run CREATE EXTENSION vector, or set RAGKV_VECTORS=faiss",
            )
        transaction.exec_driver_sql("CREATE EXTENSION IF NOT EXISTS vector")
