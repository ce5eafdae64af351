"""A SQLite file of the catalogue: made, migrated, and refused where it is damaged (sqlite_file.py)."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from sqlalchemy import NullPool, create_engine
from sqlalchemy.dialects import sqlite

from ragkv.catalog import database, full_text, migrations
from ragkv.catalog.transaction import Transaction
from ragkv.errors import CatalogCorrupt

APPLICATION_ID = 0x7261676B  # "ragk"; it distinguishes catalogues from other SQLite files
VERSION = 2
"""Raised where an older ragkv must not open the file any more. Other changes are migrations. 2: the triggers of the
word index need a function of this ragkv."""
DIALECT = sqlite.dialect(paramstyle="qmark")


def connect(path: Path) -> sqlite3.Connection:
    """Open a connection to a file that is there."""
    # mode=rw: a missing file is an error and not a new, empty catalogue.
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?mode=rw",
        uri=True,
        timeout=database.BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")  # for what needs no transaction of ours
        full_text.prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def create_tables(path: Path) -> None:
    """Create the file under a temporary name and link it to `path`, so that an empty file there is always damage."""
    temporary = path.with_name(f"{path.name}.new-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        connection = sqlite3.connect(temporary, isolation_level=None)
        try:
            full_text.prepare(connection)
            connection.execute("PRAGMA journal_mode = WAL")
            migrate(temporary)
            full_text.rebuild(Transaction(connection, DIALECT))
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            connection.close()
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass  # Another process created it first.
        except OSError:
            os.rename(temporary, path)  # The file system has no hard links.
    finally:
        temporary.unlink(missing_ok=True)


def migrate(path: Path) -> None:
    """Run the migrations that the file lacks, in one transaction that no other process writes beside."""
    engine = create_engine("sqlite://", creator=lambda: connect(path), poolclass=NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        migrations.upgrade(connection)
        connection.commit()


def refuse_partial_page(path: Path, transaction: Transaction) -> None:
    """Raise CatalogCorrupt where the last page of the file is torn and no log may still hold it."""
    # SQLite fills a torn last page with zeros. If there is a write-ahead log, it may still hold the page.
    log = path.with_name(path.name + "-wal")
    torn = path.stat().st_size % transaction.exec_driver_sql("PRAGMA page_size").fetchone()[0]
    if torn and not (log.exists() and log.stat().st_size):
        raise corrupt(path, "its last page is torn")


def refuse_leftovers(path: Path) -> None:
    """Raise CatalogCorrupt where the file is gone and its log is not."""
    if path.with_name(path.name + "-wal").exists():
        raise corrupt(path, "the file is missing but its -wal file exists")


def corrupt(path: Path, reason: str) -> CatalogCorrupt:
    """Return the error for a damaged file."""
    return database.damaged(str(path), reason)
