"""Headers of e-mails to text, in any character set: Python's parser knows few labels, and takes them at their word.

    =?gb2312?B?zNWGtA==?=            an encoded word (RFC 2047); one character may be split over two of them
    filename*=windows-874''%E0%A4    a parameter (RFC 2231)
    M\\xfcller                        bytes that say nothing of themselves: UTF-8, or the character set of the text

They are rewritten in UTF-8 before they are parsed.
"""

from __future__ import annotations

import binascii
import re
from itertools import groupby
from urllib.parse import quote, unquote_to_bytes

from ragkv.errors import InvalidDocument
from ragkv.ingest.formats import charsets

_WORD = re.compile(r"=\?([^?*\s]{1,40})(?:\*[^?\s]{0,20})?\?([BbQq])\?([^?\s]*+)\?=")
_PARAMETER = re.compile(
    r"(\*(?:0\*)?=\s?)([\w.:-]{1,40})'([\w-]{0,20})'([^\s;]*+)"
    r"((?:\s*;\s*[\w-]{1,20}\*\d{1,3}\*?=\s?(?:\"[^\"]*+\"|[^\s;\"]++))*+)"
)
_MORE = re.compile(r"(\*?)=\s?(?:\"([^\"]*+)\"|([^\s;\"]++))")


def readable(value: str, declared: str) -> str:
    """Return a header as the parser needs it. declared: the character set of the message's text, if it says so."""
    if not value.isascii() or "\x1b" in value:
        value = _of_bytes(value.encode("utf-8", errors="surrogateescape"), declared)
    if "=?" in value:
        value = _with_words(value)
    return _PARAMETER.sub(_parameter, value) if "''" in value or "*=" in value else value


def _of_bytes(data: bytes, declared: str) -> str:
    """Decode bytes that no word encodes. What cannot be read becomes `�`."""
    try:
        data.decode()
    except UnicodeDecodeError:
        if charsets.name_of(declared) not in ("", "utf-8"):
            return _decoded(data, declared)
    try:
        return charsets.detect(data)[0]
    except InvalidDocument:
        return data.decode(errors="replace")


def _decoded(data: bytes, label: str) -> str:
    try:
        return charsets.decode(data, label)[0]
    except InvalidDocument:
        return data.decode(errors="replace")


def _with_words(value: str) -> str:
    """Rewrite the encoded words. Those that follow each other in one character set are decoded together."""
    parts, end, run = list[str](), 0, list[tuple[str, bytes]]()
    for match in _WORD.finditer(value):
        between = value[end : match.start()]
        if between.strip() or not run:
            parts += [_words(run), between]
            run = []
        run.append((match[1].lower(), _bytes_of(match[2], match[3])))
        end = match.end()
    return "".join([*parts, _words(run), value[end:]])


def _words(run: list[tuple[str, bytes]]) -> str:
    """Return the (label, bytes) of encoded words as words in UTF-8."""
    groups = groupby(run, key=lambda word: word[0])
    return " ".join(_word(label, b"".join(data for _, data in words)) for label, words in groups)


def _bytes_of(encoding: str, text: str) -> bytes:
    """Decode the letters of an encoded word."""
    if encoding in "Bb":
        try:
            return binascii.a2b_base64(text.encode(errors="replace") + b"==")
        except binascii.Error:
            return b""
    return binascii.a2b_qp(text.encode(errors="replace"), header=True)


def _word(label: str, data: bytes) -> str:
    text = _decoded(data, label).encode(errors="replace")
    return f"=?utf-8?b?{binascii.b2a_base64(text, newline=False).decode()}?="


def _parameter(match: re.Match[str]) -> str:
    """Rewrite a value with the parts that follow it: a character may be divided between two."""
    more = (bare if is_encoded else quote(text or bare) for is_encoded, text, bare in _MORE.findall(match[5]))
    text = _decoded(unquote_to_bytes(match[4] + "".join(more)), match[2])
    return f"{match[1]}utf-8'{match[3]}'{quote(text)}"
