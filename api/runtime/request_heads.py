"""The head of a request: its size, and what RFC 9110 and RFC 9112 do not allow in it.

Two programs that read one head differently can be told two things by it: a proxy sees one request where the service
sees two, or checks another name, another key or another length than the one that counts here. Such a head is therefore
refused as a whole. h11 reads some in its own way: it joins folded lines, takes a lone LF for the end of a line, and
ignores `Content-Length` beside `Transfer-Encoding`.

`check_head` sees the bytes of a connection (connections.py). `check_headers` sees what a server has made of them, for
Ray's proxy (replicas/proxy.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ragkv.api.errors import Fault

HEAD_BYTES = 16 * 1024
"""Most bytes of a request line with all headers."""
MOST_HEADERS = 100
"""Most headers of a request."""
SINGLE = frozenset(
    {b"authorization", b"content-length", b"content-type", b"host", b"origin", b"transfer-encoding", b"x-api-key"}
)
"""Headers that decide what a request means or may do. Which of two counts is nobody's guess."""

_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/([0-9])\.([0-9])")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE)

_FRAMED_TWICE = Fault(400, "a request has either Content-Length or Transfer-Encoding, not both", "bad_request")
_LENGTH = Fault(400, "Content-Length must be one number", "bad_request")
_VERSION = Fault(400, "this service speaks HTTP/1.1", "http_version")
_TARGET = Fault(
    400, "the request target must be a path, or an address under the name in the header Host", "bad_request"
)
_LONG_LINE = Fault(414, f"the request line has more than {HEAD_BYTES} bytes", "head_too_large")
TOO_LARGE = Fault(431, f"the request line and the headers have more than {HEAD_BYTES} bytes", "head_too_large")
_TOO_MANY = Fault(431, f"the request has more than {MOST_HEADERS} headers", "head_too_large")


def check_head(data: bytes) -> Fault | None:
    """Return what is wrong with the head that a connection begins with; None if nothing is, or if more has to come.

    Args:
        data: All that has come of the request so far.
    """
    end = re.search(rb"\n\r?\n", data)
    head = data[: end.start() + 1].removesuffix(b"\n").removesuffix(b"\r") if end else data
    if len(head) > HEAD_BYTES:
        return TOO_LARGE if b"\n" in head[:HEAD_BYTES] else _LONG_LINE
    return _check_lines(head.split(b"\r\n")) if end else None


def _check_lines(lines: Sequence[bytes]) -> Fault | None:
    first, *others = lines
    request = _REQUEST_LINE.fullmatch(first)
    if request is None:
        return _malformed("the request line")
    if request[3] != b"1" or request[4] not in b"01":
        return _VERSION
    headers = []
    for line in others:
        name, colon, value = line.partition(b":")
        # A folded line begins with a space, so it has no name.
        if not colon or not _NAME.fullmatch(name) or _CONTROL.search(line):
            return _malformed("a header")
        headers.append((name.lower(), value.strip(b" \t")))
    if request[4] == b"0" and any(name == b"transfer-encoding" for name, _ in headers):
        return _malformed("a header")
    return check_headers(headers) or _check_target(request[1], request[2], dict(headers).get(b"host", b""))


def check_headers(headers: Sequence[tuple[bytes, bytes]]) -> Fault | None:
    """Return what is wrong with the headers of a request, by their names in lower case; None if nothing is."""
    if len(headers) > MOST_HEADERS:
        return _TOO_MANY
    if sum(len(name) + len(value) for name, value in headers) > HEAD_BYTES:
        return TOO_LARGE
    counts = Counter(name for name, _ in headers)
    repeated = next((name for name in sorted(SINGLE) if counts[name] > 1), None)
    if repeated is not None:
        return Fault(400, f"the header {repeated.decode().title()} is there more than once", "repeated_header")
    if counts[b"content-length"] and counts[b"transfer-encoding"]:
        return _FRAMED_TWICE
    length = dict(headers).get(b"content-length", b"0")
    return None if re.fullmatch(rb"[0-9]{1,18}", length) else _LENGTH


def _check_target(method: bytes, target: bytes, host: bytes) -> Fault | None:
    if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
        return None
    absolute = _ABSOLUTE.fullmatch(target)
    return None if absolute is not None and absolute[1] and absolute[1].lower() == host.lower() else _TARGET


def origin_form(target: bytes) -> bytes:
    """Return the path and query of a request target that may be a whole address."""
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        return target
    return absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]


def _malformed(what: str) -> Fault:
    return Fault(400, f"{what} is not well-formed", "bad_request")
