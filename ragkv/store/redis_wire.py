"""Redis' wire format (RESP 2) over a connected socket: commands out, replies in, and a deadline on every byte.

    command   *<words>CRLF, then per word $<bytes>CRLF <the word> CRLF
    reply     +text  -error  :number  $<bytes>CRLF <value> CRLF  $-1 (nil)  *<items>CRLF and the items

Large values are neither gathered nor copied: out they go from where they lie, and `fill` has the kernel write them
where they belong. Only the small things around them, and values smaller than BUFFER, pass through a buffer.

What goes wrong is an OSError (TimeoutError when it takes too long). Then, and when `fill` tells of another value than
was wanted, nobody knows which reply comes next, and the connection must be closed.
"""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

BUFFER = 2**16
SLICE = 2**20
"""Most bytes that are sent at once."""
LARGE = 2**16
"""A word of this size is sent from where it lies."""
LINE = 2**16
"""Longest line; an error text of a server is far shorter."""
VALUE = 2**29
"""Largest value that Redis has; a length above it is noise."""
NESTED = 8

Command: TypeAlias = "tuple[str | int | bytes | memoryview, ...]"


@dataclass(frozen=True)
class ServerRefusal:
    """An error that the server answered with: its code in capitals, then what it says."""

    text: str

    @property
    def code(self) -> str:
        """The first word, such as WRONGTYPE."""
        return self.text.partition(" ")[0]


Reply: TypeAlias = "bytes | int | ServerRefusal | list[Reply] | None"


class RespConnection:
    """One connection, while one thread uses it."""

    def __init__(self, line: socket.socket, patience: float) -> None:
        """`patience`: seconds in which something must move while commands go out."""
        self._socket, self._patience = line, patience
        self._raw = _Timed(line)
        self._replies = io.BufferedReader(self._raw, BUFFER)

    def send(self, commands: Iterable[Command], deadline: float) -> None:
        """Send commands, one after another; replies may be under way meanwhile."""
        for piece in packed(commands):
            for start in range(0, len(piece), SLICE):
                self._socket.settimeout(min(self._patience, left(deadline)))
                self._socket.sendall(piece[start : start + SLICE])

    def reply(self, deadline: float) -> Reply:
        """The next reply, whatever it is."""
        self._raw.deadline = deadline
        return self._reply(NESTED)

    def fill(self, out: memoryview, deadline: float) -> int | ServerRefusal:
        """Read a value into `out`. Returns its size, -1 when there is none; `out` is full only if it has this size."""
        self._raw.deadline = deadline
        kind, text = self._head()
        if kind == b"-":
            return ServerRefusal(text.decode(errors="replace"))
        size = _number(text)
        if kind != b"$":
            raise ConnectionError(f"a value was to come, not {kind + text[:80]!r}")
        if size == out.nbytes:
            if self._replies.readinto(out) != size:
                raise ConnectionError("the connection was closed")
            self._end()
        return size

    def settled(self) -> bool:
        """Whether nothing has been read that no one asked for."""
        self._raw.deadline = None
        return not self._replies.peek(1)

    def _reply(self, nested: int) -> Reply:
        kind, text = self._head()
        if kind == b"+":
            return text
        if kind == b"-":
            return ServerRefusal(text.decode(errors="replace"))
        number = _number(text)
        if kind == b":":
            return number
        if number == -1 and kind in b"$*":
            return None
        if kind == b"$" and 0 <= number <= VALUE:
            value = self._replies.read(number)
            self._end()
            return value
        if kind == b"*" and number >= 0 and nested:
            return [self._reply(nested - 1) for _ in range(number)]
        raise ConnectionError(f"this is not Redis' protocol: {kind + text[:80]!r}")

    def _head(self) -> tuple[bytes, bytes]:
        line = self._replies.readline(LINE)
        if not line.endswith(b"\r\n"):
            raise ConnectionError(
                f"this is not Redis' protocol: {line[:80]!r}" if line else "the connection was closed"
            )
        return line[:1], line[1:-2]

    def _end(self) -> None:
        """The line end after a value: that it is there says that the value was as long as announced."""
        if self._replies.read(2) != b"\r\n":
            raise ConnectionError("a value does not end where it should")


class _Timed(io.RawIOBase):
    """A socket to read from until a deadline; without one nothing is there."""

    def __init__(self, line: socket.socket) -> None:
        self._socket = line
        self.deadline: float | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, out: memoryview) -> int | None:  # type: ignore[override]
        if self.deadline is None:
            return None
        self._socket.settimeout(left(self.deadline))
        return self._socket.recv_into(out)


def left(deadline: float) -> float:
    """Seconds until the deadline. Raises TimeoutError when it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("out of time")
    return seconds


def packed(commands: Iterable[Command]) -> Iterator[bytes | memoryview]:
    """Commands as bytes: small words joined, so that a window of commands is one packet, large ones as they are."""
    small: list[bytes] = []
    held = 0
    for command in commands:
        small.append(b"*%d\r\n" % len(command))
        for word in command:
            data = str(word).encode() if isinstance(word, str | int) else memoryview(word).cast("B")
            small.append(b"$%d\r\n" % len(data))
            if len(data) >= LARGE:
                yield b"".join(small)
                yield data
                small, held = [], 0
            else:
                small.append(bytes(data))
                held += len(data)
            small.append(b"\r\n")
        if held >= SLICE:
            yield b"".join(small)
            small, held = [], 0
    if small:
        yield b"".join(small)


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConnectionError(f"a number was to come, not {text[:80]!r}") from None
