"""Requests as the bytes that a client sends, and the answer that comes back."""

from __future__ import annotations

import base64
import gzip
import socket
import time
from dataclasses import dataclass

SMALL = 64 * 1024
"""Bytes of a request that may not hold up others."""
PATIENCE = 30.0
"""Seconds that an answer may take."""
WAITS = (b"wait=true", b'"ingest"', b"/events")
"""Marks of requests that are answered when a job is done. Reading a document takes its time, so the client leaves."""
LEAVES = 2.0
"""Seconds after which it does."""

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class Request:
    """A request, well-formed or not.

    Attributes:
        kind: What is tried, for the report.
        wire: All of its bytes.
        cut: Whether it ends before it is complete. No answer is owed to it then.
        pieces: How many pieces it is sent in.
    """

    kind: str
    wire: bytes
    cut: bool = False
    pieces: int = 1

    def __repr__(self) -> str:
        return f"{self.kind}, {len(self.wire)} bytes: {self.wire[:300]!r}"

    @property
    def patience(self) -> float:
        """Seconds that the client waits for the answer."""
        return LEAVES if any(mark in self.wire for mark in WAITS) else PATIENCE

    @property
    def small(self) -> bool:
        """Whether it is so small that others may not notice it."""
        return len(self.wire) <= SMALL

    def replay(self, port: int) -> str:
        """Return a command line that sends the request again."""
        packed = base64.b64encode(gzip.compress(self.wire, mtime=0)).decode()
        return f"base64 -d <<< {packed} | zcat | nc -q 30 127.0.0.1 {port}"


def assembled(method: str, target: bytes, headers: Headers, body: bytes = b"") -> bytes:
    """Make the bytes of a request. Headers whose name occurs in `headers` are not added.

    Args:
        method: Method.
        target: Path and query.
        headers: Headers; the last of each name counts, an empty value of Content-Length leaves it out.
        body: Body.
    """
    given = {name.lower() for name, _ in headers}
    usual = ((b"Host", b"127.0.0.1"), (b"Connection", b"close"), (b"Content-Length", b"%d" % len(body)))
    lines = [*headers, *(header for header in usual if header[0].lower() not in given)]
    head = b"".join(b"%s: %s\r\n" % (name, value) for name, value in lines if value != b"-")
    return b"%s %s HTTP/1.1\r\n%s\r\n%s" % (method.encode(), target, head, body)


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        status: Status of the answer; 0 where there was none.
        body: What followed its head.
        fault: Why it is not complete; "" where it is.
        seconds: How long it took.
    """

    status: int
    body: bytes
    fault: str
    seconds: float


def send(port: int, request: Request) -> Answer:
    """Send a request on a connection of its own and return the answer, also one that came while it was being sent."""
    began = time.monotonic()
    data, fault = b"", ""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        rest = memoryview(request.wire)
        step = max(1, -(-len(rest) // request.pieces))
        try:
            for at in range(0, len(rest), step):
                connection.sendall(rest[at : at + step])
                if request.pieces > 1:
                    time.sleep(0.01)
            if request.cut:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # closed before everything was sent: the answer may be there
        try:
            while not _complete(data, request):
                connection.settimeout(max(0.01, began + request.patience - time.monotonic()))
                more = connection.recv(2**20)
                if not more:
                    break
                data += more
        except TimeoutError:
            if request.patience == LEAVES:
                return Answer(0, b"", "", time.monotonic() - began)
            fault = f"no complete answer within {PATIENCE:.0f} s"
        except OSError as error:
            fault = "" if _status(data) else f"{type(error).__name__}"
    status = _status(data)
    if not fault and not request.cut and not _complete(data, request, ended=True):
        fault = "the answer broke off" if status else "the connection ended without an answer"
    return Answer(status, _body(data), fault, time.monotonic() - began)


def _final(data: bytes) -> bytes:
    """Leave out informational answers, which come before the answer."""
    while data.startswith(b"HTTP/1.1 1") and not data.startswith(b"HTTP/1.1 101"):
        _, end, data = data.partition(b"\r\n\r\n")
        if not end:
            return b""
    return data


def _status(data: bytes) -> int:
    words = _final(data).partition(b"\r\n")[0].split(b" ")
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") and words[1].isdigit() else 0


def _body(data: bytes) -> bytes:
    return _final(data).partition(b"\r\n\r\n")[2]


def _complete(data: bytes, request: Request, ended: bool = False) -> bool:
    """Whether an answer is whole. Where its head does not say, the end of the connection does."""
    head, end, body = _final(data).partition(b"\r\n\r\n")
    if not end:
        return False
    lines = head.lower().split(b"\r\n")
    if _status(data) in (101, 204, 304) or request.wire.startswith(b"HEAD "):
        return True
    if b"transfer-encoding: chunked" in lines:
        return body.endswith(b"0\r\n\r\n")
    lengths = [line.partition(b":")[2] for line in lines if line.startswith(b"content-length:")]
    return len(body) >= int(lengths[0]) if lengths else ended
