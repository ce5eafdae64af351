"""A catalogue in PostgreSQL, for several processes on several machines.

Each transaction takes a connection from SQLAlchemy's pool, which tries it first and replaces it if the server closed
it.

A read is a REPEATABLE READ transaction: it sees one snapshot. A write is a READ COMMITTED transaction behind an
advisory lock, which is shared by those that run together and exclusive for one that is alone (database.py). A statement
that follows the lock therefore sees all that earlier holders have committed, as with the one write lock of SQLite, and
no write fails because of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, NullPool, create_engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ragkv.catalog import database, migrations
from ragkv.catalog.database import Database
from ragkv.catalog.transaction import CHANNEL, Transaction, lock_number
from ragkv.errors import (
    CatalogClosed,
    ConfigError,
    InputError,
    MissingPackage,
    RagkvError,
    StoreFull,
    StoreUnavailable,
)

DRIVER = "postgresql+psycopg"
CONNECT_SECONDS = 5
"""Seconds that the server may take to accept a connection."""
SILENT_SECONDS = 10
"""Seconds after which a connection to a machine that went away is given up."""
KEPT_CONNECTIONS, MOST_CONNECTIONS = 8, 40
IDLE_SECONDS = 120
"""Seconds after which the server ends a transaction whose process stopped, so that its locks hold nobody up."""

_WRITING = lock_number("writing")
_MIGRATING = lock_number("migrating")
_BEGIN_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_BEGIN_WRITE = "BEGIN ISOLATION LEVEL READ COMMITTED"
_LOCK_ALONE = f"SELECT pg_advisory_xact_lock({_WRITING})"
_LOCK_TOGETHER = f"SELECT pg_advisory_xact_lock_shared({_WRITING})"
# What the server says, in its own language where that is not English, when it will not let us in.
_REFUSALS = ("authentication failed", "does not exist", "no pg_hba.conf entry", "no password supplied")


class PostgresDatabase(Database):
    """A pool of connections to one PostgreSQL database."""

    has_words = False

    def __init__(self, url: URL):
        """Create the pool without connecting; use `open`, which also brings the tables up to date."""
        import psycopg

        self._psycopg = psycopg
        self.name = f"{url.host or 'the local socket'}{f':{url.port}' if url.port else ''}/{url.database or ''}"
        self._url, self._arguments = url, _connect_arguments(url)
        self._engine = create_engine(
            url,
            connect_args=self._arguments | {"autocommit": True},  # transactions begin by the statements above
            pool_pre_ping=True,
            pool_size=KEPT_CONNECTIONS,
            max_overflow=MOST_CONNECTIONS - KEPT_CONNECTIONS,
            pool_timeout=database.BUSY_SECONDS,
            hide_parameters=True,
        )
        self._closed = False

    @classmethod
    def open(cls, address: str) -> PostgresDatabase:
        """Connect to a database, and create its tables or bring them up to date.

        Raises:
            CatalogCorrupt: Tables are missing.
            ConfigError: The address is wrong, the login is refused, or the database belongs to a newer ragkv.
            MissingPackage: The driver is not installed.
            StoreUnavailable: The server does not answer.
        """
        opened = cls(_parsed(address))
        try:
            with opened.read() as transaction:
                revision = migrations.checked(migrations.revision_of(transaction), opened.name)
            if revision != migrations.HEAD:
                with opened._translate_errors():
                    opened._migrate()
            with opened.read() as transaction:
                migrations.check_tables(transaction, opened.name)
        except BaseException:
            opened.close()
            raise
        return opened

    def copy(self, path: Path) -> None:
        """Raise ConfigError: PostgreSQL has programs for this."""
        raise ConfigError(f"the catalogue {self.name} is in PostgreSQL", "back it up with pg_dump")

    def change_signal(self) -> PostgresSignal:
        """Return what wakes a listener when a transaction has changed a collection."""
        with self._translate_errors():
            return PostgresSignal(self)

    def close(self) -> None:
        """Close idle connections now, and connections in use when their transactions end."""
        self._closed = True
        self._engine.dispose()

    def connect(self) -> Any:
        """Open a connection beside the pool."""
        dialect = self._engine.dialect
        positional, named = dialect.create_connect_args(self._url)
        return dialect.connect(*positional, **{**named, **self._arguments, "autocommit": True})

    def _migrate(self) -> None:
        """Run the migrations that are missing, in one transaction. Other processes that start now wait for it."""
        engine = create_engine(self._url, connect_args=self._arguments, poolclass=NullPool, hide_parameters=True)
        with engine.begin() as connection:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATING})")
            migrations.upgrade(connection)

    @contextmanager
    def _read(self) -> Iterator[Transaction]:
        with self._transaction(_BEGIN_READ) as transaction:
            yield transaction

    @contextmanager
    def _write(self, alone: bool, durable: bool) -> Iterator[Transaction]:
        with self._transaction(_BEGIN_WRITE, _LOCK_ALONE if alone else _LOCK_TOGETHER) as transaction:
            yield transaction

    @contextmanager
    def _transaction(self, *begin: str) -> Iterator[Transaction]:
        if self._closed:
            raise CatalogClosed(self.name)
        lent = self._engine.raw_connection()
        connection = lent.dbapi_connection
        try:
            for statement in begin:
                connection.execute(statement)  # type: ignore[union-attr]
            yield Transaction(connection, self._engine.dialect)
            connection.execute("COMMIT")  # type: ignore[union-attr]
        except BaseException:
            try:
                connection.execute("ROLLBACK")  # type: ignore[union-attr]
            except Exception:
                lent.invalidate()  # the next transaction opens a new connection
            raise
        finally:
            lent.close()

    def _translate(self, error: Exception) -> RagkvError | None:
        found = error.orig if isinstance(error, DBAPIError) else error
        if isinstance(error, PoolTimeout):
            return StoreUnavailable(f"the catalogue {self.name} is busy: all {MOST_CONNECTIONS} connections are in use")
        if not isinstance(found, self._psycopg.Error):
            return None
        return _translate(self.name, found, self._psycopg)


class PostgresSignal:
    """Listens to the channel on which transactions tell of changes. A lost connection is opened again."""

    def __init__(self, owner: PostgresDatabase):
        """Connect and listen."""
        self._owner = owner
        self._connection: Any = self._listening()

    def wait(self, seconds: float) -> bool:
        """See `ChangeSignal`."""
        with self._owner._translate_errors():
            if self._connection is None:
                self._connection = self._listening()
                return True  # what was told meanwhile was not heard
            try:
                told = list(self._connection.notifies(timeout=seconds, stop_after=1))
                if told:
                    told += self._connection.notifies(timeout=0)  # one look serves them all
                return bool(told)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    def _listening(self) -> Any:
        connection = self._owner.connect()
        connection.execute(f"LISTEN {CHANNEL}")
        return connection


def _parsed(address: str) -> URL:
    """Parse an address and find the driver. Messages do not quote the address, which may hold a password."""
    try:
        url = make_url(address)
        if url.drivername in ("postgresql", "postgres"):
            url = url.set(drivername=DRIVER)
        if url.drivername != DRIVER:
            raise ConfigError(
                f"RAGKV_CATALOG begins with {url.drivername}://", f"use {DRIVER}://USER:PASSWORD@HOST/NAME"
            )
    except (ArgumentError, ValueError):
        raise ConfigError("RAGKV_CATALOG is no address", f"use {DRIVER}://USER:PASSWORD@HOST/NAME") from None
    try:
        import psycopg  # noqa: F401
    except (ImportError, NoSuchModuleError) as error:
        raise MissingPackage(
            "a catalogue in PostgreSQL needs the extra ragkv[postgres]", "run `pip install 'psycopg[binary]>=3.3,<4'`"
        ) from error
    return url


def _connect_arguments(url: URL) -> dict[str, Any]:
    """Return what a connection is opened with, where the address does not say it."""
    busy = int(1000 * database.BUSY_SECONDS)
    options = f"-c lock_timeout={busy} -c idle_in_transaction_session_timeout={1000 * IDLE_SECONDS}"
    wanted = {
        "connect_timeout": CONNECT_SECONDS,
        "tcp_user_timeout": 1000 * SILENT_SECONDS,
        "keepalives_idle": SILENT_SECONDS,
        "application_name": "ragkv",
        "options": options,
    }
    return {name: value for name, value in wanted.items() if name not in url.query}


def _translate(name: str, error: Any, psycopg: Any) -> RagkvError | None:
    """Return the error of `ragkv.errors` for an error of psycopg, or None for an error in our own SQL."""
    state: str = error.sqlstate or ""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if state == "53100":
        return StoreFull(f"no space left for the catalogue {name}; nothing was changed")
    if state in ("55P03", "40P01", "40001", "57014"):
        return StoreUnavailable(f"the catalogue {name} is busy: {reason}")
    # Besides damaged pages: a table or column of ours that is not there, or that a migration finds there already.
    if state in ("XX001", "XX002", "42P01", "42703", "42P07", "42701"):
        return database.damaged(name, reason)
    refused = not state and any(words in reason for words in _REFUSALS)  # a refused login has no code
    if refused or state[:2] in ("28", "3D") or state in ("42501", "25006"):
        return ConfigError(f"cannot use the catalogue {name}: {reason}")
    if state[:2] in ("08", "53", "57", "58") or (not state and isinstance(error, psycopg.OperationalError)):
        return StoreUnavailable(f"the catalogue {name} does not answer: {reason}")
    if isinstance(error, psycopg.InterfaceError):
        return StoreUnavailable(f"the connection to the catalogue {name} was lost: {reason}")
    if isinstance(error, psycopg.DataError):
        return InputError(f"the text cannot be stored: {reason}")
    return None
