"""Ranges of Redis values into one buffer, quickly: GETRANGE in pieces, over several connections when it pays.

Large ranges are cut into pieces of half a megabyte. Each connection keeps about a megabyte under way, so that the
server always has the next request and never much to hold, and takes its next pieces from one list, in order: earlier
ranges arrive first, and a connection that is slow takes fewer. One connection with requests under way keeps a server's
thread busy; more are opened, each with a thread that also checks what it has read (`arrived`), only for loads large
enough to pay for waking it, and only where a processor is free for it (measured in docs/results/store.md).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import TypeAlias

from ragkv.store.base import Arrived, Range
from ragkv.store.redis_link import ServerLink
from ragkv.store.redis_wire import RespConnection, ServerRefusal

PIECE = 2**19
UNDER_WAY_BYTES = 2**20
UNDER_WAY = 64
PARALLEL_BYTES = 4 * 2**20
MAX_READERS = 4

Piece: TypeAlias = tuple[int, str, int, int, int]
"""Number of its range, name of the value, first byte and size there, first byte in the buffer: plain, for there are
hundreds."""


class OddReply(Exception):
    """A piece came back as an error, or in another size."""

    def __init__(self, piece: Piece, reply: int | ServerRefusal) -> None:
        super().__init__()
        self.piece, self.reply = piece, reply


class _Abandoned(Exception):
    """Leaves a line whose replies nobody will read, so that it is closed."""


class BulkReader:
    """Reads ranges of values behind one link. Thread-safe; threads start with the first load that is large enough."""

    def __init__(self, link: ServerLink, readers: int | None = None) -> None:
        """`readers`: most connections for one load; by default as many as processors are left beside one, at most 4."""
        self._link = link
        self._readers = readers or max(1, min(MAX_READERS, len(os.sched_getaffinity(0)) - 1))
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def read(self, names: Sequence[str], ranges: Sequence[Range], out: memoryview, arrived: Arrived) -> None:
        """Fill `out` with the ranges, in order; `names[i]` is the value that range i is a part of.

        Raises OddReply, StoreUnavailable, and what `arrived` raises; then nobody writes to `out` any more.
        """
        load = _Load(self._link, names, ranges, out, arrived)
        helpers = self._helpers(load) if out.nbytes >= PARALLEL_BYTES and self._readers > 1 else []
        load.work()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        if load.fault is not None:
            raise load.fault

    def close(self) -> None:
        """Let the threads go; the next large load starts new ones."""
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown(wait=False)
            self._threads = None

    def _helpers(self, load: _Load) -> list[Future[None]]:
        """Where all threads are busy with other loads, or the process was forked, these never start, nor need they."""
        with self._lock:
            self._threads = self._threads or ThreadPoolExecutor(self._readers - 1, "ragkv-redis")
            return [self._threads.submit(load.work) for _ in range(self._readers - 1)]


class _Load:
    """One read: its pieces in order, for whoever works on it. fault: what ended it, the first one."""

    def __init__(
        self, link: ServerLink, names: Sequence[str], ranges: Sequence[Range], out: memoryview, arrived: Arrived
    ) -> None:
        self.fault: BaseException | None = None
        self._link, self._out, self._arrived = link, out, arrived
        self._deadline = link.deadline(out.nbytes)
        self._lock = threading.Lock()
        self._pieces = _cut(names, ranges)
        self._missing = [-(-part.size // PIECE) for part in ranges]
        for number, pieces in enumerate(self._missing):
            if pieces == 0:
                arrived(number)

    def work(self) -> None:
        """Read pieces until none are left. Raises nothing: a fault is for the thread that asked for the load."""
        try:
            pieces = self._take(UNDER_WAY_BYTES, UNDER_WAY)
            if pieces:
                with self._link.line() as wire:
                    self._pump(wire, deque(pieces))
        except _Abandoned:
            pass
        except BaseException as fault:
            self._end(fault)

    def _pump(self, wire: RespConnection, asked: deque[Piece]) -> None:
        """Read the replies to these pieces and to all that can be had after them."""
        under_way = self._ask(wire, asked)
        while asked:
            number, _, _, size, at = piece = asked.popleft()
            reply = wire.fill(self._out[at : at + size], min(self._deadline, self._link.deadline(size)))
            if reply != size:
                self._end(OddReply(piece, reply))
            under_way -= size
            if under_way <= UNDER_WAY_BYTES // 2 and len(asked) <= UNDER_WAY // 2:
                more = self._take(UNDER_WAY_BYTES - under_way, UNDER_WAY - len(asked))
                under_way += self._ask(wire, more)
                asked.extend(more)
            if self.fault is None:
                self._came(number)
            if self.fault is not None:
                raise _Abandoned

    def _ask(self, wire: RespConnection, pieces: Iterable[Piece]) -> int:
        """Request these pieces; returns their bytes."""
        wire.send((("GETRANGE", name, start, start + size - 1) for _, name, start, size, _ in pieces), self._deadline)
        return sum(size for *_, size, _ in pieces)

    def _take(self, room: int, count: int) -> list[Piece]:
        """The next pieces, not many more than `room` bytes; none after a fault."""
        taken: list[Piece] = []
        with self._lock:
            while self.fault is None and room > 0 and len(taken) < count and (piece := next(self._pieces, None)):
                taken.append(piece)
                room -= piece[3]
        return taken

    def _came(self, number: int) -> None:
        with self._lock:
            self._missing[number] -= 1
            whole = self._missing[number] == 0
        if whole:
            try:
                self._arrived(number)
            except BaseException as fault:
                self._end(fault)

    def _end(self, fault: BaseException) -> None:
        with self._lock:
            self.fault = self.fault or fault


def _cut(names: Sequence[str], ranges: Sequence[Range]) -> Iterator[Piece]:
    starts = accumulate((part.size for part in ranges), initial=0)
    for number, (name, part, at) in enumerate(zip(names, ranges, starts, strict=False)):
        for done in range(0, part.size, PIECE):
            yield number, name, part.offset + done, min(PIECE, part.size - done), at + done
