"""Access to one SQLite file: WAL mode, an integrity check at open, and SQLite errors translated to `ragkv.errors`."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragkv.catalog import attributes, full_text, schema, spans, versions
from ragkv.catalog.listener import POLL_SECONDS
from ragkv.errors import CatalogCorrupt, ConfigError, RagkvError, StoreFull, StoreUnavailable

BUSY_SECONDS = 30.0
"""Seconds that a write waits for another process to finish writing."""

_HEADER = b"SQLite format 3\0"

# SQLite's error codes when the disk, a quota or a file size limit stops a write.
_NO_ROOM = frozenset({sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_SHMSIZE})


class Database:
    """A pool of connections to one SQLite file. Thread-safe.

    Each transaction has a connection to itself. The writers of this process run one after another. A reader sees one
    snapshot and never waits for a writer.
    """

    def __init__(self, path: Path):
        """Create the pool without opening the file; use `open`, which also checks the file."""
        self.path = path
        self._idle: list[sqlite3.Connection] = []
        self._pool_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(cls, path: Path) -> Database:
        """Open the file, or create it.

        Raises:
            CatalogCorrupt: The file is damaged.
            ConfigError: The file belongs to another program or to a newer ragkv, or cannot be opened.
            StoreFull: There is no space to create the file.
        """
        database = cls(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                _refuse_leftovers(path)
                with database._translate_errors():
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
        """Open a read transaction, which sees one state of the file from beginning to end."""
        with self._translate_errors(), self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Open a write transaction, which is applied completely or not at all. Do not nest. Raises StoreFull."""
        with self._write_lock, self._translate_errors(), self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    def copy(self, path: Path) -> None:
        """Write one state of the catalogue to a new file and flush it. Writers are not blocked. Raises OSError."""
        with self.read() as connection:
            target = sqlite3.connect(path, isolation_level=None)
            try:
                connection.backup(target)
            finally:
                target.close()

    def change_signal(self) -> FileSignal:
        """Return what wakes a listener when the file changes."""
        with self._translate_errors():
            return FileSignal(_connect(self.path))

    def close(self) -> None:
        """Close idle connections now, and connections in use when their transactions end."""
        with self._pool_lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        connection = self._acquire()
        try:
            connection.execute(begin)
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # After some errors, such as a full disk, SQLite has already rolled back.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except BaseException:
            connection.close()  # Its state is unknown; the next transaction opens a new connection.
            raise
        self._release(connection)

    def _acquire(self) -> sqlite3.Connection:
        with self._pool_lock:
            if self._closed:
                raise RagkvError(f"the catalogue {self.path} is closed")
            if self._idle:
                return self._idle.pop()
        return _connect(self.path)

    def _release(self, connection: sqlite3.Connection) -> None:
        with self._pool_lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _check(self) -> None:
        """Refuse a damaged or foreign file, and rebuild derived tables that are damaged or missing."""
        with self.path.open("rb") as file:
            if file.read(len(_HEADER)) != _HEADER:
                raise _corrupt(self.path, "it does not begin like an SQLite file")
        with self.read() as connection:
            _refuse_partial_page(self.path, connection)
            application_id = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            # Newer versions of SQLite check FTS5 tables here, too. A damaged one is rebuilt below.
            messages = [row[0] for row in connection.execute("PRAGMA quick_check(10)")]
        problems = [message for message in messages if message != "ok" and "FTS5" not in message]
        if problems:
            raise _corrupt(self.path, problems[0])
        if application_id != schema.APPLICATION_ID:
            raise ConfigError(f"{self.path} is an SQLite file of another program")
        if version > schema.VERSION:
            raise ConfigError(f"{self.path} was written by a newer ragkv (schema {version}, known: {schema.VERSION})")
        if not tables >= schema.NAMES:
            raise _corrupt(self.path, "tables are missing")
        with self.write() as connection:
            for table in schema.ADDED:
                connection.execute(table)
            for index in (full_text, attributes, versions, spans):  # spans last: it reads the versions
                if not index.is_intact(connection):
                    index.rebuild(connection)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            translated = _translate(self.path, error)
            if translated is None:
                raise
            raise translated from error


class FileSignal:
    """Polls the counter that SQLite raises when another connection commits."""

    def __init__(self, connection: sqlite3.Connection):
        """Take a connection that nothing else uses."""
        self._connection = connection
        self._version = self._data_version()

    def wait(self, seconds: float) -> bool:
        """See `ChangeSignal`."""
        end = time.monotonic() + seconds
        while (version := self._data_version()) == self._version:
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, POLL_SECONDS))
        self._version = version
        return True

    def _data_version(self) -> int:
        version: int = self._connection.execute("PRAGMA data_version").fetchone()[0]
        return version

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _connect(path: Path) -> sqlite3.Connection:
    # mode=rw: a missing file is an error and not a new, empty catalogue.
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
    """Create the file under a temporary name and link it to `path`, so that an empty file there is always damage."""
    temporary = path.with_name(f"{path.name}.new-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        connection = sqlite3.connect(temporary, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(schema.TABLES)
            full_text.rebuild(connection)
            connection.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {schema.VERSION}")
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


def _refuse_partial_page(path: Path, connection: sqlite3.Connection) -> None:
    # SQLite fills a torn last page with zeros. If there is a write-ahead log, it may still hold the page.
    log = path.with_name(path.name + "-wal")
    torn = path.stat().st_size % connection.execute("PRAGMA page_size").fetchone()[0]
    if torn and not (log.exists() and log.stat().st_size):
        raise _corrupt(path, "its last page is torn")


def _refuse_leftovers(path: Path) -> None:
    if path.with_name(path.name + "-wal").exists():
        raise _corrupt(path, "the file is missing but its -wal file exists")


def _corrupt(path: Path, reason: str) -> CatalogCorrupt:
    return CatalogCorrupt(
        f"the catalogue {path} is damaged ({reason}); restore a backup, or move it away and ingest the documents again"
    )


def _translate(path: Path, error: sqlite3.Error) -> RagkvError | None:
    """Return the error of `ragkv.errors` for an SQLite error, or None for an error in our own SQL."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    primary = code & 0xFF
    if primary == sqlite3.SQLITE_FULL or code in _NO_ROOM:
        return StoreFull(f"no space left for the catalogue {path}; nothing was changed")
    if code == sqlite3.SQLITE_CORRUPT_VTAB:
        return CatalogCorrupt(f"the word index of the catalogue {path} is damaged; `ragkv reindex` rebuilds it")
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
