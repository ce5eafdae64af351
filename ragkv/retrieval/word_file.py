"""WordFile: the SQLite file of a process' own word index.

It is derived from the catalogue, so it may be deleted at any time. Processes that share a data folder share it.

    facts         name, value: the format of the file
    collections   name, generation: the state of the catalogue that the chunks of a collection have
    chunks        row, collection, title, text: as in the catalogue
    chunk_words   FTS5 over chunks (ragkv/catalog/full_text.py)
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from ragkv.catalog import full_text
from ragkv.catalog.transaction import Transaction

logger = logging.getLogger(__name__)

FORMAT = "1"
BUSY_SECONDS = 30.0
"""Seconds that an update waits for that of another process."""

_TABLES = (
    "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS collections (name TEXT PRIMARY KEY, generation INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS chunks ("
    " row INTEGER PRIMARY KEY, collection TEXT NOT NULL, title TEXT NOT NULL, text TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS chunks_by_collection ON chunks (collection)",
)
_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH})

_DIALECT = SQLiteDialect_pysqlite()


class _Unusable(sqlite3.DatabaseError):
    """The file is not what this module writes."""

    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


class _NoFolder(sqlite3.OperationalError):
    """There is no folder for the file."""

    sqlite_errorcode = sqlite3.SQLITE_CANTOPEN


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether a new file would solve an error. SQLITE_ERROR is what a missing table looks like."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE


class WordFile:
    """Transactions on the file. Thread-safe. The methods raise sqlite3.Error."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._files = 0  # counts the files that were discarded, so that no connection to one is used again
        self._prepared = False

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Open a read transaction, which sees one state of the file."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Open a write transaction, which is applied completely or not at all."""
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    def discard(self, error: sqlite3.Error) -> None:
        """Delete a damaged file. The next transaction creates a new one."""
        logger.warning("the word index %s is damaged and is built again: %s", self.path, error)
        self.close()
        with self._lock:
            for suffix in ("-wal", "-shm", ""):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._files += 1
            self._prepared = False
        for connection in idle:
            connection.close()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        connection, files = self._acquire()
        try:
            connection.execute(begin)
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            connection.close()  # rolls back
            raise
        with self._lock:
            if files == self._files:
                self._idle.append(connection)
                return
        connection.close()

    def _acquire(self) -> tuple[sqlite3.Connection, int]:
        with self._lock:
            if self._idle:
                return self._idle.pop(), self._files
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _NoFolder(f"{self.path.parent}: {error.strerror}") from error
            connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            try:
                connection.execute("PRAGMA synchronous = NORMAL")
                full_text.prepare(connection)
                if not self._prepared:
                    _prepare(connection)
                    self._prepared = True
            except BaseException:
                connection.close()
                raise
            return connection, self._files


def _prepare(connection: sqlite3.Connection) -> None:
    """Create the tables of a new file, and verify those of an old one."""
    connection.execute("PRAGMA journal_mode = WAL")
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise _Unusable(problem)
    connection.execute("BEGIN IMMEDIATE")
    new = not connection.execute("SELECT EXISTS (SELECT 1 FROM sqlite_master)").fetchone()[0]
    if new:
        for table in _TABLES:
            connection.execute(table)
        connection.execute("INSERT INTO facts VALUES ('format', ?)", (FORMAT,))
        full_text.rebuild(Transaction(connection, _DIALECT))
    elif connection.execute("SELECT value FROM facts WHERE name = 'format'").fetchone() != (FORMAT,):
        raise _Unusable("it has another format")
    elif not full_text.is_intact(Transaction(connection, _DIALECT)):
        raise _Unusable("the full-text table does not agree with the chunks")
    connection.execute("COMMIT")
