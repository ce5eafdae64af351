"""Text of requests is UTF-8: no charset makes it anything else, and half characters get in through no door."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.api.conftest import HARBOUR, Service
from tests.api.test_bad_input import check_problem

HALF = "\ud800"
LOGIN = "/dashboard/login"
CODECS = (
    *("unicode_escape", "raw_unicode_escape", "undefined", "utf-7", "idna", "punycode", "utf-16", "utf-32-le"),
    *("latin-1", "cp1252", "utf-8-sig", "rot13", "base64", "zlib", "mbcs", "nothing", "utf-8,utf-7", ""),
)
FORM = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n--x--\r\n'
FILE = b'--x\r\nContent-Disposition: form-data; name="files"; filename="%s"\r\n\r\nThe lamp is lit.\r\n--x--\r\n'
POSTED = (
    ("/v1/answers", {"question": "who?", "collection": "c", "conversation_id": "n", "method": "m", "prefill": "p"}),
    ("/v1/answers", {"question": "who?", "decode": "d", "filter": {"kind": "v"}}),
    ("/v1/answers", {"question": "who?", "filter": {"kind": ["v"]}}),
    ("/v1/search", {"query": "who?", "collection": "c", "filter": {"kind": "v"}}),
    ("/v1/documents", {**HARBOUR, "collection": "c", "metadata": {"kind": "v", "list": ["v"], "deep": {"a": "v"}}}),
    ("/v1/documents", {"documents": [{**HARBOUR, "collection": "c"}]}),
    ("/v1/embeddings", {"model": "m", "input": "i", "encoding_format": "float", "user": "u"}),
    ("/v1/embeddings", {"model": "m", "input": ["i"]}),
    ("/v1/rerank", {"model": "m", "query": "q", "documents": ["d"]}),
    ("/v1/handovers", {"question": "who?", "collection": "c", "method": "m", "filter": {"kind": "v"}}),
    ("/v1/handovers", {"question": "q", "history": [{"question": "q", "answer": "a"}], "instructions": "s"}),
    ("/v1/handovers/rows", {"chunks": [{"row": 1, "blocks": [0]}], "cache_salt": "s", "collection": "c"}),
    ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "c", "name": "n"}], "user": "u"}),
    ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "c"}], "stop": "s"}),
    ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "c"}], "stop": ["s"]}),
    ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "c"}], "system": "s"}),
    ("/v1/completions", {"model": "m", "prompt": ["p"], "stop": ["s"]}),
    ("/v1/responses", {"model": "m", "input": "i", "instructions": "s", "metadata": {"k": "v"}}),
    ("/v1/responses", {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "c"}]}]}),
    ("/v1/messages/count_tokens", {"model": "m", "messages": [{"role": "user", "content": "c"}]}),
    ("/api/chat", {"model": "m", "messages": [{"role": "user", "content": "c"}], "options": {"stop": ["s"]}}),
    ("/api/generate", {"model": "m", "prompt": "p", "system": "s"}),
)


def post(service: Service, path: str, kind: str, body: bytes) -> httpx.Response:
    return service.client.post(path, content=body, headers={"content-type": kind})


@pytest.mark.parametrize("charset", CODECS)
def test_a_charset_other_than_utf8_is_refused_at_every_door(service: Service, charset: str) -> None:
    named = f"charset={charset}"
    forms = f"multipart/form-data; boundary=x; {named}"
    for path, kind, body in (
        (LOGIN, forms, FORM % (b"key", b"\\ud800+2AA-")),
        (LOGIN, f"application/x-www-form-urlencoded; {named}", b"key=%5Cud800"),
        ("/v1/documents", forms, FORM % (b"collection", b"a+2AA-")),
        ("/v1/documents", f'multipart/form-data; Charset="{charset}"; boundary=x', FILE % b"+2AA-.txt"),
        ("/v1/answers", f"application/json; {named}", b'{"question": "who?"}'),
        ("/v1/documents", f"application/json;{named}; a=b", json.dumps(HARBOUR).encode()),
        ("/mcp", f"application/json; {named}", b"{}"),
    ):
        assert check_problem(post(service, path, kind, body), 415)["code"] == "unsupported_charset", (path, kind)


@pytest.mark.parametrize(
    "named", ["charset*=utf-8''utf-7", "charset*0=utf-; charset*1=7", "charset=utf-8; charset=utf-7"]
)
def test_a_charset_in_pieces_or_twice_is_refused(service: Service, named: str) -> None:
    refused = post(service, LOGIN, f"multipart/form-data; boundary=x; {named}", FORM % (b"key", b"+2AA-"))
    check_problem(refused, 415)


@pytest.mark.parametrize("named", ["charset=utf-8", 'charset="UTF-8"', "Charset=utf8", "charset=us-ascii"])
def test_the_names_of_utf8_are_accepted(service: Service, named: str) -> None:
    assert post(service, "/v1/answers", f"application/json; {named}", b'{"question": ""}').status_code == 422
    check_problem(post(service, LOGIN, f"multipart/form-data; boundary=x; {named}", FORM % (b"key", b"none")), 401)
    check_problem(post(service, LOGIN, f"application/x-www-form-urlencoded; {named}", b"key=none"), 401)


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-32-be", "latin-1", "utf-8"])
def test_json_in_another_encoding_is_refused(service: Service, codec: str) -> None:
    for path in ("/v1/answers", "/v1/documents"):
        body = json.dumps({**HARBOUR, "question": "Qué?" + HALF * (codec == "utf-8")}, ensure_ascii=False)
        check_problem(post(service, path, "application/json", body.encode(codec, "surrogatepass")), 422)


@pytest.mark.parametrize("path", ["/v1/documents/%FF", "/v1/documents/%ED%A0%80", "/v1/documents/a%C3", "/%80"])
def test_an_address_that_is_no_utf8_is_refused(service: Service, path: str) -> None:
    for method in ("GET", "DELETE", "PUT"):
        assert check_problem(service.client.request(method, path), 400)["code"] == "bad_request"
    query = path.rpartition("/")[2]
    check_problem(service.client.get(f"/v1/documents?collection={query}"), 400)
    check_problem(service.client.get(f"/v1/documents?{query}=1"), 400)


def with_half(value: Any) -> list[Any]:
    """All copies of a JSON value in which one string, or one name, ends in half a character."""
    if isinstance(value, str):
        return [value + HALF]
    if isinstance(value, list):
        return [[*value[:at], half, *value[at + 1 :]] for at, inner in enumerate(value) for half in with_half(inner)]
    if not isinstance(value, dict):
        return []
    names = [{(name + HALF if name == one else name): inner for name, inner in value.items()} for one in value]
    return names + [{**value, name: half} for name, inner in value.items() for half in with_half(inner)]


@pytest.mark.parametrize(("path", "body"), POSTED)
def test_no_field_of_a_request_takes_half_a_character(service: Service, path: str, body: dict[str, Any]) -> None:
    for half in with_half(body):
        refused = service.client.post(
            path, content=json.dumps(half).encode(), headers={"content-type": "application/json"}
        )
        assert 400 <= refused.status_code < 500, (half, refused.text)
        refused.content.decode()


@pytest.mark.parametrize("name", ["Authorization", "X-API-Key", "X-Ragkv-Affinity", "X-Request-ID", "Cookie", "Origin"])
def test_odd_bytes_in_headers_break_nothing(service: Service, name: str) -> None:
    for value in (b"\xed\xa0\x80", b"\xff\xfe", b"Bearer \xed\xa0\x80", b"ragkv_ticket=\xed\xa0\x80.1.2.3.4"):
        with socket.create_connection(("127.0.0.1", service.port), timeout=10) as line:
            line.sendall(b"GET /v1/documents HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
            line.sendall(name.encode() + b": " + value + b"\r\n\r\n")
            assert int(line.recv(64).split()[1]) in (200, 401, 403)
