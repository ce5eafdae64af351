"""Queries on the embedders of stored vectors, and on the way from one embedder to the next.

The vectors of a collection come from one embedder: the recorded one, or its own while a change is under way. The next
vectors of its chunks are kept beside the present ones. When they are complete, one transaction puts them in the place
of the present ones. When all collections have changed, the next embedder is the recorded one.

    facts embedder           the embedder of all collections that are not in `collection_embedders`
    facts next_embedder      the embedder of the rows in `next_vectors`; only during a change
    facts embedder_source N  the setting that opens the embedder N

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import bindparam, delete, exists, func, insert, select

from ragkv.catalog import pgvector
from ragkv.catalog.models import EmbedderIdentity, Passage, Reembedding
from ragkv.catalog.statements import upsert, values
from ragkv.catalog.tables import chunks, collection_embedders, facts, next_vectors, vectors
from ragkv.catalog.transaction import Transaction
from ragkv.errors import EmbedderChanged

VectorTable = Literal["vectors", "next_vectors"]

_MINE = chunks.c.collection == bindparam("of")
_ROWS = select(chunks.c.row).where(_MINE)
_ANY = select(exists(select(1).select_from(chunks)))
_ANY_OF = select(exists(select(1).select_from(chunks).where(_MINE)))
_OWN = select(collection_embedders.c.name, collection_embedders.c.dimension).where(
    collection_embedders.c.collection == bindparam("of")
)
_SET_OWN = upsert(collection_embedders, ["collection"])
_FACT = select(facts.c.value).where(facts.c.name == bindparam("fact"))
_SET_FACT = upsert(facts, ["name"])
_DELETE_FACT = delete(facts).where(facts.c.name == bindparam("fact"))
_DELETE_OWN, _DELETE_NEXT = delete(collection_embedders), delete(next_vectors)
_COLLECTIONS = select(chunks.c.collection).distinct().order_by(chunks.c.collection)
_COUNT, _COUNT_NEXT = (select(func.count()).select_from(table) for table in (chunks, next_vectors))
_COUNT_OF = _COUNT.where(chunks.c.collection.in_(select(values("names", "text").c.value)))
_LACKS_NEXT = ~exists(select(1).select_from(next_vectors).where(next_vectors.c.chunk == chunks.c.row))
_UNEMBEDDED = (
    select(chunks.c.row, chunks.c.title, chunks.c.text)
    .where(_MINE, chunks.c.row > bindparam("after"), _LACKS_NEXT)
    .order_by(chunks.c.row)
    .limit(bindparam("most"))
)
_PRESENT = select(chunks.c.row).where(chunks.c.row.in_(select(values("rows", "bigint").c.value)))
_STORE_NEXT = upsert(next_vectors, ["chunk"])
_DELETE_OLD = delete(vectors).where(vectors.c.chunk.in_(_ROWS))
_MOVE = insert(vectors).from_select(
    ["chunk", "vector"], select(next_vectors.c.chunk, next_vectors.c.vector).where(next_vectors.c.chunk.in_(_ROWS))
)
_DELETE_MOVED = delete(next_vectors).where(next_vectors.c.chunk.in_(_ROWS))


def recorded(transaction: Transaction) -> EmbedderIdentity | None:
    """Return the embedder of the stored vectors, or None while there are no chunks."""
    return _fact(transaction, "embedder") if transaction.scalar(_ANY) else None


def of_collection(transaction: Transaction, collection: str) -> EmbedderIdentity | None:
    """Return the embedder of the vectors of a collection, or None while there are no chunks at all."""
    own = transaction.execute(_OWN, {"of": collection}).fetchone()
    return _with_source(transaction, *own) if own else recorded(transaction)


def following(transaction: Transaction) -> EmbedderIdentity | None:
    """Return the embedder that a change leads to, or None without a change."""
    return _fact(transaction, "next_embedder")


def record(transaction: Transaction, identity: EmbedderIdentity) -> None:
    """Make this the embedder of all collections. A change that was under way is given up."""
    transaction.execute(_DELETE_OWN)
    transaction.execute(_DELETE_NEXT)
    transaction.execute(_DELETE_FACT, {"fact": "next_embedder"})
    _set_fact(transaction, "embedder", identity)


def check(transaction: Transaction, identity: EmbedderIdentity) -> None:
    """Check that vectors of this embedder may be stored.

    Raises:
        EmbedderChanged: The stored vectors come from another embedder, and no change leads to this one.
    """
    found = recorded(transaction)
    if found is not None and identity not in (found, following(transaction)):
        raise _changed(found, identity)


def place(transaction: Transaction, collection: str, identity: EmbedderIdentity) -> VectorTable:
    """Return the table for new vectors of this embedder, and record the embedder where there are no vectors yet.

    Raises:
        EmbedderChanged: The stored vectors come from another embedder, and no change leads to this one.
    """
    found = recorded(transaction)
    if found is None:
        transaction.lock("embedder")  # two first documents may come together, from two embedders
        found = recorded(transaction)
    if found is None:
        record(transaction, identity)
        return "vectors"
    own = of_collection(transaction, collection)
    if identity == own:
        return "vectors"
    if identity != (following(transaction) or found):
        raise _changed(own or found, identity)
    if transaction.scalar(_ANY_OF, {"of": collection}):
        return "next_vectors"
    _set_collection(transaction, collection, identity)
    return "vectors"


def aim(transaction: Transaction, identity: EmbedderIdentity) -> None:
    """Begin or go on with the change to an embedder. Nothing happens where all vectors come from it."""
    found = recorded(transaction)
    if found is None:
        return
    if not stale(transaction, identity):
        record(transaction, identity)
    elif following(transaction) != identity:
        transaction.execute(_DELETE_NEXT)
        _set_fact(transaction, "next_embedder", identity)


def stale(transaction: Transaction, identity: EmbedderIdentity) -> list[str]:
    """Return the collections whose vectors come from another embedder, ordered by name."""
    names = [name for (name,) in transaction.execute(_COLLECTIONS).fetchall()]
    return [name for name in names if of_collection(transaction, name) != identity]


def progress(transaction: Transaction) -> Reembedding | None:
    """Return how far the change to another embedder is, or None without one."""
    target, found = following(transaction), recorded(transaction)
    if target is None or found is None:
        return None
    total: int = transaction.scalar(_COUNT)
    left: int = transaction.scalar(_COUNT_OF, {"names": transaction.array(stale(transaction, target))})
    left -= transaction.scalar(_COUNT_NEXT)
    return Reembedding(found, target, total - left, total)


def unembedded(transaction: Transaction, collection: str, after: int, limit: int) -> list[Passage]:
    """Return the next chunks of a collection that have no next vector, ordered by row."""
    found = transaction.execute(_UNEMBEDDED, {"of": collection, "after": after, "most": limit})
    return [Passage(*row) for row in found]


def store_next(
    transaction: Transaction, rows: Sequence[int], vectors: NDArray[np.float32], identity: EmbedderIdentity
) -> None:
    """Store next vectors. Chunks that were removed meanwhile are left out.

    Raises:
        EmbedderChanged: The change leads to another embedder now.
    """
    _require_aim(transaction, identity)
    present = {row for (row,) in transaction.execute(_PRESENT, {"rows": transaction.array(int(row) for row in rows)})}
    blobs = (vector.tobytes() for vector in np.ascontiguousarray(vectors, np.float32))
    stored = ({"chunk": row, "vector": blob} for row, blob in zip(rows, blobs, strict=True) if row in present)
    transaction.execute_all(_STORE_NEXT, stored)


def swap(transaction: Transaction, collection: str, identity: EmbedderIdentity) -> bool:
    """Put the next vectors of a collection in the place of its present ones, if they are complete.

    The caller raises the generation of the collection.

    Returns:
        Whether they were complete.

    Raises:
        EmbedderChanged: The change leads to another embedder now.
    """
    _require_aim(transaction, identity)
    if unembedded(transaction, collection, 0, 1):
        return False
    for statement in (_DELETE_OLD, _MOVE, _DELETE_MOVED):
        transaction.execute(statement, {"of": collection})
    pgvector.replace(transaction, collection)
    _set_collection(transaction, collection, identity)
    if not stale(transaction, identity):
        record(transaction, identity)
    return True


def _require_aim(transaction: Transaction, identity: EmbedderIdentity) -> None:
    target = following(transaction)
    if target != identity:
        other = target or recorded(transaction)
        reason = f": another process uses {other.name}" if other else ""
        raise EmbedderChanged(f"the vectors are no longer changed to {identity.name}{reason}")


def _changed(found: EmbedderIdentity, identity: EmbedderIdentity) -> EmbedderChanged:
    return EmbedderChanged(
        f"the catalogue's vectors come from {found.name} ({found.dimension} dimensions), the embedder is now "
        f"{identity.name} ({identity.dimension})",
        "run `ragkv serve` or `ragkv reindex`, which embed all documents again, or set RAGKV_EMBEDDER back",
    )


def _set_collection(transaction: Transaction, collection: str, identity: EmbedderIdentity) -> None:
    own = {"collection": collection, "name": identity.name, "dimension": identity.dimension}
    transaction.execute(_SET_OWN, own)
    _set_source(transaction, identity)


def _fact(transaction: Transaction, name: str) -> EmbedderIdentity | None:
    value = transaction.scalar(_FACT, {"fact": name})
    return _with_source(transaction, *json.loads(value)) if value else None


def _set_fact(transaction: Transaction, name: str, identity: EmbedderIdentity) -> None:
    transaction.execute(_SET_FACT, {"name": name, "value": json.dumps([identity.name, identity.dimension])})
    _set_source(transaction, identity)


def _with_source(transaction: Transaction, name: str, dimension: int) -> EmbedderIdentity:
    source = transaction.scalar(_FACT, {"fact": f"embedder_source {name}"})
    return EmbedderIdentity(name, dimension, source or "")


def _set_source(transaction: Transaction, identity: EmbedderIdentity) -> None:
    if identity.source:
        transaction.execute(_SET_FACT, {"name": f"embedder_source {identity.name}", "value": identity.source})
