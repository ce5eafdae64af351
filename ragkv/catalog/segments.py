"""Queries on the segments of chunks (ragkv/retrieval/segments.py). They can be made again from the texts.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import bindparam, select

from ragkv.catalog.models import EmbedderIdentity
from ragkv.catalog.statements import upsert, values
from ragkv.catalog.tables import chunks, segments
from ragkv.catalog.transaction import Transaction

_WANTED = select(values("rows", "bigint").c.value)
_LOAD = select(segments.c.chunk, segments.c.segments).where(
    segments.c.chunk.in_(_WANTED), segments.c.embedder == bindparam("name")
)
_PRESENT = select(chunks.c.row).where(chunks.c.row.in_(_WANTED))
_STORE = upsert(segments, ["chunk"])


def load(transaction: Transaction, rows: Iterable[int], embedder: EmbedderIdentity) -> dict[int, NDArray[np.int8]]:
    """Return the segments [S, dimension] of chunks that this embedder made, by row. Others are left out."""
    wanted = {"rows": transaction.array(int(row) for row in rows), "name": embedder.name}
    found, width = transaction.execute(_LOAD, wanted), embedder.dimension
    return {row: np.frombuffer(blob, np.int8).reshape(-1, width) for row, blob in found if len(blob) % width == 0}


def store(transaction: Transaction, found: Mapping[int, NDArray[np.int8]], embedder: EmbedderIdentity) -> None:
    """Store segments by row, in place of earlier ones. Rows that no longer exist are left out."""
    present = {row for (row,) in transaction.execute(_PRESENT, {"rows": transaction.array(found)})}
    stored = [
        {"chunk": row, "embedder": embedder.name, "segments": np.ascontiguousarray(each, np.int8).tobytes()}
        for row, each in found.items()
        if row in present
    ]
    transaction.execute_all(_STORE, stored)
