"""A bounded link to one Redis server: every call returns a reply or raises one of our errors, in time.

redis-py connects (URL, TLS, Unix socket, AUTH, SELECT) and keeps the connection pool. The traffic on a connected socket
is ours (redis_wire.py). Nothing is retried.

Connecting may take `timeout` seconds. An exchange may take `timeout` plus the time of its bytes on a link of 32 MiB/s,
whether the server hangs or sends slowly. Only within redis-py's own handshakes (AUTH, SELECT, TLS) does the time start
again with each packet.

After a connection failure every call fails at once for one second (the circuit breaker). So a server that is down or
hangs costs one timeout per second, not one per chunk. An error reply of the server, such as out of memory or read-only,
does not open the breaker, because reads may still work.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis import connection as client
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from ragkv.errors import ConfigError, EntryCorrupt, StoreError, StoreFull, StoreUnavailable
from ragkv.store.redis_wire import Command, Reply, RespConnection, ServerRefusal

BREAK_SECONDS = 1.0
SLOWEST = 32 * 2**20
"""Bytes per second below which a store is useless, because encoding a chunk again is faster."""
UNSENT = 8 * 2**20
"""Bytes of commands that the system may still buffer after the last send call."""


class Moved(StoreUnavailable):
    """The key belongs to another node of a cluster. The node that answers so knows to which (redis_cluster.py)."""


class ServerLink:
    """A pool of connections to one server, with deadlines and a circuit breaker. Thread-safe.

    Each exchange takes its own connection from the pool. Nothing is sent before the first use. The password of the URL
    appears in no message and no repr.

    Attributes:
        address: `host:port`, or the path of a Unix socket.
    """

    def __init__(self, url: str, timeout: float) -> None:
        """Parse the URL. `timeout` is in seconds. Raises ConfigError when the URL is malformed."""
        options = _options(url, timeout)
        self.address = str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")
        self._timeout = timeout
        self._secrets = [str(options[name]) for name in ("password", "ssl_password") if options.get(name)]
        self._pool = client.ConnectionPool(**options)
        self._open_until = 0.0
        self._reason = ""

    def __repr__(self) -> str:
        return f"ServerLink({self.address!r})"

    def deadline(self, size: int) -> float:
        """Return the deadline of an exchange of `size` bytes that begins now."""
        return time.monotonic() + self._timeout + size / SLOWEST

    def command(self, *command: Any, size: int = 0) -> Any:
        """Send one command and return its reply.

        Args:
            command: The words of the command.
            size: Bytes that the reply may have, for the deadline.

        Raises:
            StoreUnavailable: The server cannot be reached, hangs, or refuses the command.
            StoreFull: The server has no room.
            EntryCorrupt: The value has another type.
        """
        return self.checked(*self.pipeline([command], self.deadline(size)))

    def pipeline(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """Send commands and return their replies, in order. Error replies are items of the list: see `checked`.

        Raises:
            StoreUnavailable: The server cannot be reached, hangs, or failed less than a second ago.
        """
        if not commands:
            return []
        with self.connection() as wire:
            wire.send(commands, deadline)
            # A large entry has a late deadline. A server that accepts it and then hangs must not use it up.
            answer = min(deadline, self.deadline(UNSENT))
            return [wire.reply(answer) for _ in commands]

    @contextmanager
    def connection(self) -> Iterator[RespConnection]:
        """Take a connection from the pool.

        It is closed when the block raises anything or leaves replies unread, because another user would take these
        replies for its own.

        Raises:
            StoreUnavailable: As in `pipeline`. It also replaces any OSError of the block.
        """
        open_for = self._open_until - time.monotonic()
        if open_for > 0:
            raise StoreUnavailable(f"Redis at {self.address} is left alone for {open_for:.1f} s: {self._reason}")
        try:
            connection: Any = self._pool.get_connection()
            try:
                connected = connected_socket(connection)
                wire = RespConnection(connected, self._timeout)
                yield wire
                if not wire.is_idle():
                    raise ConnectionError("an unexpected reply arrived")
                connected.settimeout(self._timeout)
            except BaseException:
                connection.disconnect()
                raise
            finally:
                self._pool.release(connection)
        except (RedisError, OSError) as error:
            self._reason = self._redact(f"{type(error).__name__}: {error}")
            self._open_until = time.monotonic() + BREAK_SECONDS
            # Not chained, because the error may quote an AUTH command.
            raise StoreUnavailable(f"Redis at {self.address}: {self._reason}") from None

    def checked(self, reply: Reply) -> Any:
        """Return a reply, or raise the error that it stands for (`refusal_error`)."""
        if isinstance(reply, ServerRefusal):
            raise self.refusal_error(reply)
        return reply

    def refusal_error(self, refusal: ServerRefusal) -> StoreError:
        """Return the error for an error reply: StoreFull, EntryCorrupt (a value of another type), Moved or
        StoreUnavailable."""
        kind: type[StoreError] = StoreUnavailable
        # MISCONF: Redis refuses writes because it cannot save, usually because the disk is full.
        if refusal.code in ("OOM", "MISCONF") or "OOM command not allowed" in refusal.text:
            kind = StoreFull
        elif refusal.code == "WRONGTYPE":
            kind = EntryCorrupt
        elif refusal.code == "MOVED":
            kind = Moved
        return kind(f"Redis at {self.address} answers {self._redact(refusal.text)}")

    def close(self) -> None:
        """Close all connections."""
        self._pool.disconnect()

    def _redact(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def connected_socket(connection: Any) -> socket.socket:
    """Return the socket of a connection that redis-py has connected: plain, TLS or Unix.

    This is the only place that uses redis-py's internals, because redis-py reads values only through its own buffers.
    tests/store/test_redis_link.py checks the assumptions: the pool hands out connections with nothing unread, and it
    keeps using a connection whose socket others have used and left idle.
    """
    connected: socket.socket = connection._sock
    return connected


def _options(url: str, timeout: float) -> dict[str, Any]:
    """Return the connection pool's arguments. The URL cannot change timeouts, retries and decoding."""
    parse: Any = client.parse_url
    try:
        options: dict[str, Any] = parse(url)
        kind = options.pop("connection_class", client.Connection)
        options.update(
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
            retry_on_timeout=False,
            retry_on_error=[],
            health_check_interval=0,
            decode_responses=False,
            protocol=2,
            driver_info=None,  # Otherwise every connection starts with commands about the client library.
        )
        kind(**options)
    except (ValueError, TypeError, RedisError):
        # Neither chained nor quoted, because the URL may contain a password.
        raise ConfigError("store: this Redis URL is malformed; it should be like redis://host:6379/0") from None
    return {**options, "connection_class": kind, "max_connections": 1024}
