"""Queries on the turns of conversations. A session's state can be rebuilt from its turns.

A turn refers to its chunks by row and id and does not copy their text. So the text of a deleted or replaced document
stays in no turn, except where an answer quotes it. A row number is never reused, so a turn cannot refer to a wrong
chunk.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragkv.catalog.models import StoredTurn

_COLUMNS = "row, method, reader, created, joined, question, answer, asked, written"


def add(
    connection: sqlite3.Connection, collection: str, conversation: str, after: Sequence[int], turn: StoredTurn
) -> int | None:
    """Store a turn after the turns at the rows `after`.

    Returns:
        The row of the new turn. None, and nothing is stored, if the conversation does not consist of exactly these
        turns any more: it was removed while the question was being answered.
    """
    sql = "SELECT row FROM turns WHERE collection = ? AND conversation = ? ORDER BY row LIMIT ?"
    found = [row for (row,) in connection.execute(sql, (collection, conversation, len(after)))]
    if found != list(after):
        return None
    asked, written = (np.asarray(ids, dtype="<i4").tobytes() for ids in (turn.asked, turn.written))
    metadata = (collection, conversation, turn.method, turn.reader, time.time(), json.dumps(turn.joined))
    return connection.execute(
        "INSERT INTO turns (collection, conversation, method, reader, created, joined, question, answer, asked,"
        " written) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*metadata, turn.question, turn.answer, asked, written),
    ).lastrowid


def turns(connection: sqlite3.Connection, collection: str, conversation: str) -> list[StoredTurn]:
    """Return the turns of a conversation, in order; [] if there is no such conversation."""
    sql = f"SELECT {_COLUMNS} FROM turns WHERE collection = ? AND conversation = ? ORDER BY row"
    return [_turn(columns) for columns in connection.execute(sql, (collection, conversation))]


def remove(connection: sqlite3.Connection, collection: str, conversation: str) -> int:
    """Delete a conversation; return the number of its turns."""
    sql = "DELETE FROM turns WHERE collection = ? AND conversation = ?"
    return connection.execute(sql, (collection, conversation)).rowcount


def clear(connection: sqlite3.Connection, collection: str) -> int:
    """Delete all conversations of a collection; return the number of their turns."""
    return connection.execute("DELETE FROM turns WHERE collection = ?", (collection,)).rowcount


def _turn(columns: Sequence[Any]) -> StoredTurn:
    row, method, reader, created, joined, question, answer, asked, written = columns
    chunks = tuple((chunk_row, chunk_id) for chunk_row, chunk_id in json.loads(joined))
    return StoredTurn(question, answer, _token_ids(asked), _token_ids(written), chunks, method, reader, created, row)


def _token_ids(blob: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(blob, "<i4").tolist())
