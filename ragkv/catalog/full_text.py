"""Full-text search with BM25 over the titles and texts of chunks.

The FTS5 table `chunk_words` is derived from the table `chunks`, as search reads it: the view `searched_chunks` has its
content. Triggers keep it up to date, and it can be rebuilt. Only SQLite has it. What it is made of is compared with
this module when a file is opened, so an index of an earlier release is built again.

Triggers and view call `ragkv.normalisation.searchable`, so a connection that writes chunks needs `prepare`.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Select, bindparam, column, literal_column, select, table
from sqlalchemy import text as sql_text

from ragkv.catalog import attributes
from ragkv.catalog.attributes import FilterShape
from ragkv.catalog.tables import chunks
from ragkv.catalog.transaction import Transaction
from ragkv.normalisation import SEARCHABLE, searchable
from ragkv.types import Filter

TITLE_WEIGHT, TEXT_WEIGHT = 2.0, 1.0
MAX_WORDS = 64
"""At most so many distinct words of a question are looked up, which bounds the cost of a very long question."""

# By name, what the index consists of.
_PARTS = {
    "searched_chunks": f"""
    CREATE VIEW searched_chunks AS
        SELECT row, {SEARCHABLE}(title) AS title, {SEARCHABLE}(text) AS text FROM chunks
    """,
    "chunk_words": """
    CREATE VIRTUAL TABLE chunk_words USING fts5(
        title, text, content='searched_chunks', content_rowid='row', tokenize='porter unicode61 remove_diacritics 2'
    )
    """,
    "chunk_words_insert": f"""
    CREATE TRIGGER chunk_words_insert AFTER INSERT ON chunks BEGIN
        INSERT INTO chunk_words (rowid, title, text)
        VALUES (new.row, {SEARCHABLE}(new.title), {SEARCHABLE}(new.text));
    END
    """,
    "chunk_words_delete": f"""
    CREATE TRIGGER chunk_words_delete AFTER DELETE ON chunks BEGIN
        INSERT INTO chunk_words (chunk_words, rowid, title, text)
        VALUES ('delete', old.row, {SEARCHABLE}(old.title), {SEARCHABLE}(old.text));
    END
    """,
}
_WORDS = table("chunk_words", column("rowid"))
_SCORE: ColumnElement[float] = literal_column(f"-bm25(chunk_words, {TITLE_WEIGHT}, {TEXT_WEIGHT})").label("score")
_MADE = "SELECT name, sql FROM sqlite_master WHERE name IN ({})".format(", ".join(map(repr, _PARTS)))
_COUNTS = "SELECT (SELECT count(*) FROM chunk_words_docsize), (SELECT count(*) FROM chunks)"
# These words occur in nearly every chunk and question. They do not help to rank, and scanning their postings would be
# most of the cost of a search.
_STOP_WORDS = frozenset(
    "a an and are as at be by did do does for from had has have how in is it its of on or that the their there these "
    "they this to was were what when where which who whom whose why will with would".split()
)


def prepare(connection: sqlite3.Connection) -> None:
    """Let the triggers of a connection normalise what they index."""
    connection.create_function(SEARCHABLE, 1, searchable, deterministic=True)


def query(text: str, every: bool = False) -> str:
    """Return an FTS5 query for chunks that share a word with `text`, or have `every` one; "" if the text has no word.

    Every word is quoted, so no part of the text is interpreted as FTS5 syntax. A single word is no query for `every`.
    """
    words = list(dict.fromkeys(re.findall(r"[^\W_]+", searchable(text).lower())))
    selective = [word for word in words if word not in _STOP_WORDS]
    sought = [f'"{word}"' for word in (selective or words)[:MAX_WORDS]]
    return (" AND ".join(sought) if len(sought) > 1 else "") if every else " OR ".join(sought)


def match(
    transaction: Transaction,
    collection: str,
    text: str,
    limit: int,
    filter: Filter | None = None,
    documents: Sequence[str] | None = None,
    *,
    every: bool = False,
) -> list[tuple[int, float]]:
    """Return [(chunk row, BM25 score)], best first; a larger score is better. See `Catalog.match`."""
    words = query(text, every)
    shape, parameters = attributes.condition(transaction, collection, filter, documents)
    return transaction.execute(_match(shape), {**parameters, "words": words, "most": limit}).fetchall() if words else []


@lru_cache(maxsize=256)
def _match(shape: FilterShape) -> Select[Any]:
    return (
        select(chunks.c.row, _SCORE)
        .select_from(_WORDS.join(chunks, chunks.c.row == _WORDS.c.rowid))
        .where(sql_text("chunk_words MATCH :words"), chunks.c.collection == bindparam("collection"))
        .where(*shape.conditions(chunks.c.document))
        .order_by(_SCORE.desc(), chunks.c.row)
        .limit(bindparam("most"))
    )


def is_intact(transaction: Transaction) -> bool:
    """Return whether the index and its triggers are those of this module, are consistent and cover every chunk.

    Needs a write transaction.
    """
    if dict(transaction.exec_driver_sql(_MADE).fetchall()) != {name: sql.strip() for name, sql in _PARTS.items()}:
        return False
    try:
        transaction.exec_driver_sql("INSERT INTO chunk_words (chunk_words) VALUES ('integrity-check')")
        ((indexed, stored),) = transaction.exec_driver_sql(_COUNTS).fetchall()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL):
            raise
        return False
    return bool(indexed == stored)


def rebuild(transaction: Transaction) -> None:
    """Rebuild the index from the chunks. Needs a write transaction."""
    try:
        transaction.exec_driver_sql("DROP TABLE IF EXISTS chunk_words")
    except sqlite3.DatabaseError:
        _drop_damaged(transaction)
    for name, kind in (
        ("searched_chunks", "VIEW"),
        ("chunk_words_insert", "TRIGGER"),
        ("chunk_words_delete", "TRIGGER"),
    ):
        transaction.exec_driver_sql(f"DROP {kind} IF EXISTS {name}")
    for sql in _PARTS.values():
        transaction.exec_driver_sql(sql)
    transaction.exec_driver_sql("INSERT INTO chunk_words (chunk_words) VALUES ('rebuild')")


def _drop_damaged(transaction: Transaction) -> None:
    """Remove an index that is too damaged for DROP TABLE: delete its schema entry and drop its shadow tables."""
    transaction.exec_driver_sql("PRAGMA writable_schema = ON")
    transaction.exec_driver_sql("DELETE FROM sqlite_master WHERE type = 'table' AND name = 'chunk_words'")
    transaction.exec_driver_sql("PRAGMA writable_schema = RESET")
    for part in ("config", "content", "data", "docsize", "idx"):
        transaction.exec_driver_sql(f"DROP TABLE IF EXISTS chunk_words_{part}")
