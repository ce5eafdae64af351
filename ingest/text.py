"""UTF-8 text: decode it, and check the characters that a document may hold. Faults do not name the document."""

from __future__ import annotations

import re

from ragkv.errors import InvalidDocument

# Control characters that text has no use for. NUL is not among them: it is refused wherever it occurs.
_CONTROLS = bytes((*range(1, 9), *range(14, 27), *range(28, 32), 127))
_AT_ONCE = 2**20
"""Bytes that are looked at in one call, between which other threads run."""
_CONTROL = re.compile(r"[\x01-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_CONTROL_SHARE = 0.01
_REPLACED_SHARE = 0.01
_UNREAD = "over one in a hundred of its characters are �: they could not be read"


def decode(data: bytes) -> str:
    """Decode UTF-8 and normalise line ends to \\n. Raises InvalidDocument with the offset of the first bad byte."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InvalidDocument("byte 0 starts UTF-16 text; save the file as UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidDocument(f"byte {error.start} is not UTF-8 text") from None
    check_text(text)
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def check_replacements(text: str, said: str = _UNREAD) -> None:
    """Raise InvalidDocument where too many characters stand for what could not be decoded. said: the message."""
    if text.count("\ufffd") > _REPLACED_SHARE * len(text):
        raise InvalidDocument(said)


def check_text(text: str) -> None:
    """Raise InvalidDocument for characters that text does not hold. Offsets count bytes in UTF-8."""
    position = text.find("\0")
    if position >= 0:
        raise InvalidDocument(f"byte {len(text[:position].encode(errors='replace'))} is NUL, this is not text")
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidDocument(f"character {error.start} is half of a surrogate pair") from None
    parts = (data[start : start + _AT_ONCE] for start in range(0, len(data), _AT_ONCE))
    controls = len(data) - sum(len(part.translate(None, _CONTROLS)) for part in parts)
    if controls > _CONTROL_SHARE * len(text):
        first = _CONTROL.search(text)
        offset = len(text[: first.start()].encode()) if first else 0
        raise InvalidDocument(f"{controls} control characters from byte {offset} on, this is not text")
