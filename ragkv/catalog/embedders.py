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
import sqlite3
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog.models import EmbedderIdentity, Passage, Reembedding
from ragkv.errors import EmbedderChanged

VectorTable = Literal["vectors", "next_vectors"]

_ROWS = "(SELECT row FROM chunks WHERE collection = ?)"


def recorded(connection: sqlite3.Connection) -> EmbedderIdentity | None:
    """Return the embedder of the stored vectors, or None while there are no chunks."""
    if connection.execute("SELECT NOT EXISTS (SELECT 1 FROM chunks)").fetchone()[0]:
        return None
    return _fact(connection, "embedder")


def of_collection(connection: sqlite3.Connection, collection: str) -> EmbedderIdentity | None:
    """Return the embedder of the vectors of a collection, or None while there are no chunks at all."""
    sql = "SELECT name, dimension FROM collection_embedders WHERE collection = ?"
    own = connection.execute(sql, (collection,)).fetchone()
    return _with_source(connection, *own) if own else recorded(connection)


def following(connection: sqlite3.Connection) -> EmbedderIdentity | None:
    """Return the embedder that a change leads to, or None without a change."""
    return _fact(connection, "next_embedder")


def record(connection: sqlite3.Connection, identity: EmbedderIdentity) -> None:
    """Make this the embedder of all collections. A change that was under way is given up."""
    for table in ("collection_embedders", "next_vectors"):
        connection.execute(f"DELETE FROM {table}")
    connection.execute("DELETE FROM facts WHERE name = 'next_embedder'")
    _set_fact(connection, "embedder", identity)


def check(connection: sqlite3.Connection, identity: EmbedderIdentity) -> None:
    """Check that vectors of this embedder may be stored.

    Raises:
        EmbedderChanged: The stored vectors come from another embedder, and no change leads to this one.
    """
    found = recorded(connection)
    if found is not None and identity not in (found, following(connection)):
        raise _changed(found, identity)


def place(connection: sqlite3.Connection, collection: str, identity: EmbedderIdentity) -> VectorTable:
    """Return the table for new vectors of this embedder, and record the embedder where there are no vectors yet.

    Raises:
        EmbedderChanged: The stored vectors come from another embedder, and no change leads to this one.
    """
    found = recorded(connection)
    if found is None:
        record(connection, identity)
        return "vectors"
    own = of_collection(connection, collection)
    if identity == own:
        return "vectors"
    if identity != (following(connection) or found):
        raise _changed(own or found, identity)
    if connection.execute("SELECT EXISTS (SELECT 1 FROM chunks WHERE collection = ?)", (collection,)).fetchone()[0]:
        return "next_vectors"
    _set_collection(connection, collection, identity)
    return "vectors"


def aim(connection: sqlite3.Connection, identity: EmbedderIdentity) -> None:
    """Begin or go on with the change to an embedder. Nothing happens where all vectors come from it."""
    found = recorded(connection)
    if found is None:
        return
    if not stale(connection, identity):
        record(connection, identity)
    elif following(connection) != identity:
        connection.execute("DELETE FROM next_vectors")
        _set_fact(connection, "next_embedder", identity)


def stale(connection: sqlite3.Connection, identity: EmbedderIdentity) -> list[str]:
    """Return the collections whose vectors come from another embedder, ordered by name."""
    names = [name for (name,) in connection.execute("SELECT DISTINCT collection FROM chunks ORDER BY collection")]
    return [name for name in names if of_collection(connection, name) != identity]


def progress(connection: sqlite3.Connection) -> Reembedding | None:
    """Return how far the change to another embedder is, or None without one."""
    target, found = following(connection), recorded(connection)
    if target is None or found is None:
        return None
    total = connection.execute("SELECT count(*) FROM chunks").fetchone()[0]
    waiting = stale(connection, target)
    sql = "SELECT count(*) FROM chunks WHERE collection IN (SELECT value FROM json_each(?))"
    left = connection.execute(sql, (json.dumps(waiting),)).fetchone()[0]
    left -= connection.execute("SELECT count(*) FROM next_vectors").fetchone()[0]
    return Reembedding(found, target, total - left, total)


