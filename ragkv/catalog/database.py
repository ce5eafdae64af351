"""Database: transactions of one catalogue, in an SQLite file (sqlite_file.py) or in PostgreSQL (postgres.py).

A reader sees one snapshot from beginning to end. Writers come in two kinds:

    alone      waits for all other writers of all processes, and they wait for it. What it has read stays true until it
               ends.
    together   runs beside others of this kind, but never beside one that is alone. It takes `Transaction.lock` for what
               two of them may not do at the same time.

With SQLite every writer is alone: the file has one write lock.

A durable transaction is on the disk when it ends. One that is not may be lost when the machine fails, together with
those after it that are not durable either. No failure of the process loses it. With PostgreSQL all are durable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ragkv.catalog.listener import ChangeSignal
from ragkv.catalog.transaction import Transaction
from ragkv.errors import CatalogCorrupt, RagkvError, StoreFull

P = ParamSpec("P")
T = TypeVar("T")

GiveWay = Callable[[Path, int, bool], bool]
"""Makes room on the disk of a file: for so many bytes, if that much is not free; True: where a write met a full disk.
Returns whether anything gave way. It never raises."""


def nothing_gives_way(path: Path, size: int, full: bool) -> bool:
    """The default of `GiveWay`."""
    return False


BUSY_SECONDS = 30.0
"""Seconds that a write waits for another process to finish writing."""


class Database(ABC):
    """The transactions of a catalogue. Thread-safe: each transaction has a connection to itself.

    Attributes:
        name: What messages call the catalogue. It holds no password.
        has_words: Whether the database has a word index.
        damage: What was found damaged. No transaction is started any more.
    """

    name: str
    has_words: bool
    damage: CatalogCorrupt | None = None

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """Open a read transaction, which sees one state of the catalogue from beginning to end."""
        with self._translate_errors(), self._read() as transaction:
            yield transaction

    @contextmanager
    def write(self, alone: bool = True, durable: bool = True, size: int = 0) -> Iterator[Transaction]:
        """Open a write transaction, which is applied completely or not at all. Do not nest. Raises StoreFull.

        alone: No other transaction writes at the same time; see the module.
        durable: It is on the disk when it ends; see the module.
        size: Bytes that it writes, where they may be more than a few pages.
        """
        self._make_room(size)
        try:
            with self._translate_errors(), self._write(alone, durable) as transaction:
                yield transaction
        except StoreFull as error:
            error.gave_way = self._make_room(size, full=True)
            raise

    @abstractmethod
    def copy(self, path: Path) -> None:
        """Write one state of the catalogue to a new file and flush it. Raises OSError, and ConfigError if it cannot."""

    def check(self) -> None:
        """Raise CatalogCorrupt where the catalogue is damaged, as far as that can be seen without reading all of it."""
        if self.damage is not None:
            raise CatalogCorrupt(self.damage.message)

    @abstractmethod
    def change_signal(self) -> ChangeSignal:
        """Return what wakes a listener when the catalogue changes."""

    @abstractmethod
    def close(self) -> None:
        """Close idle connections now, and connections in use when their transactions end."""

    def _make_room(self, size: int = 0, full: bool = False) -> bool:
        """Make room for so many bytes, where that is possible. Returns whether there is more now."""
        return False

    @abstractmethod
    def _read(self) -> Any: ...

    @abstractmethod
    def _write(self, alone: bool, durable: bool) -> Any: ...

    @abstractmethod
    def _translate(self, error: Exception) -> RagkvError | None:
        """Return the error of `ragkv.errors` for an error of the driver; None for an error in our own SQL."""

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except RagkvError:
            raise
        except Exception as error:
            translated = self._translate(error)
            if translated is None:
                raise
            raise translated from error


def damaged(name: str, reason: str) -> CatalogCorrupt:
    """Return the error that says what is wrong with a catalogue, and what to do."""
    return CatalogCorrupt(
        f"the catalogue {name} is damaged ({reason})",
        "restore a backup, or move it away and ingest the documents again",
    )


def again_with_room(change: Callable[P, T]) -> Callable[P, T]:
    """Run a change of a catalogue again, once, where it met a full disk on which something gave way."""

    @wraps(change)
    def run(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return change(*arguments, **named)
        except StoreFull as error:
            if not error.gave_way:
                raise
        return change(*arguments, **named)

    return run
