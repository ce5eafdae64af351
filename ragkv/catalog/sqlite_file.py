"""A catalogue in one SQLite file: WAL mode, an integrity check at open, SQLite errors translated to `ragkv.errors`.

This file, derived.py and full_text.py hold what only SQLite has: PRAGMA, triggers, FTS5, the online backup.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ragkv.catalog import database, derived, full_text, migrations, spans
from ragkv.catalog.database import Database, GiveWay, nothing_gives_way
from ragkv.catalog.listener import POLL_SECONDS
from ragkv.catalog.sqlite_schema import (
    APPLICATION_ID,
    DIALECT,
    VERSION,
    connect,
    corrupt,
    create_tables,
    migrate,
    refuse_leftovers,
    refuse_partial_page,
)
from ragkv.catalog.transaction import Transaction
from ragkv.errors import CatalogClosed, CatalogCorrupt, ConfigError, RagkvError, StoreFull, StoreUnavailable

OLDEST_TABLES = frozenset({"facts", "collections", "documents", "chunks", "vectors", "jobs", "job_documents"})
"""Tables that every release has written."""

logger = logging.getLogger(__name__)

_HEADER = b"SQLite format 3\0"

# SQLite's error codes when the disk, a quota or a file size limit stops a write.
_NO_ROOM = frozenset({sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_SHMSIZE})


class SqliteFile(Database):
    """A pool of connections to one SQLite file.

    The writers of this process run one after another. A reader never waits for a writer.

    A file that was found damaged is not used any more: what one page has lost, another may contradict, and pages that
    are still in memory would hide it.
    """

    has_words = True

    def __init__(self, path: Path, give_way: GiveWay = nothing_gives_way):
        """Create the pool without opening the file; use `open`, which also checks the file."""
        self.path, self.name, self._give_way = path, str(path), give_way
        self._idle: list[sqlite3.Connection] = []
        self._pool_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(cls, path: Path, give_way: GiveWay = nothing_gives_way) -> SqliteFile:
        """Open the file, or create it, and bring its tables up to date. `give_way` makes room for it on a full disk.

        Raises:
            CatalogCorrupt: The file is damaged.
            ConfigError: The file belongs to another program or to a newer ragkv, or cannot be opened.
            StoreFull: There is no space to create the file.
        """
        opened = cls(path, give_way)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            opened._make_room()  # a reader, too, needs some: for the file of the index of the log
            if not path.exists():
                refuse_leftovers(path)
                with opened._translate_errors():
                    create_tables(path)
            opened._check()
        except OSError as error:
            opened.close()
            raise ConfigError(f"cannot open the catalogue {path}: {error.strerror or error}") from error
        except BaseException:
            opened.close()
            raise
        return opened

    def _make_room(self, size: int = 0, full: bool = False) -> bool:
        return self._give_way(self.path, size, full)

    def _read(self) -> AbstractContextManager[Transaction]:
        return self._transaction("BEGIN")

    @contextmanager
    def _write(self, alone: bool, durable: bool) -> Iterator[Transaction]:
        with self._write_lock, self._transaction("BEGIN IMMEDIATE", durable) as transaction:
            yield transaction

    def copy(self, path: Path) -> None:
        """Write one state of the catalogue to a new file and flush it. Writers are not blocked. Raises OSError."""
        with self.read() as transaction:
            target = sqlite3.connect(path, isolation_level=None)
            try:
                transaction.driver.backup(target)
            finally:
                target.close()

    def check(self) -> None:
        """See `Database.check`. A new connection reads the file's first page, which others have in memory."""
        super().check()
        with self._translate_errors():  # not by open(): closing a file drops the locks that SQLite has on it
            connection = connect(self.path)
            try:
                connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            finally:
                connection.close()

    def change_signal(self) -> FileSignal:
        """Return what wakes a listener when the file changes."""
        with self._translate_errors():
            return FileSignal(connect(self.path))

    def close(self) -> None:
        """Close idle connections now, and connections in use when their transactions end."""
        with self._pool_lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextmanager
    def _transaction(self, begin: str, durable: bool | None = None) -> Iterator[Transaction]:
        """Run a transaction; durable: whether its commit waits for the disk, None for one that only reads."""
        connection = self._acquire()
        try:
            # In WAL mode NORMAL writes the log without waiting for the disk; the next FULL commit waits for all of it.
            if durable is not None:
                connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute(begin)
            try:
                yield Transaction(connection, DIALECT)
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
                raise CatalogClosed(self.name)
            super().check()
            if self._idle:
                return self._idle.pop()
        return connect(self.path)

    def _release(self, connection: sqlite3.Connection) -> None:
        with self._pool_lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _check(self) -> None:
        """Refuse a damaged or foreign file, migrate it, and rebuild derived tables that are damaged or missing."""
        with self.path.open("rb") as file:
            if file.read(len(_HEADER)) != _HEADER:
                raise corrupt(self.path, "it does not begin like an SQLite file")
        with self.read() as transaction:
            refuse_partial_page(self.path, transaction)
            application_id = transaction.exec_driver_sql("PRAGMA application_id").fetchone()[0]
            version = transaction.exec_driver_sql("PRAGMA user_version").fetchone()[0]
            found = transaction.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = {name for (name,) in found}
            # Newer versions of SQLite check FTS5 tables here, too. A damaged one is rebuilt below.
            messages = [row[0] for row in transaction.exec_driver_sql("PRAGMA quick_check(10)")]
        problems = [message for message in messages if message != "ok" and "FTS5" not in message]
        if problems:
            raise corrupt(self.path, problems[0])
        if application_id != APPLICATION_ID:
            raise ConfigError(
                f"{self.path} is an SQLite file of another program", "move it away, or set RAGKV_DATA to another folder"
            )
        if version > VERSION:
            raise ConfigError(f"{self.path} was written by a newer ragkv (schema {version}, known: {VERSION})")
        if not tables >= OLDEST_TABLES:
            raise corrupt(self.path, "tables are missing")
        if self._revision() != migrations.HEAD:
            with self._translate_errors():
                migrate(self.path)
        with self.read() as transaction:
            migrations.check_tables(transaction, self.name)
        with self.write() as transaction:
            for index in (full_text, derived.attributes, derived.versions, spans):  # spans last: it reads the versions
                if not index.is_intact(transaction):
                    index.rebuild(transaction)
            if version < VERSION:
                transaction.exec_driver_sql(f"PRAGMA user_version = {VERSION}")

    def _revision(self) -> str | None:
        with self.read() as transaction:
            return migrations.checked(migrations.revision_of(transaction), self.name)

    def _translate(self, error: Exception) -> RagkvError | None:
        found = getattr(error, "orig", error)  # SQLAlchemy wraps what happens in a migration
        translated = _translate(self.path, found) if isinstance(found, sqlite3.Error) else None
        if isinstance(translated, CatalogCorrupt) and not _of_word_index(found):
            self._found_damage(translated)
        return translated

    def _found_damage(self, damage: CatalogCorrupt) -> None:
        """Note that the file is damaged, and log it the first time."""
        with self._pool_lock:
            if self.damage is not None:
                return
            self.damage, idle, self._idle = damage, self._idle, []
        for connection in idle:
            connection.close()
        logger.critical("%s. Until then every request that needs it is refused", damage)


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


