"""Heads of requests: what is too large or can be read in two ways is refused, and the answer arrives."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.api.runtime import connections
from ragkv.api.runtime.request_heads import HEAD_BYTES, MOST_HEADERS, check_head, check_headers, origin_form
from tests.api.conftest import Service

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
POST = HEALTH.replace(b"GET /healthz", b"POST /v1/answers") + b"Content-Type: application/json\r\n"
SMUGGLED = b"GET /v1/collections HTTP/1.1\r\nHost: localhost\r\n\r\n"
ROUTES = ("/v1/answers", "/v1/chat/completions", "/v1/search", "/v1/embeddings", "/v1/documents", "/mcp", "/nowhere")


def exchange(service: Service, sent: bytes) -> bytes:
    """Send all and read until the service closes the connection."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as line:
        line.sendall(sent)
        data = b""
        while piece := line.recv(65536):
            data += piece
    return data


def refused(service: Service, sent: bytes) -> tuple[int, Any]:
    """The status and the problem of the only answer on a connection, which the service then closes."""
    answer = exchange(service, sent)
    assert answer.count(b"HTTP/1.1 ") == 1, answer
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    problem = json.loads(body)
    assert problem["status"] == int(head.split()[1])
    return problem["status"], problem


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(
            HEALTH + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED, 400, id="CL+TE"
        ),
        pytest.param(
            HEALTH + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + SMUGGLED, 400, id="TE+CL"
        ),
        pytest.param(HEALTH + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", 400, id="length twice"),
        pytest.param(HEALTH + b"Content-Length: 5, 5\r\n\r\nhello", 400, id="list of lengths"),
        pytest.param(HEALTH + b"Content-Length: +5\r\n\r\nhello", 400, id="signed length"),
        pytest.param(HEALTH + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400, id="coding"),
        pytest.param(
            HEALTH + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, id="TE twice"
        ),
        pytest.param(HEALTH + b"Host: localhost\r\n\r\n", 400, id="host twice"),
        pytest.param(HEALTH + b"X-API-Key: a\r\nX-API-Key: a\r\n\r\n", 400, id="key twice"),
        pytest.param(
            HEALTH + b"Authorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n", 400, id="credential twice"
        ),
        pytest.param(HEALTH + b"Content-Type: text/plain\r\nContent-Type: text/html\r\n\r\n", 400, id="type twice"),
        pytest.param(HEALTH + b"X-Folded: a\r\n b\r\n\r\n", 400, id="folded line"),
        pytest.param(HEALTH + b"X-Cut: a\rb: c\r\n\r\n", 400, id="bare CR"),
        pytest.param(HEALTH + b"X-Cut: a\nb: c\r\n\r\n", 400, id="bare LF"),
        pytest.param(HEALTH + b"X-Nothing: a\0b\r\n\r\n", 400, id="NUL"),
        pytest.param(HEALTH + b"X-Control: a\x1bb\r\n\r\n", 400, id="control"),
        pytest.param(HEALTH + b"X-Space : a\r\n\r\n", 400, id="space before the colon"),
        pytest.param(HEALTH + b": a\r\n\r\n", 400, id="no name"),
        pytest.param(b"GET /healthz HTTP/1.1\r\n\r\n", 400, id="no host"),
        pytest.param(b"GET http://evil.example/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, id="another name"),
        pytest.param(b"GET http://a@localhost/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, id="user"),
        pytest.param(b"GET healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, id="no path"),
        pytest.param(b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, id="authority"),
        pytest.param(b"GET /healthz  HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, id="two spaces"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, id="HTTP/2"),
        pytest.param(b"GET /healthz HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, id="TE in 1.0"),
        pytest.param(HEALTH + b"X-Long: " + b"x" * 20_000 + b"\r\n\r\n", 431, id="long header"),
        pytest.param(HEALTH + b"X: y\r\n" * 3000 + b"\r\n", 431, id="3,000 headers"),
        pytest.param(HEALTH + b"X: y\r\n" * 500_000, 431, id="headers without end"),
        pytest.param(b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414, id="long path"),
    ],
)
def test_a_head_that_is_ambiguous_or_too_large_is_refused_and_the_connection_closed(
    service: Service, sent: bytes, status: int
) -> None:
    assert refused(service, sent)[0] == status


def test_a_socket_of_the_dashboard_has_the_same_limits(service: Service) -> None:
    upgrade = b"GET /dashboard/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    assert refused(service, upgrade + b"X-Long: " + b"x" * 20_000 + b"\r\n\r\n")[0] == 431
    assert refused(service, upgrade + b"Origin: http://a\r\nOrigin: http://b\r\n\r\n")[0] == 400


def test_heads_at_the_limits_and_addresses_as_targets_are_served(service: Service) -> None:
    last = b"Connection: close\r\n\r\n"
    many = HEALTH + b"X: y\r\n" * (MOST_HEADERS - 2) + last
    long = HEALTH + b"X: " + b"y" * (HEAD_BYTES - 200) + b"\r\n" + last
    whole = HEALTH.replace(b"/healthz", b"http://LocalHost/healthz") + last
    old = b"GET /healthz HTTP/1.0\r\n\r\n"
    for sent in (many, long, whole, old):
        assert exchange(service, sent).startswith(b"HTTP/1.1 200"), sent[:80]
    two = exchange(service, HEALTH + b"\r\n" + HEALTH + last)
    assert two.count(b"HTTP/1.1 200") == 2, "one after another on one connection"


@pytest.mark.parametrize("path", ROUTES)
def test_a_client_that_sends_ten_megabytes_before_it_reads_gets_an_answer(service: Service, path: str) -> None:
    body = json.dumps({"question": "x" * 10_000_000}).encode()
    line = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
    line.request("POST", path, body, {"Content-Type": "application/json"})
    answer = line.getresponse()
    assert answer.status == 413
    assert answer.headers["Connection"] == "close"
    assert "10000016" in answer.read().decode()
    line.close()
    sent = httpx.post(service.url + path, content=body, headers={"content-type": "application/json"}, timeout=20)
    assert sent.status_code == 413


def test_a_chunked_body_over_the_limit_gets_an_answer_too(service: Service) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(10):
            yield b"x" * 2**20

    line = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
    line.request("POST", "/v1/answers", pieces(), {"Content-Type": "application/json"}, encode_chunked=True)
    assert line.getresponse().status == 413


def test_what_comes_after_the_answer_is_read_within_bounds(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_BYTES", 2**20)
    for length in (b"Content-Length: 99999999999\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"):
        sent = 0
        with suppress(OSError), socket.create_connection(("127.0.0.1", service.port), timeout=10) as line:
            line.sendall(POST + length)
            while sent < 2**30:
                line.sendall(b"100000\r\n" + b"x" * 2**20 + b"\r\n")
                sent += 2**20
        assert sent < 2**26


def test_a_body_that_is_not_chunked_as_it_says_is_refused_while_it_is_read(service: Service) -> None:
    sent = POST + b"Transfer-Encoding: chunked\r\n\r\nnone\r\n"
    assert refused(service, sent)[0] == 400


@settings(deadline=None)
@given(data=st.binary(max_size=300) | st.builds(lambda more: HEALTH + more, st.binary(max_size=300)))
def test_no_bytes_break_the_check_and_what_it_lets_pass_is_plain(data: bytes) -> None:
    if check_head(data) is None and (end := data.find(b"\r\n\r\n")) >= 0:
        head = data[:end]
        assert head.count(b"\n") == head.count(b"\r") == head.count(b"\r\n")
        assert all(byte >= 32 or byte in b"\r\n\t" for byte in head)
        assert not any(line[:1] in (b" ", b"\t") for line in head.split(b"\r\n"))


@settings(deadline=None)
@given(
    names=st.lists(st.sampled_from([b"host", b"x-api-key", b"content-length", b"transfer-encoding", b"x"]), max_size=6)
)
def test_headers_that_pass_have_one_meaning(names: list[bytes]) -> None:
    fault = check_headers([(name, b"1") for name in names])
    decisive = [name for name in names if name != b"x"]
    framed_twice = {b"content-length", b"transfer-encoding"} <= set(names)
    assert (fault is None) == (len(set(decisive)) == len(decisive) and not framed_twice)


@pytest.mark.parametrize(
    ("target", "path"),
    [(b"/a?b", b"/a?b"), (b"http://x", b"/"), (b"HTTPS://x?a=b", b"/?a=b"), (b"http://x/a//b?c", b"/a//b?c")],
)
def test_an_address_is_reduced_to_its_path_and_query(target: bytes, path: bytes) -> None:
    assert origin_form(target) == path
