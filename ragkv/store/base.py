"""The contract of a KV store. A store moves bytes; what they mean is the codec's business (codec.py).

An entry is a head (one value) and a body (one byte string per layer). Backends pass tests/store/test_contract.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ragkv.types import Key


@dataclass(frozen=True)
class Range:
    """`size` bytes from byte `offset` of the body of `layer`."""

    layer: int
    offset: int
    size: int


Arrived = Callable[[int], None]
"""Told the number of a range once its bytes are there, in the thread that read them, so that checking one range goes on
beside reading the next. What it raises ends the read."""


@dataclass(frozen=True)
class StoreStats:
    """entries: whole entries · bytes: heads and bodies together, without the backend's own overhead."""

    entries: int
    bytes: int


@dataclass(frozen=True)
class Swept:
    """What `sweep` found. bytes are those of the files · expired: past their time · temporary: of writers that died."""

    expired: StoreStats = StoreStats(0, 0)
    temporary: StoreStats = StoreStats(0, 0)


def ignore(number: int) -> None:
    """For readers that check nothing."""


class KVStore(Protocol):
    """Where encoded chunks live.

    Thread-safe. Keys are [0-9a-f]{64}. Every method may raise StoreUnavailable, within a bounded time.
    """

    def put(self, key: Key, head: bytes, body: Sequence[bytes | memoryview]) -> None:
        """Store an entry whole: a reader sees the old entry, the new one, or none; never a mixture.

        Raises StoreFull when there is no room; the previous state is then intact.
        """
        ...

    def head(self, key: Key) -> bytes:
        """The head as it was put. Raises EntryMissing; EntryCorrupt when the backend's own framing is damaged."""
        ...

    def read(self, key: Key, ranges: Sequence[Range], out: memoryview, arrived: Arrived = ignore) -> None:
        """Fill `out` (writable, contiguous bytes, exactly the sum of the sizes) with the ranges, in order.

        Reads only those bytes. `arrived` hears of every range once; ranges may arrive in any order.
        Raises EntryMissing when the entry or a part of it is gone, EntryCorrupt when a range lies outside the body or
        fewer bytes came back, and what `arrived` raises. On error the content of `out` is undefined.
        """
        ...

    def layers(self, key: Key) -> tuple[int, ...]:
        """Bytes of each layer of the body, for those who copy an entry without knowing what it means.

        Raises EntryMissing, EntryCorrupt.
        """
        ...

    def delete(self, key: Key) -> bool:
        """Remove the entry; False when there was none."""
        ...

    def keys(self) -> Iterator[Key]:
        """Keys of the entries present when the call began, in no order."""
        ...

    def stats(self) -> StoreStats:
        """Entries and bytes, counted now."""
        ...

    def sweep(self, dry_run: bool) -> Swept:
        """Remove what the backend itself knows to be of no use; with `dry_run` only tell of it."""
        ...

    def ping(self) -> None:
        """Return when the store answers; raise StoreUnavailable when it does not."""
        ...

    def close(self) -> None:
        """Let go of files and sockets."""
        ...