def _of_word_index(error: Exception) -> bool:
    """Whether the word index alone is damaged, which can be rebuilt."""
    return getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_CORRUPT_VTAB


def _translate(path: Path, error: sqlite3.Error) -> RagkvError | None:
    """Return the error of `ragkv.errors` for an SQLite error, or None for an error in our own SQL."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    primary = code & 0xFF
    if primary == sqlite3.SQLITE_FULL or code in _NO_ROOM:
        return StoreFull(f"no space left for the catalogue {path}; nothing was changed")
    if _of_word_index(error):
        return CatalogCorrupt(f"the word index of the catalogue {path} is damaged; `ragkv reindex` rebuilds it")
    # A statement of ours that a whole catalogue does not know comes from a table that is gone, or is there too early.
    foreign = str(error).startswith("no such table") or str(error).endswith("already exists")
    if (
        primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
        or (primary == sqlite3.SQLITE_ERROR and foreign)
        or "decode to UTF-8" in str(error)
    ):
        return corrupt(path, str(error))
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreUnavailable(
            f"the catalogue {path} is busy: another process has been writing for {database.BUSY_SECONDS:g} s"
        )
    if primary in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return ConfigError(f"cannot use the catalogue {path}: {error}")
    if primary == sqlite3.SQLITE_IOERR:
        return StoreUnavailable(f"the catalogue {path} cannot be read or written: {error}")
    return None
