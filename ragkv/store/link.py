"""A bounded line to a Redis server: commands go out, replies or one of our errors come back, in time.

Nothing is retried. Connecting may take `timeout`, and an exchange `timeout` plus what its bytes take on a link of
32 MiB/s; only a server that keeps trickling bytes of one reply can take longer, because the deadline is looked at
between replies. After a failure of the connection every call fails at once for one second (the breaker), so a server
that is down or hangs costs one timeout per second, not one per chunk. An error that the server answers with (out of
memory, read-only) is no such failure: reads may well go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from redis import connection as client
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout
from redis.retry import Retry

from ragkv.errors import ConfigError, EntryCorrupt, StoreError, StoreFull, StoreUnavailable

BREAK_SECONDS = 1.0
SLOWEST = 32 * 2**20
"""Bytes per second below which a store is of no use: encoding a chunk again is quicker."""
SLICE = 2**20

Command = tuple[Any, ...]


class Link:
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

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """The replies to the commands, in order. An error that the server answers with is an item: see `accepted`.

        Raises StoreUnavailable when the server cannot be reached, hangs, or failed less than a second ago.
        """
        if not commands:
            return []
        closed_for = self._closed_until - time.monotonic()
        if closed_for > 0:
            raise StoreUnavailable(f"Redis at {self.where} is left alone for {closed_for:.1f} s: {self._reason}")
        try:
            connection: Any = self._pool.get_connection()
            try:
                connection.send_packed_command(_slices(connection.pack_commands(commands), deadline))
                return [_reply(connection, deadline) for _ in commands]
            except BaseException:
                connection.disconnect()  # Replies may be under way that the next user would take for its own.
                raise
            finally:
                self._pool.release(connection)
        except (RedisError, OSError) as error:
            self._reason = self._clean(f"{type(error).__name__}: {error}")
            self._closed_until = time.monotonic() + BREAK_SECONDS
            # Not chained: the error may quote an AUTH command.
            raise StoreUnavailable(f"Redis at {self.where}: {self._reason}") from None

    def accepted(self, reply: Any) -> Any:
        """The reply. Where it is an error: StoreFull, EntryCorrupt (a value of another type) or StoreUnavailable."""
        if not isinstance(reply, Exception):
            return reply
        text = self._clean(str(reply))
        code = getattr(reply, "status_code", None) or text.split(" ")[0]
        kind: type[StoreError] = StoreUnavailable
        # MISCONF: Redis takes no writes because it cannot save, as a rule for want of disk space.
        if code in ("OOM", "MISCONF") or "OOM command not allowed" in text:
            kind = StoreFull
        elif code == "WRONGTYPE":
            kind = EntryCorrupt
        raise kind(f"Redis at {self.where} answers {text if text.startswith(code) else f'{code} {text}'}")

    def close(self) -> None:
        """Close all connections."""
        self._pool.disconnect()

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _options(url: str, timeout: float) -> dict[str, Any]:
    """Arguments of the connection pool. What the URL says about time, retries and decoding is overruled."""
    parse: Any = client.parse_url
    try:
        options: dict[str, Any] = parse(url)
        kind = options.pop("connection_class", client.Connection)
        options.update(
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            socket_read_size=256 * 1024,
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


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise RedisTimeout("out of time")
    return left


def _slices(pieces: Iterable[bytes], deadline: float) -> Iterator[memoryview]:
    """Each slice has the whole socket timeout to go out, so a large entry needs no larger timeout."""
    for piece in pieces:
        for start in range(0, len(piece), SLICE):
            _left(deadline)
            yield memoryview(piece)[start : start + SLICE]


def _reply(connection: Any, deadline: float) -> Any:
    try:
        return connection.read_response(timeout=_left(deadline))
    except ResponseError as error:
        return error
