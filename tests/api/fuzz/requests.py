"""Hostile requests: bodies of every route, uploads, forms, queries, heads and frames."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

from tests.api.fuzz.files import LINE, ODD_FORMS, SUFFIXES, encoded, form, part, uploads
from tests.api.fuzz.hostile import mutated, runs, texts, values
from tests.api.fuzz.wire import Headers, Request, assembled

KEY = "ragkv_fuzz"
"""API key of the service."""
JSON = (b"Content-Type", b"application/json")
WITH_KEY = (b"Authorization", b"Bearer " + KEY.encode())
ADD = "/v1/documents"
KEPT = {"id": "tarn", "text": "The harbour of Tarn was built in 1889 by Ada Brook.", "metadata": {"year": 1889}}
"""Document of the collection `kept`, which is always there: what is asked is asked of it."""
ASKED = {"collection": "kept", "top_k": 2, "filter": {"year": [1889]}}
QUESTION = {"question": "Who built the harbour of Tarn?", "max_tokens": 2, **ASKED}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Who built it?"}], "max_tokens": 2, "ragkv": ASKED}
TITLE = '### Task:\nGive a title as JSON: {"title": "a"}\n<chat_history>\nuser: who?\nassistant: Ada.\n</chat_history>'
CALLS = {
    "search": {"query": "harbour", **ASKED},
    "ask": {**QUESTION, "conversation_id": "one"},
    "ingest": {"documents": [LINE]},
    "list_documents": {"collection": "kept", "q": "a", "limit": 2},
    "delete_document": {"id": "line"},
}


def _rpc(method: str, params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}


BODIES: tuple[tuple[str, str, Any], ...] = (
    ("POST", ADD, LINE),
    ("POST", ADD, {"documents": [LINE, {**LINE, "id": "other", "collection": "default"}]}),
    ("PUT", "/v1/documents/line", {"text": "# Tarn\n\nThe harbour.", "metadata": {"format": "markdown"}}),
    ("POST", "/v1/search", {"query": "harbour", **ASKED, "documents": ["tarn"]}),
    ("POST", "/v1/answers", QUESTION),
    ("POST", "/v1/answers", {**QUESTION, "conversation_id": "one", "stream": True}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", {**CHAT, "stream": True, "stop": ["a"], "tools": [{}], "user": "a"}),
    ("POST", "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": TITLE}]}),
    ("POST", "/v1/completions", {"model": "tiny", "prompt": ["Who?"], "max_tokens": 2, "stream": True, "ragkv": ASKED}),
    ("POST", "/v1/responses", {"model": "tiny", "input": "Who?", "max_output_tokens": 2, "ragkv": ASKED}),
    ("POST", "/v1/responses", {"model": "tiny", "input": CHAT["messages"], "stream": True, "ragkv": ASKED}),
    ("DELETE", "/v1/responses/none", {}),
    ("POST", "/v1/messages", {**CHAT, "stream": True, "system": [{"type": "text", "text": "a"}]}),
    ("POST", "/v1/messages/count_tokens", CHAT),
    ("POST", "/api/chat", {**CHAT, "stream": True, "options": {"num_predict": 2, "stop": ["a"]}, "keep_alive": "5m"}),
    ("POST", "/api/generate", {"model": "tiny", "prompt": "Who?", "stream": False, "options": {"ragkv": ASKED}}),
    ("POST", "/v1/embeddings", {"model": "all-MiniLM-L6-v2", "input": ["harbour", "bridge"]}),
    ("POST", "/v1/rerank", {"query": "harbour", "documents": ["The harbour.", "The bridge."], "top_n": 1}),
    ("POST", "/v1/handovers", {"question": "Who?", "collection": "kept", "top_k": 1, "method": "reuse"}),
    ("POST", "/v1/handovers/rows", {"chunks": [{"row": 1, "blocks": [0]}], "cache_salt": "a", "collection": "kept"}),
    ("POST", "/v1/jobs/none/cancel", {}),
    ("DELETE", "/v1/documents/line", {"collection": "default"}),
    ("DELETE", "/v1/collections/default", {}),
    ("DELETE", "/v1/conversations/one", {}),
    *(("POST", "/mcp", _rpc("tools/call", {"name": name, "arguments": given})) for name, given in CALLS.items()),
    ("POST", "/mcp", _rpc("resources/read", {"uri": "ragkv://documents/kept/tarn"})),
    (
        "POST",
        "/mcp",
        _rpc(
            "initialize",
            {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}},
        ),
    ),
    ("POST", "/mcp", _rpc("tools/list", None)),
)
"""What works, by method and path: each is changed in one place."""
RPC = ((b"Accept", b"application/json, text/event-stream"), (b"MCP-Protocol-Version", b"2025-06-18"))

CHARSETS = (
    *(
        "utf-7",
        "unicode_escape",
        "raw_unicode_escape",
        "undefined",
        "idna",
        "punycode",
        "rot13",
        "base64",
        "utf-16",
        "utf-32",
    ),
    *(
        "utf-8-sig",
        "latin-1",
        "zlib",
        "hex",
        "mbcs",
        "oem",
        "palmos",
        "cp037",
        "x" * 300,
        "\x00",
        '"utf-8',
        "utf-8; charset=utf-7",
    ),
)
TYPES = (
    *(
        "application/json",
        "application/x-www-form-urlencoded",
        "text/plain",
        "application/xml",
        "text/json",
        "*/*",
        "",
        "a",
    ),
    *(
        "multipart/form-data",
        "multipart/form-data; boundary=b",
        "multipart/form-data; boundary=",
        "multipart/mixed; boundary=b",
    ),
    *(
        "application/json; charset=utf-16",
        "application/vnd.api+json",
        "application/json;" * 300,
        "application/octet-stream",
    ),
)


def content_types() -> st.SearchStrategy[bytes]:
    """Content types that do not say what the body is, and charsets that are none or of another kind."""
    charset = st.builds("{}; charset={}".format, st.sampled_from(TYPES[:3]), st.sampled_from(CHARSETS))
    return (charset | st.sampled_from(TYPES)).map(lambda text: text.encode("latin-1"))


def headers_of(path: str, kind: bytes = JSON[1]) -> Headers:
    """Return the headers of a request to a path: the key, the type of the body, and what MCP needs."""
    return (WITH_KEY, (b"Content-Type", kind), *(RPC if path == "/mcp" else ()))


@st.composite
def bodies(draw: st.DrawFn) -> Request:
    """A body that works, changed in one place."""
    method, path, body = draw(st.sampled_from(BODIES))
    wire = encoded(draw(mutated(body)))
    return Request(f"body of {method} {path}", assembled(method, path.encode(), headers_of(path), wire))


@st.composite
def mislabelled(draw: st.DrawFn) -> Request:
    """A body under a content type, a charset or an encoding that it does not have, or that nobody expects."""
    method, path, body = draw(st.sampled_from(BODIES))
    text = draw(st.just(json.dumps(body)) | mutated(body))
    wire = encoded(text, draw(st.sampled_from(("utf-8", "utf-8", "utf-16", "utf-8-sig", "utf-7"))))
    headers = headers_of(path, draw(content_types()))
    if draw(st.booleans()):
        coding = draw(st.sampled_from((b"gzip", b"deflate", b"br", b"identity", b"gzip, gzip", b"a")))
        wire = gzip.compress(wire, mtime=0) if draw(st.booleans()) else wire
        headers = (*headers, (b"Content-Encoding", coding))
    return Request(f"type of {method} {path}", assembled(method, path.encode(), headers, wire))


def operations(document: dict[str, Any]) -> list[st.SearchStrategy[Any]]:
    """Requests of each operation of an OpenAPI document, made by schemathesis."""
    from schemathesis import openapi  # takes half a second

    return [result.ok().as_strategy() for result in openapi.from_dict(document).get_all_operations()]


@st.composite
def described(draw: st.DrawFn, made: list[st.SearchStrategy[Any]]) -> Request:
    """A request that fits the OpenAPI document; half of the bodies are changed in one place."""
    case = draw(draw(st.sampled_from(made)))
    path = case.formatted_path + (
        "?" + "&".join(f"{quote(k)}={quote(str(v))}" for k, v in case.query.items()) if case.query else ""
    )
    wire = b""
    if isinstance(case.body, dict):
        body = {**case.body}
        for name in ("max_tokens", "max_completion_tokens", "deadline_s"):  # one that is short is kept, and ends in 504
            body.pop(name, None)
        body = body | ({"max_tokens": 2} if "question" in body or "messages" in body else {})
        text = draw(st.just(json.dumps(body)) | mutated(body))
        wire = encoded(text)
    headers = headers_of(path)
    return Request(
        f"schema of {case.method} {case.path}", assembled(case.method, path.encode("latin-1", "replace"), headers, wire)
    )


@st.composite
def files(draw: st.DrawFn) -> Request:
    """An upload of files of one format."""
    suffix = draw(st.sampled_from(SUFFIXES))
    wire = draw(uploads(suffix))
    headers = headers_of("", b"multipart/form-data; boundary=b")
    return Request(f"upload of {suffix}", assembled("POST", ADD.encode(), headers, wire))


@st.composite
def forms(draw: st.DrawFn) -> Request:
    """A form with odd boundaries, parts and charsets, sent to a route that reads forms."""
    if draw(st.booleans()):
        boundary, wire = draw(st.sampled_from(ODD_FORMS))
        kind = b"multipart/form-data; boundary=" + boundary
        if draw(st.booleans()):
            kind += b"; charset=" + draw(st.sampled_from(CHARSETS)).encode("latin-1")
        path = draw(st.sampled_from((ADD, ADD, "/dashboard/login")))
    else:
        path, kind = "/dashboard/login", b"application/x-www-form-urlencoded; charset="
        kind += draw(st.sampled_from(CHARSETS)).encode("latin-1")
        text = draw(st.just(KEY) | texts())
        wire = b"key=" + draw(
            st.sampled_from((quote(text, errors="ignore").encode(), encoded(text), b"a&" * 20_000, b"%ff%00%u1"))
        )
    headers = tuple((name, _clean(value)) for name, value in headers_of(path, kind))
    return Request(f"form to {path}", assembled("POST", path.encode(), headers, wire))


def _clean(value: bytes) -> bytes:
    return value.replace(b"\x00", b"")


@st.composite
def named_fields(draw: st.DrawFn) -> Request:
    """A form with a field whose charset or type is odd."""
    name = draw(st.sampled_from(("collection", "metadata", "files", "_charset_", "key", "a" * 9_000)))
    charset = draw(st.sampled_from(CHARSETS)).encode("latin-1").replace(b"\x00", b"")
    odd = part(name, encoded(draw(texts())), None, b"Content-Type: text/plain; charset=" + charset + b"\r\n")
    wire = form(b"b", [odd, part("files", b"The harbour.", b"a.txt")])
    kind = b"multipart/form-data; boundary=b; charset=" + charset
    return Request("form with a charset", assembled("POST", ADD.encode(), headers_of("", kind), wire))


PATHS = (
    *("/v1/documents/{}", "/v1/documents/{}/text", "/v1/documents/{}/chunks", "/v1/documents/{}/pages/1"),
    *("/v1/jobs/{}", "/v1/jobs/{}/events"),
    *("/v1/collections/{}", "/v1/answers/{}", "/v1/answers/{}/map", "/v1/conversations/{}", "/v1/models/{}", "/{}"),
    *("/dashboard/{}", "/dashboard/_nicegui/{}", "/_nicegui_ws/socket.io/?a={}", "/mcp/{}", "/static/{}", "/v1/{}"),
)
QUERIES = (
    *("/v1/documents?collection={}", "/v1/documents?filter={}", "/v1/documents?after={}", "/v1/documents?q={}"),
    *(
        "/v1/documents?limit={}",
        "/v1/documents?sort={}",
        "/v1/documents/line/text?start={}&end=9",
        "/v1/answers?before={}",
    ),
    *(
        "/v1/documents/line/chunks?after={}",
        "/v1/answers?limit={}",
        "/v1/jobs?status={}",
        "/v1/documents?{}",
        "/healthz?{}",
    ),
    *("/readyz?a={}", "/metrics?{}", "/openapi.json?{}", "/v1/documents/line/text?start=0&end={}", "/dashboard/?{}"),
)


@st.composite
def targets(draw: st.DrawFn) -> Request:
    """A path or a query with a hostile part, and any method."""
    template = draw(st.sampled_from(PATHS + QUERIES))
    value = draw(texts() | values() | runs(3_000))
    safe = draw(st.sampled_from(("", "/", "/%&=?#")))
    inner = draw(
        st.sampled_from(
            (
                quote(value, safe, errors="ignore"),
                "%ff%fe",
                "%00",
                "%2e%2e%2f" * 30,
                "a&" * 4_000,
                "a=1&" * 9_000,
                "%",
                "../" * 99,
            )
        )
    )
    method = draw(st.sampled_from(("GET", "GET", "GET", "DELETE", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")))
    return Request(f"{method} {template}", assembled(method, template.format(inner).encode(), (WITH_KEY, JSON)))


@st.composite
def requests(draw: st.DrawFn, made: list[st.SearchStrategy[Any]]) -> Request:
    """Every kind of hostile request.

    Args:
        draw: Of hypothesis.
        made: Requests of the operations of the OpenAPI document.
    """
    from tests.api.fuzz.heads import heads

    kinds = (bodies, bodies, bodies, mislabelled, files, files, files, forms, named_fields, targets, heads, heads, None)
    kind = draw(
        st.sampled_from(kinds)
    )  # drawn, because `one_of` would give each operation of the schema the same share
    request: Request = draw(kind() if kind else described(made))
    return request
