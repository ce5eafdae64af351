"""One read of the Redis store: pieces of its ranges, over several connections (redis_store.py)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

from ragkv.store.base import Arrived, Range
from ragkv.store.redis_link import ServerLink
from ragkv.store.redis_wire import RespConnection, ServerRefusal

PIECE = 2**19
IN_FLIGHT_BYTES = 2**20
IN_FLIGHT = 64
"""Most requests that a connection has in flight."""


Piece: TypeAlias = tuple[int, str, int, int, int]
"""(index of its range, name of the value, first byte there, size, first byte in the output buffer). A plain tuple,
because a load has hundreds."""


class UnexpectedReply(Exception):
    """A piece was answered with an error, or with another size."""

    def __init__(self, piece: Piece, reply: int | ServerRefusal) -> None:
        super().__init__()
        self.piece, self.reply = piece, reply


class _Abandoned(Exception):
    """Closes a connection whose remaining replies nobody will read."""


class RangeLoad:
    """One read, on which several threads may work.

    Attributes:
        fault: The first error, which ends the load.
    """

    def __init__(
        self, link: ServerLink, names: Sequence[str], ranges: Sequence[Range], out: memoryview, arrived: Arrived
    ) -> None:
        """Cut ranges of values into pieces.

        Args:
            link: Connections to the server.
            names: Name of the value of each range.
            ranges: What to read.
            out: Where the ranges go, one after another.
            arrived: Is called with the number of each range that is whole.
        """
        self.fault: BaseException | None = None
        self._link, self._out, self._arrived = link, out, arrived
        self._deadline = link.deadline(out.nbytes)
        self._lock = threading.Lock()
        self._pieces = _cut(names, ranges)
        self._missing = [-(-part.size // PIECE) for part in ranges]
        for number, pieces in enumerate(self._missing):
            if pieces == 0:
                arrived(number)

    def run(self) -> None:
        """Read pieces over one connection until none are left. Errors are stored in `fault`, not raised."""
        try:
            pending = deque(self._next_pieces(IN_FLIGHT_BYTES, IN_FLIGHT))
            if not pending:
                return
            with self._link.connection() as wire:
                in_flight = self._request(wire, pending)
                while pending:
                    number, _, _, size, at = piece = pending.popleft()
                    reply = wire.fill(self._out[at : at + size], min(self._deadline, self._link.deadline(size)))
                    if reply != size:
                        self._fail(UnexpectedReply(piece, reply))
                    in_flight -= size
                    if in_flight <= IN_FLIGHT_BYTES // 2 and len(pending) <= IN_FLIGHT // 2:
                        more = self._next_pieces(IN_FLIGHT_BYTES - in_flight, IN_FLIGHT - len(pending))
                        in_flight += self._request(wire, more)
                        pending.extend(more)
                    if self.fault is None:
                        self._count(number)
                    if self.fault is not None:
                        raise _Abandoned
        except _Abandoned:
            pass
        except BaseException as fault:
            self._fail(fault)

    def _request(self, wire: RespConnection, pieces: Iterable[Piece]) -> int:
        """Request pieces and return their bytes."""
        wire.send((("GETRANGE", name, start, start + size - 1) for _, name, start, size, _ in pieces), self._deadline)
        return sum(size for *_, size, _ in pieces)

    def _next_pieces(self, room: int, count: int) -> list[Piece]:
        """Take the next pieces, at most `count` and not many more than `room` bytes; none after a fault."""
        pieces: list[Piece] = []
        with self._lock:
            while self.fault is None and room > 0 and len(pieces) < count and (piece := next(self._pieces, None)):
                pieces.append(piece)
                room -= piece[3]
        return pieces

    def _count(self, number: int) -> None:
        """Count a piece of a range that has arrived, and report the range when it is whole."""
        with self._lock:
            self._missing[number] -= 1
            whole = self._missing[number] == 0
        if whole:
            try:
                self._arrived(number)
            except BaseException as fault:
                self._fail(fault)

    def _fail(self, fault: BaseException) -> None:
        with self._lock:
            self.fault = self.fault or fault


def _cut(names: Sequence[str], ranges: Sequence[Range]) -> Iterator[Piece]:
    starts = accumulate((part.size for part in ranges), initial=0)
    for number, (name, part, at) in enumerate(zip(names, ranges, starts, strict=False)):
        for done in range(0, part.size, PIECE):
            yield number, name, part.offset + done, min(PIECE, part.size - done), at + done
