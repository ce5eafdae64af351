"""The contract of a KV store. A store moves bytes; the codec knows what they mean (format/codec.py).

An entry is a head (one byte string) and a body (one byte string per layer). Every backend passes
tests/store/test_contract.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ragkv.types import Key


@dataclass(frozen=True)
class Range:
    """`size` bytes of the body of `layer`, from byte `offset` on."""

    layer: int
    offset: int
    size: int


Arrived = Callable[[int], None]
"""Called with the index of a range when its bytes have arrived, in the thread that read them. So a range can be
verified while the next one is read. An exception ends the read."""


@dataclass(frozen=True)
class StoreStats:
    """Contents of a store.

    Attributes:
        entries: Entries that are whole.
        bytes: Bytes of their heads and bodies, without the backend's overhead.
    """

    entries: int
    bytes: int


@dataclass(frozen=True)
class Swept:
    """What `sweep` found. Bytes are those of the files.

    Attributes:
        expired: Entries past their time to live.
        temporary: Temporary files of writers that died.
    """

    expired: StoreStats = StoreStats(0, 0)
    temporary: StoreStats = StoreStats(0, 0)


def ignore(number: int) -> None:
    """Do nothing: the callback of readers that verify nothing."""


LeaseState = Literal["taken", "held", "stored"]
"""What became of an attempt to take a lease: the caller has it, another owner has it, or the entry is there."""


class Leases(Protocol):
    """Who encodes an entry that is missing. Thread-safe.

    A lease is advice to processes that miss the same entry at the same time. Nothing else depends on it: an entry may
    be put without one, and two owners that both believe to have it cost an encoding. It ends when the entry is put,
    when its owner releases it, or when its time has passed.

    Every method may raise StoreUnavailable, within a bounded time.
    """

    def take(self, key: Key, owner: str, seconds: float) -> LeaseState:
        """Take the lease of an entry that is missing.

        Args:
            key: The entry.
            owner: A random name that no other attempt has.
            seconds: Life of the lease.

        Raises:
            StoreFull: There is no room for the lease.
        """
        ...

    def renew(self, key: Key, owner: str, seconds: float) -> bool:
        """Let a lease live for `seconds` from now on. Returns False when this owner does not have it."""
        ...

    def release(self, key: Key, owner: str) -> None:
        """End a lease, if this owner has it."""
        ...


class KVStore(Protocol):
    """Stores encoded chunks. Thread-safe.

    Keys match [0-9a-f]{64}. Every method may raise StoreUnavailable, within a bounded time.
    """

    @property
    def leases(self) -> Leases:
        """The leases of the entries. `put` ends the lease of its entry, whoever has it."""
        ...

    def put(self, key: Key, head: bytes, body: Sequence[bytes | memoryview]) -> None:
        """Store an entry atomically: a reader sees the old entry, the new one, or none, but never a mixture.

        Raises:
            StoreFull: There is no room. The previous state is intact.
        """
        ...

    def head(self, key: Key) -> bytes:
        """Return the head as it was put.

        Raises:
            EntryMissing: There is no such entry.
            EntryCorrupt: The backend's own framing is damaged.
        """
        ...

    def read(self, key: Key, ranges: Sequence[Range], out: memoryview, arrived: Arrived = ignore) -> None:
        """Read ranges of the body, and no other bytes. On an error the content of `out` is undefined.

        Args:
            key: The entry.
            ranges: The ranges. They may arrive in any order.
            out: Writable, contiguous bytes, exactly the sum of the sizes. Filled with the ranges in their order.
            arrived: Called once for every range. Its exceptions are passed on.

        Raises:
            EntryMissing: The entry, or a part of it, is gone.
            EntryCorrupt: A range lies outside the body, or too few bytes arrived.
        """
        ...

    def layers(self, key: Key) -> tuple[int, ...]:
        """Return the bytes of each layer of the body, for copies that do not parse the entry.

        Raises:
            EntryMissing: There is no such entry.
            EntryCorrupt: The backend's own framing is damaged.
        """
        ...

    def delete(self, key: Key) -> bool:
        """Remove an entry. Returns False when there was none."""
        ...

    def give_way(self, path: Path, size: int, full: bool) -> bool:
        """Remove entries where they take the room that a file of the catalogue needs. It never raises.

        Args:
            path: The file.
            size: Bytes that are to be written to it.
            full: Whether a write of it has met a full disk.

        Returns:
            Whether entries were removed.
        """
        ...

    def keys(self) -> Iterator[Key]:
        """Return the keys of the entries that are present when the call begins, in no order."""
        ...

    def stats(self) -> StoreStats:
        """Count entries and bytes."""
        ...

    def sweep(self, dry_run: bool) -> Swept:
        """Remove what the backend itself knows to be useless. With `dry_run`, only count it."""
        ...

    def ping(self) -> None:
        """Return if the store answers. Raises StoreUnavailable otherwise."""
        ...

    def close(self) -> None:
        """Close files and sockets."""
        ...
