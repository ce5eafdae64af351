"""Connections whose requests do not arrive are closed, and one client cannot take them all."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ragkv.api.runtime import connections
from ragkv.api.runtime.connection_count import Connections
from ragkv.api.runtime.connections import BODY_SECONDS, HEAD_SECONDS
from tests.api.conftest import Service, serving, settings

HEAD = b"POST /v1/answers HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
HALVES = {
    "nothing": b"",
    "a line": b"GET /healthz HTT",
    "a head": b"GET /healthz HTTP/1.1\r\nHost: loc",
    "a body": HEAD,
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with time limits of half a second."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HEAD_SECONDS", "BODY_SECONDS"):
            patch.setattr(connections, name, 0.5)
        with serving(settings(tmp_path_factory.mktemp("quick"), connections=250)) as service:
            yield service


def connected(service: Service) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), timeout=10)


def rest(line: socket.socket) -> bytes:
    """Read until the service closes the connection."""
    data = b""
    while piece := line.recv(4096):
        data += piece
    return data


def drip(line: socket.socket, until: float) -> None:
    """Send a byte every tenth of a second."""
    while time.monotonic() < until:
        line.sendall(b"x")
        time.sleep(0.1)


def test_the_limits_are_short_enough_to_free_connections_within_ten_seconds() -> None:
    assert max(HEAD_SECONDS, BODY_SECONDS, connections.IDLE_SECONDS) < 10


def test_two_hundred_half_sent_requests_are_closed_while_others_are_served(quick: Service) -> None:
    lines = [connected(quick) for _ in range(200)]
    began = time.monotonic()
    for number, line in enumerate(lines):
        line.sendall(list(HALVES.values())[number % len(HALVES)])
    with httpx.Client(base_url=quick.url, timeout=5) as client:
        assert client.get("/healthz").status_code == 200
    for line in lines:
        assert rest(line).startswith(b"HTTP/1.1 408"), "closed, and told why"
        line.close()
    assert time.monotonic() - began < 10
    until = time.monotonic() + 5
    while len(quick.app.state.connections) > 1 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(quick.app.state.connections) <= 1, "the client of the tests may hold one"


@pytest.mark.parametrize("start", [b"GET /healthz HTTP/1.1\r\nX: ", HEAD])
def test_a_head_or_a_body_that_drips_is_closed_too(quick: Service, start: bytes) -> None:
    began = time.monotonic()
    with connected(quick) as line:
        line.sendall(start)
        with pytest.raises(OSError):  # noqa: PT011 - reset or broken pipe
            drip(line, began + 8)
    assert time.monotonic() - began < 5


def test_a_slow_body_that_comes_fast_enough_is_read(quick: Service) -> None:
    body = b'{"question": "' + b"x" * 1500 + b'"}'
    with connected(quick) as line:
        line.sendall(
            HEAD.replace(b"500", str(len(body)).encode()).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        )
        for start in range(0, len(body), 200):
            line.sendall(body[start : start + 200])
            time.sleep(0.1)
        assert rest(line).startswith(b"HTTP/1.1 404"), "the collection is empty"


def test_a_body_in_tiny_chunks_is_read_a_little_at_a_time(quick: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is an event of its own. Between two reads other connections have their turn."""
    sizes = list[int]()
    read = connections.BoundedProtocol.data_received
    monkeypatch.setattr(
        connections.BoundedProtocol, "data_received", lambda self, data: (sizes.append(len(data)), read(self, data))
    )
    chunks = b"1\r\n \r\n" * 30_000 + b"0\r\n\r\n"
    with connected(quick) as line:
        line.sendall(HEAD.replace(b"Content-Length: 500", b"Transfer-Encoding: chunked\r\nConnection: close") + chunks)
        assert rest(line).startswith(b"HTTP/1.1 422")
    assert sum(sizes) > len(chunks)
    assert max(sizes) <= 16 * 1024


def test_a_connection_may_be_idle_between_two_requests(quick: Service) -> None:
    with connected(quick) as line:
        for _ in range(3):
            line.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = line.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200")
            while b'"refused":' not in answer:  # the last field of the body, which may come in parts
                answer += line.recv(4096)
            time.sleep(0.7)  # longer than a head may take, shorter than a connection may be idle


def test_an_address_has_a_bounded_number_of_connections(tmp_path: Path) -> None:
    with serving(settings(tmp_path, connections=3)) as service:
        lines = [connected(service) for _ in range(3)]
        with connected(service) as over:
            assert rest(over).startswith(b"HTTP/1.1 503")
        assert service.app.state.connections.refused == 1
        lines[0].close()
        until = time.monotonic() + 5
        while len(service.app.state.connections) > 2 and time.monotonic() < until:
            time.sleep(0.02)
        with connected(service) as again:
            again.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert rest(again).startswith(b"HTTP/1.1 200")
        for line in lines[1:]:
            line.close()


def test_addresses_are_counted_apart_and_zero_means_any_number() -> None:
    one = Connections(1)
    assert (one.add("a"), one.add("b"), one.add("a")) == (True, True, False)
    one.drop("a")
    one.drop("a")
    assert (one.add("a"), len(one)) == (True, 2)
    assert all(Connections(0).add("a") for _ in range(3))
