"""Heads and frames of requests that clients do not send: what stands between a proxy's view of a request and ours."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.api.fuzz.requests import BODIES, JSON, KEY, WITH_KEY
from tests.api.fuzz.wire import Request, assembled

SMALL_BODY = b'{"question": "who?", "max_tokens": 2}'
ASK = (
    b"POST /v1/answers HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"
    % KEY.encode()
)
CHUNK = b"%x\r\n%s\r\n" % (len(SMALL_BODY), SMALL_BODY)
LAST = b"0\r\n\r\n"
MORE = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(SMALL_BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CLOSE = b"Connection: close\r\n"

FRAMES: tuple[tuple[bytes, bytes, bool], ...] = (
    (LENGTH + CHUNKED, CHUNK + LAST, False),
    (CHUNKED + LENGTH, CHUNK + LAST + MORE, False),
    (b"Content-Length: 4\r\n" + CHUNKED, CHUNK + LAST, False),
    (LENGTH * 2, SMALL_BODY, False),
    (LENGTH + b"Content-Length: 5\r\n", SMALL_BODY, False),
    *(
        (b"Content-Length: " + value + b"\r\n", SMALL_BODY, False)
        for value in (b"+5", b"-1", b"0x5", b"5,5", b"5, 6", b"", b"5 5", b"\xb2", b"9" * 30, b"9" * 5_000)
    ),
    (b"Content-Length: 999\r\n", SMALL_BODY, True),
    (b"Content-Length: 99999999\r\n", SMALL_BODY, True),
    (b"Content-Length: 3\r\n", SMALL_BODY + MORE, False),
    *(
        (b"Transfer-Encoding: " + value + b"\r\n", CHUNK + LAST, False)
        for value in (
            b"gzip",
            b"gzip, chunked",
            b"chunked, identity",
            b"xchunked",
            b"\x0bchunked",
            b"chunked\r\nTransfer-Encoding: chunked",
            b"CHUNKED",
            b"identity",
            b"",
        )
    ),
    *(
        (CHUNKED, size + b"\r\n" + SMALL_BODY + b"\r\n" + LAST, False)
        for size in (
            b"F" * 16,
            b"F" * 300,
            b"-1",
            b"g",
            b"0x25",
            b"+25",
            b" 25",
            b"25 ;a",
            b"25;" + b"a" * 20_000,
            b"\x00",
            b"2_5",
        )
    ),
    (CHUNKED, b"25\r\n" + SMALL_BODY, True),
    (CHUNKED, CHUNK, True),
    (CHUNKED, CHUNK.replace(b"\r\n", b"\n") + b"0\n\n", True),
    (CHUNKED, b"".join(b"1\r\n%c\r\n" % byte for byte in SMALL_BODY) + LAST, False),
    (CHUNKED, b"1\r\n \r\n" * 9_000 + CHUNK + LAST, False),
    (CHUNKED, CHUNK + b"0\r\nX-Trailer: a\r\nContent-Length: 1\r\n\r\n", False),
    (CHUNKED, CHUNK + b"0\r\n" + b"X: a\r\n" * 3_000 + b"\r\n", False),
    (b"Expect: 100-continue\r\n" + LENGTH, SMALL_BODY, False),
    (b"Expect: a\r\n" + LENGTH, SMALL_BODY, False),
    (LENGTH, SMALL_BODY + MORE * 30, False),
    (LENGTH, SMALL_BODY[:9], True),
    (LENGTH, b"", True),
)
"""Headers that frame a body, what follows the head, and whether the request breaks off."""

LINES = (
    *(
        b"GET / HTTP/0.9",
        b"GET / HTTP/1.0",
        b"GET / HTTP/2.0",
        b"GET / HTTP/1.1.1",
        b"GET /",
        b"GET",
        b"",
        b"GET  / HTTP/1.1",
    ),
    *(
        b"GET\t/ HTTP/1.1",
        b"get /healthz HTTP/1.1",
        b"A" * 9_000 + b" / HTTP/1.1",
        b"G\xc3\x89T / HTTP/1.1",
        b"GET /\xff HTTP/1.1",
    ),
    *(
        b"GET /\x00 HTTP/1.1",
        b"GET /" + b"a" * 9_000 + b" HTTP/1.1",
        b"GET /" + b"a" * 62_000 + b" HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
    ),
    *(
        b"CONNECT a:1 HTTP/1.1",
        b"TRACE / HTTP/1.1",
        b"GET http://evil.example/healthz HTTP/1.1",
        b"GET //evil.example/ HTTP/1.1",
    ),
    *(
        b"GET /healthz#a HTTP/1.1",
        b"GET healthz HTTP/1.1",
        b"GET /%ff%fe HTTP/1.1",
        b"GET /?" + b"a=1&" * 9_000 + b" HTTP/1.1",
    ),
    *(
        b"PRI * HTTP/2.0\r\n\r\nSM",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\r\n\r\nGET /healthz HTTP/1.1",
        b"GET / HTTP/1.1\r\n" * 30,
    ),
)
"""First lines of requests."""

FIELDS = (
    *(
        b"X-A: " + b"a" * 20_000,
        b"X-A: a\r\n" * 300 + b"X-A: a",
        b"X-A: a\r\n" * 3_000 + b"X-A: a",
        b"a" * 20_000 + b": a",
    ),
    *(
        b"X-A: a\x00b",
        b"X-A: a\rb",
        b"X-A: a\nb",
        b"X-A: a\r\n b",
        b"\tX-A: a",
        b"X-A : a",
        b"X A: a",
        b": a",
        b"X-A",
        b"X-\xc3\xa9: a",
    ),
    *(
        b"X-A: \xff\xfe",
        b"X-A: \x1b[31m",
        b"X-A:",
        b"X-A: " + b" " * 7_000 + b"a",
        b"X-A: a" + b" " * 7_000,
        b"X-A: " + b"\t " * 3_500,
    ),
    *(
        b"Cookie: " + b"a=b; " * 1_500,
        b"Cookie: ragkv=" + b"a." * 3_000,
        b"Cookie: ragkv_ticket=\xff",
        b"Cookie: =;=;;,",
        b'Cookie: a="\\"',
    ),
    *(
        b"Authorization: Bearer",
        b"Authorization: Bearer a b",
        b"Authorization: Basic \xff",
        b"Authorization: Bearer \xc3\xa9",
        b"Authorization: a\r\nAuthorization: b",
    ),
    *(
        b"Authorization: Bearer " + b"e30." * 1_500,
        b"Authorization: Bearer eyJhbGciOiJub25lIn0.eyJleHAiOjFlNDAwfQ.",
        b"Authorization: Digest a=" + b'"' * 99,
    ),
    *(
        b"X-API-Key: a\r\nX-API-Key: b",
        b"X-API-Key: " + KEY.encode() + b"\r\nX-API-Key: a",
        b"X-API-Key: \xff",
        b"X-API-Key:",
    ),
    *(
        b"Range: bytes=0-,-1,5-2",
        b"Range: bytes=" + b"0-1," * 1_500,
        b"Accept: " + b"a/b;q=0.1," * 700,
        b"Accept: \xff",
        b"Accept-Encoding: " + b"gzip," * 1_500,
    ),
    *(
        b"X-Request-ID: a\x7fb",
        b"X-Request-ID: " + b"a" * 7_000,
        b"traceparent: 00-" + b"z" * 99,
        b"X-Forwarded-For: " + b"a," * 3_000,
        b"X-Forwarded-Proto: \xff",
    ),
    *(
        b"Origin: null",
        b"Origin: http://[::1",
        b"Origin: http://evil.example",
        b"Referer: http://[",
        b"Upgrade: h2c\r\nConnection: Upgrade",
        b"Keep-Alive: 99999",
    ),
    *(
        b"If-None-Match: *",
        b"If-Modified-Since: " + b"9" * 300,
        b"Accept-Language: " + b"a-" * 3_000,
        b"Last-Event-ID: \xff",
        b"MCP-Session-Id: \xff",
    ),
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: a\r\nSec-WebSocket-Version: 99",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: " + b"a" * 24 + b"\r\nSec-WebSocket-Version: 13",
)
"""Header fields."""

HOSTS = (
    *(
        b"",
        b" ",
        b"a",
        b"[::1]",
        b"[::1].evil.com",
        b"[::1",
        b"::1",
        b"evil.com#.localhost",
        b"evil.com/.localhost",
        b"evil .localhost",
    ),
    *(
        b"localhost:",
        b"localhost:99999",
        b"localhost:a",
        b"localhost..",
        b"LOCALHOST.",
        b".localhost",
        b"127.0.0.1@evil.com",
        b"127.1",
        b"0x7f.1",
    ),
    *(
        b"\xff",
        b"xn--\xff",
        b"a" * 7_000,
        b"a.\r\nHost: 127.0.0.1",
        b"127.0.0.1\r\nHost: evil.com",
        b"[",
        b"]",
        b"[]",
        b"[::ffff:127.0.0.1]",
        b"[fe80::1%25a]",
    ),
    *(
        b"\xe3\x83\x9e.localhost",
        b"127.0.0.1, evil.com",
        b"127.0.0.1\tevil.com",
        b"?",
        b"%6cocalhost",
        b"localhost\\.evil.com",
    ),
)
"""Values of the header Host."""

PATHS = (
    b"/healthz",
    b"/v1/documents",
    b"/v1/models",
    b"/dashboard",
    b"/",
    b"/mcp",
    b"/v1/answers",
    b"/_nicegui_ws/socket.io/?EIO=4&transport=websocket",
)


@st.composite
def _framed(draw: st.DrawFn) -> Request:
    headers, rest, cut = draw(st.sampled_from(FRAMES))
    close = draw(st.sampled_from((CLOSE, b"")))
    return Request("frame", ASK + close + headers + b"\r\n" + rest, cut, draw(st.sampled_from((1, 1, 2, 5))))


@st.composite
def _line(draw: st.DrawFn) -> Request:
    line = draw(st.sampled_from(LINES))
    end = draw(st.sampled_from((b"\r\n", b"\r\n", b"\n")))
    wire = line + end + b"Host: 127.0.0.1" + end + b"Connection: close" + end + end
    return Request("first line", wire, line in (b"", b"PRI * HTTP/2.0\r\n\r\nSM"), draw(st.sampled_from((1, 1, 3))))


@st.composite
def _field(draw: st.DrawFn) -> Request:
    path, fields = draw(st.sampled_from(PATHS)), draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=2))
    method = draw(st.sampled_from((b"GET", b"GET", b"HEAD", b"DELETE")))
    key = draw(st.sampled_from((b"", b"Authorization: Bearer %s\r\n" % KEY.encode())))
    head = b"%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n%s" % (method, path, key)
    return Request(
        "header",
        head + b"".join(field + b"\r\n" for field in fields) + b"\r\n",
        pieces=draw(st.sampled_from((1, 1, 4))),
    )


@st.composite
def _host(draw: st.DrawFn) -> Request:
    path, host = draw(st.sampled_from(PATHS)), draw(st.sampled_from(HOSTS))
    return Request("host", assembled("GET", path, (WITH_KEY, (b"Host", host))))


@st.composite
def _broken_off(draw: st.DrawFn) -> Request:
    method, path, _ = draw(st.sampled_from(BODIES))
    wire = assembled(method, path.encode(), (WITH_KEY, JSON), SMALL_BODY)
    return Request("cut", wire[: draw(st.integers(1, len(wire) - 1))], True, draw(st.sampled_from((1, 3))))


@st.composite
def _too_large(draw: st.DrawFn) -> Request:
    method, path, _ = draw(st.sampled_from(BODIES))
    wire = b'{"question": "%s"}' % (draw(st.sampled_from((b"a", b"[", b"\\n", b" "))) * 3_000_000)
    return Request(f"large body of {method} {path}", assembled(method, path.encode(), (WITH_KEY, JSON), wire))


def heads() -> st.SearchStrategy[Request]:
    """Requests whose head, frame or size is hostile."""
    return st.one_of(_framed(), _line(), _field(), _field(), _host(), _broken_off(), _too_large())
