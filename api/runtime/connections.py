"""Bounds on connections: how long a client may take to send a request, and how many connections it may have.

Uvicorn bounds the size of a request's head, and how long a connection may be idle between two requests
(`timeout_keep_alive`). It waits without end for the first request of a connection, the rest of a head and the rest of a
body. A client could hold connections and file descriptors with a few bytes, and keep others from being served.

    head     HEAD_SECONDS from the connection or the first byte, however many bytes come meanwhile
    body     BODY_SECONDS without a byte, and BODY_SECONDS plus one second for each BODY_RATE bytes altogether
    number   RAGKV_CONNECTIONS a client address

Connections of WebSockets count until they are upgraded; websockets pings them afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from functools import partial
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_SECONDS = 8.0
BODY_SECONDS = 8.0
BODY_RATE = 1024
"""Bytes a second that a client must send of a body on average."""
IDLE_SECONDS = 5
"""How long a connection may be idle between two requests."""
LOG_SECONDS = 60.0
"""Least time between two log lines about refused connections."""

_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

logger = logging.getLogger("ragkv.api")


class Connections:
    """The open connections of a service, by the address of the client.

    Attributes:
        most: Connections that one address may have; 0 for any number.
        refused: Connections over that number since the start.
    """

    def __init__(self, most: int):
        self.most, self.refused = most, 0
        self._open: Counter[str] = Counter()
        self._logged = (0, 0.0)

    def __len__(self) -> int:
        return self._open.total()

    def add(self, client: str) -> bool:
        """Count a connection. Return whether the client may have it."""
        self._open[client] += 1
        if not self.most or self._open[client] <= self.most:
            return True
        self.refused += 1
        count, when = self._logged
        if not count or time.monotonic() - when >= LOG_SECONDS:
            new = self.refused - count
            logger.warning("%d connections over RAGKV_CONNECTIONS (%d), the last one from %s", new, self.most, client)
            self._logged = self.refused, time.monotonic()
        return False

    def drop(self, client: str) -> None:
        """Stop to count a connection."""
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]


class BoundedProtocol(H11Protocol):
    """One connection of a client, closed when its request does not arrive in time."""

    def __init__(self, open_connections: Connections, **uvicorn: Any):
        """Create the protocol of a connection.

        Args:
            open_connections: Counts the connections of the service.
            uvicorn: What uvicorn passes to a protocol.
        """
        super().__init__(**uvicorn)
        self._open_connections = open_connections
        self._address = ""
        self._counted = False
        self._timer: asyncio.TimerHandle | None = None
        self._waits_for: object = None
        self._started = 0.0
        self._received = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection and wait for its first request."""
        super().connection_made(transport)
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
        if self.transport.is_closing():
            return
        self._received += len(data)
        super().data_received(data)
        if self._counted:
            self._wait()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over to the protocol of WebSockets."""
        self._release()
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        """Wait for the next request. Between two requests uvicorn's own limit applies."""
        super().on_response_complete()
        self._stop_timer()
        self._waits_for = None

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
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_TIMED_OUT)
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release(self) -> None:
        self._stop_timer()
        if self._counted:
            self._counted = False
            self._open_connections.drop(self._address)


def protocol_options(open_connections: Connections) -> dict[str, Any]:
    """Return the options of uvicorn that bound connections."""
    return {"http": partial(BoundedProtocol, open_connections), "timeout_keep_alive": IDLE_SECONDS}
