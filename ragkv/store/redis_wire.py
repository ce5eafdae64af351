"""The Redis protocol (RESP 2) over a connected socket, with a deadline on every byte.

    command   *<words>CRLF, then per word $<bytes>CRLF <the word> CRLF
    reply     +text  -error  :number  $<bytes>CRLF <value> CRLF  $-1 (nil)  *<items>CRLF and the items

Large values are not copied: they are sent from the caller's memory, and `fill` lets the kernel write them into the
caller's buffer. Only the small parts around them, and values smaller than BUFFER, pass through a buffer.

Failures are OSErrors; a missed deadline is a TimeoutError. After a failure, and after `fill` returned another size than
was expected, it is unknown which reply comes next, so the connection must be closed.
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
"""Most bytes of one send call."""
LARGE = 2**16
"""Words of this size are sent without copying them."""
LINE = 2**16
"""Longest line. The error texts of servers are far shorter."""
VALUE = 2**29
"""Largest value in Redis. A longer length is not valid."""
NESTED = 8
"""Deepest nesting of arrays in a reply."""

Command: TypeAlias = "tuple[str | int | bytes | memoryview, ...]"


@dataclass(frozen=True)
class ServerRefusal:
    """An error reply of the server: a code in capitals, then a text."""

    text: str

    @property
    def code(self) -> str:
        """The error's code, such as WRONGTYPE."""
        return self.text.partition(" ")[0]


Reply: TypeAlias = "bytes | int | ServerRefusal | list[Reply] | None"


class RespConnection:
    """A connection that one thread uses at a time."""

    def __init__(self, connected: socket.socket, patience: float) -> None:
        """Wrap a connected socket.

        Args:
            connected: The socket.
            patience: Seconds within which a send must make progress.
        """
        self._socket, self._patience = connected, patience
        self._raw = _DeadlineReader(connected)
        self._replies = io.BufferedReader(self._raw, BUFFER)

    def send(self, commands: Iterable[Command], deadline: float) -> None:
        """Send commands, one after another. Replies may arrive meanwhile."""
        for piece in pack_commands(commands):
            for start in range(0, len(piece), SLICE):
                self._socket.settimeout(min(self._patience, seconds_left(deadline)))
                self._socket.sendall(piece[start : start + SLICE])

    def reply(self, deadline: float) -> Reply:
        """Read the next reply of any type."""
        self._raw.deadline = deadline
        return self._read_reply(NESTED)

    def fill(self, out: memoryview, deadline: float) -> int | ServerRefusal:
        """Read a value into `out`.

        Returns:
            The size of the value, -1 when there is none, or the server's error. `out` is filled only when the value
            has its size.
        """
        self._raw.deadline = deadline
        kind, text = _split_line(self._replies.readline(LINE))
        if kind == b"-":
            return ServerRefusal(text.decode(errors="replace"))
        size = _parse_int(text)
        if kind != b"$":
            raise ConnectionError(f"expected a value, not {kind + text[:80]!r}")
        if size == out.nbytes:
            if self._replies.readinto(out) != size:
                raise ConnectionError("the connection was closed")
            self._read_line_end()
        return size

    def is_idle(self) -> bool:
        """Return whether no unexpected bytes have been read."""
        self._raw.deadline = None
        return not self._replies.peek(1)

    def _read_reply(self, nested: int) -> Reply:
        kind, text = _split_line(self._replies.readline(LINE))
        if kind == b"+":
            return text
        if kind == b"-":
            return ServerRefusal(text.decode(errors="replace"))
        number = _parse_int(text)
        if kind == b":":
            return number
        if number == -1 and kind in b"$*":
            return None
        if kind == b"$" and 0 <= number <= VALUE:
            value = self._replies.read(number)
            self._read_line_end()
            return value
        if kind == b"*" and number >= 0 and nested:
            return [self._read_reply(nested - 1) for _ in range(number)]
        raise ConnectionError(f"this is not Redis' protocol: {kind + text[:80]!r}")

    def _read_line_end(self) -> None:
        """Read the line end after a value. If it is there, the value was as long as announced."""
        if self._replies.read(2) != b"\r\n":
            raise ConnectionError("a value does not end where it should")


class _DeadlineReader(io.RawIOBase):
    """Reads from a socket until a deadline. Without a deadline it reads nothing."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.deadline: float | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, out: memoryview) -> int | None:  # type: ignore[override]
        if self.deadline is None:
            return None
        self._socket.settimeout(seconds_left(self.deadline))
        return self._socket.recv_into(out)


def seconds_left(deadline: float) -> float:
    """Return the seconds until the deadline. Raises TimeoutError when it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("out of time")
    return seconds


def pack_commands(commands: Iterable[Command]) -> Iterator[bytes | memoryview]:
    """Encode commands. Small words are joined, so that many commands make one packet; large words are not copied."""
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


def _split_line(line: bytes) -> tuple[bytes, bytes]:
    """Return the type and the text of a reply's first line."""
    if not line.endswith(b"\r\n"):
        raise ConnectionError(f"this is not Redis' protocol: {line[:80]!r}" if line else "the connection was closed")
    return line[:1], line[1:-2]


def _parse_int(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConnectionError(f"expected a number, not {text[:80]!r}") from None
