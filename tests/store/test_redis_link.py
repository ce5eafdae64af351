"""The link: what it assumes about redis-py, and that every connection is clean for its next user."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from ragkv.errors import StoreUnavailable
from ragkv.store.base import Range
from ragkv.store.redis_link import BREAK_SECONDS, ServerLink, connected_socket
from ragkv.store.redis_store import RedisStore
from ragkv.types import Key
from tests.redis_server import RedisServer, free_port, redis_server
from tests.store.chunks import read_ranges

KEY = Key("ab" * 32)
TIMEOUT = 0.25


@contextmanager
def impostor(respond: Callable[[socket.socket], None], visits: int = 1) -> Iterator[str]:
    """Yield the URL of a listener that runs `respond` for so many connections, one after another."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(visits):
                line, _ = listener.accept()
                try:
                    with line:
                        respond(line)
                except OSError:
                    pass  # the other end has closed the connection

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join()


def test_a_socket_of_redis_py_can_be_used_directly_and_then_by_redis_py_again(server: RedisServer) -> None:
    pool = redis.ConnectionPool.from_url(server.url, protocol=2)
    connection = pool.get_connection()
    line = connected_socket(connection)
    assert line.getpeername() == ("127.0.0.1", server.port)
    line.sendall(b"ECHO ours\r\n")
    assert line.recv(100) == b"$4\r\nours\r\n"
    pool.release(connection)
    assert redis.Redis(connection_pool=pool).echo("theirs") == b"theirs"
    again = pool.get_connection()
    assert connected_socket(again) is line
    pool.release(again)
    pool.disconnect()


def test_the_pool_hands_out_no_connection_with_an_unread_reply(server: RedisServer) -> None:
    pool = redis.ConnectionPool.from_url(server.url, protocol=2)
    connection = pool.get_connection()
    line = connected_socket(connection)
    line.sendall(b"ECHO late\r\n")
    assert line.recv(1, socket.MSG_PEEK)
    pool.release(connection)
    assert connected_socket(pool.get_connection()) is not line
    pool.disconnect()


def test_a_connection_is_used_again_after_replies_of_every_kind(own: RedisServer) -> None:
    link = ServerLink(own.url, TIMEOUT)
    with redis.Redis.from_url(own.url) as admin:
        before = admin.info("stats")["total_connections_received"]
        replies = link.pipeline([("SET", "a", 1), ("GET", "a"), ("LPUSH", "a", 2), ("GET", "no")], link.deadline(0))
        assert replies[:2] + replies[3:] == [b"OK", b"1", None]
        assert link.command("GET", "a") == b"1"
        assert admin.info("stats")["total_connections_received"] == before + 1


def test_a_connection_with_an_unexpected_reply_is_closed() -> None:
    def respond(line: socket.socket) -> None:
        line.recv(1000)
        line.sendall(b"+PONG\r\n+PONG\r\n")
        assert line.recv(1000) == b""

    with impostor(respond) as url, pytest.raises(StoreUnavailable, match="an unexpected reply"):
        ServerLink(url, TIMEOUT).command("PING")


def test_an_exception_during_its_use_closes_a_connection(own: RedisServer) -> None:
    link = ServerLink(own.url, TIMEOUT)

    def leave_early() -> None:
        with link.connection() as wire:
            wire.send([("ECHO", "stale")], link.deadline(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave_early()
    assert link.command("ECHO", "fresh") == b"fresh"


def test_slow_replies_and_ranges_end_at_the_deadline() -> None:
    def respond(line: socket.socket) -> None:
        line.recv(1000)
        for byte in b"$1000\r\n" + bytes(1000):
            line.sendall(bytes([byte]))
            time.sleep(0.02)

    with impostor(respond, visits=2) as url:
        for use in (
            RedisStore(url, TIMEOUT).ping,
            lambda: read_ranges(RedisStore(url, TIMEOUT), KEY, Range(0, 0, 1000)),
        ):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match=r"out of time|timed out"):
                use()
            assert TIMEOUT <= time.monotonic() - began < 10 * TIMEOUT, "all comes in twenty seconds"


def test_a_server_that_hangs_after_a_large_entry_does_not_use_up_the_deadline_of_the_entry() -> None:
    size = 64 * 2**20

    def respond(line: socket.socket) -> None:
        line.sendall(b"$-1\r\n")
        while size and line.recv(2**20):
            pass

    with impostor(respond) as url:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            RedisStore(url, TIMEOUT).put(KEY, b"head", [bytes(size)])
        assert time.monotonic() - began < 1.5


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Redis server that only accepts TLS. The URL names its own certificate."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    with redis_server(*options, "--tls-auth-clients", "no", "--requirepass", "sesame"):
        yield f"rediss://:sesame@127.0.0.1:{port}/1?ssl_ca_certs={certificate}"


def test_ranges_are_read_over_tls(tls: str) -> None:
    store = RedisStore(tls, 1.0)
    body = [bytes([layer]) * (6 * 2**20) for layer in range(2)]
    store.put(KEY, b"head", body)
    ranges = [Range(1, 5, 5 * 2**20), Range(0, 0, 9), Range(1, 0, 2**20)]
    assert read_ranges(store, KEY, *ranges) == b"\1" * (5 * 2**20) + b"\0" * 9 + b"\1" * 2**20
    assert store.delete(KEY)


def test_an_unknown_certificate_is_refused(tls: str) -> None:
    with pytest.raises(StoreUnavailable, match="certificate"):
        RedisStore(tls.partition("?")[0], 1.0).ping()


def test_a_unix_socket_that_appears_later_is_used_after_a_second(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    link = ServerLink(f"unix://{path}", TIMEOUT)
    with pytest.raises(StoreUnavailable):
        link.command("PING")
    with redis_server("--unixsocket", str(path)):
        with pytest.raises(StoreUnavailable, match="left alone"):
            link.command("PING")
        time.sleep(BREAK_SECONDS)
        assert link.command("PING") == b"PONG"
