"""Requests that once stopped the service, or that it answered wrongly. Every run begins with them."""

from __future__ import annotations

import json

from tests.api.fuzz.files import LINE, form, part
from tests.api.fuzz.heads import ASK, CHUNK, CHUNKED, LAST, LENGTH
from tests.api.fuzz.hostile import nested
from tests.api.fuzz.requests import ADD, CHAT, JSON, KEY, WITH_KEY
from tests.api.fuzz.wire import Request, assembled

WANTED = '### Task:\n{"title": "a"}\n<chat_history>'
TITLE = "Provide a concise, 5-word-or-less title for the conversation.\nConversation:"


def _json(method: str, path: str, body: object) -> bytes:
    return assembled(method, path.encode(), (WITH_KEY, JSON), json.dumps(body).encode())


def _upload(name: str, content: str) -> bytes:
    headers = (WITH_KEY, (b"Content-Type", b"multipart/form-data; boundary=b"))
    return assembled("POST", ADD.encode(), headers, form(b"b", [part("files", content.encode(), name.encode())]))


def _line(depth: int) -> str:
    return json.dumps({**LINE, "metadata": {"a": 0}}).replace('"a": 0', f'"a": {nested(depth, "[")}')


def _chat(text: str) -> bytes:
    return _json("POST", "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": text}]})


def _typed(path: str, kind: str, body: bytes) -> bytes:
    return assembled("POST", path.encode(), (WITH_KEY, (b"Content-Type", kind.encode())), body)


_HEADING = "# a" + " " * 2_500 + "b"
_CHARSETS = ("unicode_escape", "raw_unicode_escape", "undefined", "utf-7", "idna", "rot13", "base64", "utf-16")
_NAMED = form(b"b", [part("collection", b"+2AA-"), part("files", b"The harbour.", b"a.txt")])

ATTACKS: tuple[Request, ...] = (
    *(
        Request(f"metadata nested {depth} deep", _upload("a.jsonl", _line(depth)))
        for depth in (100, 934, 974, 978, 982, 990, 20_000)
    ),
    Request("heading in an upload", _upload("a.md", _HEADING)),
    Request(
        "heading in a PUT", _json("PUT", "/v1/documents/a", {"text": _HEADING, "metadata": {"format": "markdown"}})
    ),
    Request("heading in a POST", _json("POST", ADD, {**LINE, "text": _HEADING, "metadata": {"format": "markdown"}})),
    *(Request(f"title of {count} line breaks", _chat(TITLE + "\n" * count + "a")) for count in (1_200, 40_000)),
    *(Request(f"title after {count} line breaks", _chat(f"{TITLE} a{chr(10) * count}b")) for count in (1_200, 40_000)),
    *(
        Request(f"chat of {count} line breaks", _chat(f"{WANTED}a{chr(10) * count}a</chat_history>"))
        for count in (1_200, 40_000)
    ),
    Request("chat of line breaks and users", _chat(f"{WANTED}user:{chr(10) * 5_000}a</chat_history>")),
    Request("chat without an end", _chat(WANTED + " " * 3_000)),
    Request("format that is a list", _json("POST", ADD, {**LINE, "metadata": {"format": ["markdown"]}})),
    Request("lines of spaces", _upload("a.txt", (" " * 600 + "1\n") * 100)),
    Request("words of added tokens", _json("POST", ADD, {**LINE, "text": "<tool_call>" * 4_000})),
    *(
        Request(
            f"login in {name}",
            _typed("/dashboard/login", f"application/x-www-form-urlencoded; charset={name}", b"key=\\ud800%5Cx"),
        )
        for name in _CHARSETS
    ),
    *(
        Request(
            f"login form in {name}",
            _typed(
                "/dashboard/login",
                f"multipart/form-data; boundary=b; charset={name}",
                form(b"b", [part("key", b"\\ud800\\x")]),
            ),
        )
        for name in _CHARSETS
    ),
    *(
        Request(f"upload in {name}", _typed(ADD, f"multipart/form-data; boundary=b; charset={name}", _NAMED))
        for name in _CHARSETS
    ),
    *(
        Request(f"10 MB to {path}", _json("POST", path, {"question": "a" * 10_000_000}))
        for path in ("/v1/answers", "/v1/chat/completions")
    ),
    Request("length and chunks", ASK + LENGTH + CHUNKED + b"\r\n" + CHUNK + LAST),
    Request("20 KB of one header", assembled("GET", b"/v1/models", (WITH_KEY, (b"X-A", b"a" * 20_000)))),
    Request("3,000 headers", assembled("GET", b"/v1/models", (WITH_KEY, *(((b"X-A", b"a"),) * 3_000)))),
    Request("two keys", assembled("GET", b"/v1/models", ((b"X-API-Key", KEY.encode()), (b"X-API-Key", b"a")))),
    *(
        Request("host", assembled("GET", b"/v1/models", (WITH_KEY, (b"Host", host))))
        for host in (b"[::1].evil.com", b"evil.com#.localhost", b"evil.com/.localhost", b"evil .localhost")
    ),
)
