"""Queries on the turns of conversations. A session's state can be rebuilt from its turns.

A turn refers to its chunks by row and id and does not copy their text. Its answer may quote them, and so may the
answers that follow in the conversation. So all of these are removed in the transaction that deletes or replaces a
document (`withdraw`): only the questions stay. A row number of a chunk is never reused, so a turn cannot refer to a
wrong one.

Every function runs inside a transaction of the caller.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from sqlalchemy import bindparam, delete, func, insert, select, update

from ragkv.catalog import chunks, tables
from ragkv.catalog.models import StoredTurn
from ragkv.catalog.statements import values
from ragkv.catalog.transaction import Transaction
from ragkv.errors import Outdated

_TURNS, _READ = tables.turns, tables.turn_documents
_MINE = (_TURNS.c.collection == bindparam("of"), _TURNS.c.conversation == bindparam("named"))
_ROWS = select(_TURNS.c.row).where(*_MINE).order_by(_TURNS.c.row).limit(bindparam("most"))
_INSERT = insert(_TURNS).returning(_TURNS.c.row)
_NOTE = insert(_READ).from_select(
    ["turn", "document"],
    select(bindparam("turn", type_=_TURNS.c.row.type), tables.chunks.c.document)
    .distinct()
    .where(tables.chunks.c.row.in_(select(values("rows", "bigint").c.value))),
)
_READERS = (
    select(_TURNS.c.collection, _TURNS.c.conversation, func.min(_TURNS.c.row))
    .select_from(_TURNS.join(_READ, _READ.c.turn == _TURNS.c.row))
    .where(_READ.c.document == bindparam("document"))
    .group_by(_TURNS.c.collection, _TURNS.c.conversation)
)
_WITHDRAW = (
    update(_TURNS)
    .where(*_MINE, _TURNS.c.row >= bindparam("first"))
    .values(answer=bindparam("nothing"), written=bindparam("no_tokens"), removed=1)
)
_COLUMNS = ("row", "method", "reader", "created", "removed", "joined", "question", "answer", "asked", "written")
_SELECT = select(*(_TURNS.c[name] for name in _COLUMNS)).where(*_MINE).order_by(_TURNS.c.row)
_REMOVE = delete(_TURNS).where(*_MINE)
_CLEAR = delete(_TURNS).where(_TURNS.c.collection == bindparam("of"))


def add(
    transaction: Transaction,
    collection: str,
    conversation: str,
    after: Sequence[int],
    turn: StoredTurn,
    read: Collection[int],
) -> int | None:
    """Store a turn after the turns at the rows `after`.

    Args:
        transaction: The transaction.
        collection: Collection of the conversation.
        conversation: Its name.
        after: Rows of its earlier turns.
        turn: What to store.
        read: Rows of all chunks that the answer was read from.

    Returns:
        The row of the new turn. None, and nothing is stored, if the conversation does not consist of exactly these
        turns any more: it was removed while the question was being answered.

    Raises:
        Outdated: A chunk is gone.
    """
    # A document of the collection that is replaced meanwhile finds the turn, or the turn finds its chunk gone.
    transaction.lock(f"collection {collection}", f"conversation {collection} {conversation}")
    if chunks.standing(transaction, collection, read) != set(read):
        raise Outdated
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
    transaction.execute(_NOTE, {"turn": row, "rows": transaction.array(joined for joined, _ in turn.joined)})
    return row


def withdraw(transaction: Transaction, documents: Iterable[int]) -> None:
    """Remove the answers that may hold text of documents, before these are deleted or replaced.

    Args:
        transaction: The transaction.
        documents: Rows of the documents.
    """
    for document in documents:
        found = transaction.execute(_READERS, {"document": document}).fetchall()
        transaction.execute_all(
            _WITHDRAW,
            [
                {"of": collection, "named": conversation, "first": first, "nothing": "", "no_tokens": b""}
                for collection, conversation, first in found
            ],
        )


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
    row, method, reader, created, removed, joined, question, answer, asked, written = columns
    read = tuple((chunk_row, chunk_id) for chunk_row, chunk_id in json.loads(joined))
    tokens = _token_ids(asked), _token_ids(written)
    return StoredTurn(question, answer, *tokens, read, method, reader, created, row, bool(removed))


def _token_ids(blob: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(blob, "<i4").tolist())
