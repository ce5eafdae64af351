"""Queries on the turns of conversations. A session's state can be rebuilt from its turns.

A turn refers to its chunks by row and id and does not copy their text. So the text of a deleted or replaced document
stays in no turn, except where an answer quotes it. A row number is never reused, so a turn cannot refer to a wrong
chunk.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import bindparam, delete, insert, select

from ragkv.catalog import tables
from ragkv.catalog.models import StoredTurn
from ragkv.catalog.transaction import Transaction

_TURNS = tables.turns
_MINE = (_TURNS.c.collection == bindparam("of"), _TURNS.c.conversation == bindparam("named"))
_ROWS = select(_TURNS.c.row).where(*_MINE).order_by(_TURNS.c.row).limit(bindparam("most"))
_INSERT = insert(_TURNS).returning(_TURNS.c.row)
_COLUMNS = ("row", "method", "reader", "created", "joined", "question", "answer", "asked", "written")
_SELECT = select(*(_TURNS.c[name] for name in _COLUMNS)).where(*_MINE).order_by(_TURNS.c.row)
_REMOVE = delete(_TURNS).where(*_MINE)
_CLEAR = delete(_TURNS).where(_TURNS.c.collection == bindparam("of"))


def add(
    transaction: Transaction, collection: str, conversation: str, after: Sequence[int], turn: StoredTurn
) -> int | None:
    """Store a turn after the turns at the rows `after`.

    Returns:
        The row of the new turn. None, and nothing is stored, if the conversation does not consist of exactly these
        turns any more: it was removed while the question was being answered.
    """
    transaction.lock(f"conversation {collection} {conversation}")
    name = {"of": collection, "named": conversation}
    found = [row for (row,) in transaction.execute(_ROWS, {**name, "most": len(after)})]
    if found != list(after):
        return None
    asked, written = (np.asarray(ids, dtype="<i4").tobytes() for ids in (turn.asked, turn.written))
    stored: dict[str, Any] = {
        "collection": collection,
        "conversation": conversation,
        "method": turn.method,
        "reader": turn.reader,
    }
    stored |= {"created": time.time(), "joined": json.dumps(turn.joined), "question": turn.question}
    stored |= {"answer": turn.answer, "asked": asked, "written": written}
    row: int = transaction.scalar(_INSERT, stored)
    return row


def turns(transaction: Transaction, collection: str, conversation: str) -> list[StoredTurn]:
    """Return the turns of a conversation, in order; [] if there is no such conversation."""
    return [_turn(columns) for columns in transaction.execute(_SELECT, {"of": collection, "named": conversation})]


def remove(transaction: Transaction, collection: str, conversation: str) -> int:
    """Delete a conversation; return the number of its turns."""
    return transaction.execute(_REMOVE, {"of": collection, "named": conversation}).rowcount


def clear(transaction: Transaction, collection: str) -> int:
    """Delete all conversations of a collection; return the number of their turns."""
    return transaction.execute(_CLEAR, {"of": collection}).rowcount


def _turn(columns: Sequence[Any]) -> StoredTurn:
    row, method, reader, created, joined, question, answer, asked, written = columns
    chunks = tuple((chunk_row, chunk_id) for chunk_row, chunk_id in json.loads(joined))
    return StoredTurn(question, answer, _token_ids(asked), _token_ids(written), chunks, method, reader, created, row)


def _token_ids(blob: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(blob, "<i4").tolist())
