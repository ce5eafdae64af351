"""Copies a catalogue in an SQLite file into an empty one in PostgreSQL: all rows, with their numbers.

The numbers stay, because turns and jobs refer to rows and not to ids. The sequences of PostgreSQL go on where SQLite
stopped, so a number is never used twice. What running processes hold (claims and leases) is not copied: a document that
was being ingested is queued again.

Both functions run inside transactions of the caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from sqlalchemy import Table, exists, insert, select

from ragkv.catalog import attributes, pgvector, tables
from ragkv.catalog.limits import read_metadata
from ragkv.catalog.statements import upsert
from ragkv.catalog.transaction import Transaction
from ragkv.errors import InputError
from ragkv.types import Document

BATCH = 500
"""Rows that are in memory at a time."""
_LARGE = frozenset({"files", "job_documents"})
"""Tables whose rows hold whole files: of these few at a time are in memory."""
_LARGE_BATCH = 4
HELD = frozenset({"claims", "claimed", "leases"})
"""Tables of what running processes hold."""
MET = frozenset({"facts", "collections", "collection_embedders"})
"""Tables in which a service that was started over an empty catalogue may have written."""
_DOCUMENTS = select(*(tables.documents.c[name] for name in ("row", "id", "title", "metadata")))


def check_empty(transaction: Transaction, name: str) -> None:
    """Raise InputError if a catalogue has documents, conversations or jobs. name: what the message calls it."""
    for table in (tables.documents, tables.turns, tables.jobs):
        if transaction.scalar(select(exists(select(1).select_from(table)))):
            raise InputError(f"the catalogue {name} has {table.name} already", "name an empty database")


def copy_rows(source: Transaction, target: Transaction) -> None:
    """Copy all rows of an SQLite catalogue into an empty one in PostgreSQL.

    Args:
        source: Of the SQLite file, whose tables are up to date.
        target: A write transaction of the database that is alone.

    Raises:
        InputError: A text has a character that PostgreSQL does not store.
    """
    for table in tables.metadata.sorted_tables:  # parents first
        if table.name in HELD | tables.POSTGRESQL_ONLY:
            continue
        primary = [column.name for column in table.primary_key]
        statement = upsert(table, primary) if table.name in MET else insert(table)
        names = table.columns.keys()
        for rows in _batches(source, table):
            target.execute_all(statement, [dict(zip(names, row, strict=True)) for row in rows])
    for row, id, title, metadata in source.execute(_DOCUMENTS):
        attributes.record(target, row, Document(id, title, "", read_metadata(metadata)))
    _continue_sequences(source, target)
    pgvector.replace(target)
    target.notify()


def _batches(source: Transaction, table: Table) -> Iterator[list[Any]]:
    found = iter(source.execute(select(table)))
    while rows := list(islice(found, _LARGE_BATCH if table.name in _LARGE else BATCH)):
        yield rows


def _continue_sequences(source: Transaction, target: Transaction) -> None:
    """Let every sequence go on behind the last number that SQLite gave to a row, also where that row is gone."""
    given = dict(source.exec_driver_sql("SELECT name, seq FROM sqlite_sequence"))
    for table in tables.metadata.sorted_tables:
        if "row" not in table.columns:
            continue
        last = given.get(table.name) or source.exec_driver_sql(f"SELECT max(row) FROM {table.name}").fetchone()[0]
        if last:
            sequence = "pg_get_serial_sequence(%s, 'row')"
            target.exec_driver_sql(
                f"SELECT setval({sequence}, greatest(%s, nextval({sequence})))", (table.name, last, table.name)
            )
