"""One SQLite file, opened with care: WAL, checked at open, faults named in the words of errors.py."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragkv.catalog import attributes, schema
from ragkv.catalog import full_text as words
from ragkv.errors import CatalogCorrupt, ConfigError, RagkvError, StoreFull, StoreUnavailable

BUSY_SECONDS = 30.0
"""How long a write waits for another process that is writing."""

_HEADER = b"SQLite format 3\0"

# What SQLite says when the disk, a quota or a file size limit stops a write.
_NO_ROOM = frozenset({sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_SHMSIZE})


class Database:
    """Connections to one SQLite file. Thread-safe: each transaction borrows a connection that no other one uses, and
    the writers of this process take turns. Readers see one snapshot and wait for nobody."""

    def __init__(self, path: Path):
        """Use `open`, which also checks the file."""
        self.path = path
        self._idle: list[sqlite3.Connection] = []
        self._guard = threading.Lock()
        self._turn = threading.Lock()
        self._closed = False

    @classmethod
    def open(cls, path: Path) -> Database:
        """Open or create the file. Raises CatalogCorrupt, ConfigError (not ours, newer, not writable), StoreFull."""
        database = cls(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                _refuse_leftovers(path)
                with database._faults():
                    _create(path)
            database._check()
        except OSError as error:
            database.close()
            raise ConfigError(f"cannot open the catalogue {path}: {error.strerror or error}") from error
        except BaseException:
            database.close()
            raise
        return database

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A transaction that sees one state of the file from beginning to end."""
        with self._faults(), self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A transaction that happens whole or not at all. Do not nest. Raises StoreFull when there is no room."""
        with self._turn, self._faults(), self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    def copy(self, path: Path) -> None:
        """Write one state of the catalogue to a new file, and flush it. Writers go on meanwhile. Raises OSError."""
        with self.read() as connection:
            target = sqlite3.connect(path, isolation_level=None)
            try:
                connection.backup(target)
            finally:
                target.close()

    def close(self) -> None:
        """Close idle connections now, borrowed ones when they come back."""
        with self._guard:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        connection = self._borrow()
        try:
            connection.execute(begin)
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # SQLite has already rolled back by itself after some faults, a full disk among them.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except BaseException:
            connection.close()  # its state is not known; the next transaction opens another
            raise
        self._give_back(connection)

    def _borrow(self) -> sqlite3.Connection:
        with self._guard:
            if self._closed:
                raise RagkvError(f"the catalogue {self.path} is closed")
            if self._idle:
                return self._idle.pop()
        return _connect(self.path)

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._guard:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _check(self) -> None:
        """Refuse what is damaged or not ours; mend words and attributes, which are only views."""
        with self.path.open("rb") as file:
            if file.read(len(_HEADER)) != _HEADER:
                raise _corrupt(self.path, "it does not begin like an SQLite file")
        with self.read() as connection:
            _refuse_partial_page(self.path, connection)
            mark = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            # Newer SQLite checks FTS5 tables here as well; those are repaired below.
            faults = [row[0] for row in connection.execute("PRAGMA quick_check(10)")]
        faults = [fault for fault in faults if fault != "ok" and "FTS5" not in fault]
        if faults:
            raise _corrupt(self.path, faults[0])
        if mark != schema.APPLICATION_ID:
            raise ConfigError(f"{self.path} is an SQLite file of another program")
        if version > schema.VERSION:
            raise ConfigError(f"{self.path} was written by a newer ragkv (schema {version}, known: {schema.VERSION})")
        if not tables >= schema.NAMES:
            raise _corrupt(self.path, "tables are missing")
        with self.write() as connection:
            for table in schema.ADDED:
                connection.execute(table)
            for view in (words, attributes):
                if not view.whole(connection):
                    view.rebuild(connection)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            named = _named(self.path, error)
            if named is None:
                raise
            raise named from error


def _connect(path: Path) -> sqlite3.Connection:
    # mode=rw: a file that disappeared is a fault, not a new empty catalogue.
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?mode=rw",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _create(path: Path) -> None:
    """Make the file elsewhere and move it here whole, so that an empty file here is always damage."""
    fresh = path.with_name(f"{path.name}.new-{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        connection = sqlite3.connect(fresh, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(schema.TABLES)
            words.rebuild(connection)
            connection.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {schema.VERSION}")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            connection.close()
        try:
            os.link(fresh, path)
        except FileExistsError:
            pass  # another process was first
        except OSError:
            os.rename(fresh, path)  # a file system without hard links
    finally:
        fresh.unlink(missing_ok=True)


def _refuse_partial_page(path: Path, connection: sqlite3.Connection) -> None:
    # SQLite fills up a torn last page with zeros. With a log beside it, the page may still come from there.
    log = path.with_name(path.name + "-wal")
    torn = path.stat().st_size % connection.execute("PRAGMA page_size").fetchone()[0]
    if torn and not (log.exists() and log.stat().st_size):
        raise _corrupt(path, "its last page is torn")


def _refuse_leftovers(path: Path) -> None:
    if path.with_name(path.name + "-wal").exists():
        raise _corrupt(path, "the file is gone but its -wal file is there")


def _corrupt(path: Path, what: str) -> CatalogCorrupt:
    return CatalogCorrupt(
        f"the catalogue {path} is damaged ({what}); restore a backup, or move it away and ingest the documents again"
    )


def _named(path: Path, error: sqlite3.Error) -> RagkvError | None:
    """The same fault in our words; None for a fault of our own SQL."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    primary = code & 0xFF
    if primary == sqlite3.SQLITE_FULL or code in _NO_ROOM:
        return StoreFull(f"no space left for the catalogue {path}; nothing was changed")
    if code == sqlite3.SQLITE_CORRUPT_VTAB:
        return CatalogCorrupt(f"the word index of the catalogue {path} is damaged; `ragkv reindex` builds it anew")
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _corrupt(path, str(error))
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreUnavailable(
            f"the catalogue {path} is busy: another process has been writing for {BUSY_SECONDS:g} s"
        )
    if primary in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return ConfigError(f"cannot use the catalogue {path}: {error}")
    if primary == sqlite3.SQLITE_IOERR:
        return StoreUnavailable(f"the catalogue {path} cannot be read or written: {error}")
    return None
