"""The encoding of text in requests: UTF-8, whatever a client says.

Parsers of forms decode with the charset that `Content-Type` names, and Python has codecs that make half characters
(`utf-7`), run escapes (`unicode_escape`) or only raise (`undefined`). Python's JSON takes UTF-16 and encoded halves of
surrogate pairs, too. Bytes of a path or a query that are no UTF-8 would all become the same replacement character, so
that two names would be one.
"""

from __future__ import annotations

import codecs
import re
from urllib.parse import unquote_to_bytes

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope

from ragkv.api.errors import Fault

_CHARSET = re.compile(r"charset[\s*0-9]*=")
_UTF8 = re.compile(r"""charset\s*=\s*(?P<quote>["']?)(utf-?8|us-ascii|ascii)(?P=quote)\s*(;|$)""")
_TEXTS = re.compile(r"\s*(application/([^\s;]+\+)?json|application/x-www-form-urlencoded)\s*(;|$)")
_OTHER_CHARSET = Fault(415, "text is read as UTF-8 here; name no other charset in Content-Type", "unsupported_charset")
_OTHER_ADDRESS = Fault(400, "the path and the query are UTF-8, each byte of it percent-encoded", "bad_request")
_OTHER_BODY = "the body is not readable as UTF-8 text"


def fault_of_encoding(scope: Scope) -> Fault | None:
    """Return why the text of a request cannot be read; None if its address and headers allow it."""
    kind = Headers(scope=scope).get("content-type", "").lower()
    if (named := len(_CHARSET.findall(kind))) and (named > 1 or not _UTF8.search(kind)):
        return _OTHER_CHARSET
    raw = unquote_to_bytes(scope.get("raw_path") or b"") + b"?" + unquote_to_bytes(scope.get("query_string", b""))
    try:
        raw.decode()
    except UnicodeDecodeError:
        return _OTHER_ADDRESS
    return None


class BodyText:
    """Checks a body piece by piece, if its kind is text as a whole. The parts of a form of files are not."""

    def __init__(self, scope: Scope):
        kind = Headers(scope=scope).get("content-type", "").lower()
        self._decoder = codecs.getincrementaldecoder("utf-8")() if _TEXTS.match(kind) else None

    def check(self, piece: bytes, last: bool) -> None:
        """Check the next piece.

        Raises:
            HTTPException: It is not UTF-8, or holds bytes that no text here has.
        """
        if self._decoder is None:
            return
        try:
            self._decoder.decode(piece, last)
        except UnicodeDecodeError:
            raise HTTPException(400, _OTHER_BODY) from None
        if b"\0" in piece:  # UTF-16 and UTF-32 are full of them
            raise HTTPException(400, _OTHER_BODY)
