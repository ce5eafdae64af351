"""A bounded line to a Redis server: commands go out, replies or one of our errors come back, in time.

redis-py connects (URL, TLS, unix socket, AUTH, SELECT) and keeps the pool; what goes over a connected socket is ours
(wire.py). Nothing is retried. Connecting may take `timeout`, and an exchange `timeout` plus what its bytes take on a
link of 32 MiB/s, whether a server hangs or trickles; only in redis-py's own greetings (AUTH, SELECT, the TLS handshake)
the time counts anew with each packet. After a failure of the connection every call fails at once for one second (the
breaker), so a server that is down or hangs costs one timeout per second, not one per chunk. An error that the server
answers with (out of memory, read-only) is no such failure: reads may well go on.
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
"""Bytes per second below which a store is of no use: encoding a chunk again is quicker."""
UNSENT = 8 * 2**20
"""What the system may still hold of the commands when the last of them is handed over."""


class Moved(StoreUnavailable):
    """The key belongs to another node of a cluster, and the one that says so knows to which (cluster.py)."""


class ServerLink:
    """Thread-safe: each exchange takes a connection of its own from a pool.

    Nothing is sent before the first use. The password of the URL is in no message and no repr.
    """

    def __init__(self, url: str, timeout: float) -> None:
        """`timeout` in seconds. Raises ConfigError when the URL cannot be understood."""
        options = _options(url, timeout)
        self.where = str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")
        self._timeout = timeout
        self._secrets = [str(options[name]) for name in ("password", "ssl_password") if options.get(name)]
        self._pool = client.ConnectionPool(**options)
        self._closed_until = 0.0
        self._reason = ""

    def __repr__(self) -> str:
        return f"Link({self.where!r})"

    def deadline(self, size: int) -> float:
        """When an exchange of `size` bytes that begins now must be over."""
        return time.monotonic() + self._timeout + size / SLOWEST

    def ask(self, *command: Any, size: int = 0) -> Any:
        """The reply to one command; `size`: bytes it may have. Raises StoreUnavailable, StoreFull, EntryCorrupt."""
        return self.accepted(*self.exchange([command], self.deadline(size)))

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """The replies to the commands, in order. An error that the server answers with is an item: see `accepted`.

        Raises StoreUnavailable when the server cannot be reached, hangs, or failed less than a second ago.
        """
        if not commands:
            return []
        with self.line() as wire:
            wire.send(commands, deadline)
            # A large entry has a late deadline; a server that took it and then hangs shall not use it up.
            answer = min(deadline, self.deadline(UNSENT))
            return [wire.reply(answer) for _ in commands]

    @contextmanager
    def line(self) -> Iterator[RespConnection]:
        """A connection of one's own. It is closed when anything is raised inside, or is left over: another user would
        take the replies under way for its own. Raises StoreUnavailable as `exchange` does, in place of OSError too."""
        closed_for = self._closed_until - time.monotonic()
        if closed_for > 0:
            raise StoreUnavailable(f"Redis at {self.where} is left alone for {closed_for:.1f} s: {self._reason}")
        try:
            connection: Any = self._pool.get_connection()
            try:
                line = connected_socket(connection)
                wire = RespConnection(line, self._timeout)
                yield wire
                if not wire.settled():
                    raise ConnectionError("a reply came that nobody asked for")
                line.settimeout(self._timeout)
            except BaseException:
                connection.disconnect()
                raise
            finally:
                self._pool.release(connection)
        except (RedisError, OSError) as error:
            self._reason = self._clean(f"{type(error).__name__}: {error}")
            self._closed_until = time.monotonic() + BREAK_SECONDS
            # Not chained: the error may quote an AUTH command.
            raise StoreUnavailable(f"Redis at {self.where}: {self._reason}") from None

    def accepted(self, reply: Reply) -> Any:
        """The reply. Where it is an error: StoreFull, EntryCorrupt (a value of another type) or StoreUnavailable."""
        if not isinstance(reply, ServerRefusal):
            return reply
        kind: type[StoreError] = StoreUnavailable
        # MISCONF: Redis takes no writes because it cannot save, as a rule for want of disk space.
        if reply.code in ("OOM", "MISCONF") or "OOM command not allowed" in reply.text:
            kind = StoreFull
        elif reply.code == "WRONGTYPE":
            kind = EntryCorrupt
        elif reply.code == "MOVED":
            kind = Moved
        raise kind(f"Redis at {self.where} answers {self._clean(reply.text)}")

    def close(self) -> None:
        """Close all connections."""
        self._pool.disconnect()

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def connected_socket(connection: Any) -> socket.socket:
    """The socket of a connection that redis-py has connected: plain, TLS or unix.

    The one place that looks inside redis-py, which reads values only through buffers of its own.
    tests/store/test_redis_link.py holds what is taken for granted here: that the pool hands out connections with nothing
    unread, and goes on with one whose socket was used and settled by others.
    """
    line: socket.socket = connection._sock
    return line


def _options(url: str, timeout: float) -> dict[str, Any]:
    """Arguments of the connection pool. What the URL says about time, retries and decoding is overruled."""
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
            driver_info=None,  # Otherwise every connection begins with commands about the client library.
        )
        kind(**options)
    except (ValueError, TypeError, RedisError):
        # Neither chained nor quoted: the URL may hold a password.
        raise ConfigError("store: this Redis URL is malformed; it should be like redis://host:6379/0") from None
    return {**options, "connection_class": kind, "max_connections": 1024}
