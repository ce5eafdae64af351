"""Bounds on connections: how long a client may take to send a request, and how many connections it may have.

Uvicorn bounds how long a connection may be idle between two requests (`timeout_keep_alive`). It waits without end for
the first request of a connection, the rest of a head and the rest of a body. A client could hold connections and file
descriptors with a few bytes, and keep others from being served.

    head     HEAD_SECONDS from the connection or the first byte, however many bytes come meanwhile
    body     BODY_SECONDS without a byte, and BODY_SECONDS plus one second for each BODY_RATE bytes altogether
    number   RAGKV_CONNECTIONS a client address

Connections of WebSockets count until they are upgraded; websockets pings them afterwards.

A head that is too large or ambiguous gets its answer here (request_heads.py), also before an upgrade.

Many clients read nothing before they have sent all. Closing the connection under them would reset it, and the answer
that says what is wrong (413, 431, 400) would be lost. So the service sends its answer and the end of its side, and then
throws away what still comes: LINGER_BYTES at most, for LINGER_SECONDS at most, and not longer than QUIET_SECONDS after
the last byte.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from ragkv.api.errors import MEDIA_TYPE, Fault
from ragkv.api.runtime.connection_count import Connections
from ragkv.api.runtime.request_heads import HEAD_BYTES, TOO_LARGE, check_head, origin_form

HEAD_SECONDS = 8.0
BODY_SECONDS = 8.0
BODY_RATE = 1024
"""Bytes a second that a client must send of a body on average."""
IDLE_SECONDS = 5
"""How long a connection may be idle between two requests."""
READ_BYTES = 16 * 1024
"""Bytes that are read of a connection at a time. A body in chunks of one byte takes 2 ms of each KB: asyncio's 256 KB
would hold up everybody for half a second."""
LINGER_BYTES = 64 * 2**20
LINGER_SECONDS = 8.0
QUIET_SECONDS = 1.0

_CODING = Fault(400, "the only transfer coding is chunked", "transfer_coding")
_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

logger = logging.getLogger("ragkv.api")


class StrictConnection(h11.Connection):
    """Reads requests, and none whose head is ambiguous.

    Attributes:
        fault: What is wrong with the request that was refused.
    """

    fault = Fault(400, "the request is not well-formed", "bad_request")

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES)

    def next_event(self) -> Any:
        """Return what came next. Raises h11.RemoteProtocolError, and `fault` then says why."""
        if self.their_state is h11.IDLE and (fault := check_head(self.trailing_data[0])) is not None:
            self.fault = fault
            raise h11.RemoteProtocolError(fault.detail, fault.status)
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == TOO_LARGE.status:
                self.fault = TOO_LARGE
            elif error.error_status_hint == 501:
                self.fault = _CODING
            raise
        if isinstance(event, h11.Request) and (target := origin_form(event.target)) != event.target:
            return h11.Request(
                method=event.method, target=target, headers=event.headers, http_version=event.http_version
            )
        return event


class LingeringTransport:
    """A transport whose `close` is another one. It passes on everything else."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]):
        self._transport = transport
        self.close = close
        self.lingers = False

    def is_closing(self) -> bool:
        """Return whether nothing more can be sent."""
        return self.lingers or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedProtocol(H11Protocol):
    """One connection of a client, closed when its request does not arrive in time."""

    def __init__(self, open_connections: Connections, **uvicorn: Any):
        """Create the protocol of a connection.

        Args:
            open_connections: Counts the connections of the service.
            uvicorn: What uvicorn passes to a protocol.
        """
        super().__init__(**uvicorn)
        self.conn = StrictConnection()
        self._open_connections = open_connections
        self._address = ""
        self._counted = False
        self._timer: asyncio.TimerHandle | None = None
        self._waits_for: object = None
        self._started = 0.0
        self._received = 0
        self._wire: asyncio.Transport = None  # type: ignore[assignment]
        self._unread = LINGER_BYTES
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection and wait for its first request."""
        self._wire = transport
        if hasattr(transport, "max_size"):  # of asyncio's own loop, which `ragkv serve` runs on
            transport.max_size = READ_BYTES
        super().connection_made(cast("asyncio.Transport", LingeringTransport(transport, self._close)))
        self._address = self.client[0] if self.client else ""
        self._counted = True
        if not self._open_connections.add(self._address):
            transport.write(_TOO_MANY)
            transport.close()
            return
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._release()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what came, and go on to wait for what lacks."""
        if self._lingers or self._answered:
            self._unread -= len(data)
            if self._unread < 0:
                self._wire.close()
        if self._lingers:
            self._linger()
        if self.transport.is_closing():
            return
        self._received += len(data)
        super().data_received(data)
        if self._counted and not self._lingers:
            self._wait()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be read, and read no other of this connection."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_answer(cast("StrictConnection", self.conn).fault))
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self._refused = True
        self.transport.close()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over to the protocol of WebSockets."""
        self._release()
        self.transport = self._wire
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        """Wait for the next request. Between two requests uvicorn's own limit applies."""
        super().on_response_complete()
        if self._lingers:
            return
        self._stop_timer()
        self._waits_for, self._unread = None, LINGER_BYTES
        if self._answered:
            self._wait()

    @property
    def _lingers(self) -> bool:
        return cast("LingeringTransport", self.transport).lingers

    @property
    def _answered(self) -> bool:
        """Whether the answer is sent and the body of its request is not all there."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and cycle.response_complete and self.conn.their_state is h11.SEND_BODY

    def _wait(self) -> None:
        """Set the time at which the connection is closed, by what the client has still to send."""
        state = self.conn.their_state
        if state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_timer()
            self._waits_for = None
            return
        now = self.loop.time()
        if state is not self._waits_for:
            self._waits_for, self._started, self._received = state, now, 0
        if state is h11.IDLE:
            ends = self._started + HEAD_SECONDS
        elif self._answered:
            ends = self._started + LINGER_SECONDS
        else:
            ends = min(now, self._started + self._received / BODY_RATE) + BODY_SECONDS
        self._stop_timer()
        self._timer = self.loop.call_at(ends, self._expire)

    def _expire(self) -> None:
        """Close the connection, unless the service itself stopped reading from it."""
        if self.flow.read_paused:
            self._timer = self.loop.call_later(BODY_SECONDS, self._expire)
            return
        cycle = cast("RequestResponseCycle | None", self.cycle)  # the last request; None before the first
        if not self._answered and (cycle is None or cycle.response_complete or not cycle.response_started):
            self.transport.write(_TIMED_OUT)
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self._wire.close()

    def _close(self) -> None:
        """Close the connection, but read on for a while if the client is still sending."""
        sending = self._refused or self.conn.their_state is h11.SEND_BODY
        if self._lingers or not sending or self._wire.is_closing() or not self._wire.can_write_eof():
            return self._wire.close()
        cast("LingeringTransport", self.transport).lingers = True
        self._wire.write_eof()
        self.flow.resume_reading()
        self._started, self._unread = self.loop.time(), LINGER_BYTES
        self._linger()

    def _linger(self) -> None:
        self._stop_timer()
        ends = min(self.loop.time() + QUIET_SECONDS, self._started + LINGER_SECONDS)
        self._timer = self.loop.call_at(ends, self._wire.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release(self) -> None:
        self._stop_timer()
        if self._counted:
            self._counted = False
            self._open_connections.drop(self._address)


def _answer(fault: Fault) -> bytes:
    """Return a whole response."""
    body = json.dumps(fault.to_problem(), ensure_ascii=False).encode()
    head = (
        f"HTTP/1.1 {fault.status} {HTTPStatus(fault.status).phrase}\r\ncontent-type: {MEDIA_TYPE}\r\n"
        f"content-length: {len(body)}\r\ncache-control: no-store\r\nx-content-type-options: nosniff\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body


def protocol_options(open_connections: Connections) -> dict[str, Any]:
    """Return the options of uvicorn that bound connections."""
    return {"http": partial(BoundedProtocol, open_connections), "timeout_keep_alive": IDLE_SECONDS}