def unembedded(connection: sqlite3.Connection, collection: str, after: int, limit: int) -> list[Passage]:
    """Return the next chunks of a collection that have no next vector, ordered by row."""
    sql = (
        "SELECT row, title, text FROM chunks WHERE collection = ? AND row > ?"
        " AND NOT EXISTS (SELECT 1 FROM next_vectors WHERE chunk = row) ORDER BY row LIMIT ?"
    )
    return [Passage(*found) for found in connection.execute(sql, (collection, after, limit))]


def store_next(
    connection: sqlite3.Connection, rows: Sequence[int], vectors: NDArray[np.float32], identity: EmbedderIdentity
) -> None:
    """Store next vectors. Chunks that were removed meanwhile are left out.

    Raises:
        EmbedderChanged: The change leads to another embedder now.
    """
    _require_aim(connection, identity)
    sql = "INSERT OR REPLACE INTO next_vectors SELECT row, ? FROM chunks WHERE row = ?"
    blobs = (vector.tobytes() for vector in np.ascontiguousarray(vectors, np.float32))
    connection.executemany(sql, zip(blobs, rows, strict=True))


def swap(connection: sqlite3.Connection, collection: str, identity: EmbedderIdentity) -> bool:
    """Put the next vectors of a collection in the place of its present ones, if they are complete.

    The caller raises the generation of the collection.

    Returns:
        Whether they were complete.

    Raises:
        EmbedderChanged: The change leads to another embedder now.
    """
    _require_aim(connection, identity)
    if unembedded(connection, collection, 0, 1):
        return False
    connection.execute(f"DELETE FROM vectors WHERE chunk IN {_ROWS}", (collection,))
    sql = f"INSERT INTO vectors SELECT chunk, vector FROM next_vectors WHERE chunk IN {_ROWS}"
    connection.execute(sql, (collection,))
    connection.execute(f"DELETE FROM next_vectors WHERE chunk IN {_ROWS}", (collection,))
    _set_collection(connection, collection, identity)
    if not stale(connection, identity):
        record(connection, identity)
    return True


def _require_aim(connection: sqlite3.Connection, identity: EmbedderIdentity) -> None:
    target = following(connection)
    if target != identity:
        other = target or recorded(connection)
        reason = f": another process uses {other.name}" if other else ""
        raise EmbedderChanged(f"the vectors are no longer changed to {identity.name}{reason}")


def _changed(found: EmbedderIdentity, identity: EmbedderIdentity) -> EmbedderChanged:
    return EmbedderChanged(
        f"the catalogue's vectors come from {found.name} ({found.dimension} dimensions), the embedder is now "
        f"{identity.name} ({identity.dimension})",
        "run `ragkv serve` or `ragkv reindex`, which embed all documents again, or set RAGKV_EMBEDDER back",
    )


def _set_collection(connection: sqlite3.Connection, collection: str, identity: EmbedderIdentity) -> None:
    sql = "INSERT OR REPLACE INTO collection_embedders VALUES (?, ?, ?)"
    connection.execute(sql, (collection, identity.name, identity.dimension))
    _set_source(connection, identity)


def _fact(connection: sqlite3.Connection, name: str) -> EmbedderIdentity | None:
    row = connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return _with_source(connection, *json.loads(row[0])) if row else None


def _set_fact(connection: sqlite3.Connection, name: str, identity: EmbedderIdentity) -> None:
    value = json.dumps([identity.name, identity.dimension])
    connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))
    _set_source(connection, identity)


def _with_source(connection: sqlite3.Connection, name: str, dimension: int) -> EmbedderIdentity:
    row = connection.execute("SELECT value FROM facts WHERE name = ?", (f"embedder_source {name}",)).fetchone()
    return EmbedderIdentity(name, dimension, row[0] if row else "")


def _set_source(connection: sqlite3.Connection, identity: EmbedderIdentity) -> None:
    if identity.source:
        name = f"embedder_source {identity.name}"
        connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, identity.source))
