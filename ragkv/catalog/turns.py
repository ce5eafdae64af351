"""Turns: what was asked and answered in conversations, from which the state of each can be made again.

Chunks are kept by row and by name, never by content: what a deleted or replaced document said is in no turn, but for
what an answer quotes. A row is never used twice, so a chunk that is gone stays gone.

These functions run inside a transaction of the caller.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence

import numpy as np

from ragkv.catalog.models import StoredTurn

_TURN = "row, method, reader, created, joined, question, answer, asked, written"


def add(
    connection: sqlite3.Connection, collection: str, conversation: str, after: Sequence[int], turn: StoredTurn
) -> int | None:
    """Store a turn behind the turns `after`; returns its row. None, and nothing is stored, where they are gone: the
    conversation was removed while the question was being answered."""
    sql = "SELECT row FROM turns WHERE collection = ? AND conversation = ? ORDER BY row LIMIT ?"
    found = [row for (row,) in connection.execute(sql, (collection, conversation, len(after)))]
    if found != list(after):
        return None
    asked, written = (np.asarray(ids, dtype="<i4").tobytes() for ids in (turn.asked, turn.written))
    facts = (collection, conversation, turn.method, turn.reader, time.time(), json.dumps(turn.joined))
    return connection.execute(
        "INSERT INTO turns (collection, conversation, method, reader, created, joined, question, answer, asked,"
        " written) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*facts, turn.question, turn.answer, asked, written),
    ).lastrowid


def turns(connection: sqlite3.Connection, collection: str, conversation: str) -> list[StoredTurn]:
    """The turns of a conversation, in order; [] where there is none."""
    sql = f"SELECT {_TURN} FROM turns WHERE collection = ? AND conversation = ? ORDER BY row"
    return [_turn(*row) for row in connection.execute(sql, (collection, conversation))]


def remove(connection: sqlite3.Connection, collection: str, conversation: str) -> int:
    """Forget a conversation; returns how many turns it had."""
    sql = "DELETE FROM turns WHERE collection = ? AND conversation = ?"
    return connection.execute(sql, (collection, conversation)).rowcount


def clear(connection: sqlite3.Connection, collection: str) -> int:
    """Forget all conversations of a collection; returns how many turns they had."""
    return connection.execute("DELETE FROM turns WHERE collection = ?", (collection,)).rowcount


def _turn(
    row: int,
    method: str,
    reader: str,
    created: float,
    joined: str,
    question: str,
    answer: str,
    asked: bytes,
    written: bytes,
) -> StoredTurn:
    chunks = tuple((number, name) for number, name in json.loads(joined))
    return StoredTurn(question, answer, _ids(asked), _ids(written), chunks, method, reader, created, row)


def _ids(blob: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(blob, "<i4").tolist())
